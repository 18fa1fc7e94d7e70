"""Sides of the comparison: nothing, vllm-router or the gateway before the engine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from loadtest.lab.vllm.real_vllm import Vllm
from loadtest.processes import Child, Gateway, answers, free_port, get, until

SIDES = ("direct", "vllm-router", "weir")
POLICY = Path(__file__).parents[3] / "policies" / "one-engine.yaml"
ENGINE = "http://127.0.0.1:8100"  # what that file calls the engine; the one started here has another port
DRAIN = 300.0  # seconds for the engine to come to rest


def router() -> str | None:
    """The router's program, where it is installed."""
    return os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")


@contextlib.contextmanager
def access(name: str, vllm: Vllm, policy: Path, folder: Path) -> Iterator[str]:
    """The URL by which calls reach the engine on this side, while its server runs. Raises ChildError."""
    if name == "direct":
        yield vllm.url
    elif name == "weir":
        text = policy.read_text()
        engine = () if ENGINE in text else ("--engine", vllm.url)
        own = folder / "policy.yaml"
        own.write_text(text.replace(ENGINE, vllm.url))
        log = str(folder / "calls.jsonl")
        with Gateway(folder / "weir.log", "--policy", str(own), "--log", log, *engine) as gateway:
            yield gateway.url
    else:
        port = free_port()
        command = [str(router()), "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        command += ["--worker-urls", vllm.url, "--policy", "round_robin", "--log-level", "error"]
        with Child("vllm-router", command, folder / "vllm-router.log") as child:
            url = f"http://127.0.0.1:{port}"
            child.wait(lambda: answers(f"{url}/health"), 60.0, "200 on /health")
            yield url


def settle(vllm: Vllm) -> None:
    """Until the engine has nothing left to do; then it forgets what prompts it has seen. Raises ChildError."""
    if until(lambda: vllm.running() + vllm.waiting() == 0, DRAIN, every=0.2) is None:
        raise vllm.child.failure("did not come to rest")
    get(f"{vllm.url}/reset_prefix_cache", method="POST", timeout=30.0)
