"""API keys made and revoked on the control port: on a real file, with the admin token alone, and shown once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.control.console.sources import Sources
from gateway.core.policy.file import decode
from gateway.decider.api_keys import ApiKeys
from gateway.decider.key_file import add, digest_of, entries
from gateway.shared.files.file_status import FileStatus
from tests.control.parts import TOKEN, USER_KEY, Parts, play

ADMIN = {"authorization": f"Bearer {TOKEN}"}
POLICY = decode(b"keys_file: keys.txt\ntenants: {acme: {}, zoo: {}}\n")


class Site:
    """Keys of a policy in a folder; `read` counts how often its files were read again."""

    def __init__(self, folder: Path, policy: bytes = b"") -> None:
        self.file = folder / "keys.txt"
        self.said: list[str] = []
        self.status = FileStatus()
        self.read = 0
        found = decode(policy) if policy else POLICY
        self.keys = ApiKeys(folder / "policy.yaml", lambda: found, self.reload, self.said.append)
        self.sources = Sources(keys=self.keys)

    async def reload(self) -> FileStatus:
        self.read += 1
        return self.status


def test_a_key_is_made_shown_once_and_revoked(tmp_path: Path) -> None:
    site = Site(tmp_path)

    async def scene(gateway: Parts) -> None:
        made = await gateway.post("/tenants/acme/keys", **ADMIN)
        assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
        key, digest = made.json()["key"], made.json()["hash"]
        assert digest_of(key).startswith(digest)
        assert [(entry.tenant, entry.digest) for entry in entries(site.file)] == [("acme", digest_of(key))]
        assert site.read == 1
        other = await gateway.ask("DELETE", f"/tenants/zoo/keys/{digest}", **ADMIN)
        assert other.status_code == 404
        assert len(entries(site.file)) == 1
        ended = await gateway.ask("DELETE", f"/tenants/acme/keys/{digest[:8]}", **ADMIN)
        assert (ended.status_code, ended.json()) == (200, {"tenant": "acme", "hash": digest})
        assert entries(site.file) == []
        assert site.read == 2
        assert len(site.said) == 2
        assert not any(key in line for line in site.said)
        assert key not in site.file.read_text()

    play(scene, TOKEN, sources=site.sources)


def test_only_the_admin_token_makes_or_revokes(tmp_path: Path) -> None:
    site = Site(tmp_path)
    digest = digest_of(add(site.file, "acme", "2026-01-31"))

    async def scene(gateway: Parts) -> None:
        for method, path in (("POST", "/tenants/acme/keys"), ("DELETE", f"/tenants/acme/keys/{digest}")):
            assert (await gateway.ask(method, path)).status_code == 401
            assert (await gateway.ask(method, path, authorization=f"Bearer {TOKEN}x")).status_code == 401
            assert (await gateway.ask(method, path, authorization=f"Bearer {USER_KEY}")).status_code == 403
            assert (await gateway.ask(method, path, origin="http://evil", **ADMIN)).status_code == 403
        assert (await gateway.get("/tenants/acme/keys", **ADMIN)).status_code == 405

    async def without_a_token(gateway: Parts) -> None:
        for method, path in (("POST", "/tenants/acme/keys"), ("DELETE", f"/tenants/acme/keys/{digest}")):
            answer = await gateway.ask(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_keys")

    play(scene, TOKEN, sources=site.sources)
    play(without_a_token, sources=site.sources)
    assert [entry.digest for entry in entries(site.file)] == [digest]


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    site = Site(tmp_path)
    digest = digest_of(add(site.file, "acme", "2026-01-31"))

    async def scene(gateway: Parts) -> None:
        for path, status in (
            ("/tenants/nobody/keys/" + digest, 404),
            ("/tenants/acme/keys/" + "0" * 12, 404),
            ("/tenants/acme/keys/" + digest[:7], 400),
            ("/tenants/acme/keys/sk-a-key-of-a-user", 400),
        ):
            assert (await gateway.ask("DELETE", path, **ADMIN)).status_code == status
        assert (await gateway.post("/tenants/%3Cb%3E/keys", **ADMIN)).status_code == 404
        site.status = FileStatus(error="line 3: no such field")
        ended = await gateway.ask("DELETE", f"/tenants/acme/keys/{digest}", **ADMIN)
        assert "line 3" in ended.json()["problem"]
        site.file.chmod(0o666)
        refused = await gateway.post("/tenants/acme/keys", **ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "keys_file")
        assert "chmod go-w" in refused.json()["error"]["message"]

    play(scene, TOKEN, sources=site.sources)


@pytest.mark.parametrize("digest", [None, "0" * 8])
def test_a_policy_without_a_keys_file_says_so(tmp_path: Path, digest: str | None) -> None:
    async def scene(gateway: Parts) -> None:
        path = "/tenants/acme/keys" + (f"/{digest}" if digest else "")
        answer = await gateway.ask("DELETE" if digest else "POST", path, **ADMIN)
        assert answer.status_code == 409
        assert "keys_file: keys.txt" in answer.json()["error"]["message"]

    play(scene, TOKEN, sources=Site(tmp_path, b"tenants: {acme: {}}\n").sources)
