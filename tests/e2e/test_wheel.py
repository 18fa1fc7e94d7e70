"""The wheel, installed away from the source tree: all files but the lab's, and a newcomer's first steps."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from loadtest.processes import Child, answers
from tests.wheels import ROOT, built, tree

PACKAGES = ("gateway", "loadtest", "sidecar")
SHIPPED = ("*.py", "*.yaml", "*.css", "*.html", "*.json")
LAB = Path("loadtest", "lab")  # for those who work on Weir, in the source tree alone


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content alone."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(built(tree(folder / "source"), folder)) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def ran(installed: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_everything_is_in_it(installed: Path) -> None:
    for package in PACKAGES:
        for pattern in SHIPPED:
            for file in (ROOT / package).rglob(pattern):
                name = file.relative_to(ROOT)
                assert name.is_relative_to(LAB) or (installed / name).is_file(), f"{name} is not in the wheel"
    assert not (installed / LAB).exists()
    for file in (*(ROOT / "policies").glob("*.yaml"), ROOT / "policies" / "schema.json"):
        assert (installed / "gateway" / "policies" / file.name).read_bytes() == file.read_bytes()
    pages = {"outcomes.md", "runbooks.md"}
    assert {file.name for file in (installed / "gateway" / "docs").iterdir()} == pages
    for page in pages:
        assert (installed / "gateway" / "docs" / page).read_bytes() == (ROOT / "docs" / page).read_bytes()


@pytest.mark.slow
def test_first_steps_without_a_source_tree(installed: Path, tmp_path: Path) -> None:
    where = ran(installed, tmp_path, "gateway.cli", "init", "--out", "-")
    assert where.returncode == 0, where.stderr
    for argv, said in (
        (("gateway.cli", "init"), "gateway check policy.yaml"),
        (("gateway.cli", "check", "policy.yaml"), "policy.yaml: ok"),
        (("sidecar.cli", "init"), "sidecar check sidecar.yaml"),
        (("sidecar.cli", "check", "sidecar.yaml"), "sidecar.yaml: ok"),
        (("sidecar.cli", "--version"), "weir "),
    ):
        done = ran(installed, tmp_path, *argv)
        assert (done.returncode, said in done.stdout) == (0, True), (argv, done.stdout, done.stderr)
    code = "import gateway, pathlib; print(pathlib.Path(gateway.__file__).parent.parent)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(found.stdout.strip()) == installed
    command = [
        *("env", "-C", str(tmp_path), f"PYTHONPATH={installed}", sys.executable, "-m", "gateway.cli", "serve"),
        *("--policy", "policy.yaml", "--engine", "sim:1", "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"),
    ]
    with Child("gateway", command, tmp_path / "output") as gateway:
        url = gateway.line(r"data port (\S+)", 60.0)
        gateway.wait(lambda: answers(f"{url}/v1/models"), 60.0, "its models")
