"""`sidecar pull` from folders, a hub and a web server on real sockets: whole or not there, and never in vain."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from loadtest.processes import until
from sidecar import cli
from sidecar.cli.pull_progress import Bar, Lines
from sidecar.pull import transfer
from sidecar.pull.listing import Listing, SourceFile
from sidecar.sizing.model_files import ModelLocation, read_model
from tests.sidecar.pull_server import COMMIT, Server, serving

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
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)
    return Machine(tmp_path, capsys)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub that the environment names, with a model; its origin is `server.origin`."""
    found = Server(model())
    with serving(found) as origin:
        monkeypatch.setenv("HF_ENDPOINT", origin)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        found.origin = origin  # type: ignore[attr-defined] # for the tests
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
    assert out.startswith(f"local: 0.0 GiB in {machine.target} after 0.")
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
    assert (told["files"], told["bytes"]) == (3, sum(map(len, server.files.values())))
    assert machine.pull("hub")[1].endswith("already\n")
    server.lfs = False
    assert machine.pull("local", "--from", "org/m")[0] == 0
    assert content(machine.target) == server.files
    assert {each[3] for each in server.asked} == {None}
    where = ModelLocation(model="org/m", folder=machine.folder, environment=os.environ)
    assert read_model(where)[1].bytes == 3 * MIB, "vLLM and its estimate find it there"


@pytest.mark.parametrize("listed", [True, False], ids=["SHA256SUMS", "links"])
def test_a_web_servers_folder(machine: Machine, server: Server, listed: bool) -> None:
    files = dict(server.files)
    if listed:
        lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()]
        server.files["SHA256SUMS"] = "".join(lines).encode()
    status, out, err = machine.pull("local", "--from", f"{server.origin}/files")  # type: ignore[attr-defined]
    assert (status, content(machine.target)) == (0, files), (out, err)
    if listed:
        server.files["model.safetensors"] = weights()
        status, _, err = machine.pull("local", "--from", f"{server.origin}/files", "--replace")  # type: ignore[attr-defined]
        assert (status, content(machine.target)) == (0, files), "it is there by its sizes"


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


@pytest.mark.parametrize("ranges", [True, False])
def test_answers_that_are_cut_off_are_gone_on_with(machine: Machine, server: Server, ranges: bool) -> None:
    server.ranges = ranges
    server.cut = [1, 4096, 1 * MIB, 100_000]
    status, _, err = machine.pull("hub")
    assert status == 0, err
    asked = [each[2] for each in server.asked if each[1].endswith("model.safetensors")]
    assert asked == [None, f"bytes={MIB}-", f"bytes={MIB + 100_000 if ranges else 100_000}-"], "from where it was cut"
    assert "tried again in 0 s" in err


@pytest.mark.slow
def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_not(machine: Machine, server: Server) -> None:
    server.statuses = [503, 429, 500, 502]
    assert machine.pull("hub", "--json")[0] == 0
    server.statuses = [503] * 5
    server.files["config.json"] = b"{ }"
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, "the server answers 503" in err) == (1, True)
    asked = len(server.asked)
    server.statuses = [403]
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, len(server.asked) - asked) == (1, 2)
    assert "HF_TOKEN" in err


@pytest.mark.slow
def test_a_pull_that_is_killed_leaves_no_model_and_the_next_goes_on(machine: Machine, server: Server) -> None:
    server.files = model(40 * MIB)
    server.gate = threading.Event()
    server.files = {name: server.files[name] for name in ("model.safetensors", "config.json", "tokenizer/vocab.json")}
    child = machine.start("local", "--from", "org/m")
    part = machine.target.parent / ".m.pulling" / "part"
    try:
        assert server.half.wait(20)
        assert until(lambda: part.exists() and part.stat().st_size > 10 * MIB, 20.0) is not None
        status, _, err = machine.pull("local", "--from", "org/m")
        assert (status, "another pull of" in err) == (1, True)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert not machine.target.exists()
    kept = part.stat().st_size
    server.gate.set()
    status, out, err = machine.pull("local", "--from", "org/m")
    assert (status, content(machine.target)) == (0, server.files)
    assert "of it by an earlier pull" in out
    assert f"bytes={kept}-" in {each[2] for each in server.asked}


@pytest.mark.slow
def test_a_source_that_has_changed_meanwhile_is_begun_anew(machine: Machine, server: Server) -> None:
    server.cut = [1 * MIB] * 10
    server.ranges = False
    assert machine.pull("local", "--from", "org/m")[0] == 1
    server.cut, server.files = [], model()
    status, out, _ = machine.pull("local", "--from", "org/m")
    assert (status, "earlier pull" in out) == (0, False)
    assert content(machine.target) == server.files


