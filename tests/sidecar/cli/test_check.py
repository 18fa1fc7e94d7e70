"""`sidecar check`: its output and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gateway import __version__
from gateway.shared.files.checked import listed
from sidecar.cli import main
from sidecar.core.config import decode
from sidecar.core.flags import FLAGS
from tests.certificates import certificate

EXAMPLE = Path(__file__).parents[3] / "sidecar" / "cli" / "example.yaml"


class Ran:
    """What `main` did: its status and its two outputs."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        try:
            status = main(argv)
        except SystemExit as end:
            status = int(str(end.code))
        out, err = self._capsys.readouterr()
        return status, out, err


def found_in(err: str, file: Path) -> list[tuple[int, str, str]]:
    """Line, field and message of each mistake in a file that was checked."""
    found = re.findall(rf"^{re.escape(str(file))}:(\d+):\d+: (?!warning)(\S+): (.*)$", err, re.MULTILINE)
    return [(int(line), field, message) for line, field, message in found]


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    return Ran(capsys)


def test_the_example_is_good(ran: Ran) -> None:
    assert ran("check", "--no-files", str(EXAMPLE)) == (0, f"{EXAMPLE}: ok\n", "")


def test_the_file_in_full_is_a_file(ran: Ran) -> None:
    status, out, err = ran("check", str(EXAMPLE), "--explain", "--no-files")
    assert (status, err) == (0, "")
    assert decode(out.encode()) == decode(EXAMPLE.read_bytes())
    assert "load_stall: 5m" in out


def test_a_bundle_of_authorities_may_have_comments_in_any_language_and_is_not_empty(ran: Ran, tmp_path: Path) -> None:
    file, (pem, _) = tmp_path / "sidecar.yaml", certificate(tmp_path, "ca")
    file.write_text(f"models: {{m: {{model_path: {tmp_path}}}}}\nca_file: ca.pem\n")
    whole = "# F\u0151tan\u00fas\u00edtv\u00e1ny\n" + pem.read_text()
    pem.write_text("# as long as a large bundle\n" * 20_000 + whole, "utf-8")
    assert ran("check", str(file)) == (0, f"{file}: ok\n", "")
    pem.write_text("")
    status, _, err = ran("check", str(file))
    assert (status, "no certificates in PEM" in err) == (2, True)


