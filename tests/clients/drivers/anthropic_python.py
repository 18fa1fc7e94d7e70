"""Cells of Anthropic's package for Python."""

from __future__ import annotations

import anthropic
from cells import ENDLESS, HELLO, KEY, LEVEL, MODEL, ROOT, SLOW, Reading, check, failing, run

client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=60.0)
create = client.messages.create
TOOL = {"name": LEVEL["name"], "description": LEVEL["description"], "input_schema": LEVEL["parameters"]}


def messages() -> None:
    answer = create(model=MODEL, messages=HELLO, max_tokens=8, system="Be brief.")
    check(answer.content[0].text)
    check((answer.usage.output_tokens, answer.stop_reason) == (8, "max_tokens"), answer)


def stream() -> None:
    greedy = {"temperature": 0}
    whole = create(model=MODEL, messages=HELLO, max_tokens=8, extra_body=greedy)
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=8, extra_body=greedy) as events:
        text = "".join(events.text_stream)
        last = events.get_final_message()
    check(text == whole.content[0].text, text)
    check(last.usage.output_tokens == 8, last)


def tools() -> None:
    choice = {"type": "tool", "name": "level_of"}
    answer = create(model=MODEL, messages=HELLO, max_tokens=60, tools=[TOOL], tool_choice=choice)
    block = answer.content[0]
    check((block.type, block.name) == ("tool_use", "level_of"), answer)
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True)]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "131"}]}
    check(create(model=MODEL, messages=[*HELLO, said, result], max_tokens=5, tools=[TOOL]).content)


def structured() -> None:
    answer = client.messages.parse(model=MODEL, messages=HELLO, max_tokens=100, output_format=Reading)
    check(isinstance(answer.parsed_output, Reading), answer)


def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    used = create(model=MODEL, messages=HELLO, system="Be brief.", max_tokens=1).usage
    read = used.input_tokens + (used.cache_read_input_tokens or 0)
    check(counted.input_tokens == read, (counted, used))


def errors() -> None:
    unknown = failing(anthropic.NotFoundError, lambda: create(model="no-such-model", messages=HELLO, max_tokens=5))
    check("no-such-model" in unknown.message, unknown)

    def ask(retries: int) -> object:
        slow = client.with_options(api_key=SLOW, max_retries=retries)
        return slow.messages.create(model=MODEL, messages=HELLO, max_tokens=1).content[0]

    refused = failing(anthropic.RateLimitError, lambda: ask(0), times=3)
    check(int(refused.response.headers["retry-after"]) >= 1, refused)
    for _ in range(3):
        ask(3)


def cancel() -> None:
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=4000, extra_body=ENDLESS) as events:
        next(iter(events))


run(messages, stream, tools, structured, count_tokens, errors, cancel)
