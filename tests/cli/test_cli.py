"""Command line: its arguments, and one line for every mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import gateway
from gateway import cli
from gateway.cli import parser_for, serve
from gateway.cli.files import TOKEN_VARIABLE, checked
from gateway.core.policy.file import decode
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.serve import starting
from gateway.serve.embedded import EmbeddedFleet
from gateway.serve.starting import Options, Running, StartError, announcement
from gateway.shared.certificate import Certificate
from loadtest.load.scenario import SHIPPED, load
from loadtest.load.scenario import decode as decode_scenario
from tests.layout import loaded
from tests.plain_http import NOBODY

ROOT = Path(__file__).parents[2]
TOKEN = "0123456789abcdef"  # noqa: S105 # a test's own
ENGINE = ("--engine", "http://127.0.0.1:9")


class Ran:
    """What `main` did: its status, its two outputs, and the options it would have served with."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.options: Options | None = None
        self._capsys = capsys
        monkeypatch.setattr(serve, "run", self._run)
        monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    def _run(self, options: Options) -> int:
        self.options = options
        return 0

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        try:
            status = cli.main(argv)
        except SystemExit as end:
            status = int(str(end.code))
        out, err = self._capsys.readouterr()
        return status, out, err

    def served(self, *argv: str) -> Options:
        status, out, err = self("serve", *argv)
        assert (status, out, err) == (0, "", "")
        assert self.options is not None
        return self.options


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    return Ran(capsys, monkeypatch)


def test_version(ran: Ran) -> None:
    assert ran("--version") == (0, f"weir {gateway.__version__}\n", "")


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["serve", "--help"],
        ["check", "--help"],
        ["key", "--help"],
        ["key", "add", "--help"],
        ["status", "--help"],
        ["bench", "--help"],
    ],
)
def test_help_teaches_by_examples_that_parse(ran: Ran, argv: list[str]) -> None:
    status, out, err = ran(*argv)
    assert (status, err) == (0, "")
    examples = [line.strip() for line in out.splitlines() if re.match(r"\s+(?:WEIR_\S+ )?gateway \w+ ", line)]
    assert examples
    for line in examples:
        words = shlex.split(re.split(r"\s{3,}", line)[0])
        words = words[words.index("gateway") + 1 :]
        parser_for(words).parse_args(words)
    assert max(map(len, out.splitlines())) <= 120


def test_the_defaults(ran: Ran) -> None:
    options = ran.served(*ENGINE)
    assert options.policy is None
    assert options.engines == (EngineEntry(url="http://127.0.0.1:9"),)
    assert (options.embedded, options.listen, options.control) == ((), "127.0.0.1:8000", "127.0.0.1:8001")
    assert (options.certificate, options.admin_tokens, options.log) == (None, (), "-")
    assert options.epp is None


