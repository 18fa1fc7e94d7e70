"""Tenants' isolation in a real vLLM's prefix cache: each finds its own prompts again, and no other's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import openai
import pytest

from loadtest.processes import Gateway
from tests.vllm.conftest import PATIENCE, Place
from tests.vllm.real_vllm import MODEL

pytestmark = pytest.mark.vllm
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex"}


def cached(gateway: Gateway, tenant: str, prompt: str) -> int:
    """Tokens of the prompt that the engine had cached, as it tells this tenant."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS[tenant], max_retries=0, timeout=PATIENCE) as client:
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


@pytest.mark.parametrize(("isolation", "shared"), [("tenant", False), ("none", True)])
def test_what_another_tenant_has_asked_is_found_only_where_caches_are_shared(
    place: Place, tmp_path: Path, isolation: str, shared: bool
) -> None:
    place.engine()
    tenants = {name: {"keys": [hashlib.sha256(key.encode()).hexdigest()]} for name, key in KEYS.items()}
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"routing: {{cache_isolation: {isolation}}}\ntenants: {tenants}\n")
    prompt = f"With {isolation}: " + "one two three four five six seven eight " * 20
    with Gateway(tmp_path / "log", "--policy", str(policy), "--engine", place.url) as gateway:
        assert cached(gateway, "acme", prompt) == 0
        assert cached(gateway, "acme", prompt) > 100
        assert (cached(gateway, "globex", prompt) > 100) is shared
