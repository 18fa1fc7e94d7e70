"""Dashboard page: one file that loads nothing, runs only its own script, and holds no secret."""

from __future__ import annotations

import base64
import hashlib
import re

from tests.control.parts import TOKEN, Parts, play


def test_the_page_is_given_without_the_token_and_its_data_only_with_it() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert answer.headers["x-frame-options"] == "DENY"
        assert (await gateway.ask("HEAD", "/")).status_code == 200
        assert (await gateway.post("/")).status_code == 401
        for path in re.findall(r'"(/[a-z]+)"', answer.text):
            assert (await gateway.get(path)).status_code == 401
            assert (await gateway.get(path, authorization=f"Bearer {TOKEN}")).status_code == 200
        assert "/fleet" in answer.text

    play(scene, TOKEN)


def test_only_what_is_in_the_page_may_run() -> None:
    async def scene(gateway: Parts) -> None:
        answer = await gateway.get("/")
        rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
        for tag in ("script", "style"):
            (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert rules[f"{tag}-src"] == f"'sha256-{digest}'"

    play(scene)


def test_what_the_gateway_says_never_becomes_markup() -> None:
    async def scene(gateway: Parts) -> None:
        text = (await gateway.get("/")).text
        for forbidden in (
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(",
            r"https?://",  # nothing is loaded from anywhere
            r"\s(?:on[a-z]+|style)=",  # the policy would not let it
            r"localStorage|sessionStorage|cookie",  # the token stays in memory
        ):
            assert re.search(forbidden, text) is None, forbidden

    play(scene)
