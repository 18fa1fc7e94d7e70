"""Drawing of a view: lines keep to width and height, and no text of a gateway controls the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
from rich.console import Console

from gateway.control.view import QueueView
from gateway.top.draw import frame, share
from gateway.top.grid import ASCII, BLOCKS, Glyphs, bar, count, rate, seconds, spark
from gateway.top.view import View, view_of
from tests.top.samples import call, engine, model, sample, sidecar, sleeper


def lines(
    view: View, width: int, height: int | None = None, *, trouble: str = "", glyphs: Glyphs = BLOCKS
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(frame(view, "http://127.0.0.1:8001", trouble, width, height, glyphs))
    return captured.get().splitlines()


@pytest.fixture(scope="module")
def busy() -> View:
    names = [f"model-with-a-long-name-{number}" for number in range(9)]
    newest = sample(
        2.0,
        {
            ("calls", "default", "ok"): 20.0,
            ("calls", "batch", "queue_full"): 7.0,
            ("calls", "batch", "shed"): 9.0,
            ("wait", "default", "+Inf"): 2.0,
            ("wait", "default", "10.0"): 2.0,
        },
        calls=(call(), call(tenant="other")),
        engines=[engine(f"10.0.0.{number}:8000", kv_usage=0.4) for number in range(20)]
        + [engine("b", up=False)]
        + [engine("/run/engines/of/a/long/name/one.sock"), engine("/run/engines/of/a/long/name/two.sock")],
        models=[model(name, mode="brownout") for name in names],
        queues=[QueueView(model=names[0], class_name="default", calls=3, tokens=99)],
        sidecars=[sidecar("box", sleeper("big", why="no_memory", ready_in_s=None), sleeper("small", state="error"))],
    )
    return view_of(newest, [sample(0.0).point, newest.point])


@pytest.mark.parametrize("width", [1, 20, 40, 79, 80, 109, 110, 160, 300])
def test_no_line_is_wider_than_it_may_be(busy: View, width: int) -> None:
    assert max(map(len, lines(busy, width, trouble="no answer " * 40))) <= max(width, 20)


@pytest.mark.parametrize("height", [16, 24, 40, 60, 100])
def test_no_more_lines_than_fit_and_it_says_what_is_left_out(busy: View, height: int) -> None:
    shown = lines(busy, 80, height, trouble="no answer " * 40)
    assert shown[1].endswith("…")
    assert len(shown) <= height
    assert any(line.startswith("… ") and line.rstrip().endswith(" more") for line in shown) == (height < 60)
    for heading in ("CALLS ENDED", "CLASS", "TENANT", "MODEL", "ENGINE", "SIDECAR", "NOT AWAKE"):
        assert sum(line.startswith(heading) for line in shown) == 1


@pytest.mark.parametrize(
    ("rows", "room", "expected"),
    [
        ([3, 2], 9, [3, 2]),
        ([8, 2], 6, [4, 2]),
        ([8, 8], 6, [3, 3]),
        ([9, 1, 5], 7, [3, 1, 3]),
        ([4, 4], 0, [1, 1]),
        ([], 0, []),
    ],
)
def test_the_longest_give_way(rows: list[int], room: int, expected: list[int]) -> None:
    assert share(rows, room) == expected


def test_what_tells_engines_apart_is_not_cut_off(busy: View) -> None:
    shown = lines(busy, 80)
    assert [line.split()[0] for line in shown if ".sock" in line] == ["…/long/name/one.sock", "…/long/name/two.sock"]


def test_what_is_said_of_everything(busy: View) -> None:
    text = "\n".join(lines(busy, 160))
    for expected in (
        r"default +3 +1\.0s +0 +0 +5\.0s +9\.9s",
        r"batch .* shed 4\.5, queue full 3\.5",
        r"model-with-a-long-name-0 +brownout .* default 3",
        r"10\.0\.0\.0:8000 +up +3/8 .* 600 +40% +1\.00 +- +m",
        r"\nb +down ",
        r"box +200ms +2 +20\.0 of 80\.0 GiB",
        r"big +box +sleeping +- +no_memory",
    ):
        assert re.search(expected, text), expected


def test_nothing_a_gateway_says_gets_at_the_terminal() -> None:
    evil = "\x1b[2J\x07\r\n\u202e\x9b[bold]x[/bold]"
    newest = sample(
        2.0,
        {("calls", "default", evil): 1.0, ("calls", evil, "ok"): 1.0},
        engines=[engine(evil)],
        models=[model(evil, mode=evil)],
        sidecars=[sidecar(evil, sleeper(evil, why=evil, state=evil), refused={evil: evil})],
    )
    shown = lines(view_of(newest, [sample(0.0).point, newest.point]), 200, trouble=evil)
    assert "[bold]x[/bold]" in "\n".join(shown)
    assert all(char.isprintable() for line in shown for char in line)


def test_ascii_where_nothing_else_can_be_carried(busy: View) -> None:
    """But for the mark of cut text, which such an output replaces."""
    assert "\n".join(lines(busy, 80, 30, glyphs=ASCII)).replace("…", "").isascii()


@pytest.mark.parametrize(
    ("held", "used", "budget", "expected"),
    [
        (0.0, 0.0, 0.8, "········┃·"),
        (0.5, 0.2, 0.8, "██▒▒▒···┃·"),
        (0.2, 0.5, 0.8, "██▄▄▄···┃·"),
        (1.0, 1.0, 0.8, "████████┃█"),
        (0.3, 0.0, 1.0, "▒▒▒······┃"),
        (0.0, 0.0, 0.0, "··········"),
    ],
)
def test_bar(held: float, used: float, budget: float, expected: str) -> None:
    assert bar(held, used, budget, 10, BLOCKS).plain == expected


@pytest.mark.parametrize(
    ("history", "width", "expected"),
    [
        ([], 5, ""),
        ([0.0, 0.0], 5, "▁▁"),
        ([0.0, 0.001, 50.0, 100.0], 5, "▁▂▅█"),
        ([9.0, 1.0, 2.0], 2, "▅█"),
        ([1.0], 0, ""),
    ],
)
def test_spark(history: Sequence[float], width: int, expected: str) -> None:
    assert spark(history, width, BLOCKS) == expected


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([seconds(value) for value in (None, 0.0, 0.0004, 0.25, 0.9999, 9.96, 99.96, 3600.0, 90_000.0)],
         ["-", "0", "<1ms", "250ms", "1.0s", "10.0s", "100s", "60m", "25h"]),
        ([count(value) for value in (None, 0, 9999, 12_345, 123_456, 1_234_567, 2.5e9)],
         ["-", "0", "9999", "12.3k", "123k", "1.2M", "2.5G"]),
        ([rate(value) for value in (None, 0.0, 0.01, 0.05, 3.14, 999.94, 1000.0, 54_321.0)],
         ["-", "0.0", "<0.1", "0.1", "3.1", "999.9", "1000", "54.3k"]),
    ],
)  # fmt: skip
def test_numbers(told: list[str], expected: list[str]) -> None:
    assert told == expected
