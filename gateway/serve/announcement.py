"""Start-up message of a gateway at the terminal: its addresses, and commands that work as printed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from gateway.serve.starting import Running
from gateway.shared.addresses import reachable


def announcement(running: Running, watch: str = "") -> str:
    """The text, without a last newline. `watch`: the command that shows what a sidecar of this process does."""
    data, control, models, keyed = running.data, running.control, running.models, running.keyed
    lines = [*(f"data port {address}" for address in data), f"control port {control}"]
    lines += [f"engines {' '.join(running.engines)}"] if running.engines else []
    waits = f"no engine has answered yet: {control}/readyz tells when one has"
    lines += [f"models {' '.join(models)}" if running.in_turn or models else waits, f"console {control}/"]
    if running.in_turn:
        return "\n".join([*lines, "", *_demo(data[0], running.in_turn, watch, keyed)])
    if not models:
        return "\n".join(lines)
    lines += [*([f"sidecar: {watch}"] if watch else []), "", *_curl(data[0], models[0], keyed)]
    if not data[0].startswith("unix:"):
        lines += ["", *_python(data[0], models[0], keyed)]
    return "\n".join(lines)


def _demo(address: str, models: Sequence[str], watch: str, keyed: bool) -> list[str]:
    return [
        "None is awake yet. A sidecar starts each when it is called, in about 10 seconds, on two simulated GPUs of",
        "24 GB. They do not all fit: call them in turn, and the least recently used one goes to sleep to make room.",
        "Calling that one again wakes it in a second or two. This shows it, in another terminal:",
        "",
        watch,
        "",
        *(line for model in (*models, models[0]) for line in _curl(address, model, keyed)),
    ]


def _curl(given: str, model: str, keyed: bool) -> list[str]:
    address, path = reachable(given), given.removeprefix("unix:")
    where = address if path == given else f"--unix-socket {shlex.quote(path)} http://localhost"
    key = ' -H "authorization: Bearer $KEY"' if keyed else ""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    return [
        f"curl -N {where}/v1/chat/completions -H 'content-type: application/json'{key} \\",
        f"  -d {shlex.quote(json.dumps(body))}",
    ]


def _python(address: str, model: str, keyed: bool) -> list[str]:
    key = 'os.environ["KEY"]' if keyed else '"none"'
    return [
        *(["import os"] if keyed else []),
        "from openai import OpenAI  # pip install openai",
        f'client = OpenAI(base_url="{reachable(address)}/v1", api_key={key})',
        'messages = [{"role": "user", "content": "Say hello."}]',
        f"answer = client.chat.completions.create(model={json.dumps(model)}, messages=messages)",
        "print(answer.choices[0].message.content)",
    ]
