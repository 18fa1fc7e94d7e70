"""`gateway calibrate` as a process, and its profile in all commands that take one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loadtest.engine.profile_file import ProfileFile, profile_of, profiles, text_of
from loadtest.processes import Child, Gateway

pytestmark = pytest.mark.slow


def gateway(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *argv], capture_output=True, text=True, timeout=240, check=False
    )


def test_a_live_engine_is_calibrated_and_simulated(tmp_path: Path) -> None:
    real = msgspec.structs.replace(
        profiles()["a100-8b"], max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024
    )
    given, out = tmp_path / "given.yaml", tmp_path / "found.yaml"
    given.write_text(text_of(ProfileFile(profile=real)))
    argv = [sys.executable, "-m", "loadtest.engine", "--port", "0", "--profile", str(given)]
    with Child("engine", argv, tmp_path / "engine.log") as child:
        url = child.line(r"^ready (http://\S+)", 60.0)
        done = gateway("calibrate", "--target", url, "--out", str(out), "--budget", "10s")
    assert done.returncode == 0, done.stderr
    assert "each sequence that decodes" in done.stdout
    assert "calibrating: asking what it is" in done.stderr, "progress, in lines since nobody looks on"
    assert out.read_text().startswith("# gateway calibrate --target http://127.0.0.1:")
    found = profile_of(str(out))
    for name in ("num_gpu_blocks", "max_num_seqs", "max_model_len"):
        assert getattr(found, name) == getattr(real, name)
    assert min(found.base, found.prefill) > 0  # how exact they are, is tested in virtual time

    again = gateway("calibrate", "--target", url, "--out", str(out))
    assert (again.returncode, "exists: choose another, or --force" in again.stderr) == (2, True)
    load = ("--scenario", "chat", "--rate", "1/s", "--duration", "4s", "--warmup", "0s")
    simulated = gateway("simulate", "--profile", str(out), "--engines", "1", *load)
    assert simulated.returncode == 0, simulated.stderr
    with Gateway(tmp_path / "log", "--engine", f"sim:1:{out}") as serving:
        assert len(serving.fleet()["engines"]) == 1
