"""Alerts against a real Prometheus, each fired by its fault: `make alerts`.

A gateway, engines and a sidecar run as processes under light traffic. Nothing may fire for a minute, which is an hour
of the rules' time. Then each fault happens: its alert must fire, and cease once the fault is mended.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.processes import until
from tests.operate.drills import DRILLS, Drill
from tests.operate.prometheus import RULES, SPEED, compressed
from tests.operate.site import OperatedSite
from tests.programs import PROMETHEUS, required

QUIET = 60.0  # seconds: an hour of the rules' time
FIRES = 60.0  # seconds within which an alert must fire, and cease
LIGHT = 2.0  # calls a second
pytestmark = [pytest.mark.slow, pytest.mark.prometheus]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedSite]:
    required(PROMETHEUS)
    with OperatedSite(tmp_path_factory.mktemp("site"), compressed(RULES.read_text())) as made:
        made.callers("light", LIGHT)
        assert until(lambda: bool(made.prometheus.query('up{job="weir"} == 1')), 60.0) is not None
        yield made


def test_nothing_fires_in_an_hour_of_light_traffic(site: OperatedSite) -> None:
    assert until(lambda: bool(site.prometheus.firing()), QUIET, every=0.25) is None, site.prometheus.firing()


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.alert)
def test_an_alert_fires_by_its_fault_and_ceases_once_that_is_mended(site: OperatedSite, drill: Drill) -> None:
    def fires() -> bool:
        drill.again(site)
        return drill.alert in site.prometheus.firing()

    drill.strike(site)
    try:
        fired = until(fires, FIRES, every=0.25)
    finally:
        drill.mend(site)
    ceased = until(lambda: drill.alert not in site.prometheus.firing(), FIRES, every=0.25)
    site.settled()
    assert fired is not None, f"{drill.fault}: not within {FIRES * SPEED / 60:g} min of the rules' time"
    print(f"{drill.alert}: fires {fired * SPEED / 60:.1f} min of the rules' time after {drill.fault}")
    assert ceased is not None, f"it still fires {FIRES * SPEED / 60:g} min after that is mended"
