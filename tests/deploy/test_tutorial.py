"""The wheel, away from the source tree: all files but the lab's, a newcomer's first steps, and docs/tutorial.md line by
line in a bare environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadtest.processes import Child, answers, free_port
from tests.deploy.tools import ROOT, imported
from tests.e2e.children import SimEngine
from tests.wheels import built, pip, tree

pytestmark = pytest.mark.slow

PACKAGES = ("gateway", "loadtest", "sidecar")
SHIPPED = ("*.py", "*.yaml", "*.css", "*.html", "*.json")
LAB = Path("loadtest", "lab")  # for those who work on Weir, in the source tree alone

MODEL = "Qwen/Qwen3-0.6B"
PAGE = ROOT / "docs/tutorial.md"
INSTALLING = re.compile(r"python3 -m venv|weir/bin/pip|\. weir/bin/activate")  # the fixture has done that
# A line that serves goes on in the background until the next one; what follows waits until it is healthy.
PRELUDE = """\
set -eu
server=
stop() { if [ -n "$server" ]; then kill "$server"; wait "$server" || true; fi; server=; }
trap stop EXIT
healthy() {
    for _ in $(seq 1200); do
        kill -0 "$server"
        if curl -fso /dev/null http://127.0.0.1:8000/health; then return; fi
        sleep 0.1
    done
    echo "not healthy within two minutes" >&2
    exit 1
}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return built(tree(folder / "source"), folder)


def script(page: str, data: int, control: int, engine: str) -> str:
    """The page's lines of bash as one script, on these ports."""
    lines = [PRELUDE]
    for block in re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            command = line
            if INSTALLING.match(command):
                continue
            lines.append("echo")
            if command.startswith("gateway serve"):
                listen = f"--listen 127.0.0.1:{data} --control 127.0.0.1:{control}"
                command = f"stop; {command} {listen} & server=$!; healthy"
            elif command.startswith("gateway status"):
                command += f" --url http://127.0.0.1:{control}"
            lines.append(command)
    text = "\n".join([*lines, "stop"]) + "\n"
    return text.replace("127.0.0.1:8100", engine).replace("127.0.0.1:8000", f"127.0.0.1:{data}")


def test_the_page_line_by_line(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed (apt-get install curl)")
    bare = tmp_path / "weir"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    pip("--python", bare / "bin/python", "install", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    environment = {**kept, "PATH": f"{bare}/bin:/usr/bin:/bin"}
    where = [bare / "bin/python", "-c", "import gateway; print(gateway.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(bare)), "not the installed one"
    with ExitStack() as stack:
        engine = SimEngine(tmp_path / "engine.log", "--model", MODEL)
        stack.callback(engine.child.stop)
        text = script(PAGE.read_text(), free_port(), free_port(), engine.url.removeprefix("http://"))
        ran = subprocess.run(
            ["/bin/bash", "-c", text],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout[-6000:]
    assert ran.stdout.count('"chat.completion"') == 3, ran.stdout[-6000:]
    assert f" info call: 200 (ok) default acme {MODEL} on 127.0.0.1" in ran.stdout


def test_twine_finds_nothing_wrong(wheel: Path) -> None:
    imported("twine")
    check = [sys.executable, "-m", "twine", "check", "--strict", wheel]
    ran = subprocess.run(check, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds the wheel's content alone."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "site")
    return wheel.parent / "site"


def ran(installed: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


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
