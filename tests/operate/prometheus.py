"""Prometheus in a child process, and its HTTP API.

Time is compressed: a scrape interval of 15 s becomes 250 ms, and every duration of the rules shrinks alike. So an alert
that waits ten minutes is seen in ten seconds, by the same rules in the same engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from loadtest.processes import Child, answers, get
from tests.programs import PROMETHEUS

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yaml"
SPEED = 60  # by which durations of the rules shrink
INTERVAL = "250ms"  # 15 s of a Prometheus in use
_UNITS = {"s": 1_000, "m": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"(?P<before>\[|for: )(?P<count>\d+)(?P<unit>[smh])\b")


def names() -> list[str]:
    """Every alert of the rules."""
    return re.findall(r"^ +- alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def compressed(rules: str) -> str:
    """The rules with every `for` and every range SPEED times shorter."""

    def shrunk(match: re.Match[str]) -> str:
        return f"{match['before']}{int(match['count']) * _UNITS[match['unit']] // SPEED}ms"

    return _DURATION.sub(shrunk, rules)


class Prometheus:
    """A Prometheus on a port of its own on loopback. `jobs`: `HOST:PORT` addresses to scrape by the name of their job;
    `tokens`: a file with the token of a job that wants one; `rules`: text of alerting rules, taken as it is."""

    def __init__(
        self,
        folder: Path,
        jobs: Mapping[str, Sequence[str]],
        *,
        tokens: Mapping[str, Path] = {},
        rules: str = "groups: []\n",
    ) -> None:
        scrapes: list[dict[str, Any]] = [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]}
            | ({"authorization": {"credentials_file": str(tokens[job])}} if job in tokens else {})
            for job, targets in jobs.items()
        ]
        (folder / "rules.yaml").write_text(rules)
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": ["rules.yaml"],
            "scrape_configs": scrapes,
        }
        file = folder / "prometheus.json"  # JSON is YAML
        file.write_text(json.dumps(config))
        argv = [*PROMETHEUS.command(), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0", "--query.lookback-delta=2s"]  # fmt: skip
        self.child = Child("prometheus", argv, folder / "prometheus.log")
        with self.child.starting():
            self.url = "http://" + self.child.line(r'msg="Listening on" address=(127\.0\.0\.1:\d+)', 60.0)
            self.child.wait(lambda: answers(f"{self.url}/-/ready"), 60.0, "200 on /-/ready")

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.child.stop()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an instant vector, as Prometheus' HTTP API has them. Raises ValueError for a query that it
        refuses."""
        status, body = get(f"{self.url}/api/v1/query?query={quote(expression)}")
        answer = json.loads(body)
        if status != 200:
            raise ValueError(f"{expression}: {answer['error']}")
        series: list[dict[str, Any]] = answer["data"]["result"]
        return series

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """The alerts that fire now: the labels of each, by name."""
        found: dict[str, list[dict[str, str]]] = {}
        for alert in json.loads(get(f"{self.url}/api/v1/alerts")[1])["data"]["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found
