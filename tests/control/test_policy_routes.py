"""GET /policy and POST /policy/reload: the active policy without its secrets, and a reload of its file."""

from __future__ import annotations

import httpx

from gateway.core.policy.file import decode, explain
from gateway.core.policy.policy import Policy
from gateway.shared.files.file_status import FileStatus
from tests.control.parts import Parts, play

HASH = "0123456789abcdef" * 4
POLICY = decode(f"tenants:\n  acme: {{keys: [{HASH}], models: [m]}}\nfleet: {{poll: 250ms}}\n".encode())
STATUS = FileStatus(version=3, digest="abcdef012345", loaded_at="2026-11-21T10:00:00+00:00", file="/etc/weir.yaml")
BAD = STATUS.failed("weir.yaml:2: one\nweir.yaml:3: two\x0btenants: {eve: {}}", "2026-11-21T11:00:00+00:00")


class File:
    """A policy file as the reloader shows it."""

    def __init__(self, status: FileStatus) -> None:
        self.status = status
        self.asked = 0

    async def reload_now(self) -> FileStatus:
        self.asked += 1
        return self.status


def test_yaml_is_every_field_under_a_comment_and_decodes_again() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/policy")
        assert answer.headers["content-type"] == "application/yaml"
        head = answer.text.splitlines()
        assert head[:2] == [
            "# version 3, /etc/weir.yaml",
            "# sha256 abcdef012345, loaded at 2026-11-21T10:00:00+00:00",
        ]
        assert answer.text.endswith(explain(Policy()))
        assert decode(answer.content) == Policy()

    play(scene, policy_status=lambda: STATUS)


def test_what_is_wrong_with_a_newer_file_stays_inside_the_comment() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/policy")
        assert "\n# at 2026-11-21T11:00:00+00:00 the file could not be used:\n# weir.yaml:2: one\n" in answer.text
        assert decode(answer.content) == Policy(), "no line of the error has become policy"

    play(scene, policy_status=lambda: BAD)


def test_hashes_of_keys_are_never_shown_whole() -> None:
    async def scene(gateway: Parts) -> None:
        text = (await gateway.get("/policy")).text
        assert HASH[:8] in text
        assert HASH[:9] not in text
        assert gateway.dispatch.policy.tenants["acme"].keys == (HASH,)

    play(scene, policy=POLICY)


def test_without_a_file_there_is_nothing_to_reload() -> None:
    async def scene(gateway: Parts) -> None:
        assert "# version 1, no file: the defaults and" in (await gateway.get("/policy")).text
        answer = await gateway.post("/policy/reload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_policy_file")

    play(scene)


def test_the_demos_policy_is_named() -> None:
    async def scene(gateway: Parts) -> None:
        assert "# version 1, no file: that of gateway init demo\n" in (await gateway.get("/policy")).text

    play(scene, policy_status=lambda: FileStatus(origin="that of gateway init demo"))


def reloaded(status: FileStatus) -> httpx.Response:
    """The answer to one POST."""
    answers = []
    file = File(status)

    async def scene(gateway: Parts) -> None:
        answers.append(await gateway.post("/policy/reload"))
        assert file.asked == 1

    play(scene, reload=file.reload_now, policy_status=lambda: file.status)
    return answers[0]


def test_a_reload_answers_with_the_status() -> None:
    answer = reloaded(STATUS)
    assert answer.status_code == 200
    assert answer.json() == {
        "version": 3,
        "digest": "abcdef012345",
        "loaded_at": "2026-11-21T10:00:00+00:00",
        "file": "/etc/weir.yaml",
        "origin": None,
        "error": None,
        "error_at": None,
        "reloads": 0,
        "failures": 0,
    }


def test_a_reload_of_a_bad_file_answers_with_all_its_problems() -> None:
    answer = reloaded(BAD)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert message.startswith(
        "Nothing has changed: the policy file cannot be used.\nweir.yaml:2: one\nweir.yaml:3: two"
    )
