"""`gateway key` on real files: written lines, output, and refusals."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli
from gateway.core.request.tenants import keys_from
from gateway.decider import key_file
from gateway.decider.key_file import KeysError, add, digest_of, entries, revoke
from gateway.shared.files.checked import InvalidFile
from tests.beside import beside

ROOT = Path(__file__).parents[2]
POLICY = "keys_file: keys.txt\ntenants: {acme: {}, zoo: {}}\n"
TODAY = "2026-01-31"
A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(POLICY)
    return tmp_path


class Ran:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, policy: Path) -> None:
        self._capsys, self._monkeypatch, self._policy = capsys, monkeypatch, policy

    def __call__(self, *argv: str, stdin: str = "") -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        status = cli.main(["key", *argv, "--policy", str(self._policy)])
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Ran:
    return Ran(capsys, monkeypatch, folder / "policy.yaml")


def test_a_key_is_printed_once_and_only_its_hash_is_kept(ran: Ran, folder: Path) -> None:
    file = folder / "keys.txt"
    status, out, err = ran("add", "acme")
    key = out.removesuffix("\n")
    assert status == 0
    assert re.fullmatch(r"weir-[A-Za-z0-9_-]{32}", key)
    digest = digest_of(key)
    assert err == f"gateway: this is a key of acme; it is not shown again. Its hash {digest[:12]} is in {file}\n"
    assert re.fullmatch(rf"{digest} acme  # \d{{4}}-\d\d-\d\d\n", file.read_text())
    assert file.stat().st_mode & 0o777 == 0o600
    assert keys_from(file.read_bytes(), "k") == {digest: "acme"}


def test_keys_are_listed_and_revoked(ran: Ran, folder: Path) -> None:
    file = folder / "keys.txt"
    assert ran("list") == (0, "", "")
    first, second = ran("add", "acme")[1], ran("add", "zoo")[1]
    file.write_text(file.read_text() + f"{A} gone by hand\n")
    (folder / "policy.yaml").write_text(POLICY.replace("zoo: {}", f"zoo: {{keys: [{B}]}}"))
    status, out, err = ran("list")
    assert (status, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        [digest_of(first)[:12], "acme"], [digest_of(second)[:12], "zoo"], [A[:12], "gone"], [B[:12], "zoo"],
    ]  # fmt: skip
    assert out.splitlines()[2:] == [
        f"{A[:12]}  gone  by hand  (no such tenant: the policy is refused until it is revoked)",
        f"{B[:12]}  zoo  (in the policy itself)",
    ]
    expected = f"gateway: the key {digest_of(first)[:12]} of acme is revoked in {file}\n"
    assert ran("revoke", stdin=first) == (0, "", expected)
    assert ran("revoke", digest_of(second)[:8])[0] == 0
    assert keys_from(file.read_bytes(), "k") == {A: "gone"}
    status, _, err = ran("revoke", stdin=first)
    assert status == 2, "it is gone already"
    assert err == f"gateway: {file}: no key has the hash {digest_of(first)[:12]}; see `gateway key list`\n"


@pytest.mark.parametrize(
    ("argv", "stdin", "expected"),
    [
        (["add", "acmee"], "", "there is no tenant 'acmee' (did you mean acme?)"),
        (["add", "stranger"], "", "there is no tenant 'stranger' (its tenants are acme, zoo)"),
        (["revoke"], "", "no key came on standard input"),
        (["revoke"], " \n", "no key came on standard input"),
        (["revoke", "weir-0123456789"], "", "others can see those"),
        (["revoke", "abc"], "", "HASH is 8 digits or more"),
        (["revoke", "aaaaaaaa"], "", "2 keys have the hash aaaaaaaa; see"),
        (["revoke", "a" * 65], "", "HASH is 8 digits or more"),
        (["revoke", "bbbbbbbb"], "", "no key has the hash bbbbbbbb; see"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    ran: Ran, folder: Path, argv: list[str], stdin: str, expected: str
) -> None:
    file = folder / "keys.txt"
    file.write_text(before := f"{A} acme\n{A[:-1]}b acme\n")
    file.chmod(0o600)
    status, out, err = ran(*argv, stdin=stdin)
    assert (status, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
    assert "weir-" not in err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("tenants: {acme: {}}\n", "policy.yaml: it names no file for keys: add a line such as `keys_file: keys.txt`"),
        ("tenant: {}\n", "policy.yaml:1: found unknown field"),
        (None, "policy.yaml: No such file or directory"),
        ("keys_file: none/keys.txt\ntenants: {acme: {}}\n", "none/keys.txt: No such file or directory"),
        ("keys_file: /\ntenants: {acme: {}}\n", "/: Is a directory"),
    ],
)
def test_a_policy_that_cannot_be_served(ran: Ran, folder: Path, policy: str | None, expected: str) -> None:
    file = folder / "policy.yaml"
    if policy is None:
        file.unlink()
    else:
        file.write_text(policy)
    status, out, err = ran("add", "acme")
    assert (status, out) == (2, "")
    assert expected in err


def test_a_file_with_mistakes_is_not_added_to(ran: Ran, folder: Path) -> None:
    file = folder / "keys.txt"
    file.write_text("weir-oops acme\n")
    for argv in (["add", "acme"], ["list"], ["revoke", "aaaaaaaa"]):
        status, out, err = ran(*argv)
        assert (status, out) == (2, "")
        assert f"{file}:1: found 9 characters instead of the hash" in err
    assert file.read_text() == "weir-oops acme\n"


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_last_line_without_its_end_stays_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text(f"# ours\n{A} acme # by hand")
    key = add(file, "zoo", TODAY)
    assert file.read_text() == f"# ours\n{A} acme # by hand\n{digest_of(key)} zoo  # {TODAY}\n"


def test_revoking_changes_one_byte_wherever_the_line_begins(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    text = f"\ufeff{A} acme {B} # a comment\r\n# {B} zoo\n\n  {B} zoo"
    file.write_bytes(text.encode())
    assert [(entry.tenant, entry.comment) for entry in entries(file)] == [("acme", f"{B} # a comment"), ("zoo", "")]
    revoke(file, B)
    assert file.read_bytes() == text.replace(f"\n\n  {B}", f"\n\n# {B}").encode()
    revoke(file, A)
    assert entries(file) == []
    assert keys_from(file.read_bytes(), "k") == {}


def test_what_is_no_plain_file_of_ones_own_is_not_written_to(tmp_path: Path) -> None:
    target, link, pipe, open_to_all = (tmp_path / name for name in ("target", "link", "pipe", "open"))
    target.write_text("")
    target.chmod(0o600)
    link.symlink_to(target)
    os.mkfifo(pipe)
    open_to_all.write_text(f"{A} acme\n")
    open_to_all.chmod(0o666)
    for file, why in [
        (link, "a symbolic link; name the file itself"),
        (pipe, "not a regular file"),
        (open_to_all, "others may write to it, and so make keys for themselves: chmod go-w"),
    ]:
        with pytest.raises(KeysError, match=f"^{re.escape(str(file))}: {why}"):
            add(file, "acme", TODAY)
        with pytest.raises(KeysError, match=why):
            revoke(file, A)
    assert target.read_text() == ""
    assert [entry.tenant for entry in entries(open_to_all)] == ["acme"], "looking is another matter"
    assert entries(link) == []


def test_a_dangling_link_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeysError, match="symbolic link"):
        add(tmp_path / "link", "acme", TODAY)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_file_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.txt"
    add(file, "acme", TODAY)
    monkeypatch.setattr(key_file, "MAX_KEYS", 1)
    with pytest.raises(KeysError, match="it has 1 keys, and no more are read"):
        add(file, "acme", TODAY)
    assert len(entries(file)) == 1


def test_what_is_printed_of_a_comment_cannot_command_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_bytes(f"{A} acme \x1b[2J".encode() + b"\xff\n")
    assert entries(file)[0].comment == "?[2J\ufffd"


def test_many_at_once_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    made: list[str] = []

    def some() -> None:
        for turn in range(10):
            key = add(file, "acme", TODAY)
            if turn % 2:
                revoke(file, digest_of(key))
            else:
                made.append(key)

    with beside(*[some] * 8):
        pass
    assert set(keys_from(file.read_bytes(), "k")) == {digest_of(key) for key in made}
    assert len(made) == 40


def test_a_line_that_is_written_in_part_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.txt"
    add(file, "acme", TODAY)
    before = entries(file)
    write = os.write
    for written in (1, 30, 68):  # of a line: its `#`, some of the hash, some of the tenant
        monkeypatch.setattr(os, "write", lambda descriptor, data, n=written: write(descriptor, data[:n]))
        with pytest.raises(KeysError, match="not be written in full"):
            add(file, "acme", TODAY)
        assert entries(file) == before
    monkeypatch.setattr(os, "write", write)
    key = add(file, "acme", TODAY)
    assert [entry.digest for entry in entries(file)] == [before[0].digest, digest_of(key)]


def test_a_bad_file_raises_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("x\ny\n")
    with pytest.raises(InvalidFile, match=r"(?s):1: .*:2: "):
        entries(file)


def test_at_a_terminal_the_key_is_asked_for_and_not_shown(folder: Path) -> None:
    key = add(folder / "keys.txt", "acme", TODAY)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gateway.cli", "key", "revoke", "--policy", str(folder / "policy.yaml")]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd=ROOT)
    os.close(theirs)
    try:
        said = b""
        while b"the key: " not in said:
            said += os.read(ours, 1024)
        os.write(ours, f"{key}\n".encode())
        while b"is revoked" not in said:
            said += os.read(ours, 1024)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert key.encode() not in said
    assert entries(folder / "keys.txt") == []
