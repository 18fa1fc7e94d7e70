"""Console on the control port: its files load nothing but each other, hold no secret and never make markup of words."""

from __future__ import annotations

import re

import pytest

from gateway.control.console.files import console_files
from tests.control.parts import TOKEN, USER_KEY, Parts, play


def test_the_files_are_given_without_the_token_and_its_data_only_with_it() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert answer.headers["x-frame-options"] == "DENY"
        assert (await gateway.ask("HEAD", "/")).status_code == 200
        for path in ("/", "/console/main.js"):
            assert (await gateway.post(path)).status_code == 401
        for path in console_files():
            assert (await gateway.get(path)).status_code == 200
        assert (await gateway.get("/console/no.js")).status_code == 401
        assert (await gateway.get("/console/no.js", authorization=f"Bearer {TOKEN}")).status_code == 404
        assert (await gateway.get("/events")).status_code == 401
        assert (await gateway.get("/events", authorization=f"Bearer {USER_KEY}")).status_code == 403

    play(scene, TOKEN)


def test_a_page_elsewhere_may_link_to_the_page_and_load_none_of_its_files() -> None:
    async def scene(gateway: Parts) -> None:
        assert (await gateway.get("/", sec_fetch_site="cross-site")).status_code == 200
        assert (await gateway.get("/console/main.js", sec_fetch_site="cross-site")).status_code == 403
        assert (await gateway.get("/console/main.js", sec_fetch_site="same-origin")).status_code == 200

    play(scene)


def test_only_what_the_port_gives_may_run() -> None:
    async def scene(gateway: Parts) -> None:
        for path, file in console_files().items():
            answer = await gateway.get(path)
            assert answer.headers["content-type"] == file.type
            rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
            assert rules["default-src"] == "'none'"
            assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
            assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"

    play(scene)


@pytest.mark.parametrize(
    "forbidden",
    [
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\.srcdoc",
        r"https?://(?!www\.w3\.org/2000/svg)",  # nothing is loaded from anywhere; that one is a name
        r"\s(?:on[a-z]+|style)=\"",  # the policy would not let it
        r"<script>|<style>",
        r"localStorage|sessionStorage|\bcookie",  # the token stays in memory
    ],
)
def test_what_the_gateway_says_never_becomes_markup(forbidden: str) -> None:
    for path, file in console_files().items():
        assert re.search(forbidden, file.body.decode()) is None, path


def test_every_file_that_is_loaded_is_there() -> None:
    files = console_files()
    for path, file in files.items():
        for name in re.findall(r'from "\./([a-z]+\.js)"', file.body.decode()):
            assert f"/console/{name}" in files, path
    for name in re.findall(r'(?:href|src)="(/[^"]+)"', files["/"].body.decode()):
        assert name in files


def test_orders_are_passed_on_and_their_answers_back() -> None:
    given: list[tuple[str, str, str]] = []

    async def order(sidecar: str, profile: str, what: str) -> tuple[int, bytes]:
        given.append((sidecar, profile, what))
        if sidecar == "gone":
            raise LookupError("No sidecar gone.")
        if sidecar == "silent":
            raise ConnectionError("It did not answer.")
        return 409, b'{"error":{"message":"it is off"}}'

    async def scene(gateway: Parts) -> None:
        path = "/sidecars/gpu-1/models/llama%203/sleep"
        assert (await gateway.post(path)).status_code == 401
        answer = await gateway.post(path, authorization=f"Bearer {TOKEN}")
        assert (answer.status_code, answer.json()["error"]["message"]) == (409, "it is off")
        codes = [
            (await gateway.post(f"/sidecars/{rest}", authorization=f"Bearer {TOKEN}")).status_code
            for rest in ("gone/models/x/ensure", "silent/models/x/ensure", "gpu-1/models/x/destroy")
        ]
        assert codes == [404, 502, 404]
        assert (await gateway.get(path, authorization=f"Bearer {TOKEN}")).status_code == 405
        assert given == [("gpu-1", "llama 3", "sleep"), ("gone", "x", "ensure"), ("silent", "x", "ensure")]

    play(scene, TOKEN, order=order)
