"""Probe of vLLM's request classes, run by vLLM's own Python: one JSON line in, one out.

In: `{"kind": ..., "text": a body}`, or `{"kind": ...}` for the names of the fields that the kind's classes have. Out:
what vLLM reads (null where it refuses the body), or those names. FastAPI hands a class what `json.loads` gives.
"""

import importlib
import json
import sys
import typing

from pydantic import TypeAdapter

ENTRY = "vllm.entrypoints."
CLASSES = {
    "chat": (ENTRY + "openai.chat_completion.protocol", "ChatCompletionRequest"),
    "completion": (ENTRY + "openai.completion.protocol", "CompletionRequest"),
    "response": (ENTRY + "openai.responses.protocol", "ResponsesRequest"),
    "message": (ENTRY + "anthropic.protocol", "AnthropicMessagesRequest"),
    "embedding": (ENTRY + "pooling.embed.protocol", "EmbeddingRequest"),
    "pooling": (ENTRY + "pooling.pooling.protocol", "PoolingRequest"),
    "classify": (ENTRY + "pooling.classify.protocol", "ClassificationRequest"),
    "rerank": (ENTRY + "pooling.scoring.protocol", "RerankRequest"),
    "score": (ENTRY + "pooling.scoring.protocol", "ScoreRequest"),
    "tokenize": (ENTRY + "serve.tokenize.protocol", "TokenizeRequest"),
    "detokenize": (ENTRY + "serve.tokenize.protocol", "DetokenizeRequest"),
    "transcription": (ENTRY + "speech_to_text.transcription.protocol", "TranscriptionRequest"),
    "translation": (ENTRY + "speech_to_text.translation.protocol", "TranslationRequest"),
}
SHARED = ("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens")
OURS = ("priority", "cache_salt", "kv_transfer_params", "ec_transfer_params")


def members(annotation):
    """The classes of a union, however it is written."""
    if isinstance(annotation, type):
        return [annotation]
    if hasattr(annotation, "__value__"):
        return members(annotation.__value__)
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:
        arguments = arguments[:1]
    return [member for argument in arguments for member in members(argument)]


def main():
    known = {}
    for line in sys.stdin:
        asked = json.loads(line)
        module, name = CLASSES[asked["kind"]]
        annotation = getattr(importlib.import_module(module), name)
        if "text" not in asked:
            fields = {field.alias or name for one in members(annotation) for name, field in one.model_fields.items()}
            print("=" + json.dumps(sorted(fields)), flush=True)
            continue
        adapter = known.setdefault(asked["kind"], TypeAdapter(annotation))
        body = json.loads(asked["text"])
        try:
            made = adapter.validate_python(json.loads(asked["text"]))
        except Exception:  # a refusal: pydantic's, or whatever a validator of vLLM's raises
            print("=null", flush=True)
            continue
        read = {name: getattr(made, name, None) for name in (*SHARED, *OURS)}
        read["class"] = type(made).__name__
        read["fields"] = {name: body[name] for name in type(made).model_fields if name in body}
        print("=" + json.dumps(read), flush=True)


if __name__ == "__main__":
    main()
