"""Loading of a policy file and the files it names, on real files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway.decider.loading import load
from gateway.shared.files.checked import InvalidFile
from gateway.upstream.trust import Trust
from tests.tokens import KeyPair, key_set
from tests.wire.test_server_seats import made

ENGINES = "fleet: {engines: [{url: 'http://h:1', api_key_file: a.key}, {url: 'http://h:2'}]}\n"


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder / "p.yaml"


def test_names_are_relative_to_the_policys_own_folder(tmp_path: Path) -> None:
    path = written(tmp_path, p_yaml=ENGINES, a_key="secret\n")
    assert load(path, Path.read_bytes).api_keys == {"http://h:1": "secret"}


def test_the_keys_of_the_keys_file_become_their_tenants(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weir-key").hexdigest()
    path = written(tmp_path, p_yaml="keys_file: k.txt\ntenants: {acme: {}}\n", k_txt=f"{digest} acme\n")
    assert load(path, Path.read_bytes).policy.tenants["acme"].keys == (digest,)


def test_a_keys_file_that_is_not_there_yet_lets_nobody_in_by_it(tmp_path: Path) -> None:
    path = written(tmp_path, p_yaml="keys_file: k.txt\ntenants: {acme: {}}\n")
    assert load(path, Path.read_bytes).policy.tenants["acme"].keys == ()


@pytest.mark.parametrize("key", ["", "two words", "k\u00e9y", "a\nb"])
def test_an_engines_key_is_one_word_of_visible_ascii(tmp_path: Path, key: str) -> None:
    path = written(tmp_path, p_yaml=ENGINES, a_key=key)
    with pytest.raises(InvalidFile, match=r"p\.yaml:1: fleet\.engines\[0\]\.api_key_file: .*a\.key, expected a file "):
        load(path, Path.read_bytes)


def test_sidecars_show_the_token_of_their_file(tmp_path: Path) -> None:
    policy = "fleet: {sidecars: {token_file: s.token}}\n"
    token = "0123456789abcdef"  # noqa: S105 # a test's own
    path = written(tmp_path, p_yaml=policy, s_token=f" {token}\n")
    assert load(path, Path.read_bytes).sidecar_tokens == (token,)
    path = written(tmp_path, p_yaml=policy, s_token=f"{token}\r\n\r\n{token[::-1]}\r\n")
    assert load(path, Path.read_bytes).sidecar_tokens == (token, token[::-1]), "one takes the place of the other"
    for bad in ("", "short", "two words of them", token * 300, f"{token}\nshort", f"{token}\n" * 3):
        path = written(tmp_path, p_yaml=policy, s_token=bad)
        with pytest.raises(InvalidFile, match=r"sidecars\.token_file: .*s\.token, .* at least 16 "):
            load(path, Path.read_bytes)
    (tmp_path / "s.token").unlink()
    with pytest.raises(InvalidFile, match=r"token_file: .*s\.token: No such file"):
        load(path, Path.read_bytes)
    assert load(written(tmp_path, p_yaml="fleet: {sidecars: {}}\n"), Path.read_bytes).sidecar_tokens == ()


def test_what_sidecars_are_shown_and_whose_certificates_are_trusted(tmp_path: Path) -> None:
    sidecars = "order_token_file: o.token, tls: {ca_file: ca.pem, name: weir-sidecar}"
    policy, order = f"fleet: {{sidecars: {{{sidecars}}}}}\n", "order-of-sixteen-letters"
    made(tmp_path, "ca")
    path = written(tmp_path, p_yaml=policy, o_token=order)
    found = load(path, Path.read_bytes)
    assert (found.sidecar_tokens, found.order_tokens) == ((), (order,))
    assert found.sidecar_trust == Trust(ca=(tmp_path / "ca.pem").read_text(), name="weir-sidecar")
    pem = (tmp_path / "ca.pem").read_text()
    (tmp_path / "ca.pem").write_text(f"# F\u0151tan\u00fas\u00edtv\u00e1ny, as bundles name it\n{pem}", "utf-8")
    assert pem in str(load(path, Path.read_bytes).sidecar_trust.ca)
    (tmp_path / "ca.pem").write_text("")  # for which `ssl` would trust the system's authorities
    with pytest.raises(InvalidFile, match=r"sidecars\.tls\.ca_file: .*ca\.pem: .*, expected a file of certificates"):
        load(path, Path.read_bytes)
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(InvalidFile, match=r"sidecars\.tls\.ca_file: .*ca\.pem: .*, expected a file of certificates"):
        load(path, Path.read_bytes)
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(InvalidFile, match=r"ca_file: .*ca\.pem: No such file"):
        load(path, Path.read_bytes)
    path = written(tmp_path, p_yaml="fleet: {sidecars: {order_token_file: o.token, tls: {}}}\n", o_token="short")  # noqa: S106
    with pytest.raises(InvalidFile, match=r"order_token_file: .*o\.token, .* at least 16 "):
        load(path, Path.read_bytes)
    path = written(tmp_path, p_yaml="fleet: {sidecars: {tls: {}}}\n")
    assert load(path, Path.read_bytes).sidecar_trust == Trust()


def test_cache_salts_are_made_with_the_secret_of_a_file(tmp_path: Path) -> None:
    policy, word = "routing: {cache_secret_file: c.secret}\n", "0123456789abcdef"
    path = written(tmp_path, p_yaml=policy, c_secret=f"{word}\n")
    assert load(path, Path.read_bytes).cache_secret == word
    path = written(tmp_path, p_yaml=policy, c_secret=word[:15])
    with pytest.raises(InvalidFile, match=r"routing\.cache_secret_file: .*c\.secret, .* one secret of at least 16 "):
        load(path, Path.read_bytes)
    assert load(written(tmp_path, p_yaml="{}\n"), Path.read_bytes).cache_secret is None


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, p_yaml=ENGINES)
    with pytest.raises(InvalidFile, match=r"api_key_file: .*a\.key: No such file"):
        load(path, Path.read_bytes)
    (tmp_path / "k.txt").mkdir()
    with pytest.raises(InvalidFile, match=r"keys_file: .*k\.txt: Is a directory"):
        load(written(tmp_path, p_yaml="keys_file: k.txt\n"), Path.read_bytes)
    with pytest.raises(InvalidFile, match=r"fleet\.engines\[0\]\.url: .*port"):
        load(written(tmp_path, p_yaml="fleet: {engines: [{url: 'http://h:99999'}]}\n"), Path.read_bytes)
    with pytest.raises(InvalidFile):
        load(written(tmp_path, p_yaml="nonsense: 1\n"), Path.read_bytes)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml", Path.read_bytes)


AUTH = "auth: {issuer: i, audience: a, jwks: k.json}\ntenants: {acme: {}}\n"


def test_the_keys_of_an_issuer_are_in_their_file(tmp_path: Path) -> None:
    keys = key_set(KeyPair("one"))
    path = written(tmp_path, p_yaml=AUTH, k_json=keys.decode())
    assert load(path, Path.read_bytes).jwks == keys
    (tmp_path / "k.json").chmod(0o666)
    with pytest.raises(InvalidFile, match=r"auth\.jwks: .*everybody on this machine may write"):
        load(path, Path.read_bytes)
    with pytest.raises(InvalidFile, match=r"auth\.jwks: .*no public key that verifies tokens"):
        load(written(tmp_path, p_yaml=AUTH, k_json='{"keys": []}'), Path.read_bytes)
    (tmp_path / "k.json").unlink()
    with pytest.raises(InvalidFile, match=r"auth\.jwks: .*No such file"):
        load(path, Path.read_bytes)


def test_tokens_need_pyjwt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, p_yaml=AUTH, k_json=key_set(KeyPair("one")).decode())
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InvalidFile, match=r"auth: .*pip install 'WEIR\.whl\[jwt\]'"):
        load(path, Path.read_bytes)
