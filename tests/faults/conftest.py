"""Faults are met with a decider in the same process, and with one that is reached by frames."""

from __future__ import annotations

import pytest

from tests import over_frames
from tests.faults import scripted


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.endswith(("test_faults", "test_prefill")):
        metafunc.parametrize("decider", ["direct", "frames"], indirect=True)


@pytest.fixture(autouse=True)
def decider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "direct") == "frames":
        assert request.module.gateway_over is scripted.gateway_over
        monkeypatch.setattr(request.module, "gateway_over", over_frames.gateway_over)
