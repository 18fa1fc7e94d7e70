"""`gateway serve --sidecar`: one machine in one command, from the starter files, with a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from loadtest.processes import Child, until
from tests.sidecar.served import wait_kept

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

pytestmark = pytest.mark.slow


def ran(folder: Path, module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = ["env", "-C", str(folder), f"PYTHONPATH={ROOT}", sys.executable, "-m", module, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def of(folder: Path) -> list[int]:
    """The processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"{folder}/".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a newcomer has it after `init`, for simulated engines on one simulated GPU."""
    assert ran(tmp_path, "gateway.cli", "init", "one-machine").returncode == 0
    assert ran(tmp_path, "sidecar.cli", "init").returncode == 0
    file = tmp_path / "sidecar.yaml"
    text = file.read_text().replace("models:\n", "engine: {simulated: l4-8b-fp8}\nlisten: 127.0.0.1:0\nmodels:\n", 1)
    file.write_text(text.replace("gateways: [", "# gateways: ["))
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "GPU-0.total").write_text(str(24 * GIB))
    monkeypatch.setenv("WEIR_SIMULATED_GPUS", str(tmp_path / "gpus"))
    monkeypatch.setenv("WEIR_SIMULATED_SPEED", "20")
    return tmp_path


def serve(folder: Path, *more: str) -> Child:
    argv = [
        *(sys.executable, "-m", "gateway.cli", "serve", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"),
        *("--policy", str(folder / "policy.yaml"), "--sidecar", str(folder / "sidecar.yaml"), "--log", "none", *more),
    ]
    return Child("gateway", argv, folder / "output")


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_one_machine_in_one_command(machine: Path, ends: signal.Signals) -> None:
    with serve(machine) as gateway:
        url = gateway.line(r"data port (\S+)", 60.0)
        assert gateway.line(r"^models (.*)$", 60.0) == "llama-3-8b qwen-7b"
        call = {"model": "qwen-7b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=call, timeout=60.0)
        assert answer.status_code == 200, answer.text
        status = gateway.line(r"^sidecar: (.*) --watch", 60.0).split()
        command = [*status, "--json", "--config", str(machine / "sidecar.yaml")]
        assert len(of(machine)) >= 2
        assert command[-4] == "status"
        os.kill(gateway.pid, ends)
        assert until(lambda: not gateway.alive, 60.0) is not None, gateway.output()
        assert until(lambda: of(machine) == [], 60.0) is not None, of(machine)
    assert "Traceback" not in gateway.output()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_sidecar_that_ends_is_started_again_and_what_it_ran_goes_on(machine: Path, how: signal.Signals) -> None:
    def ask(model: str) -> httpx.Response:
        call = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        return httpx.post(f"{url}/v1/chat/completions", json=call, timeout=60.0)

    with serve(machine) as gateway:
        url = gateway.line(r"data port (\S+)", 60.0)
        assert ask("qwen-7b").status_code == 200
        wait_kept(machine, "qwen-7b")
        engines = set(of(machine)) - {gateway.pid}
        (sidecar,) = [pid for pid in engines if b"sidecar.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(sidecar, how)
        status = -9 if how == signal.SIGKILL else 0
        assert gateway.line(r"sidecar.yaml (has ended .*); it is", 60.0) == f"has ended with exit status {status}"
        gateway.line(r"(sidecar.yaml runs again)", 60.0)
        if how == signal.SIGKILL:
            assert ask("qwen-7b").status_code == 200
            assert engines - {sidecar} <= set(of(machine)), "its engine was taken over"
        # For which another one is started. Until the new process has reported, callers are told to try again.
        answers = [ask("llama-3-8b")]
        while answers[-1].status_code == 503 and len(answers) < 5:
            time.sleep(float(answers[-1].headers["retry-after"]))
            answers.append(ask("llama-3-8b"))
        assert answers[-1].status_code == 200, [answer.text for answer in answers]
        os.kill(gateway.pid, signal.SIGTERM)
        assert until(lambda: not gateway.alive, 60.0) is not None, gateway.output()
        assert until(lambda: of(machine) == [], 60.0) is not None, of(machine)
    assert "Traceback" not in gateway.output()


def test_the_engine_of_a_dead_sidecar_ends_with_the_gateway(machine: Path) -> None:
    with serve(machine) as gateway:
        url = gateway.line(r"data port (\S+)", 60.0)
        call = {"model": "qwen-7b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        assert httpx.post(f"{url}/v1/chat/completions", json=call, timeout=60.0).status_code == 200
        for pid in of(machine):
            if b"sidecar.cli" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        gateway.line(r"sidecar.yaml (has ended)", 60.0)
        os.kill(gateway.pid, signal.SIGTERM)
        assert until(lambda: not gateway.alive, 60.0) is not None, gateway.output()
        assert until(lambda: of(machine) == [], 60.0) is not None, of(machine)


def test_a_machine_whose_models_are_all_off_starts_all_the_same(machine: Path) -> None:
    """As by cron at night, and the machine is started anew before the morning."""
    state = machine / "sidecar.state"
    state.write_text('{"version": 1, "off": ["llama-3-8b", "qwen-7b"]}')
    state.chmod(0o600)
    with serve(machine) as gateway:
        url = gateway.line(r"data port (\S+)", 60.0)
        call = {"model": "qwen-7b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        refused = httpx.post(f"{url}/v1/chat/completions", json=call, timeout=60.0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_off"), refused.text


def test_another_token_is_told_and_nothing_is_left(machine: Path) -> None:
    (machine / "other.token").write_text("0123456789abcdef0123")
    (machine / "other.token").chmod(0o600)
    policy = machine / "policy.yaml"
    policy.write_text(policy.read_text().replace("sidecars: {}", "sidecars: {token_file: other.token}"))
    with serve(machine) as gateway:
        assert until(lambda: not gateway.alive, 60.0) is not None
        assert "has not reported to" in gateway.output()
        assert "is its token_file that of the policy's fleet.sidecars?" in gateway.output()
    assert until(lambda: of(machine) == [], 60.0) is not None, of(machine)


def test_a_gateway_that_is_told_to_end_waits_for_no_report(machine: Path) -> None:
    """The sidecar has another token here; elsewhere its files may take long to read."""
    (machine / "other.token").write_text("0123456789abcdef0123")
    (machine / "other.token").chmod(0o600)
    policy = machine / "policy.yaml"
    policy.write_text(policy.read_text().replace("sidecars: {}", "sidecars: {token_file: other.token}"))
    with serve(machine) as gateway:
        assert until(lambda: of(machine) != [], 60.0) is not None
        gateway.signal(signal.SIGTERM)
        assert until(lambda: not gateway.alive, 60.0) is not None
        assert "has not reported to" not in gateway.output()
    assert until(lambda: of(machine) == [], 60.0) is not None, of(machine)


def test_a_file_with_mistakes_ends_it_with_the_reason(machine: Path) -> None:
    (machine / "sidecar.yaml").write_text("version: 1\nmodels: {a: {model_path: /m, tensor: 2}}\n")
    with serve(machine) as gateway:
        assert until(lambda: not gateway.alive, 60.0) is not None
    assert "sidecar.yaml:2: models.a: found unknown field 'tensor'" in gateway.output()
    assert of(machine) == []