def test_every_flag(ran: Ran, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    options = ran.served(
        *("--policy", str(ROOT / "policies" / "demo.yaml")),
        *("--engine", "unix:///run/a.sock", "--engine", "sim", "--engine", "sim:3", "--engine", "sim:4:a100-8b"),
        *("--listen", "unix:/run/weir.sock", "--control", "0.0.0.0:8001", "--admin-token-file", str(token)),
        *("--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "ca.pem", "--log", "none"),
        *("--control-tls-cert", "d.pem", "--control-tls-key", "l.pem"),
        *("--epp", "127.0.0.1:9002"),
    )
    assert options.epp == "127.0.0.1:9002"
    assert options.policy == ROOT / "policies" / "demo.yaml"
    assert options.engines == (EngineEntry(url="unix:///run/a.sock"),)
    assert options.embedded == (EmbeddedFleet(), EmbeddedFleet(3), EmbeddedFleet(4, "a100-8b"))
    assert (options.listen, options.control, options.admin_tokens) == ("unix:/run/weir.sock", "0.0.0.0:8001", (TOKEN,))
    assert options.certificate == Certificate(Path("c.pem"), Path("k.pem"), Path("ca.pem"))
    assert options.control_certificate == Certificate(Path("d.pem"), Path("l.pem"))
    assert options.log == "none"


def test_the_demo(ran: Ran) -> None:
    options = ran.served("--engine", "demo", "--engine", "sim")
    assert (options.demo, options.engines, options.embedded) == (True, (), (EmbeddedFleet(),))
    assert options.policy is None
    assert options.default_policy == checked(ROOT / "policies" / "demo.yaml"), "in which calls wait for a start"
    plain = ran.served("--engine", "sim")
    assert (plain.demo, plain.default_policy) == (False, Policy())


def test_the_token_comes_from_the_environment_too(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert ran.served(*ENGINE, "--control", "127.0.0.1:8001").admin_tokens == (TOKEN,)


def test_a_token_that_would_cross_a_network_in_the_clear_is_warned_of(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    status, out, err = ran("serve", *ENGINE, "--control", "[::]:8001")
    assert (status, out) == (0, "")
    line = json.loads(err)
    assert (line["level"], line["event"]) == ("warning", "configuration")
    hides = "tokens cross the network to it in the clear: --control-tls-cert hides them"
    assert line["message"] == f"--control [::]:8001: {hides}"
    assert ran.served(*ENGINE, "--control", "[::]:8001", "--control-tls-cert", "c.pem").control == "[::]:8001"
    policy = tmp_path / "p.yaml"
    policy.write_text("fleet: {sidecars: {allow: [10.0.0.0/8]}}")
    status, out, err = ran("serve", "--policy", str(policy))
    assert [json.loads(line)["message"].split(": ", 1)[0] for line in err.splitlines()] == [str(policy)] * 2
    assert "order token are in the clear" in err
    assert ran("serve", *ENGINE, "--control-tls-key", "k") == (
        2, "", "gateway: --control-tls-key: there is no --control-tls-cert for it\n",
    )  # fmt: skip


MISTAKES = [
    ([], "the following arguments are required: COMMAND"),
    (["bench"], "where to? Give --target URL, or --engines sim:2"),
    (
        ["serve"],
        "--engine sim, --sidecar FILE, or fleet.engines, fleet.sidecars or fleet.inference_pool in the policy",
    ),
    (["serve", "--frobnicate"], "gateway serve: unrecognized arguments: --frobnicate (see gateway serve --help)"),
    (["serve", "--polcy", "x"], "unrecognized arguments: --polcy x: did you mean --policy? (see gateway serve --help)"),
    (["serve", "--polcy=x"], "unrecognized arguments: --polcy=x: did you mean --policy?"),
    (["key", "add", "acme", "--polcy", "p"], "gateway key add: the following arguments are required: --policy"),
    (["key", "list", "--policy", "p", "--plicy", "q"], "--plicy q: did you mean --policy? (see gateway key list"),
    (["sreve"], "gateway: there is no command 'sreve': did you mean serve? (see gateway --help)"),
    (["key", "ad"], "gateway key: there is no command 'ad': did you mean add?"),
    (["zzz"], "gateway: there is no command 'zzz' (see gateway --help)"),
    (["serve", "--engine"], "argument --engine: expected one argument"),
    (["serve", "--engine", "10.0.0.1:8000"], "'10.0.0.1:8000': write http://HOST:PORT"),
    (["serve", "--engine", "http://h:99999"], "the port is a number from 1 to 65535"),
    (["serve", "--engine", "http://user:pw@h:1"], "no user, query or fragment"),
    (["serve", "--engine", "sim:0"], "1 to 64 simulated engines, not 0"),
    (["serve", "--engine", "sim:5000"], "'sim:5000': 1 to 64 simulated engines, not 5000"),
    (["serve", "--engine", "sim:two"], "'sim:two' is not sim, sim:N (1 to 64 engines) or sim:N:PROFILE"),
    (["serve", "--engine", "sim:2:abacus"], "there is no profile 'abacus': neither a file nor one of a100-8b, h100-8b"),
    (["serve", *ENGINE, *ENGINE], "--engine: 127.0.0.1:9 is there twice"),
    (["serve", *ENGINE, "--listen", "8000"], "argument --listen: '8000' is not HOST:PORT"),
    (["serve", *ENGINE, "--listen", "h:65536"], "'h:65536' is not HOST:PORT"),
    (["serve", *ENGINE, "--listen", "unix:"], "unix: needs a path"),
    (["serve", *ENGINE, "--control", "unix:/run/c.sock"], "argument --control: 'unix:/run/c.sock' is not HOST:PORT"),
    (["serve", *ENGINE, "--control", "10.0.0.1:8001"], "10.0.0.1:8001 can be reached from other machines"),
    (["serve", *ENGINE, "--control", "my-host:8001"], "my-host:8001 can be reached from other machines"),
    (["serve", *ENGINE, "--tls-key", "k.pem"], "--tls-key: there is no --tls-cert for it"),
    (["serve", *ENGINE, "--epp", "unix:/e"], "argument --epp: 'unix:/e' is not HOST:PORT"),
    (["serve", *ENGINE, "--epp", "127.0.0.1:9002", "--take-over"], "an endpoint picker cannot be handed over"),
    (
        ["serve", *ENGINE, "--admin-token-file", "/nowhere/t"],
        "--admin-token-file /nowhere/t: No such file or directory",
    ),
    (["serve", *ENGINE, "--admin-token-file", "/dev/null"], "--admin-token-file /dev/null: not a plain file"),
    (["serve", "--policy", "/nowhere/p.yaml"], "/nowhere/p.yaml: No such file or directory"),
    (["serve", "--policy", "/"], "/: Is a directory"),
    (["serve", "--sidecar", "/" + "x" * 300], "x: File name too long"),
    (["simulate", "--engines", "1", "--profile", "/" + "x" * 300], "x: File name too long"),
    (["key"], "the following arguments are required: add | list | revoke"),
    (["key", "add", "acme"], "the following arguments are required: --policy"),
    (["key", "add", "--policy", "p.yaml"], "the following arguments are required: TENANT"),
    (["key", "list", "--policy", "/nowhere/p.yaml"], "/nowhere/p.yaml: No such file or directory"),
    (["status", "--url", "127.0.0.1:8001"], "'127.0.0.1:8001': write http://HOST:PORT or https://HOST:PORT"),
    (["status", "--url", "unix:///run/c.sock"], "the control port of a gateway"),
    (["status", "--token-file", "/nowhere/token"], "--token-file /nowhere/token: No such file or directory"),
    (["check"], "the following arguments are required: FILE"),
    (["check", "--strict"], "the following arguments are required: FILE"),
    (["check", "/nowhere/p.yaml"], "/nowhere/p.yaml: No such file or directory"),
]


@pytest.mark.parametrize(("argv", "expected"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_a_mistake_is_one_clear_line_and_status_2(ran: Ran, argv: list[str], expected: str) -> None:
    status, out, err = ran(*argv)
    assert (status, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
    assert ran.options is None


@pytest.mark.parametrize("token", ["short", "x" * 15, "with a space in it", "ünïcödé-ünïcödé-ünïcödé", ""])
def test_a_weak_token_is_refused(ran: Ran, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    status, _, err = ran("serve", *ENGINE)
    assert (status, err) == (
        2,
        f"gateway: {TOKEN_VARIABLE}: a token is at least 16 visible ASCII characters; 2 at most, one a line\n",
    )


def test_what_keeps_the_gateway_from_starting_is_told_in_the_same_way(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Options) -> None:
        raise StartError("it cannot start")

    monkeypatch.setattr(serve, "run", fails)
    assert ran("serve", *ENGINE) == (2, "", "gateway: it cannot start\n")


@pytest.mark.parametrize(("workers", "relays"), [("1", 0), ("2", 2), ("64", 64)])
def test_workers(ran: Ran, workers: str, relays: int) -> None:
    assert ran.served(*ENGINE, "--workers", workers).relays == relays


def test_workers_auto_leaves_a_core_to_the_decider(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.serve.cores", lambda: 8)
    assert ran.served(*ENGINE, "--workers", "auto").relays == 7
    monkeypatch.setattr("gateway.cli.serve.cores", lambda: 128)
    assert ran.served(*ENGINE, "--workers", "auto").relays == 64
    monkeypatch.setattr("gateway.cli.serve.cores", lambda: 2)
    assert ran.served(*ENGINE, "--workers", "auto").relays == 0


@pytest.mark.parametrize("workers", ["0", "65", "-1", "two", ""])
def test_workers_that_are_no_number_of_processes(ran: Ran, workers: str) -> None:
    status, _, err = ran("serve", *ENGINE, f"--workers={workers}")
    assert status == 2
    assert f"{workers!r} is neither auto nor a number from 1 to 64" in err


@pytest.mark.parametrize("flag", ["--policy", "--sidecar", "--tls-cert", "--tls-client-ca", "--control-tls-key"])
def test_a_file_without_a_name(ran: Ran, flag: str) -> None:
    status, _, err = ran("serve", *ENGINE, f"{flag}=")
    assert (status, err.count("\n")) == (2, 1)
    assert f"{flag}: expected a file, found nothing" in err


@pytest.mark.parametrize("own", [["--engine", "sim"], ["--engine", "demo"]])
def test_engines_of_its_own_cannot_be_taken_over(ran: Ran, own: list[str]) -> None:
    status, _, err = ran("serve", *own, "--take-over")
    assert status == 2
    assert "--take-over: engines and sidecars of a gateway's own end with it" in err


def test_take_over_has_a_socket_or_finds_it(ran: Ran) -> None:
    assert ran.served(*ENGINE).take_over is None
    assert ran.served(*ENGINE, "--take-over").take_over == ""
    assert ran.served(*ENGINE, "--take-over", "/run/weir/g").take_over == "/run/weir/g"


@pytest.mark.parametrize("own", ["sim", "demo"])
def test_engines_of_ones_own_may_have_several_processes(ran: Ran, own: str) -> None:
    assert ran.served("--engine", own, "--workers", "2").relays == 2


def test_a_sidecar_of_ones_own_is_for_one_process(ran: Ran, tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text("version: 1\n")
    status, _, err = ran("serve", "--sidecar", str(file), "--workers", "2")
    assert status == 2
    assert err.startswith("gateway: --workers 2: a sidecar of a gateway's own is for one process")


def test_check_names_what_is_good_and_every_problem_of_what_is_not(ran: Ran, tmp_path: Path) -> None:
    bad = ROOT / "tests" / "policies_bad" / "out_of_bounds.yaml"
    port = tmp_path / "port.yaml"
    port.write_text("fleet: {engines: [{url: 'http://h:99999'}]}")
    good = ROOT / "policies" / "demo.yaml"
    status, out, err = ran("check", str(bad), str(good), str(port))
    assert status == 2
    assert out == f"{good}: ok\n"
    lines = err.splitlines()
    assert lines[:3] == [
        f"{bad}:3:14: budget.kv_target: found '120%', expected a share such as 80%, at least 5%, at most 100%",
        "    3 |   kv_target: 120%",
        "      |              ^^^^",
    ]
    assert lines[-3:] == [
        f"{port}:1:20: fleet.engines[0].url: found 'http://h:99999', expected an engine's URL: the port is a number "
        "from 1 to 65535",
        "    1 | fleet: {engines: [{url",
        "      |                    ^^^",
    ]
    told = [line.partition(": ")[2] for line in lines if line.startswith(str(bad))]
    assert told == [line.partition(": ")[2] for line in bad.with_suffix(".txt").read_text().splitlines()]


def test_serve_tells_every_problem_of_its_policy(ran: Ran) -> None:
    bad = ROOT / "tests" / "policies_bad" / "out_of_bounds.yaml"
    status, _, err = ran("serve", "--policy", str(bad), *ENGINE)
    assert status == 2
    assert [line.split(": ")[1] for line in err.splitlines()] == [f"{bad}:{line}" for line in (3, 4, 5)]


def test_check_explains_a_policy_in_full(ran: Ran) -> None:
    file = ROOT / "policies" / "demo.yaml"
    status, out, err = ran("check", "--explain", str(file))
    assert (status, err) == (0, "")
    assert "first_byte: 20s" in out
    assert "kv_target: 80%" in out
    assert decode(out.encode()) == decode(file.read_bytes())
    assert ran("check", str(file), "--explain") == (status, out, err)


def test_check_warns_of_what_is_legal_but_unwise(ran: Ran, tmp_path: Path) -> None:
    unwise = tmp_path / "unwise.yaml"
    unwise.write_text("version: 1\ntenants: {}\n")
    warning = (
        f"{unwise}:2:1: warning: tenants: there are none, so every call is refused with 401\n"
        "    2 | tenants\n"
        "      | ^^^^^^^\n"
    )
    assert ran("check", str(unwise)) == (0, f"{unwise}: ok\n", warning)
    assert ran("check", "--strict", str(unwise)) == (2, f"{unwise}: ok\n", warning)
    good = ROOT / "policies" / "demo.yaml"
    assert ran("check", "--strict", str(good)) == (0, f"{good}: ok\n", "")
    status, out, err = ran("check", str(unwise), "--explain")
    assert (status, decode(out.encode()).tenants, err) == (0, {}, warning)


@pytest.mark.parametrize(
    ("engines", "simulated"),
    [
        (["kv, role: prefill", "kv", "kv"], "--engines 3 --prefill 1"),
        (["kv, role: prefill", "kv, role: prefill", "kv, role: decode"], "--engines 3 --prefill 2"),
        (["kv", "kv"], ""),
        (["kv, role: prefill", "kv", "others, role: prefill", "others"], ""),
    ],
    ids=["split", "more that read", "no roles", "two groups"],
)
def test_check_says_what_tells_whether_a_split_pays(
    ran: Ran, tmp_path: Path, engines: list[str], simulated: str
) -> None:
    """A simulation has one group, whose engines have roles."""
    split = tmp_path / "my split.yaml"
    listed = ", ".join(f"{{url: 'http://h{n}:8000', transfer: {each}}}" for n, each in enumerate(engines))
    split.write_text(f"classes: {{default: {{tpot: 50ms}}}}\nfleet: {{engines: [{listed}]}}\n")
    command = f"gateway simulate --policy '{split}' --trace CALLS.jsonl --profile PROFILE {simulated}"
    said = f" (whether a split into prefill and decode pays for logged calls: `{command}`)" if simulated else ""
    assert ran("check", str(split))[:2] == (0, f"{split}: ok{said}\n")


def test_check_prints_the_schema(ran: Ran) -> None:
    assert ran("check", "--schema") == (0, (ROOT / "policies" / "schema.json").read_text(), "")


def test_check_reads_scenarios_and_their_traces(ran: Ran, tmp_path: Path) -> None:
    assert ran("check", "--scenario", "--schema") == (0, (SHIPPED / "schema.json").read_text(), "")
    assert ran("check", "--scenario", "chat") == (0, "chat: ok\n", "")
    status, out, _ = ran("check", "--scenario", "--explain", "chat")
    assert (status, decode_scenario(out.encode())) == (0, load(SHIPPED / "chat.yaml"))
    file, trace = tmp_path / "s.yaml", tmp_path / "t.csv"
    file.write_text("arrivals: trace\ntrace: t.csv\n")
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:00,1,2\n" * 2000)
    assert ran("check", "--scenario", str(file)) == (0, f"{file}: ok (2000 rows in t.csv)\n", "")
    with trace.open("a") as rows:
        rows.write("yesterday,1,2\n")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("duration: 1m\narivals: {}\n")
    status, out, err = ran("check", "--scenario", str(file), "nope", str(wrong))
    assert (status, out) == (2, "")
    for line, start in zip(err.splitlines()[:3], (
        f"{trace}, line 2002: TIMESTAMP is 'yesterday'", "nope: neither a file nor one", f"{wrong}:2:1: found unknown",
    ), strict=True):  # fmt: skip
        assert line.startswith(start)


def test_check_reads_the_keys_file_where_there_is_one(ran: Ran, tmp_path: Path) -> None:
    policy, keys = tmp_path / "p.yaml", tmp_path / "keys"
    policy.write_text("tenants: {acme: {}}\nkeys_file: keys\n")
    note = f" (its keys_file {keys} does not exist yet: `gateway key add` makes it)"
    assert ran("check", "--strict", str(policy)) == (0, f"{policy}: ok{note}\n", "")
    keys.write_text(f"{'0' * 64} acme\n")
    keys.chmod(0o600)
    assert ran("check", str(policy)) == (0, f"{policy}: ok\n", "")
    keys.write_text(f"{'0' * 64} acne\nnot-a-hash\n")
    status, out, err = ran("check", str(policy))
    assert (status, out) == (2, "")
    assert err.startswith(f"{keys}:2: found 10 characters instead of the hash")
    keys.write_text(f"{'0' * 64} acne\n")
    status, out, err = ran("check", str(policy))
    assert (status, out) == (2, "")
    assert "the tenant acne, expected a tenant of the policy (did you mean acme?)" in err


def test_the_announcement_of_a_gateway_with_keys_reads_one_from_the_environment() -> None:
    text = announcement(Running(["http://127.0.0.1:8000"], "http://c", ["http://e:1"], ["m"], keyed=True))
    words = shlex.split(text[text.index("curl") : text.index("\n\nimport os")].replace("\\\n", " "))
    assert "authorization: Bearer $KEY" in words
    python = text[text.index("import os") :]
    compile(python, "snippet", "exec")
    assert 'api_key=os.environ["KEY"]' in python


def test_the_announcement_has_commands_for_what_listens() -> None:
    text = announcement(Running(["http://127.0.0.1:8000"], "http://127.0.0.1:8001", ["http://e:1"], ["it's a model"]))
    curl = text[text.index("curl") : text.index("\n\nfrom openai")]
    words = shlex.split(curl.replace("\\\n", " "))
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert '"model": "it\'s a model"' in words[-1]
    compile(text[text.index("from openai") :], "snippet", "exec")
    unix = announcement(Running(["unix:/run/w.sock"], "http://127.0.0.1:8001", ["http://e:1"], ["m"]))
    assert "curl -N --unix-socket /run/w.sock http://localhost/v1/chat/completions" in unix
    for listens, reached in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")):  # noqa: S104 # what it listens on is said
        text = announcement(Running([f"https://{listens}:8000"], "http://127.0.0.1:8001", ["http://e:1"], ["m"]))
        assert text.startswith(f"data port https://{listens}:8000\n")
        assert f"curl -N https://{reached}:8000/v1" in text
        assert f'base_url="https://{reached}:8000/v1"' in text
    assert "readyz tells when" in announcement(Running(["http://127.0.0.1:8000"], "http://c", ["http://e:1"], []))
    for models, in_turn in ((list[str](), ()), (["m"], ()), (["m"], ("m",))):
        running = Running(["http://a:1"], "http://c", ["http://e:1"], models, in_turn=in_turn)
        assert "\nconsole http://c/" in announcement(running)


# Long ones, whose reader leaves in the middle, and short ones, which are written as the command ends.
TOLD = [
    ("gateway", "--version"),
    ("gateway", "check", "policies/default.yaml"),
    ("sidecar", "--version"),
    ("gateway", "check", "policies/default.yaml", "--explain"),
    ("gateway", "serve", "--help"),
    ("sidecar", "init", "example", "--out", "-"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", TOLD, ids=" ".join)
def test_a_reader_that_has_read_enough_ends_a_command_without_a_word(words: tuple[str, ...]) -> None:
    """As `| head -1` does: the pipe is closed before all is written, and also before anything is."""
    program, *rest = words
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for lines in (1, 0):
        command = [sys.executable, "-m", f"{program}.cli", *rest]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=buffered)
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline()
        process.stdout.close()
        _, told = process.communicate(timeout=60)
        assert (process.returncode, told) == (0, b"")


def test_a_policy_whose_keys_are_not_there_yet_is_warned_of(ran: Ran, tmp_path: Path) -> None:
    policy, keys = tmp_path / "p.yaml", tmp_path / "keys"
    policy.write_text("keys_file: keys\ntenants: {acme: {}}\n")
    warning = f"keys_file: {keys} does not exist: its callers get 401 until `gateway key add` makes it"
    assert warning in ran("serve", *ENGINE, "--policy", str(policy))[2]
    keys.touch(mode=0o600)
    assert "does not exist" not in ran("serve", *ENGINE, "--policy", str(policy))[2]


@pytest.mark.slow
def test_a_real_process_serves_announces_and_drains() -> None:
    nobody = "http://127.0.0.1:9"  # the discard port: one that was free a moment ago may be another's now
    command = [sys.executable, "-m", "gateway.cli", "serve", "--engine", nobody, "--log", "none"]
    ports = ["--listen", "127.0.0.1:0", "--control", "127.0.0.1:0"]
    process = subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(4)]
        data, control = (line.rpartition(" ")[2] for line in lines[:2])
        assert lines[:3] == [f"data port {data}", f"control port {control}", f"engines {nobody}"]
        assert lines[3].startswith("no engine has answered yet")
        assert [
            httpx.get(f"{control}/{path}", trust_env=False, verify=NOBODY, timeout=60.0).status_code
            for path in ("livez", "readyz", "fleet")
        ] == [200, 503, 200]
        assert httpx.get(f"{data}/health", trust_env=False, verify=NOBODY, timeout=60.0).status_code == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "other"), [("--listen", "--control"), ("--control", "--listen")])
def test_a_real_process_ends_with_status_2_where_its_address_is_taken(flag: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "gateway.cli", "serve", *ENGINE, other, "127.0.0.1:0", flag, where]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    hint = "another process listens there: end it, or give another port"
    assert ended.stderr.splitlines()[-1] == f"gateway: {flag} {where}: Address already in use; {hint}"


def test_check_finds_every_mistake_in_one_pass_in_the_files_that_are_named_too(ran: Ran, tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text(
        "timeouts: {stall: 60}\n"
        "service_tiers: {flex: nope}\n"
        "keys_file: keys\n"
        "fleet:\n"
        "  engines: [{url: 'http://h:8000/v1', api_key_file: nothere.key}, {url: 'http://i:1', api_key_file: $KEY}]\n"
        "  sidecars: {token_file: short.token, allow: [10.0.0.1/8]}\n"
    )
    (tmp_path / "keys").write_text("not-a-hash acme\n")
    (tmp_path / "short.token").write_text("short")
    status, out, err = ran("check", str(policy))
    assert (status, out) == (2, "")
    told = [line for line in err.splitlines() if line.startswith(str(tmp_path))]
    none = "No such file or directory, expected a file with one key of visible ASCII characters"
    assert told == [
        f"{tmp_path}/keys:1: found 10 characters instead of the hash, expected the SHA-256 of a key (64 hexadecimal "
        "digits in lower case), then a tenant's name",
        f"{policy}:1:19: timeouts.stall: found '60', expected a time such as 250ms, 10s, 5m, at least 1ms, at most "
        "1d (did you mean 60s?)",
        f"{policy}:2:17: service_tiers.flex: found nope, expected one of the classes interactive, default, "
        "long_context, batch",
        f"{policy}:5:19: fleet.engines[0].url: found 'http://h:8000/v1', expected http://HOST:PORT, https://HOST:PORT "
        "or unix:///PATH, without /v1 (did you mean http://h:8000?)",
        f"{policy}:5:39: fleet.engines[0].api_key_file: found {tmp_path}/nothere.key: {none}",
        f"{policy}:5:87: fleet.engines[1].api_key_file: found {tmp_path}/$KEY: {none}; variables are not replaced by "
        "their values",
        f"{policy}:6:14: fleet.sidecars.token_file: found something else in {tmp_path}/short.token, expected a file "
        "with one token, or 2, one a line, of at least 16 visible ASCII characters",
        f"{policy}:6:47: fleet.sidecars.allow[0]: found '10.0.0.1/8', expected an IP address or a CIDR block "
        "without bits beyond its prefix (did you mean 10.0.0.0/8?)",
    ]
    served = ran("serve", "--policy", str(policy), *ENGINE)
    assert served[0] == 2
    assert [line.split(": ")[2:] for line in served[2].splitlines()] == [line.split(": ")[1:] for line in told]
    policy.write_text("fleet: {engines: [{url: 'https://h:8000', api_key_file: nothere.key}]}\n")
    assert ran("check", str(policy))[0] == 2
    assert ran("check", "--no-files", str(policy)) == (0, f"{policy}: ok\n", "")


def test_check_shows_nothing_that_may_be_a_secret(ran: Ran, tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    policy.write_text("tenants: {acme: {keys: [sk-secret-1], api_key: sk-secret-2}}\n")
    status, out, err = ran("check", str(policy))
    assert (status, "sk-secret" in out + err) == (2, False)


def test_what_an_engine_calls_its_models_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    running = Running(["http://127.0.0.1:1"], "http://127.0.0.1:2", ["e"], ["m\x1b[2J"])
    starting.say("engine e has m\x1b[2J")
    serve._announce(running)
    out = ""
    while "print(answer" not in out:  # a thread writes it
        told = capfd.readouterr()
        out += told.out + told.err
    assert "models m?[2J" in out
    assert "engine e has m?[2J" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_a_command_imports_itself_alone() -> None:
    own = {"gateway", "gateway.cli", "gateway.shared", "gateway.shared.command_line"}
    assert loaded("--help") == own
    policy = loaded("check", "policies/demo.yaml")
    assert "gateway.cli.check" in policy
    ports = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--log", "none")
    served = loaded("serve", *ENGINE, *ports)
    assert "gateway.serve.run" in served
    assert [name for name in policy | served if not name.startswith("gateway")] == []


@pytest.mark.slow
def test_the_load_test_is_imported_where_it_is_asked_for() -> None:
    assert "loadtest.load.scenario_check" in loaded("check", "--scenario", "chat")
    assert "loadtest.simulate.command" in loaded("simulate", "--help")