def test_every_mistake_of_every_file_is_a_line(ran: Ran, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("models:\n  a: {model_path: /m, sleep: {level: 3}}\ngpus: none\n")
    absent = tmp_path / "absent.yaml"
    status, out, err = ran("check", "--no-files", str(bad), str(absent), str(EXAMPLE))
    assert (status, out) == (2, f"{EXAMPLE}: ok\n")
    assert err.splitlines() == [
        f"{bad}:2:38: models.a.sleep.level: found '3', expected 1 or 2",
        "    2 |   a: {model_path: /m, sleep: {level: 3",
        "      |                                      ^",
        f"{bad}:3:7: gpus: found 'none', expected all or a list",
        "    3 | gpus: none",
        "      |       ^^^^",
        f"{absent}: No such file or directory",
    ]


def test_the_files_that_it_names_are_read_too_in_the_same_pass(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    text = "token_file: t\nmodels:\n  a: {model_path: /no/such/model, flags: {modle: x, max-num-sequences: 3}}\n"
    file.write_text(text + "listen: nowhere\n")
    status, out, err = ran("check", str(file))
    assert (status, out) == (2, "")
    assert found_in(err, file) == [
        (1, "token_file", f"found {tmp_path}/t: No such file or directory, expected the file of a token"),
        (3, "models.a.flags.modle",
         "found the flag 'modle', expected no such flag: model_path says it (did you mean model?)"),
        (3, "models.a.flags.max-num-sequences",
         f"found the flag 'max-num-sequences', expected one of {listed(FLAGS)} (did you mean max-num-seqs?)"),
        (4, "listen", "found 'nowhere', expected HOST:PORT such as 127.0.0.1:8002"),
    ]  # fmt: skip
    (tmp_path / "t").write_text("0123456789abcdef\n")
    file.write_text("token_file: t\nmodels: {c: {model_path: here}}\n")
    for mode, said in (
        (0o644, f"warning: token_file: everybody on this machine may read it: chmod o-r {tmp_path}/t"),
        (0o602, f"token_file: found {tmp_path}/t: everybody on this machine may write to it: chmod o-w {tmp_path}/t"),
    ):
        (tmp_path / "t").chmod(mode)
        assert said in ran("check", str(file))[2]
    (tmp_path / "t").chmod(0o600)
    assert ran("check", str(file)) == (0, f"{file}: ok\n", "")
    (tmp_path / "t").write_text("short\n")
    status, out, err = ran("check", str(file))
    found = (
        f"found {tmp_path}/t: a token is at least 16 visible ASCII characters; 2 at most, one a line, expected the "
        "file of a token"
    )
    assert (status, out, found_in(err, file)) == (2, "", [(1, "token_file", found)])


def test_what_serve_would_refuse_of_certificates_and_the_state_file_is_a_mistake(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    text = "token_file: t\nrelay: {listen: 127.0.0.1:8003, certificate_file: a.pem%s}\nmodels: {m: {model_path: /m}}\n"
    (tmp_path / "t").write_text("0123456789abcdef\n")
    (tmp_path / "t").chmod(0o600)
    certificate(tmp_path, "a")
    certificate(tmp_path, "b")

    def mistakes(keys: str = ", key_file: a.key", more: str = "") -> list[tuple[str, bool]]:
        file.write_text(text % keys + more)
        _, _, err = ran("check", str(file))
        return [(field, str(tmp_path) in message) for _, field, message in found_in(err, file)]

    assert mistakes() == []
    assert mistakes(", key_file: absent.key") == [("relay.key_file", True)]
    assert mistakes(", key_file: b.key") == [("relay.key_file", True)], "the key of another certificate"
    assert mistakes("") == [("relay.certificate_file", True)], "no key in it"
    (tmp_path / "a.key").chmod(0o666)
    assert mistakes() == [("relay.key_file", True)], "a key that everybody may write"
    (tmp_path / "a.key").chmod(0o600)
    (tmp_path / "states").mkdir()
    assert mistakes(more="state_file: states\n") == [("state_file", True)]
    assert ran("check", "--no-files", str(file))[0] == 0


def test_what_is_unwise_is_a_warning(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text("engine_addresses: 8100-8199\nmodels: {a: {model_path: /m, sleep: null}}\n")
    status, out, err = ran("check", str(file))
    assert (status, out) == (0, f"{file}: ok\n")
    assert err.startswith(f"{file}:1:1: warning: engine_addresses: every user of this machine")


def test_the_schema_is_of_a_sidecars_file(ran: Ran) -> None:
    status, out, err = ran("check", "--schema")
    schema = json.loads(out)
    assert (status, err, schema["title"]) == (0, "", "Weir sidecar")
    assert {"models", "token_file", "engine_addresses"} <= set(schema["properties"])
    assert "model_path" in schema["$defs"]["Profile"]["properties"]
    described = [field for field in schema["properties"].values() if "description" in field]
    assert len(described) >= len(schema["properties"]) - 1


def test_the_version(ran: Ran) -> None:
    assert ran("--version") == (0, f"weir {__version__}\n", "")


def test_help_teaches_by_example(ran: Ran) -> None:
    status, out, _ = ran("--help")
    assert status == 0
    assert "sidecar check sidecar.yaml" in out
    smallest = out[out.index("  models:") :]
    assert list(decode(smallest.encode()).models) == ["llama-3-8b"]
    assert ran("check", "--help")[1].count("sidecar check ") >= 4


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "sidecar: the following arguments are required: COMMAND (see "),
        (("check",), "sidecar: the following arguments are required: FILE (see sidecar check --help)"),
        (("start",), "sidecar: there is no command 'start': did you mean status? (see"),
        (("check", "x", "--expl"), "sidecar check: unrecognized arguments: --expl: did you mean --explain?"),
    ],
)
def test_a_bad_command_line_is_one_line(ran: Ran, argv: tuple[str, ...], line: str) -> None:
    status, out, err = ran(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)
