"""`sidecar pull` from folders and a hub on a real socket: whole or not there, and never in vain."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.processes import until
from sidecar import cli
from sidecar.cli.pull import PullProgress
from sidecar.pull import hub
from sidecar.pull.listing import Listing, SourceFile
from sidecar.sizing.model_files import ModelLocation, read_model
from tests.sidecar.pull_server import COMMIT, Server, serving, sha

MIB = 1 << 20
CONFIG = (Path(__file__).parents[1] / "configs" / "qwen3-tiny.json").read_bytes()
NAMES = ["config.json", "model.safetensors", "tokenizer/vocab.json"]


def weights(size: int = 3 * MIB) -> bytes:
    """A safetensors file of one tensor."""
    header = msgspec.json.encode({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}})
    return len(header).to_bytes(8, "little") + header + os.urandom(size)


def model(size: int = 3 * MIB) -> dict[str, bytes]:
    return {"config.json": CONFIG, "model.safetensors": weights(size), "tokenizer/vocab.json": b"[1]"}


class Machine:
    """A sidecar's file with profiles `local` (a folder that is not there yet) and `hub`, and `main` on it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.target = folder / "models" / "m"
        self.cache = folder / "hf" / "hub" / "models--org--m" / "snapshots" / COMMIT
        self.file = folder / "sidecar.yaml"
        self.file.write_text(f"models:\n  local: {{model_path: {self.target}}}\n  hub: {{model_path: org/m}}\n")
        self._capsys = capsys

    def pull(self, *words: str) -> tuple[int, str, str]:
        try:
            status = cli.main(["pull", *words, "--config", str(self.file)])
        except SystemExit as end:
            status = int(str(end.code))
        return (status, *self._capsys.readouterr())

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sidecar.cli", "pull", *words, "--config", str(self.file)]
        return subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_ENDPOINT", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return Machine(tmp_path, capsys)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub that the environment names, with a model; its origin is `server.origin`."""
    found = Server(model())
    with serving(found) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield found


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left(target: Path) -> list[str]:
    """What is beside the model's folder."""
    return sorted(path.name for path in target.parent.iterdir() if path != target)


# -- where from and where to ------------------------------------------------------------------------------------------


def test_a_folder(machine: Machine) -> None:
    source, files = machine.folder / "nfs", model()
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / ".git").mkdir()
    (source / ".git" / "x").write_bytes(b"x")
    status, out, err = machine.pull("local", "--from", "nfs")
    assert (status, content(machine.target)) == (0, files)
    assert re.match(rf"local: 0\.0 GiB in {re.escape(str(machine.target))} after \d", out)
    assert "3 files, 0.0 GiB, from " in err
    assert "`sidecar ensure local` has it started" in err
    assert left(machine.target) == []
    status, out, _ = machine.pull("local", "--from", str(source))
    assert (status, out) == (0, f"local: all 3 files are in {machine.target} already\n")


def test_a_hubs_model_into_its_cache_and_into_a_folder(machine: Machine, server: Server) -> None:
    status, out, _ = machine.pull("hub", "--json")
    cache = machine.folder / "hf" / "hub" / "models--org--m"
    assert (status, content(cache / "snapshots" / COMMIT)) == (0, server.files)
    assert (cache / "refs" / "main").read_text() == COMMIT
    assert left(cache / "snapshots" / COMMIT) == []
    told = json.loads(out)
    assert (told["files"], told["size"], told["resumed"]) == (3, sum(map(len, server.files.values())), 0)
    assert machine.pull("hub")[1].endswith("already\n")
    assert machine.pull("local", "--from", "org/m")[0] == 0
    assert content(machine.target) == server.files
    assert {each[3] for each in server.asked} == {None}
    where = ModelLocation(model="org/m", folder=machine.folder, environment=os.environ)
    assert read_model(where)[1].bytes == 3 * MIB, "vLLM and its estimate find it there"


def test_a_folders_checksums(machine: Machine) -> None:
    source, files = machine.folder / "nfs", model()
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    (source / "SHA256SUMS").write_text("".join(f"{sha(data)}  {name}\n" for name, data in files.items()))
    (source / "model.safetensors").write_bytes(files["model.safetensors"][:-1] + b"x")
    status, _, err = machine.pull("local", "--from", "nfs")
    assert (status, "model.safetensors has another checksum than SHA256SUMS lists" in err) == (1, True), err
    assert not machine.target.exists()
    (source / "model.safetensors").write_bytes(files["model.safetensors"])
    assert machine.pull("local", "--from", "nfs")[0] == 0
    assert content(machine.target) == files


