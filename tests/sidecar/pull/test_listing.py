"""Listings of models' files: what is taken of them, and what refuses them whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.pull.listing import (
    MAX_FILES,
    BadListing,
    Digest,
    SourceFile,
    checked,
    checked_name,
    chosen,
    digest_of,
    hub_files,
    links,
    sums,
)

SHA = "a" * 64
COMMIT = "b" * 40
BAD = [
    "", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/", "a\\..\\b", "a\nb", "a\x1b[2Jb", "x" * 256, "\ud800",
    "/".join("abcdefghi"), "/".join(["x" * 250] * 5), "..", ".",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_names_that_lead_anywhere_else_refuse_the_listing(name: str) -> None:
    with pytest.raises(BadListing, match="it names a file"):
        checked_name(name)


def test_names_that_do_not() -> None:
    for name in ("config.json", "1_Pooling/config.json", "..x", "a b (1).json", ".gitattributes", "modèle.json"):
        assert checked_name(name) == name


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a", "a"], "twice"),
        (["a/b", "a"], "below a file"),
        (["a/b/c", "a/b"], "below a file"),
        ([f"{number}" for number in range(MAX_FILES + 1)], "more than"),
    ],
)
def test_files_that_cannot_be_beside_each_other(names: list[str], said: str) -> None:
    with pytest.raises(BadListing, match=said):
        checked(SourceFile(name=name, size=1) for name in names)


def test_what_vllm_does_not_read_is_left_out() -> None:
    small = ["config.json", "tokenizer.json", "1_Pooling/config.json"]
    both = ["model-1.safetensors", "model-2.safetensors", "pytorch_model.bin", "tf_model.h5", "original/x.pth",
            "consolidated.safetensors", ".gitattributes", ".cache/x", "SHA256SUMS"]  # fmt: skip
    assert chosen(small + both) == [*small, "model-1.safetensors", "model-2.safetensors"]
    assert chosen(["consolidated.safetensors", "params.json"]) == ["consolidated.safetensors", "params.json"]
    assert chosen(["a.bin", "flax.msgpack", "config.json"]) == ["a.bin", "config.json"]
    gguf = ["q4/a.gguf", "q8/a.gguf", "config.json"]
    assert chosen(gguf) == gguf
    assert chosen(gguf, ["q4/*"]) == ["q4/a.gguf", "config.json"]
    assert chosen(small + both, everything=True) == [*small, *both[:6]]


def hub(*siblings: dict[str, Any], sha: Any = COMMIT) -> bytes:
    return json.dumps({"sha": sha, "siblings": list(siblings), "private": False}).encode()


def test_a_hubs_answer() -> None:
    commit, files = hub_files(
        hub(
            {"rfilename": "a.safetensors", "size": 130, "blobId": "c" * 40, "lfs": {"sha256": SHA, "size": 9}},
            {"rfilename": "config.json", "size": 3, "blobId": "C" * 40},
            {"rfilename": "x"},
        )
    )
    assert commit == COMMIT
    assert [(file.size, file.digest) for file in files] == [
        (9, Digest("sha256", SHA)),
        (3, Digest("git", "c" * 40)),
        (None, None),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xff", b"[]", b"<html>", b"[" * 100_000, hub(sha="../../x"), hub(sha=7),
        hub({"rfilename": "../x", "size": 1}),
        hub({"rfilename": "x", "size": -1}),
        hub({"rfilename": "x", "size": 2**60}),
        hub({"rfilename": "x", "size": 10**30}),
        hub({"rfilename": "x", "size": "1"}),
        hub({"rfilename": "x", "blobId": "z"}),
        hub({"rfilename": "x", "lfs": {"sha256": "a", "size": 1}}),
    ],
    ids=range(14),
)  # fmt: skip
def test_a_hub_that_lies_or_is_none(body: bytes) -> None:
    with pytest.raises(BadListing):
        hub_files(body)


def test_checksums() -> None:
    assert sums(f"{SHA}  a.bin\n\n{SHA.upper()} *./b/c.json\n") == {
        "a.bin": Digest("sha256", SHA),
        "b/c.json": Digest("sha256", SHA),
    }
    for text in ("x", f"{SHA} a", f"{SHA}  ../a", f"{SHA[1:]}  a", "<html>"):
        with pytest.raises(BadListing):
            sums(text)
    with pytest.raises(BadListing, match="more than"):
        sums("".join(f"{SHA}  {number}\n" for number in range(MAX_FILES + 1)))
    with pytest.raises(BadListing, match="none"):
        digest_of("git", SHA)


def test_links_of_a_web_servers_pages() -> None:
    page = """<a href="?C=N;O=D">x</a> <A HREF='config.json'>c</A> <a class=x href=sub/>s</a> <a href="/m/a%20b.bin?x">
    <a href="../">up</a><a href="/etc/passwd">p</a><a href="http://other/m/x">o</a><a href="http://h/m/a%26b.json">k</a>
    <a href="config.json">again</a><a href="&#46;hidden">h</a><a name="n">n</a><a href="//[">b</a><a href="#x">f</a>"""
    assert list(links(page, "http://h/m/")) == ["config.json", "sub/", "a&b.json", ".hidden"]
    with pytest.raises(BadListing, match="passwd"):
        list(links('<a href="..%2f..%2fetc%2fpasswd">x</a>', "http://h/m/"))
    assert list(links("<a " * 200_000 + "<a href=" * 100_000, "http://h/m/")) == []
