"""A real vLLM on CPU, as a child: start it, ask it, kill it. `make vllm` installs it and a tiny model.

It is started as operators start it, by its module, in a session of its own, so that the signal that ends it reaches
EngineCore and its worker too: killing the API server alone leaves them alive. One at a time: it takes both cores of a
small machine. Only the standard library is used, as the installer needs the paths.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path

from loadtest.processes import Child, answers, free_port, total

VERSION = "0.32.0"
MARKER = ".weir-complete"  # written last into what is installed
MODEL = "tiny"
READY = 400.0  # seconds; 20 on two idle cores
CONTEXT = 4096
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}

TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
SIDE_CHANNEL = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": "tcp,self,sm"}


def cache() -> Path:
    """The folder that holds both, whether it exists or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weir"


def venv() -> Path:
    """vLLM's own environment."""
    return cache() / f"vllm-cpu-{VERSION}"


def model() -> Path:
    """The tiny model's folder."""
    return cache() / "tiny-qwen3-1"


class Vllm:
    """Server of vLLM, ready to serve. `flags` are appended to its command line. `with` stops the server.

    `exchanges`: the server exchanges KV caches with others, by nixl.
    """

    def __init__(self, log: Path, port: int, *flags: str, timeout: float = READY, exchanges: bool = False) -> None:
        argv = [str(venv() / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        argv += ["--model", str(model()), "--served-model-name", MODEL]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager"]
        argv += ["--max-model-len", str(CONTEXT), *flags]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM_"))}
        # It leaves sockets and files in TMPDIR. A short path: a unix socket's has 107 bytes at most.
        self._scratch = tempfile.TemporaryDirectory(prefix="vllm-")
        if exchanges:
            argv += ["--kv-transfer-config", json.dumps(TRANSFER)]
            kept |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **SIDE_CHANNEL}
        environment = kept | ENVIRONMENT | {"TMPDIR": self._scratch.name}
        self.child = Child(f"vllm on port {port}", argv, log, env=environment)
        self.url = f"http://127.0.0.1:{port}"
        try:
            self.started_in = self.child.wait(lambda: answers(f"{self.url}/health"), timeout, "health", every=0.2)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self) -> None:
        """SIGKILL for all of its processes at once."""
        self.child.kill()
        self._scratch.cleanup()

    def hang(self) -> None:
        """SIGSTOP for its EngineCore and worker: its API server goes on, and answers health checks."""
        self._signal_core(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT for them."""
        self._signal_core(signal.SIGCONT)

    def _signal_core(self, number: int) -> None:
        for pid in self.child.group():
            if re.search("Engine|Worker", Path(f"/proc/{pid}/comm").read_text()):
                os.kill(pid, number)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL for what that leaves; the exit status. More calls change nothing."""
        status = self.child.stop()
        self._scratch.cleanup()
        return status

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its samples called `name`."""
        return total(f"{self.url}/metrics", name, **labels)

    def running(self) -> float:
        """Calls that have a slot."""
        return self.metric("vllm:num_requests_running")

    def waiting(self) -> float:
        """Calls that wait for one inside it."""
        return self.metric("vllm:num_requests_waiting")

    def usage(self) -> tuple[float, float]:
        """Tokens read and tokens generated since the start, by the engine's own counters."""
        return self.metric("vllm:prompt_tokens_total"), self.metric("vllm:generation_tokens_total")
