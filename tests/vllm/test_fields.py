"""Agreement of the gateway and vLLM's request classes on every body: read alike, or refused by the gateway.

The tables say of each field of vLLM's classes what becomes of it: it is read, it is refused, or it passes unread. The
prompts of other routes (`PROMPTS`) are refused. A field that a new version brings fails here until it is decided.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.core.request.allowed_fields import PROMPTS, READS
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.json_body import BY_GATEWAY
from gateway.core.request.outcome import Refused
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES
from tests.core.request.test_allowed_fields import BODIES
from tests.vllm import install
from tests.vllm.real_vllm import venv

pytestmark = pytest.mark.vllm

# Read by every route that has them, beside the prompts of `READS`.
READ = {
    *("model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "user"),
    *("service_tier", "prompt_cache_key", "metadata", "background", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "tools", "chat_template_kwargs"),
    "echo",
}
REFUSED = {*BY_GATEWAY, "prompt_embeds", "previous_response_id", "conversation", "data"}
PASSED = {
    # how tokens are chosen, ended and shown
    *("logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "stop", "stop_token_ids"),
    *("stop_sequences", "include_stop_str_in_output", "ignore_eos", "allowed_token_ids", "bad_words", "length_penalty"),
    *("use_beam_search", "watermarking", "repetition_detection", "skip_special_tokens", "include_reasoning"),
    *("spaces_between_special_tokens", "return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"),
    *("return_prompt_text", "return_token_strs", "routed_experts_prompt_start", "stream_interval"),
    *("parallel_tool_calls", "thinking_token_budget", "thinking", "reasoning", "reasoning_effort", "max_tool_calls"),
    *("tool_choice", "include"),
    *("response_format", "structured_outputs", "text", "output_config", "enable_response_messages", "store"),
    # how a prompt is made of what is read
    *("truncate_prompt_tokens", "truncation_side", "truncation", "add_special_tokens", "add_generation_prompt"),
    *("continue_final_message", "padding", "max_tokens_per_query", "max_tokens_per_doc", "mm_processor_kwargs"),
    *("media_io_kwargs", "suffix", "mm_payload", "return_mm_kwargs"),
    # how vectors and scores are given
    *("encoding_format", "embed_dtype", "endianness", "dimensions", "use_activation", "task", "top_n"),
    # of no harm to anybody else
    *("session_id", "vllm_xargs"),  # the latter without the names that are reserved
}
AUDIO = {
    *("file", "language", "hotwords", "to_language", "timestamp_granularities[]", "stream_include_usage"),
    *("stream_continuous_usage_stats", "prompt"),
}
KIND = {"detokenize": "tokenize"}


class RequestClasses:
    """A process of vLLM's own Python, which says what its classes make of a body."""

    def __init__(self) -> None:
        script = os.path.join(os.path.dirname(__file__), "request_classes.py")
        environment = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}
        environment["VLLM_LOGGING_LEVEL"] = "ERROR"
        self._process = subprocess.Popen(
            [venv() / "bin" / "python", script],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, **question: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("="):
                return json.loads(line[1:])
        raise AssertionError(f"the process of vLLM's classes has ended: {self._process.wait()}")

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def classes() -> Iterator[RequestClasses]:
    reason = install.missing()
    if reason:
        if os.environ.get("WEIR_REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    running = RequestClasses()
    yield running
    running.close()


@pytest.mark.parametrize("kind", [*READS, "detokenize", "transcription", "translation"])
def test_every_field_of_vllm_is_decided(classes: RequestClasses, kind: str) -> None:
    names = set(classes.ask(kind=kind))
    if kind in ("transcription", "translation"):
        assert names - AUDIO - READ - PASSED == set()
        return
    read = READ.union(READS[KIND.get(kind, kind)])
    assert names - read - REFUSED - PROMPTS - PASSED == set(), "a field of vLLM's that nobody has decided about"
    assert read & REFUSED == read & PASSED == (REFUSED | PROMPTS) & PASSED == set()


# -- random bodies ----------------------------------------------------------------------------------------------------

URL = "http://169.254.169.254/"


def value(rng: random.Random) -> Any:
    """Something that could be a prompt on some route, with an address to fetch now and then."""
    text = "".join(rng.choices("abc ", k=rng.randrange(1, 30)))
    parts = [{"type": "text", "text": text}]
    if rng.random() < 0.5:
        url = rng.choice([URL, "data:image/png;base64,AAAA"])
        key = rng.choice(["image_url", "video_url", "audio_url"])
        parts.append({"type": key, key: rng.choice([url, {"url": url}])})
    message = {"role": "user", "content": rng.choice([text, parts])}
    plain: list[Any] = [text, [text, text], [1, 2], [[1], [2]], None]
    return rng.choice([*plain, [message], [[message]], {"content": parts}, parts])


def pairs(rng: random.Random, kind: str) -> list[tuple[str, Any]]:
    """A body as its fields in order: a right one, with others added, and some twice."""
    fields = [("model", "m"), *BODIES[kind][1].items()]
    names = sorted(PROMPTS | {"inputs", "images"})
    fields += [(rng.choice(names), value(rng)) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    numbers = [1, 2, 3.0, "2", True, None, 0]
    switches = [True, False, None, 1, 0, "true", "yes", "on", "f", 1.0]
    for name in ("n", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        if rng.random() < 0.3:
            fields.append((name, rng.choice(numbers)))
    for name in ("stream", "stream_options", *BY_GATEWAY):
        if rng.random() < 0.15:
            fields.append((name, rng.choice(switches)))
    if rng.random() < 0.3:
        fields.append(rng.choice(fields))
    rng.shuffle(fields)
    return fields


def written(rng: random.Random, fields: list[tuple[str, Any]]) -> str:
    """As JSON, with a name spelt by escapes now and then."""
    spelt = [json.dumps(name).replace("_", "\\u005f") if rng.random() < 0.1 else json.dumps(name) for name, _ in fields]
    return "{" + ", ".join(f"{name}: {json.dumps(given)}" for name, (_, given) in zip(spelt, fields, strict=True)) + "}"


def texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, list | dict):
        for item in given.values() if isinstance(given, dict) else given:
            yield from texts(item)


def disagreement(call: Call, read: dict[str, Any]) -> str | None:
    """What vLLM takes otherwise than the gateway has read it."""
    kind = call.route.kind
    if read["model"] != call.model:
        return "model"
    streams = call.route.generates or call.route.form  # the others answer whole, whatever the field says
    if (bool(read["stream"]) and streams) != call.stream:
        return "stream"
    if read["priority"] or any(read[name] is not None for name in ("kv_transfer_params", "ec_transfer_params")):
        return "what only the gateway may set"
    if kind in ("chat", "completion") and (read["n"] or 1) * (call.messages if kind == "completion" else 1) != call.n:
        return "n"
    asked = {
        "chat": read["max_tokens"] if read["max_completion_tokens"] is None else read["max_completion_tokens"],
        "completion": read["max_tokens"] if call.max_tokens is not None else None,  # else vLLM takes 16
        "response": read["max_output_tokens"],
        "message": read["max_tokens"],
    }
    if kind in asked and asked[kind] != call.max_tokens:
        return "max_tokens"
    prompts = {name: given for name, given in read["fields"].items() if name in PROMPTS}
    if any(text.startswith("http:") for text in texts(prompts)):
        return "an address to fetch"
    words = sum(len(text) for text in texts(prompts) if " " in text or set(text) <= set("abcx"))
    return "text that was not counted" if words > call.ascii_bytes else None


@pytest.mark.parametrize("kind", READS)
def test_random_bodies_are_read_alike_or_refused(classes: RequestClasses, kind: str) -> None:
    rng = random.Random(f"bodies of {kind}")
    route = ROUTES[BODIES[kind][0].encode()]
    headers = {b"content-type": b"application/json"}
    both = 0
    for _ in range(1500):
        text = written(rng, pairs(rng, kind))
        try:
            call = parse(route, headers, text.encode(), settings=CallSettings(), request_id="r", tenant="t", now=0.0)
        except Refused:
            continue
        read = classes.ask(kind=kind, text=text)
        if read is not None:
            both += 1
            assert disagreement(call, read) is None, f"{text}\nvLLM: {read}\ngateway: {call}"
    assert both >= 20, "too few bodies are taken by both to say anything"
