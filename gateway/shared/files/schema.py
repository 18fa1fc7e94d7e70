"""JSON Schema (2020-12) of the files that operators write, so that editors complete, explain and check them.

It is made of the reader's own annotations and of the Structs' docstrings: the text after a field's name and a colon
describes that field. A mistake that takes the whole file to see, such as a class that does not exist, only
`gateway check` finds.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import msgspec

from gateway.shared.files.checked import plain
from gateway.shared.files.kinds import Words, bounds_of, expected, fields_of, form_of, options_of, shorthand_of
from gateway.shared.files.units import Unit

Schema = dict[str, Any]

_FIELDS = re.compile(r"((?:`\w+`, )*`\w+`): ")


def text_of(schema: Schema) -> str:
    """A schema as its file holds it."""
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"


def schema_of(kind: type[msgspec.Struct], title: str) -> Schema:
    """The schema of a whole file that says a Struct of this kind."""
    structs = _Structs()
    top = structs.schema(kind)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**head, **top, "$defs": dict(sorted(structs.made.items()))}


def described(struct: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """Split a Struct's docstring into its general part and the words on each field that it names."""
    general, *rest = _FIELDS.split(" ".join((struct.__doc__ or "").split()))
    fields: dict[str, str] = {}
    for names, text in zip(rest[::2], rest[1::2], strict=True):
        shown = text.strip(" ;.")
        fields.update(dict.fromkeys(re.findall(r"\w+", names), shown[:1].upper() + shown[1:]))
    return general.strip(), fields


class _Structs:
    """Makes schemas; those of Structs stand once each in `made`, and others refer to them."""

    def __init__(self) -> None:
        self.made: dict[str, Schema] = {}

    def schema(self, struct: type[msgspec.Struct]) -> Schema:
        general, words = described(struct)
        known = fields_of(struct).values()
        required = [field.encode_name for field in known if field.required]
        return {
            # A section with nothing in it is all defaults.
            "type": "object" if required else ["object", "null"],
            **({"description": general} if general else {}),
            "properties": {
                field.encode_name: {**self._kind(field.type), **_annotations(field, words.get(field.encode_name))}
                for field in known
            },
            **({"required": required} if required else {}),
            "additionalProperties": False,
        }

    def _kind(self, kind: Any) -> Schema:
        schemas = [schema for option in options_of(kind) for schema in self._option(option)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _option(self, kind: Any) -> list[Schema]:
        """Schemas of one option, which YAML may read as several of JSON's types."""
        form = form_of(kind)
        if form is not None:
            return _scalar(form, *bounds_of(kind))
        if kind is Any:
            return [{}]
        if kind is types.NoneType:
            return [{"type": "null"}]
        if get_origin(kind) is tuple:
            return [{"type": "array", "items": self._kind(get_args(kind)[0])}]
        if get_origin(kind) is Mapping:
            key, item = get_args(kind)
            names = _scalar(form_of(key), None, None)[0]
            return [{"type": "object", "propertyNames": names, "additionalProperties": self._kind(item)}]
        if kind.__name__ not in self.made:
            self.made[kind.__name__] = self.schema(kind)
        short = shorthand_of(kind)
        options = () if short is None else options_of(short)
        texts = [schema for option in options if option is not types.NoneType for schema in self._option(option)]
        return [*texts, {"$ref": f"#/$defs/{kind.__name__}"}]


def _scalar(form: Any, least: float | None, most: float | None) -> list[Schema]:
    if isinstance(form, Words):
        values = [reading for value in form.values.values() for reading in dict.fromkeys((_unquoted(value), value))]
        return [{"type": "boolean"} if set(values) == {True, False} else {"enum": values}]
    text = {"type": "string", "pattern": f"^(?:{form.pattern})$"}
    if not isinstance(form, Unit):
        return [text]
    schemas: list[Schema] = [{"type": "boolean"}] if form.words else []
    if "" in dict(form.scales) and not form.before:
        bounds = {name: bound for name, bound in (("minimum", least), ("maximum", most)) if bound is not None}
        schemas.append({"type": "integer" if form.whole else "number", **bounds})
    return [*schemas, text]


def _annotations(field: msgspec.structs.FieldInfo, words: str | None) -> Schema:
    """Annotations of one field: a description for people, and the default that an editor fills in."""
    sentences = [words or ""]
    default: Schema = {}
    if any(form_of(option) is not None or hasattr(option, "shorthand") for option in options_of(field.type)):
        sentences.append(f"Expected: {expected(field.type)}")
        if not field.required:
            shown = plain(field.default, field.type)
            sentences.append("" if shown is None else f"Default: {shown}")
            default = {"default": _unquoted(shown)}
    text = ". ".join(filter(None, sentences))
    return {**({"description": f"{text}."} if text else {}), **default}


def _unquoted(value: Any) -> Any:
    """Value that YAML reads if the text of a value stands without quotes."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, TypeError):  # a word, or no text
        return value
