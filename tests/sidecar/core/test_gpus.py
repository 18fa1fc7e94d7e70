"""GPU selections, and checks that memory has come back: tables of examples."""

from __future__ import annotations

import pytest

from sidecar.core.gpus import GPU, Selection, Unselectable, chosen, returned

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "")  # the last cannot be read


@pytest.mark.parametrize(
    ("select", "visible", "expected"),
    [
        ("all", None, (0, 1, 2, 3)),
        ("all", "2,0", (0, 2)),
        ("all", " 2 , 0,", (0, 2)),
        ("all", "1,1", (1,)),
        ("all", "", ()),
        ("all", "-1", ()),
        ("all", "1,-1,2", (1,)),  # CUDA's rule: what follows a name of no GPU does not count
        ("all", "1,9,2", (1,)),
        ("all", "NoDevFiles", ()),
        ("all", "GPU-bb33,GPU-aa1", (0, 2)),
        ("all", "GPU-aa,1", ()),  # both 0 and 1: no GPU's name
        ([], None, ()),
        ([2, 0], None, (0, 2)),
        ([2], "0,2", (2,)),
    ],
)
def test_what_is_selected(select: Selection, visible: str | None, expected: tuple[int, ...]) -> None:
    assert chosen(select, UUIDS, visible) == expected


@pytest.mark.parametrize(
    ("select", "uuids", "visible", "message"),
    [
        ([4], UUIDS, None, r"no GPU 4: .* has 0 \(GPU-aa11\), 1 \(GPU-aa22\), 2 \(GPU-bb33\), 3 \(not readable\)"),
        ([0], (), None, "this machine has none"),
        ([1], UUIDS, "0,2", "GPU 1 is not in CUDA_VISIBLE_DEVICES=0,2"),
        ("all", UUIDS, "MIG-cc44", "names a MIG slice"),
    ],
)
def test_what_cannot_be_selected(select: Selection, uuids: tuple[str, ...], visible: str | None, message: str) -> None:
    with pytest.raises(Unselectable, match=message):
        chosen(select, uuids, visible)


@pytest.mark.parametrize(
    ("before", "after", "claim", "expected"),
    [
        (100, 20, 80, True),
        (100, 40, 80, True),  # 75 % of it
        (100, 41, 80, False),
        (100, 100, 80, False),
        (100, 190, 80, False),  # a neighbour grew: minus 90, neither 90 nor 2^64 - 90
        (100, 130, 0, True),  # nothing was held
    ],
)
def test_returned(before: int, after: int, claim: int, expected: bool) -> None:
    assert returned(before, after, claim) is expected


def test_one_that_cannot_be_read_has_nothing_free() -> None:
    gpu = GPU(index=3, uuid="GPU-x", name="H200", total=100, used=30, free=70, processes={7: 30})
    lost = gpu.unreadable("lost")
    assert (lost.index, lost.uuid, lost.name, lost.total) == (3, "GPU-x", "H200", 100)
    assert (lost.used, lost.free, lost.processes) == (100, 0, {})
    assert (lost.refused, lost.readable, lost.processes_hidden) == ("lost", False, True)
