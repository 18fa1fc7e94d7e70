"""Tenants of a running gateway: keys from both places, added and revoked; their classes and models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from loadtest.processes import until
from tests.e2e.traffic import CHAT, MESSAGES, QUICK, Site, Tree, body, sha256

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ACME, GLOBEX, BATCHER = "weir-key-of-acme", "weir-key-of-globex", "weir-key-of-batcher"
POLICY: Tree = {
    "keys_file": "keys.txt",
    "tenants": {
        "acme": {"best_class": "interactive"},
        "globex": {"best_class": "default", "models": ["sim"], "keys": [sha256(GLOBEX)]},
        "batcher": {"class": "batch", "best_class": "batch", "keys": [sha256(BATCHER)]},
    },
    "fleet": QUICK,
}


@pytest.fixture(scope="module")
def site(shared: Site) -> Iterator[Site]:
    (shared.file.parent / "keys.txt").write_text(f"# a comment\n{sha256(ACME)} acme 2026-01-01\n")
    shared.use(POLICY)
    yield shared
    assert until(shared.empty, 60.0) is not None


def refused(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and parameter of an answer that is an error object."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_counts_wherever_its_hash_is_and_however_it_is_sent(site: Site) -> None:
    for key in (ACME, GLOBEX, BATCHER):
        assert site.openai(key).chat.completions.create(**body_for_sdk()).usage.completion_tokens == 3
        assert site.ask(x_api_key=key).status_code == 200
    assert site.ask(authorization=f"bearer  {ACME}").status_code == 200


def body_for_sdk() -> Tree:
    return {"model": "sim", "messages": MESSAGES, "max_tokens": 3, "extra_body": {"ignore_eos": True}}


def test_wrong_and_missing_keys_are_told_the_same(site: Site) -> None:
    answers = [
        site.ask(),
        site.ask(key="weir-wrong"),
        site.ask(x_api_key=""),
        site.ask(key=ACME[:-1]),
        site.ask(x_api_key="weir-wrong"),
        site.ask(authorization=ACME),
        site.ask({"model": "no-such-model"}, key="weir-wrong"),
        site.http.get("/v1/models"),
        site.http.get("/v1/models", headers={"authorization": "Bearer weir-wrong"}),
    ]
    varies = {"x-request-id", "connection", "keep-alive"}
    told = {
        (answer.status_code, answer.content, *sorted((k, v) for k, v in answer.headers.items() if k not in varies))
        for answer in answers
    }
    assert len(told) == 1, told
    assert refused(answers[0]) == (401, "invalid_api_key", None)
    assert answers[0].headers["x-should-retry"] == "false"
    with pytest.raises(openai.AuthenticationError):
        site.openai("weir-wrong", retries=2).chat.completions.create(**body_for_sdk())
    assert site.http.get("/health").status_code == 200, "load balancers have no key"


def key_command(site: Site, *arguments: str) -> str:
    argv = [sys.executable, "-m", "gateway.cli", "key", *arguments, "--policy", str(site.file)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_key_is_made_used_and_revoked_while_it_streams(site: Site) -> None:
    key = key_command(site, "add", "acme")
    headers = {"authorization": f"Bearer {key}"}

    def is_known() -> bool:
        return site.http.get("/v1/models", headers=headers).status_code == 200

    assert until(is_known, 60.0) is not None
    site.engine.faults(slow=100.0)  # 40 s for the answer, so that it stands still in its middle
    with site.http.stream("POST", CHAT, json=body(stream=True, max_tokens=1000), headers=headers) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        site.engine.faults(hang=True)
        key_command(site, "revoke", sha256(key)[:12])
        assert until(lambda: not is_known(), 60.0) is not None
        assert refused(site.ask(key=key)) == (401, "invalid_api_key", None)
        assert site.http.get("/v1/models", headers={"x-api-key": ACME}).status_code == 200, "another key of theirs"
        assert not site.empty(), "the stream goes on"
        site.engine.faults()
        rest = [line for line in lines if line]
    assert len(rest) >= 999
    assert rest[-1] == "data: [DONE]"


def test_a_tenant_that_is_gone_takes_its_keys_along(site: Site) -> None:
    others = {name: tenant for name, tenant in POLICY["tenants"].items() if name != "globex"}
    assert site.ask(key=GLOBEX).status_code == 200
    site.use(POLICY | {"tenants": others})
    assert refused(site.ask(key=GLOBEX)) == (401, "invalid_api_key", None)
    site.use(POLICY)
    assert site.ask(key=GLOBEX).status_code == 200


def test_only_a_trusted_proxy_names_the_tenant(site: Site) -> None:
    """What the tenant may use tells whom a call was counted for: globex has one model, acme has two."""
    other: Tree = {"model": "other"}
    assert site.ask(x_tenant="acme").status_code == 401
    assert refused(site.ask(other, key=GLOBEX, x_tenant="acme")) == (403, "model_not_allowed", "model")
    site.use(POLICY | {"trusted_proxies": ["127.0.0.1"]})
    assert site.ask(other, x_tenant="acme").status_code == 200
    assert site.ask(other, key=GLOBEX, x_tenant="acme").status_code == 200, "the proxy's word is the last"
    assert refused(site.ask(other, x_tenant="globex"))[0] == 403
    assert site.ask(x_tenant="nobody").status_code == 401
    assert site.ask(x_tenant="").status_code == 401
    assert site.ask(key=ACME).status_code == 200, "what names nobody goes by its key"
    site.use(POLICY | {"trusted_proxies": ["10.0.0.0/8", "127.0.0.2"]})
    assert site.ask(x_tenant="acme").status_code == 401, "and this is not its address"


def test_users_keys_are_refused_on_the_control_port(site: Site) -> None:
    control = httpx.Client(base_url=site.gateway.control, trust_env=False, timeout=60.0)
    with control:
        for path in ("/fleet", "/metrics", "/policy", "/livez", "/"):
            for headers in ({"authorization": f"Bearer {ACME}"}, {"x-api-key": GLOBEX}):
                answer = control.get(path, headers=headers)
                assert (path, *refused(answer)) == (path, 403, "not_allowed", None)
        assert control.get("/fleet").status_code == 200
        assert control.get("/fleet", headers={"x-api-key": "weir-wrong"}).status_code == 200
        shown = control.get("/policy").text + control.get("/status").text
        assert sha256(GLOBEX) not in shown
        assert sha256(GLOBEX)[:8] in shown


# -- models and classes -----------------------------------------------------------------------------------------------


def test_a_model_that_is_not_theirs(site: Site) -> None:
    def listed(key: str) -> set[str]:
        return {model.id for model in site.openai(key).models.list()}

    assert listed(ACME) == {"sim", "other"}
    assert listed(GLOBEX) == {"sim"}
    with pytest.raises(openai.NotFoundError):
        site.openai(GLOBEX).models.retrieve("other")
    with pytest.raises(openai.PermissionDeniedError) as denied:
        site.openai(GLOBEX, retries=2).chat.completions.create(**body_for_sdk() | {"model": "other"})
    assert (denied.value.code, denied.value.param) == ("model_not_allowed", "model")
    assert "globex" in denied.value.message
    assert "other" in denied.value.message
    for model in ("other", "no-such-model"):
        answer = site.ask({"model": model}, key=GLOBEX)
        assert refused(answer) == (403, "model_not_allowed", "model"), "what exists is not theirs to know"
        assert answer.headers["x-should-retry"] == "false"
    assert refused(site.ask({"model": "no-such-model"}, key=ACME)) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("key", "asked", "tier", "given", "told"),
    [
        (ACME, None, None, "default", None),
        (ACME, "interactive", None, "interactive", None),
        (ACME, None, "priority", "interactive", None),
        (ACME, None, "flex", "batch", None),
        (ACME, None, "auto", "default", None),
        (ACME, "batch", "priority", "batch", None),
        (GLOBEX, "interactive", None, "default", "interactive"),
        (GLOBEX, None, "priority", "default", "interactive"),
        (GLOBEX, "batch", None, "batch", None),
        (BATCHER, None, None, "batch", None),
        (BATCHER, "default", None, "batch", "default"),
        (BATCHER, None, "priority", "batch", "interactive"),
    ],
)
def test_classes(site: Site, key: str, asked: str | None, tier: str | None, given: str, told: str | None) -> None:
    fields = {} if tier is None else {"service_tier": tier}
    headers = {} if asked is None else {"x_weir_class": asked}
    for stream in (False, True):
        answer = site.ask({"stream": stream} | fields, key=key, **headers)
        assert answer.status_code == 200
        assert answer.headers["x-weir-class"] == given
        assert answer.headers.get("x-weir-class-asked") == told


def test_calls_are_counted_by_class_and_keys_are_in_no_output(site: Site, tmp_path: Path) -> None:
    site.ask(key=BATCHER)
    assert site.gateway.total("weir_requests_total", outcome="ok", **{"class": "batch"}) > 0
    told = site.gateway.child.output() + json.dumps(site.gateway.fleet()) + json.dumps(site.status())
    for key in (ACME, GLOBEX, BATCHER):
        assert key not in told
        assert sha256(key) not in told
