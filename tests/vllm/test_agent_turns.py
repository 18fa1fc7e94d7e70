"""Ten turns of a coding agent at a real vLLM: what it had cached of each prompt, as it tells itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.processes import Gateway
from tests.agent_turns import shares
from tests.vllm.conftest import Place
from tests.vllm.real_vllm import MODEL

pytestmark = pytest.mark.vllm


def test_the_history_is_cached_from_the_second_turn_on(place: Place, tmp_path: Path) -> None:
    place.engine()
    with Gateway(tmp_path / "log", "--engine", place.url) as gateway:
        found = shares(gateway.url, MODEL, 10)
    print("cached of each prompt:", " ".join(f"{share:.1%}" for share in found))
    assert min(found[1:]) >= 0.9, found