def test_without_the_library_it_is_said_what_to_install(
    machine: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else find(name))
    status, _, err = machine.pull("hub")
    assert (status, "pip install 'WEIR.whl[hub]'" in err) == (1, True), err


def test_the_token_goes_to_the_hub_and_to_nobody_else(
    machine: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    elsewhere = Server(server.files)
    with serving(elsewhere) as origin:
        server.redirect = origin + "/files/{name}"
        assert machine.pull("hub")[0] == 0
    assert {each[3] for each in server.asked} == {"Bearer hf_secret"}
    assert {each[3] for each in elsewhere.asked} == {None}
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    status, _, err = machine.pull("hub")
    assert (status, "in the clear to hub.example" in err, "hf_secret" in err) == (1, True, False)


# -- what goes wrong on the way ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [True, False])
def test_answers_that_are_cut_off_are_gone_on_with(machine: Machine, server: Server, ranges: bool) -> None:
    server.files, server.ranges = model(24 * MIB), ranges
    server.cut = [15 * MIB, 3 * MIB]
    status, _, err = machine.pull("hub")
    assert status == 0, err
    assert content(machine.cache) == server.files
    asked = [each[2] for each in server.asked if each[:2] == ("GET", f"/org/m/resolve/{COMMIT}/model.safetensors")]
    assert asked[:2] == [None, "bytes=10485760-"], "the library writes pieces of 10 MB"
    assert len(asked) == 3


@pytest.mark.slow
def test_a_pull_that_fails_after_some_files_is_tried_again_and_one_that_is_refused_is_not(
    machine: Machine, server: Server
) -> None:
    server.files = {**{f"{number}.json": b"{}" for number in range(8)}, **server.files}
    server.statuses = [500]
    assert machine.pull("local", "--from", "org/m", "--json")[0] == 0
    server.statuses = [403] * 100
    asked = len(server.asked)
    status, _, err = machine.pull("hub")
    assert (status, "GatedRepoError" in err, "HF_TOKEN has to be of an account" in err) == (1, True, True), err
    assert len([each for each in server.asked[asked:] if each[0] == "GET" and "resolve" in each[1]]) < 11


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_pull_that_ends_early_leaves_no_model_and_the_next_goes_on(
    machine: Machine, server: Server, number: signal.Signals
) -> None:
    """The whole files stay; the library begins the one under way anew."""
    server.files = model(40 * MIB)
    server.gate = threading.Event()
    child = machine.start("local", "--from", "org/m")
    staging = machine.target.parent / ".m.pulling" / "files"
    try:
        assert server.half.wait(60)
        assert until((staging / "tokenizer" / "vocab.json").exists, 60.0) is not None
        assert until(lambda: any(staging.rglob("*.incomplete")), 60.0) is not None
        status, _, err = machine.pull("local", "--from", "org/m")
        assert (status, "another pull of" in err) == (1, True)
    finally:
        child.send_signal(number)
        _, said = child.communicate(timeout=60)
    assert (b"whole files are kept" in said) == (number == signal.SIGINT)
    assert not machine.target.exists()
    assert until(lambda: not helpers(staging), 60.0) is not None, "its child has ended too"
    asked = len(server.asked)
    server.gate.set()
    status, out, err = machine.pull("local", "--from", "org/m")
    assert (status, content(machine.target)) == (0, server.files), err
    assert "of it by an earlier pull" in out
    fetched = {each[1].rpartition("/")[2] for each in server.asked[asked:] if each[0] == "GET" and "resolve" in each[1]}
    assert fetched == {"model.safetensors"}
    assert left(machine.target) == []


def helpers(staging: Path) -> list[int]:
    """Processes that have a file below `staging` open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd).startswith(str(staging)) for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


@pytest.mark.slow
def test_a_source_that_has_changed_meanwhile_is_begun_anew(machine: Machine, server: Server) -> None:
    server.statuses = [403] * 100
    assert machine.pull("local", "--from", "org/m")[0] == 1
    server.statuses, server.files = [], {**model(), "more.json": b"{}"}
    status, out, _ = machine.pull("local", "--from", "org/m")
    assert (status, "earlier pull" in out) == (0, False)
    assert content(machine.target) == server.files


@pytest.mark.slow
def test_content_with_another_checksum_is_no_model(machine: Machine, server: Server) -> None:
    server.tree = [each if "lfs" not in each else {**each, "lfs": {**each["lfs"], "oid": "a" * 64}}
                   for each in server.listed()]  # fmt: skip
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, "model.safetensors: another checksum than the hub lists" in err) == (1, True), err
    assert not machine.target.exists()
    server.tree = None
    assert machine.pull("local", "--from", "org/m")[0] == 0
    assert content(machine.target) == server.files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"path": "../../../evil", "size": 3}, "lists '../../../evil', which is no name"),
        ({"path": "/etc/cron.d/evil", "size": 3}, "lists '/etc/cron.d/evil', which is no name"),
        ({"path": "config.json", "size": 3}, "lists a file twice"),
        ({"path": "config.json/x", "size": 3}, "below a file"),
        ({"path": "huge.json", "size": 2**45}, "are to come, and the disk"),
        ({"path": "huge.json", "size": 2**70}, "the hub's list of the files of org/m is none"),
        ({"path": "text.json", "size": "x"}, "the hub's list of the files of org/m is none"),
        ({"path": "gone.json", "size": 3}, "404"),
        ({"path": "long.json", "size": 1}, "another checksum"),
        ({"path": "short.json", "size": 9}, "another checksum"),
    ],
    ids=lambda value: value["path"] if isinstance(value, dict) else "",
)
def test_a_hub_that_lies_brings_nothing(machine: Machine, server: Server, change: dict[str, Any], said: str) -> None:
    server.files |= {"long.json": b"{ }", "short.json": b"{ }"}
    names = {change["path"]} & {"long.json", "short.json"}
    server.tree = [
        *(each for each in server.listed() if each["path"] not in names),
        {"type": "file", "oid": "c" * 40, **change},
    ]
    before = set(os.listdir(machine.folder))
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, said in err) == (1, True), err
    assert not machine.target.exists()
    assert set(os.listdir(machine.folder)) - before <= {"models", "hf"}


def test_a_hub_that_answers_no_list(machine: Machine, server: Server) -> None:
    for tree in (b"<html>", b"{}", b"[1]", b'[{"type": "file"}]'):
        server.tree = tree
        status, _, err = machine.pull("hub")
        assert (status, "Traceback" in err) == (1, False), err


def test_a_model_of_which_a_part_is_missing_at_the_source(machine: Machine, server: Server) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": {"w": "model-00002-of-00002.safetensors"}}
    server.files["model.safetensors.index.json"] = json.dumps(index).encode()
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, "the source's model is not whole" in err) == (1, True)
    assert not machine.target.exists()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes in memory; skipped where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
        pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        assert libc.umount2(bytes(folder), 2) == 0


def test_a_disk_without_room_is_said_before_anything_comes(machine: Machine, server: Server) -> None:
    with small_disk(machine.target.parent, 2 * MIB):
        status, _, err = machine.pull("local", "--from", "org/m")
        assert (status, "GiB are to come, and the disk of" in err) == (1, True)
        assert len([each for each in server.asked if "resolve" in each[1]]) == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_on_the_way_keeps_what_has_come(machine: Machine, server: Server) -> None:
    server.gate = threading.Event()
    with small_disk(machine.target.parent, 4 * MIB):
        child = machine.start("local", "--from", "org/m")
        assert server.half.wait(60)
        (machine.target.parent / "other").write_bytes(b"x" * (2 * MIB))
        server.gate.set()
        _, err = child.communicate(timeout=60)
        assert (child.returncode, b"No space left on device" in err) == (1, True), err
        assert not machine.target.exists()
        (machine.target.parent / "other").unlink()
        status, out, err2 = machine.pull("local", "--from", "org/m", "--json")
        assert (status, content(machine.target)) == (0, server.files), err2
        assert json.loads(out)["resumed"] > 0


# -- folders of others ------------------------------------------------------------------------------------------------


def test_links_are_followed_where_a_hubs_cache_has_them_and_nowhere_else(machine: Machine) -> None:
    repo = machine.folder / "cache" / "models--org--m"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    files = model()
    del files["tokenizer/vocab.json"]
    for number, (name, data) in enumerate(files.items()):
        (repo / "blobs" / str(number)).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert machine.pull("local", "--from", str(snapshot))[0] == 0
    assert content(machine.target) == files
    assert not any(path.is_symlink() for path in machine.target.iterdir())
    (machine.folder / "secret").write_bytes(b"s")
    (snapshot / "secret.json").symlink_to(machine.folder / "secret")
    status, _, err = machine.pull("local", "--from", str(snapshot), "--replace")
    assert (status, "is a link that leads out of the folder" in err) == (1, True)
    (snapshot / "secret.json").unlink()
    os.mkfifo(snapshot / "pipe.json")
    status, _, err = machine.pull("local", "--from", str(snapshot), "--replace")
    assert (status, "is no plain file" in err) == (1, True)


def test_another_model_that_is_there_is_replaced_only_where_that_is_said(machine: Machine, server: Server) -> None:
    machine.target.mkdir(parents=True)
    (machine.target / "config.json").write_bytes(b"{'other': 1}")
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, "--replace puts that in its place" in err) == (1, True)
    assert content(machine.target) == {"config.json": b"{'other': 1}"}
    assert machine.pull("local", "--from", "org/m", "--replace")[0] == 0
    assert content(machine.target) == server.files
    assert left(machine.target) == []


def test_a_gguf_file_comes_into_a_folder_of_its_own_and_never_in_the_place_of_others(
    machine: Machine, server: Server
) -> None:
    server.files = {"q4.gguf": b"GGUF" + bytes(100), "q8.gguf": b"GGUF" + bytes(200), "config.json": CONFIG}
    file = machine.folder / "models" / "own" / "q4.gguf"
    machine.file.write_text(f"models:\n  local: {{model_path: {file}}}\n")
    status, _, err = machine.pull("local", "--from", "org/m", "--only", "q8*")
    assert (status, "has no q4.gguf, which model_path names" in err) == (1, True)
    assert machine.pull("local", "--from", "org/m", "--only", "q4*")[0] == 0
    assert set(content(file.parent)) == {"q4.gguf", "config.json"}
    (file.parent / "another.gguf").write_bytes(b"x")
    file.unlink()
    assert machine.pull("local", "--from", "org/m")[0] == 1
    status, _, err = machine.pull("local", "--from", "org/m", "--replace")
    assert (status, "--replace is for a model in a folder of its own" in err) == (2, True)
    assert (file.parent / "another.gguf").exists()


def test_a_staging_folder_of_somebody_else_is_not_written_to(machine: Machine, server: Server) -> None:
    machine.target.parent.mkdir()
    trap = machine.folder / "trap"
    trap.mkdir()
    (machine.target.parent / ".m.pulling").symlink_to(trap)
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, list(trap.iterdir())) == (1, []), err


def test_a_model_folder_that_is_a_link_gets_its_files_where_that_leads(machine: Machine, server: Server) -> None:
    (machine.folder / "disk").mkdir()
    machine.target.parent.mkdir()
    machine.target.symlink_to(machine.folder / "disk" / "m")
    assert machine.pull("local", "--from", "org/m")[0] == 0
    assert content(machine.folder / "disk" / "m") == server.files
    assert machine.target.is_symlink()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("local",), "is a folder: --from says where its files come from"),
        (("local", "--from", "/no/such/folder"), "there is no such folder, and it is no hub's id"),
        (("local", "--from", "ftp://x/y"), "and it is no hub's id"),
        (("local", "--from", "https://x/y"), "--from takes no URL: fetch the files into a folder"),
        (("hub", "--from", "org/other"), "--from names another: a folder in model_path is written with / or ./"),
        (("hub", "--from", "."), "is a hub's id, and --from is none"),
        (("local", "--from", "org/m", "--revision", "../x"), "a branch, a tag or a commit"),
        (("nobody",), "there is no profile 'nobody'"),
    ],
)
def test_mistakes(machine: Machine, words: tuple[str, ...], said: str) -> None:
    status, out, err = machine.pull(*words)
    assert (status, out, said in err) == (2, "", True), err


def test_a_source_that_is_not_there(machine: Machine, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (("local", "--from", "org/none"), "RepositoryNotFoundError"),
        (("hub", "--revision", "v9"), "RevisionNotFoundError"),
    ):
        status, _, err = machine.pull(*words)
        assert (status, said in err) == (1, True), err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    status, _, err = machine.pull("hub")
    assert (status, "ConnectError" in err) == (1, True), err


def test_lines_of_progress_have_bytes_rate_and_the_time_that_is_left() -> None:
    said: list[str] = []
    now = [0.0]
    progress = PullProgress(said.append, lambda: now[0])
    listing = Listing(source="hub", files=(SourceFile(name="a", size=8 << 30), SourceFile(name="b", size=2 << 30)))
    progress.begin(listing, 1 << 30)
    for second in range(1, 7):
        now[0] += 1.0
        progress.here((1 << 30) + second * 512 * MIB)
    now[0] += 10.0
    progress.here(10 << 30)
    assert said == [
        "2 files, 10.0 GiB, from hub, 1.0 GiB are here already",
        "3.5 GiB of 10.0 GiB, 35%, 512 MiB/s, 13 s left",
        "all 10.0 GiB have come, checksums are compared",
    ]
