"""Accuracy of the GPU memory estimate, judged by published starts of real vLLM."""

from __future__ import annotations

import statistics

import pytest

from sidecar.core.step_times import LOAD
from sidecar.sizing.extras import drafted_share
from sidecar.sizing.model_config import shape_from
from tests.sidecar.corpus_table import factor, lines, rows, second_lines, seconds


def test_published_starts_would_succeed_at_the_first_try(capsys: pytest.CaptureFixture[str]) -> None:
    table = rows()
    judged = [each for each in table if each.succeeds is not None]
    with capsys.disabled():
        print("", *list(lines(table))[-4:], sep="\n")
    assert len(judged) >= 12
    assert sum(bool(each.succeeds) for each in judged) >= 0.95 * len(judged)
    assert sum(bool(each.chosen_succeeds) for each in judged) >= 0.95 * len(judged), "without a context_length too"
    assert sum(each.chosen is not None for each in judged) >= 4
    assert statistics.median(each.over for each in judged if each.over is not None) <= 0.08
    errors = [abs(each.context[0] / each.context[1] - 1) for each in table if each.context[1]]
    assert statistics.median(errors) <= 0.1


def test_published_starts_took_about_as_long_as_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that has measured nothing yet. Sixty seconds for each of them would be wrong by more."""
    table = seconds()
    with capsys.disabled():
        print("", *list(second_lines(table))[-2:], sep="\n")
    whole = [each for each in table if each.load[1] is not None and each.begin[1] is not None]
    assert len(whole) >= 6
    told, flat = zip(*(_factors(each.load, each.begin) for each in whole), strict=True)
    assert statistics.median(told) <= min(2.0, statistics.median(flat))
    assert factor(each.load for each in table)[0] <= 3.0
    assert factor(each.begin for each in table)[0] <= 2.0


def _factors(load: tuple[float, float | None], begin: tuple[float, float | None]) -> tuple[float, float]:
    """Of the whole start: foretold by stages, and as one that is always the same."""
    told, took = load[0] + begin[0], (load[1] or 0.0) + (begin[1] or 0.0)
    return max(told / took, took / told), max(LOAD / took, took / LOAD)


SHAPE = shape_from(b'{"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4}')


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ({}, 0.0),
        ({"speculative-config": {"method": "ngram"}}, 0.0),
        ({"speculative-config": {"method": "qwen3_next_mtp"}}, 1 / 8),
        ({"speculative-config": {"method": "eagle3", "model": "x"}}, 1 / 8),
        ({"speculative-config": {"model": "x"}}, 0.5),
    ],
)
def test_a_drafter_keeps_a_cache_of_its_own(flags: dict[str, object], share: float) -> None:
    assert drafted_share(flags, SHAPE) == share


def test_a_model_without_attention_drafts_nothing_that_is_kept() -> None:
    states = shape_from(
        b'{"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "num_heads": 8,'
        b' "head_dim": 16, "conv_kernel": 4}'
    )
    assert drafted_share({"speculative-config": {"method": "mtp"}}, states) == 0.0
