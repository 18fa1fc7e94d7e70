"""`gateway calibrate` on engines that cannot be calibrated: the cause in one line, and advice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from gateway.cli import main
from loadtest.calibrate.live_engine import Live
from loadtest.calibrate.observations import EngineLimits
from tests.loadtest.bench_servers import DONE, USAGE, WORD, always, plain, served, stream

MODELS = plain(200, b'{"data":[{"id":"m","created":null,"owned_by":null,"max_model_len":4096}]}')
METRICS = plain(200, b'vllm:cache_config_info{block_size="128",num_gpu_blocks="100"} 1.0\n', kind=b"text/plain")
NONE = plain(404, b'{"error":{"message":"no such route"}}')


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What it says last, of something that is wrong."""
    assert main(["calibrate", *argv]) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([plain(401, b"{}")], "give its key with --key-env"),
        ([plain(200, b"<html>")], "is this an OpenAI-compatible server?"),
        ([MODELS, NONE], "does not tell the size of its KV cache: give --num-gpu-blocks"),
        ([plain(200, b'{"data":[{"id":"m"}]}'), METRICS], "does not tell its max_model_len: give --max-model-len"),
        ([plain(200, b'{"data":[{"id":"a"},{"id":"b"}]}'), METRICS], "--model: name one of its models: a, b"),
        ([MODELS, METRICS, NONE, NONE], '"no such route"}}; is the URL right, without /v1'),
        ([MODELS, METRICS, plain(400, b'{"error":{"message":"ignore_eos?"}}')], "ignore_eos?"),
        ([MODELS, METRICS, plain(500, b"{}")], "the fault is the engine's: its log says more"),
        ([MODELS, METRICS, plain(429, b"{}")], "calibrate the engine itself, idle"),
        ([MODELS, METRICS, plain(200, b"{}")], "does not stream (application/json, asked for a stream)"),
        ([MODELS, METRICS, stream(*[WORD] * 8, DONE)], "ends streams without a usage"),
        ([MODELS, METRICS, stream(WORD, USAGE, DONE)], "answered with 3 tokens where 8 were asked for"),
        (
            [MODELS, METRICS, stream(WORD, USAGE.replace(b"s\":3", b"s\":8"), DONE)],
            "sends 8.0 tokens in an event: tokens that come together cannot be timed",
        ),
        ([MODELS, METRICS, stream(*[WORD] * 8, USAGE.replace(b"s\":3", b"s\":8"), DONE)], "its usage is wrong"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_engine_is_told(
    answers: list[bytes], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(always(*answers, *answers[-1:] * 20)) as server:
        target = ("--target", f"http://127.0.0.1:{server.port}")
        assert expected in said(capsys, *target, "--out", str(tmp_path / "mine.yaml"))
    assert not (tmp_path / "mine.yaml").exists()


def test_the_cache_of_one_core_is_calibrated() -> None:
    rows = b"".join(b'vllm:cache_config_info{engine="%d",kv_cache_size_tokens="1600"} 1.0\n' % core for core in (0, 1))

    async def told(live: Live) -> tuple[tuple[str, ...], EngineLimits]:
        try:
            return await live.told()
        finally:
            live.close()

    with served(always(MODELS, plain(200, rows, kind=b"text/plain"))) as server:
        found = asyncio.run(told(Live(server.address, None, {}, Random(1))))
    assert found == (("m",), EngineLimits(max_model_len=4096, num_gpu_blocks=100))


def test_mistakes_are_found_before_anything_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine")
    nobody = ("--target", "http://127.0.0.1:1")
    assert "exists: choose another, or --force" in said(capsys, *nobody, "--out", str(there))
    assert "there is no folder" in said(capsys, *nobody, "--out", str(tmp_path / "no" / "mine.yaml"))
    assert "5s at least" in said(capsys, *nobody, "--out", str(tmp_path / "mine.yaml"), "--budget", "1s")
    assert "refused; is it running there" in said(capsys, *nobody, "--out", str(there), "--force")
    assert there.read_text() == "mine"
