"""Listings of models' files: what is taken of them, and what refuses them whole."""

from __future__ import annotations

import pytest

from sidecar.pull.listing import MAX_FILES, PullError, check_names, checksums, select

SHA = "a" * 64
BAD = [
    "",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "a\\..\\b",
    "a\nb",
    "a\x1b[2Jb",
    "\ud800",
    "..",
    ".",
]


@pytest.mark.parametrize("name", BAD, ids=ascii)
def test_names_that_lead_anywhere_else_refuse_the_listing(name: str) -> None:
    with pytest.raises(PullError, match="no name for a file below"):
        check_names(["config.json", name])


def test_names_that_do_not() -> None:
    check_names(["config.json", "1_Pooling/config.json", "..x", "a b (1).json", ".gitattributes", "modèle.json"])


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
    with pytest.raises(PullError, match=said):
        check_names(names)


def test_what_vllm_does_not_read_is_left_out() -> None:
    small = ["config.json", "tokenizer.json", "1_Pooling/config.json"]
    both = ["model-1.safetensors", "model-2.safetensors", "pytorch_model.bin", "tf_model.h5", "original/x.pth",
            "consolidated.safetensors", ".gitattributes", ".cache/x", "SHA256SUMS"]  # fmt: skip
    assert select(small + both) == [*small, "model-1.safetensors", "model-2.safetensors"]
    assert select(["consolidated.safetensors", "params.json"]) == ["consolidated.safetensors", "params.json"]
    assert select(["a.bin", "flax.msgpack", "config.json"]) == ["a.bin", "config.json"]
    gguf = ["q4/a.gguf", "q8/a.gguf", "config.json"]
    assert select(gguf) == gguf
    assert select(gguf, ["q4/*"]) == ["q4/a.gguf", "config.json"]
    assert select(small + both, everything=True) == [*small, *both[:6]]


def test_checksums() -> None:
    assert checksums(f"{SHA}  a.bin\n\n{SHA.upper()} *./b/c.json\n") == {"a.bin": SHA, "b/c.json": SHA}
    for text in ("x", f"{SHA} a", f"{SHA[1:]}  a", "<html>"):
        with pytest.raises(PullError, match="a line of the source's SHA256SUMS is none"):
            checksums(text)