def test_content_with_another_checksum_is_no_model(machine: Machine, server: Server) -> None:
    wrong = json.loads(server.hub_answer())
    for sibling in wrong["siblings"]:
        sibling.get("lfs", {})["sha256"] = "a" * 64
    server.api = wrong
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, "model.safetensors has another checksum than the source lists" in err) == (1, True)
    assert not machine.target.exists()
    assert (machine.target.parent / ".m.pulling" / "part").stat().st_size == 0
    server.api = None
    assert machine.pull("local", "--from", "org/m")[0] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rfilename": "../../../evil", "size": 3}, "names a file '../../../evil'"),
        ({"rfilename": "/etc/cron.d/evil", "size": 3}, "names a file '/etc/cron.d/evil'"),
        ({"rfilename": "config.json", "size": 3}, "lists a file twice"),
        ({"rfilename": "config.json/x", "size": 3}, "below a file"),
        ({"rfilename": "huge.json", "size": 2**45}, "are to come, and the disk"),
        ({"rfilename": "huge.json", "size": 2**70}, "has 1180591620717411303424 bytes"),
        ({"rfilename": "gone.json", "size": 3}, "the server answers 404"),
        ({"rfilename": "long.json", "size": 1}, "is longer than the 1 bytes"),
        ({"rfilename": "short.json", "size": 9}, "ended after 3 of 9 bytes"),
    ],
    ids=lambda value: value["rfilename"] if isinstance(value, dict) else "",
)
def test_a_hub_that_lies_brings_nothing(machine: Machine, server: Server, change: dict[str, Any], said: str) -> None:
    api = json.loads(server.hub_answer())
    server.api = {**api, "siblings": [*api["siblings"], change]}
    server.files |= {"long.json": b"{ }", "short.json": b"{ }"}
    before = set(os.listdir(machine.folder))
    status, _, err = machine.pull("local", "--from", "org/m")
    assert (status, said in err) == (1, True), err
    assert not machine.target.exists()
    assert set(os.listdir(machine.folder)) - before <= {"models"}


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
        assert server.half.wait(20)
        (machine.target.parent / "other").write_bytes(b"x" * (2 * MIB))
        server.gate.set()
        _, err = child.communicate(timeout=30)
        assert (child.returncode, b"No space left on device: free some space" in err) == (1, True), err
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
        (("local", "--from", "ftp://x/y"), "no hub's id or http(s) URL"),
        (("hub", "--from", "org/other"), "--from names another: a folder in model_path is written with / or ./"),
        (("hub", "--from", "http://x/y"), "is a hub's id, and --from is none"),
        (("local", "--from", "org/m", "--revision", "../x"), "a branch, a tag or a commit"),
        (("nobody",), "there is no profile 'nobody'"),
    ],
)
def test_mistakes(machine: Machine, words: tuple[str, ...], said: str) -> None:
    status, out, err = machine.pull(*words)
    assert (status, out, said in err) == (2, "", True), err


def test_a_source_that_is_not_there(machine: Machine, server: Server) -> None:
    for words, said in (
        (("local", "--from", "org/none"), "has no model 'org/none' with the revision 'main'"),
        (("hub", "--revision", "v9"), "has no model 'org/m' with the revision 'v9'"),
        (("local", "--from", "http://user:secret@127.0.0.1/x"), "holds no user or password"),
        (("local", "--from", "http://127.0.0.1:1/x"), "cannot be asked"),
    ):
        status, _, err = machine.pull(*words)
        assert (status, said in err, "secret" in err) == (1, True, False), err
    server.redirect = "file:///etc/passwd"
    assert "which is not followed" in machine.pull("local", "--from", "org/m")[2]
    server.redirect = f"{server.origin}/org/m/resolve/{COMMIT}/again"  # type: ignore[attr-defined]
    assert "redirects more than 5 times" in machine.pull("local", "--from", "org/m")[2]


def test_lines_of_progress_have_bytes_rate_and_the_time_that_is_left() -> None:
    said: list[str] = []
    now = [0.0]
    lines = Lines(said.append, lambda: now[0])
    listing = Listing(source="hub", files=(SourceFile(name="a", size=8 << 30), SourceFile(name="b", size=2 << 30)))
    lines.begin(listing, 1 << 30)
    lines.file("a")
    for _ in range(6):
        now[0] += 1.0
        lines.came(512 * MIB)
    assert said == [
        "2 files, 10.0 GiB, from hub, 1.0 GiB are here already",
        "3.5 of 10.0 GiB, 35%, 512 MiB/s, 13 s left: a".replace("3.5 of", "3.5 GiB of"),
    ]


def test_a_bar_on_a_terminal_has_bytes_rate_and_the_file(machine: Machine) -> None:
    screen = io.StringIO()
    bar = Bar(Console(file=screen, force_terminal=True, width=120))
    bar.begin(Listing(source="hub", files=(SourceFile(name="a", size=10 * MIB),)), 2 * MIB)
    bar.file("[red]model.safetensors")
    bar.came(3 * MIB)
    bar.trouble("cut off [x]")
    bar.close()
    shown = screen.getvalue()
    for part in ("5.0/10.0 MiB", "(red]model.safetensors", "cut off [x]"):
        assert part in shown
    assert shown.rstrip("\r\n").endswith(("\x1b[2K", "\x1b[?25h")), "nothing of it stays"
