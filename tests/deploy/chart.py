"""The Helm chart as Helm renders it, by the values of a case in `charts/`."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import ROOT, installed

CHART = ROOT / "deploy/chart"
CASES = Path(__file__).parent / "charts"


@cache
def rendered(case: str, *flags: str) -> list[dict[str, Any]]:
    ran = helm(f"--values={CASES / case}.yaml", *flags)
    assert ran.returncode == 0, ran.stderr
    return [document for document in yaml.safe_load_all(ran.stdout) if document is not None]


def helm(*flags: str, release: str = "weir") -> subprocess.CompletedProcess[str]:
    command = [installed("helm"), "template", release, str(CHART), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def one(documents: list[dict[str, Any]], kind: str, name: str = "weir") -> dict[str, Any]:
    (found,) = (it for it in documents if (it["kind"], it["metadata"]["name"]) == (kind, name))
    return found
