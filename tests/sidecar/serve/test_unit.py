"""The systemd unit of the sidecar leaves its engines running."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[3] / "deploy/systemd/weir-sidecar.service"


def test_the_unit_leaves_engines_running() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # names as they are written
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert (service["KillMode"], service["OOMPolicy"], service["PrivateTmp"]) == ("process", "continue", "no")
    assert "PrivateDevices" not in service, "it hides the GPUs"
    assert "MemoryDenyWriteExecute" not in service, "kernels are compiled while they run"
    assert service["ExecStart"].split()[1:3] == ["serve", "--config"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/weir/bin/sidecar", sys.executable))
    asked = subprocess.run(  # fixed words
        [str(shutil.which("systemd-analyze")), "verify", str(unit)],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "", "")
