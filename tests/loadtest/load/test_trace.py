"""Recorded traffic: four formats, in order, line by line; and the message for every bad row."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest

from loadtest.load.trace import BLOCK, REORDER, Arrival, TraceError, conversations, read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,109\n2023-11-16 18:15:51.2224670,879,55\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": %s}\n'
LOGGED = '{"ts":%.3f,"request_id":"a","total":%.2f,"prompt_tokens":%d,"completion_tokens":%d}\n'
# Recorded traces are large and not part of the project: `WEIR_TRACES=DIR pytest` reads them where they are.
RECORDED = Path(os.environ.get("WEIR_TRACES", Path(__file__).parents[4] / "shared" / "traces"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def read_text(path: Path, text: str, speed: float = 1.0) -> list[tuple[float, int, int]]:
    path.write_text(text)
    return [(round(row.at, 5), row.prompt_tokens, row.output_tokens) for row in read(path, speed=speed)]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (AZURE + ROWS, [(0.0, 374, 44), (1.5, 396, 109), (4.54188, 879, 55)]),
        ("\ufeff" + AZURE + ROWS.replace("\n", "\r\n"), [(0.0, 374, 44), (1.5, 396, 109), (4.54188, 879, 55)]),
        (AZURE + "2024-05-10 23:59:59.5+00:00,1,2\n\n2024-05-11 00:00:01+00:00,3,4", [(0.0, 1, 2), (1.5, 3, 4)]),
        (BURSTGPT + "5,ChatGPT,472,18,490,API log\n45.5,GPT-4,0,0,0,API log\n", [(0.0, 472, 18), (40.5, 0, 0)]),
        (
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,1,2.5,ChatGPT,472,18,490,Conversation log\n5,2,,ChatGPT,7.0,1,8,Conversation log\n",
            [(0.0, 472, 18), (0.0, 7, 1)],
        ),
        (MOONCAKE % (500, 600, "[3, 4]") + "\n" + MOONCAKE % (1700, 1, "[]"), [(0.0, 600, 5), (1.2, 1, 5)]),
        ('{"output_length": 1, "more": {}, "timestamp": 0, "input_length": 2}', [(0.0, 2, 1)]),
        (
            LOGGED % (109, 2, 7, 1) + LOGGED % (109.5, 0, 0, 0) + LOGGED % (110, 4, 5, 60),
            [(0.0, 5, 60), (1.0, 7, 1)],
        ),
        (  # a call that a mirror got a copy of: the copy is no call of a caller's
            '{"ts":2,"prompt_tokens":7,"completion_tokens":1,"mirrored":"member"}\n'
            '{"ts":2,"prompt_tokens":7,"completion_tokens":2,"mirrored":"copy"}\n',
            [(0.0, 7, 1)],
        ),
    ],
)
def test_every_format_is_known_by_its_first_line(path: Path, text: str, rows: list[tuple[float, int, int]]) -> None:
    assert read_text(path, text) == rows


def test_a_prompt_that_begins_with_all_whole_blocks_of_an_earlier_one_is_its_conversations_next_turn() -> None:
    def row(at: float, *blocks: int, beyond: int = 0) -> Arrival:
        whole = BLOCK * (len(blocks) - bool(beyond))
        return Arrival(at, whole + beyond, 5, blocks)

    first, other, alone = row(0.0, 1, 2, 3, beyond=9), row(1.0, 1, 7), row(2.0, 9, beyond=1)
    second, third = row(3.0, 1, 2, 4, 5), row(5.0, 1, 2, 4, 5, 6, beyond=1)
    branch = row(6.0, 1, 2, 8)  # the turn after the first was there before
    found = list(conversations([first, other, alone, second, third, branch], Path()))
    assert [(one.at, [turn.at for turn in one.turns]) for one in found] == [(0.0, [3.0, 5.0]), (1.0, []), (2.0, []),
                                                                             (6.0, [])]  # fmt: skip
    with pytest.raises(TraceError, match="tells no turns"):
        list(conversations([alone, Arrival(0.0, 3 * BLOCK, 5)], Path("t.csv")))


def test_time_is_scaled(path: Path) -> None:
    assert [at for at, _, _ in read_text(path, AZURE + ROWS, speed=2.0)] == [0.0, 0.75, 2.27094]


def test_hashes_are_kept(path: Path) -> None:
    path.write_text(MOONCAKE % (0, BLOCK + 1, "[7, 9]"))
    assert list(read(path)) == [Arrival(0.0, BLOCK + 1, 5, (7, 9))]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "{}, line 1: nothing, expected the header TIMESTAMP,ContextTokens,GeneratedTokens (Azure), or a header "
         "with Timestamp, Request tokens, Response tokens (BurstGPT), or an object with timestamp, input_length, "
         "output_length and hash_ids (Mooncake), or an object with ts, total, prompt_tokens and completion_tokens (the "
         "gateway's call log)"),
        ("a,b\n1,2\n", "{}, line 1: 'a,b', expected the header TIMESTAMP"),
        ('"' + "x" * 200_000, "{}, line 1: '\"xxx"),
        (AZURE, "{} has no rows"),
        (AZURE + ROWS + "yesterday,1,2\n", "{}, line 5: TIMESTAMP is 'yesterday', expected a time such as 2023"),
        (AZURE + "2023-11-16 18:15:46,many,2\n", "{}, line 2: ContextTokens is 'many', expected a number of tokens, 0 "
         "to 10000000"),
        (AZURE + "2023-11-16 18:15:46,1,-2\n", "{}, line 2: GeneratedTokens is '-2', expected a number of tokens"),
        (AZURE + "2023-11-16 18:15:46,1,\n", "{}, line 2: GeneratedTokens is nothing, expected"),
        (AZURE + "2023-11-16 18:15:46,10000001,1\n", "{}, line 2: ContextTokens is '10000001', expected"),
        (AZURE + "2023-11-16 18:15:46,1\n", "{}, line 2: 2 columns, expected 3, as in the header"),
        (AZURE + ROWS + "\n2023-11-16 18:15:46,1,2,3\n", "{}, line 6: 4 columns, expected 3"),
        (AZURE + '"' + "x" * 200_000 + '",1,2', "{}, line 2: field larger than field limit (131072), expected a row"),
        (AZURE + "2023-11-16 18:15:46,1,2" + " " * (1 << 20), "{}, line 2: over 1048576 characters, expected a row"),
        (BURSTGPT + "soon,ChatGPT,1,2,3,API log\n", "{}, line 2: Timestamp is 'soon', expected a time in seconds"),
        (BURSTGPT + "nan,ChatGPT,1,2,3,API log\n", "{}, line 2: Timestamp is 'nan', expected a time in seconds"),
        (MOONCAKE % (0, 1, "[1]") + "{\n", "{}, line 2: Input data was truncated, expected an object with timestamp "
         "(ms), input_length, output_length and hash_ids"),
        ('{"timestamp": 0, "input_length": "6"}', "{}, line 1: Expected `int`, got `str` - at `$.input_length`, exp"),
        (MOONCAKE % (-1, 1, "[1]"), "{}, line 1: Expected `float` >= 0.0 - at `$.timestamp`, expected"),
        (MOONCAKE % (0, 512, "[1]") + MOONCAKE % (0, 513, "[1]"), "{}, line 2: 1 hash_ids for 513 tokens, expected 2, "
         "one for each 512"),
        (LOGGED % (1, 0, 1, 1) + '{"ts":2,"dropped_lines":7}\n', "{}, line 2: 7 lines were lost, expected all calls"),
        (LOGGED % (1, 0, 1, 1) + LOGGED % (2, 0, -1, 1), "{}, line 2: Expected `int` >= 0 - at `$.prompt_tokens`, exp"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        list(read(path))
    assert str(caught.value).startswith(says.format(path))


def test_another_format_than_was_said(path: Path) -> None:
    path.write_text(AZURE + ROWS)
    with pytest.raises(TraceError, match=r"line 1: 'TIMESTAMP,.*', expected a header with Timestamp, .* \(BurstGPT\)$"):
        next(read(path, "burstgpt"))


def test_bytes_that_are_no_text_are_a_bad_row(path: Path) -> None:
    path.write_bytes(AZURE.encode() + b"\xff\xfe,1,2\n")
    with pytest.raises(TraceError, match="line 2: TIMESTAMP is"):
        list(read(path))


def test_rows_a_little_out_of_order_are_put_right(path: Path) -> None:
    rng = random.Random(1)
    times = sorted(range(3 * REORDER), key=lambda at: at + rng.random() * REORDER / 2)
    assert times[0] != 0
    path.write_text(BURSTGPT + "".join(f"{at},m,{at},1,1,x\n" for at in times))
    assert [(row.at, row.prompt_tokens) for row in read(path)] == [(float(at), at) for at in range(3 * REORDER)]


def test_rows_far_out_of_order_are_an_error(path: Path) -> None:
    path.write_text(BURSTGPT + "".join(f"{at},m,1,1,1,x\n" for at in [*range(1, REORDER + 5), 0]))
    expected = f"line {REORDER + 6}: 4 s too late in the file, expected at most {REORDER} rows out of order; sort"
    with pytest.raises(TraceError, match=expected):
        list(read(path))


def test_memory_does_not_grow_with_the_file(path: Path) -> None:
    def peak(rows: int) -> int:
        path.write_text(BURSTGPT + "".join(f"{at},m,1,1,1,x\n" for at in range(rows)))
        tracemalloc.start()
        assert sum(1 for _ in read(path)) == rows
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(8 * REORDER) < 1.2 * peak(2 * REORDER)


def recorded(name: str) -> Path:
    file = RECORDED / name
    if not file.exists():
        pytest.skip(f"the recorded trace {file} is not on this machine")
    return file


def in_order(rows: Iterator[Arrival]) -> list[Arrival]:
    found = list(rows)
    assert found[0].at == 0.0
    assert all(first.at <= second.at for first, second in pairwise(found))
    return found


def test_the_recorded_trace_of_azure() -> None:
    rows = in_order(read(recorded("azure_llm_2023_conv.csv")))
    assert len(rows) == 19_366
    assert rows[-1].at == pytest.approx(3501.7, abs=0.1)
    assert sum(row.prompt_tokens for row in rows) / len(rows) == pytest.approx(1155, abs=1)


def test_the_recorded_trace_of_mooncake() -> None:
    rows = in_order(islice(read(recorded("mooncake_conversation.jsonl")), 2000))
    assert rows[1].blocks[:2] == (0, 14)
    assert all(len(row.blocks) == -(-row.prompt_tokens // BLOCK) for row in rows)
