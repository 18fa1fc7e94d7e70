"""Rotation of every token between a gateway and a sidecar of another machine: no call, report or scrape fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.processes import until
from tests.sidecar.relay.test_exposure import ADMIN, ELSEWHERE, ORDER, REPORT, Namespaces, both, chat, namespaces, run

__all__ = ["namespaces"]
pytestmark = pytest.mark.slow
TOKENS = {"report": REPORT, "order": ORDER, "admin": ADMIN}
# Scrapes the control port and calls a model until its input ends, then prints how often each status came. It reads the
# admin token anew just before each scrape, as Prometheus does. It writes a byte after each round.
CALLER = f"""
import collections, http.client, json, select, sys
seen = collections.Counter()
body = json.dumps({{"model": "a", "max_tokens": 2, "messages": [{{"role": "user", "content": "hi"}}]}})
while not select.select([sys.stdin], [], [], 0.01)[0]:
    admin = open(sys.argv[1]).readline().strip()
    for host, port, method, path, headers in (
        ("{ELSEWHERE}", 8001, "GET", "/metrics", {{"authorization": "Bearer " + admin}}),
        ("127.0.0.1", 8000, "POST", "/v1/chat/completions", {{"content-type": "application/json"}}),
    ):
        connection = http.client.HTTPConnection(host, port, timeout=50)
        connection.request(method, path, body if method == "POST" else None, headers)
        seen[f"{{path}} {{connection.getresponse().status}}"] += 1
        connection.close()
    open(sys.argv[2], "a").write(".")
print(json.dumps(seen))
"""


def shown(namespaces: Namespaces, url: str, token: str, method: str = "GET") -> int:
    """The status of the answer to whoever shows this token, on the gateway's machine."""
    argv = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-X", method, url]
    return int(run(*namespaces.elsewhere, *argv, "-H", f"authorization: Bearer {token}"))


def opens(namespaces: Namespaces, name: str, token: str) -> bool:
    """Whether a token is accepted where it belongs; a report that is let in is none (400)."""
    url, method, status = {
        "report": (f"http://{ELSEWHERE}:8001/sidecars/report", "POST", 400),
        "order": ("http://10.213.77.1:8003/engines/a/health", "GET", 200),
        "admin": (f"http://{ELSEWHERE}:8001/livez", "GET", 200),
    }[name]
    return shown(namespaces, url, token, method) == status


def logs(folder: Path) -> str:
    return "".join((folder / f"{name}.log").read_text() for name in ("gateway", "sidecar"))


def written(folder: Path, name: str, text: str) -> None:
    """Replace a token's file, and wait until each process that has it says that it has read it. The caller, as
    Prometheus, would read an empty file while another one is written over it."""
    before, readers = logs(folder).count("is active"), 1 if name == "admin" else 2
    new = folder / "new"
    new.write_text(text)
    new.chmod(0o600)
    new.replace(folder / f"{name}.token")
    assert until(lambda: logs(folder).count("is active") == before + readers, 60.0) is not None, name


def called(rounds: Path) -> None:
    """Wait for a whole round of the caller, which has then shown no token that it read before."""
    before = rounds.stat().st_size
    assert until(lambda: rounds.stat().st_size >= before + 2, 60.0) is not None


def test_tokens_are_rotated_with_an_overlap_and_nothing_fails(namespaces: Namespaces, tmp_path: Path) -> None:
    rounds = tmp_path / "rounds"
    rounds.touch()
    with both(namespaces, tmp_path):
        assert until(lambda: "[DONE]" in chat(namespaces, "a"), 60.0) is not None
        argv = [*namespaces.elsewhere, sys.executable, "-c", CALLER, str(tmp_path / "admin.token"), str(rounds)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as caller:
            for name, old in TOKENS.items():
                new = old.replace("token", "other")
                written(tmp_path, name, f"{old}\r\n{new}\r\n")
                assert opens(namespaces, name, new), name
                assert opens(namespaces, name, old), "both are accepted"
                written(tmp_path, name, f"{new}\n{old}\n")
                called(rounds)
                written(tmp_path, name, new)
                assert opens(namespaces, name, new)
                assert not opens(namespaces, name, old)
            statuses = json.loads(caller.communicate("")[0])
        assert set(statuses) == {"/v1/chat/completions 200", "/metrics 200"}, statuses
        failed = [line for line in logs(tmp_path).splitlines() if "does not take reports" in line]
        assert all("no whole answer within" in line for line in failed), "no report was refused, even if one was late"
        for name, old in TOKENS.items():
            file, new = tmp_path / f"{name}.token", old.replace("token", "other")
            for spoil in (file.unlink, lambda file=file: file.write_text("")):
                before = logs(tmp_path).count("stays active")
                spoil()
                assert until(lambda n=before: logs(tmp_path).count("stays active") > n, 60.0) is not None
                assert opens(namespaces, name, new), "a file that cannot be used changes nothing"
        told = logs(tmp_path)
        assert not any(token in told or token.replace("token", "other") in told for token in TOKENS.values())
