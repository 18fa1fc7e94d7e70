"""Name of the model in a body, replaced for a call that names its model by an alias: engines know no aliases."""

from __future__ import annotations

import msgspec

from gateway.core.request.multipart_form import with_field
from gateway.core.request.routes import Route


def with_model(body: bytes, model: str, content_type: bytes, route: Route) -> bytes:
    """`body`, which was parsed for `route`, with another model. Of equal keys in JSON every reader takes the last."""
    if route.form:
        return with_field(content_type, body, "model", model)
    return body.rstrip(b" \t\r\n")[:-1] + b',"model":' + msgspec.json.encode(model) + b"}"
