"""Site under watch: a gateway, three simulated engines, a sidecar with two models, traffic, and a Prometheus.

All of them are processes with sockets. Whatever befalls them comes by the ways that faults take in use: signals, files
that are saved, engines that misbehave, callers that ask too much.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.processes import Child, Gateway, free_port, until
from tests.operate.collector import Collector
from tests.operate.prometheus import Prometheus
from tests.sidecar.laid_out import lay_out

GIB = 1024**3
BLOCKS = 512  # KV blocks of each engine: few calls at a time fill it
POLICY = """\
version: 1
keys_file: keys
tenants: {anonymous: {}, small: {models: [other]}}
classes:
  interactive: {weight: 8, ttft: 2s, deadline: 30s, max_queue: 64}
  default: {weight: 4, ttft: 10s, deadline: 2m, max_queue: 64}
  batch: {weight: 1, deadline: 10m, max_queue: 64}
fleet: {poll: 100ms, health: 250ms, sidecars: {}}
routing: {slow_start: 1s}
breaker: {open_for: 200ms}
logging: {traces: 100%}
"""
SIDECAR = """\
id: box
gateways: ["%s"]
token_file: sidecar.token
listen: 127.0.0.1:0
engine_addresses: unix:%s
engine: {simulated: h100-8b}
gpus: all
models:
  one: {model_path: /m/one, gpu_memory: 45%%}
  two: {model_path: /m/two, gpu_memory: 45%%}
"""
SCENARIO = """\
version: 1
what: callers of a watched gateway
arrivals: {poisson: %s/s}
duration: 1h
warmup: 0s
retries: 0
workload:
  model: %s
  mix:
    - {class: interactive, share: 60%%, output: {uniform: {from: 16, to: 64}}}
    - {class: default, share: 40%%, output: {uniform: {from: 16, to: 64}}}
