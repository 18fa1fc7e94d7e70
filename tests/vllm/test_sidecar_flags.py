"""Flags that the sidecar passes to an engine, compared with a real vLLM's --help."""

from __future__ import annotations

import os
import subprocess

import pytest

from sidecar.core.arguments import ACCESS_FLAG, MODEL, SERVER, UNIFIED, help_commands, known_flags
from sidecar.core.flags import FLAGS, OWNED, SWITCH, VARIABLES
from sidecar.core.profile import EngineSettings
from tests.vllm import install
from tests.vllm.real_vllm import venv

pytestmark = pytest.mark.vllm

# Only older versions have these.
GONE = {
    "calculate-kv-scales",
    "disable-log-requests",
    "enable-reasoning",
    "guided-decoding-backend",
    "max-num-partial-prefills",
    "override-pooler-config",
    "rope-scaling",
    "swap-space",
    "task",
}
# Names of our own, refused as flags of vLLM would be.
OURS = {"model-path", "tokenizer-path", "context-length", "tensor-parallel", "served-name"}


def printed(argv: tuple[str, ...], env: dict[str, str]) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=250, env=env).stdout


def test_a_real_vllm_has_every_flag_that_it_may_be_told() -> None:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    commands = help_commands(EngineSettings(python=str(venv() / "bin" / "python")), "")
    every, usage = (argv for launcher, argv in commands if launcher == SERVER)  # this build has no script
    environ = {name: value for name, value in os.environ.items() if name in VARIABLES}
    flags = known_flags(printed(every, environ))
    assert flags - known_flags(printed(usage, environ)) <= {"--help", "--device-memory-utilization"}
    assert {name for name in FLAGS if f"--{name}" not in flags} == GONE
    assert {name for name in OWNED if f"--{name}" not in flags} == OURS
    told = {
        ACCESS_FLAG,
        *UNIFIED.values(),
        MODEL,
        "--host",
        "--port",
        "--uds",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
    }
    assert told | {"--enable-sleep-mode"} <= flags
    assert {name for name, kind in FLAGS.items() if kind == SWITCH and name not in GONE} == {
        name for name in FLAGS if f"--no-{name}" in flags
    }
