"""Flags that the sidecar passes to an engine, compared with a real vLLM's --help."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from sidecar.core.arguments import MODEL, QUIET, SERVER, UNIFIED
from sidecar.core.flags import FLAGS, OWNED, SWITCH, VARIABLES
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


# An option begins a line, two spaces in; prose and its examples stand further in. Its help begins two spaces later.
OPTION_LINE = re.compile(r"^ {2}(-\S(?:.*?))(?: {2,}.*)?$", re.MULTILINE)
OPTION_FLAG = re.compile(r"(?:^|, )(--[A-Za-z0-9][A-Za-z0-9_-]*)")


def test_a_real_vllm_has_every_flag_that_it_may_be_told() -> None:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    argv = (str(venv() / "bin" / "python"), *SERVER, "--help=all")  # this build has no script
    environ = {name: value for name, value in os.environ.items() if name in VARIABLES}
    text = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=250, env=environ).stdout
    flags = {flag for line in OPTION_LINE.findall(text) for flag in OPTION_FLAG.findall(line)}
    assert {name for name in FLAGS if f"--{name}" not in flags} == GONE
    assert {name for name in OWNED if f"--{name}" not in flags} == OURS
    told = {
        *UNIFIED.values(),
        MODEL,
        f"--{QUIET}",
        "--uds",
        "--host",
        "--port",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
    }
    assert told | {"--enable-sleep-mode"} <= flags
    assert {name for name, kind in FLAGS.items() if kind == SWITCH and name not in GONE} == {
        name for name in FLAGS if f"--no-{name}" in flags
    }