"""


class OperatedSite:
    """The processes. `rules`: alerting rules as its Prometheus is to have them. `with` ends all of them.

    `engines`: a and b serve `sim`, c alone serves `other`, which the tenant `small` asks for.
    """

    def __init__(self, folder: Path, rules: str) -> None:
        self.folder = folder
        self.engines: dict[str, Child] = {}
        self.urls: dict[str, str] = {}
        self._started = 0
        self._body = socket.socket()  # of a caller that never ends his request
        self._callers: dict[str, Child] = {}
        self._stack = ExitStack()
        self._stack.callback(self._end)
        self.collector = Collector()
        self._stack.callback(self.collector.close)
        with ExitStack() as failing:
            failing.callback(self._stack.close)
            for name in "abc":
                self.start_engine(name)
            self.save(POLICY)
            (folder / "calls.log").symlink_to("/dev/null")
            self.gateway = self._stack.enter_context(Gateway(folder / "gateway.log", *self._arguments()))
            self.key = self._cli("gateway", "key", "add", "small", "--policy", "policy.yaml").split()[0]
            self.gateway.child.process.send_signal(1)  # SIGHUP: the key counts now
            lay_out(folder / "gpus", [80 * GIB])
            (folder / "sidecar.yaml").write_text(SIDECAR % (self.gateway.control, folder / "run"))
            self.sidecar = self._stack.enter_context(self._sidecar())
            control = self.sidecar.line(r"^control API (http://\S+)", 60.0)
            jobs = {"weir": [urlsplit(self.gateway.control).netloc], "weir-sidecar": [urlsplit(control).netloc]}
            token = {"weir-sidecar": folder / "sidecar.token"}
            self.prometheus = self._stack.enter_context(Prometheus(folder, jobs, tokens=token, rules=rules))
            failing.pop_all()

    def __enter__(self) -> OperatedSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        self._body.close()
        for child in (*self._callers.values(), *self.engines.values()):
            child.kill()

    def _arguments(self) -> list[str]:
        engines = [word for url in self.urls.values() for word in ("--engine", url)]
        return [*engines, "--policy", str(self.folder / "policy.yaml"), "--log", str(self.folder / "calls.log"),
                "--otlp-traces-endpoint", self.collector.url]  # fmt: skip

    def _sidecar(self) -> Child:
        argv = [sys.executable, "-m", "sidecar.cli", "serve", "--config", str(self.folder / "sidecar.yaml"),
                "--gpus-from", str(self.folder / "gpus"), "--end-engines"]  # fmt: skip
        return Child("sidecar", argv, self.folder / "sidecar.log", env={**os.environ, "WEIR_SIMULATED_SPEED": "5"})

    def _cli(self, program: str, *words: str) -> str:
        argv = [sys.executable, "-m", f"{program}.cli", *words]
        return subprocess.run(argv, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    # -- engines ------------------------------------------------------------------------------------------------

    def start_engine(self, name: str) -> None:
        """Start an engine, at the address that it had before."""
        port = urlsplit(self.urls[name]).port if name in self.urls else free_port()
        model = "other" if name == "c" else "sim"
        argv = [sys.executable, "-m", "loadtest.engine", "--port", str(port), "--model", model,
                "--num-gpu-blocks", str(BLOCKS), "--profile", "l4-8b-fp8"]  # fmt: skip
        self._started += 1
        self.engines[name] = Child(f"engine-{name}", argv, self.folder / f"engine-{self._started}.log")
        self.urls[name] = self.engines[name].line(r"^ready (http://\S+)", 60.0)

    def faults(self, name: str, fields: Mapping[str, object]) -> None:
        """Inject these faults into an engine; none: heal it."""
        self.post(self.urls[name], "/_faults", json.dumps(fields).encode())

    def model_faults(self, model: str, fields: Mapping[str, object]) -> None:
        """Inject these faults into the next start of a model of the sidecar; none: no more."""
        (self.folder / "gpus" / f"{model}.faults").write_text(json.dumps(fields))

    # -- policy and log -----------------------------------------------------------------------------------------

    def save(self, policy: str) -> None:
        """Save the policy file."""
        file = self.folder / "policy.yaml"
        file.with_suffix(".new").write_text(policy)
        file.with_suffix(".new").replace(file)

    def log_to(self, target: str) -> None:
        """Move the call log elsewhere, as log rotation does."""
        (self.folder / "calls.log").unlink()
        (self.folder / "calls.log").symlink_to(target)
        self.gateway.child.process.send_signal(1)

    # -- callers ------------------------------------------------------------------------------------------------

    def callers(self, name: str, rate: float, *, model: str = "sim", at: str = "", key: str = "") -> None:
        """From now on calls come at this rate, a second, by Poisson; `at`: to this address instead of the gateway."""
        file = self.folder / f"{name}.yaml"
        file.write_text(SCENARIO % (f"{rate:g}", model))
        shutil.rmtree(self.folder / name, ignore_errors=True)
        argv = [sys.executable, "-m", "gateway.cli", "bench", "--scenario", str(file), "--out", str(self.folder / name),
                "--force", "--target", at or self.gateway.url, *(("--key-env", "KEY") if key else ())]  # fmt: skip
        self._callers[name] = Child(name, argv, self.folder / f"{name}.log", env={**os.environ, "KEY": key})

    def no_callers(self, name: str) -> None:
        """Stop these callers."""
        self._callers.pop(name).kill()

    def post(self, url: str, path: str, body: bytes, timeout: float = 60.0) -> int:
        """The status of one request on a connection of its own, 0 where it got no answer in time."""
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
        return answer.status

    def begin_body(self, length: int) -> None:
        """Send most of a body of this many bytes, and pause."""
        parts = urlsplit(self.gateway.url)
        self._body.close()
        self._body = socket.create_connection((parts.hostname, parts.port))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
        self._body.sendall(head + b"content-length: %d\r\n\r\n" % length + b"[" * (length - 1))

    def end_body(self) -> None:
        """Leave without its end."""
        self._body.close()

    def chat(self, model: str, content: str = "hello", timeout: float = 60.0, tier: str = "default") -> int:
        """The status of one call through the gateway; `tier`: OpenAI's service tier, of which `flex` waits longest."""
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "service_tier": tier, "max_tokens": 8, "messages": messages}
        return self.post(self.gateway.url, "/v1/chat/completions", json.dumps(body).encode(), timeout)

    def settled(self, within: float = 60.0) -> bool:
        """Whether no alert fires any more, in the end."""
        return until(lambda: not self.prometheus.firing(), within, every=0.25) is not None
