"""The model of a body, replaced for a call by an alias: whoever reads it next finds another name and the same rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request.model_name import with_model
from gateway.core.request.multipart_form import form_fields
from gateway.core.request.routes import Route
from tests.core.request.test_multipart_form import TYPE, field, form

JSON, FORM = Route(path="/v1/chat/completions", kind="chat"), Route(path="/v1/audio", kind="audio", form=True)


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.text(min_size=1), st.sampled_from([b"", b" \r\n\t"]))
def test_only_the_model_of_a_json_body_is_another(rest: dict[str, Any], model: str, after: bytes) -> None:
    body = json.dumps({"model": "alias"} | rest).encode() + after
    assert json.loads(with_model(body, model, b"application/json", JSON)) == rest | {"model": model}


@pytest.mark.parametrize("model", ["m", "org/é"])
def test_only_the_model_of_a_form_is_another(model: str) -> None:
    sound = b'Content-Disposition: form-data; name="file"; filename="model"\r\n\r\n\x00\r\n--C\r\n\xff\r\n'
    body = form(field(b"language", b"de"), field(b"model", b"alias"), sound, field(b"tags[]", b"model"))
    changed = with_model(body, model, TYPE, FORM)
    assert changed == body.replace(b"alias", model.encode())
    assert form_fields(TYPE, changed) == {"language": "de", "model": model, "file": ""}
