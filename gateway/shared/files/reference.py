"""Reference of a file that operators write, as a Markdown page.

Made of the same annotations and docstrings as the JSON Schema. Each mapping of the file has a section that lists its
fields with description, form, unit, bounds and default. A mapping that may stand at several places has one section,
under the first of them. Defaults that are long, or differ by place, stand elsewhere.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import msgspec

from gateway.shared.files.checked import plain
from gateway.shared.files.kinds import expected, fields_of, form_of, is_struct, options_of, shorthand_of
from gateway.shared.files.schema import described
from gateway.shared.files.yaml_file import flow

NAME = "NAME"  # stands for the key of an entry
ITEM = "[]"  # stands for the entry of a list
_ELSEWHERE = "\0"  # stands for where a default is that is long, or differs by place
_EXAMPLES = re.compile(r" such as [^,]+(?:, (?!at )[^,]+)*")
_NAMES = {  # descriptions of values that the page gives once, and what it calls them
    "lower-case name of letters, digits, _ . and -": "dotted name",
    "lower-case name of letters, digits, _ and -": "name",
    "file name that does not begin with -": "file name",
}
_LONGEST = 60  # characters of a default that stands with its field
_ALSO = 3  # places of a section that are listed beside its own
_VALUES = """\
A time is `250ms`, `10s`, `5m`, `2h` or `1d`; a size `512`, `64KiB` or `16MiB`; a number `256`, `200k` or `1M`; a share
`80%` or `0.8`; a multiple `1.2x`; a rate `10/s`, `600/min`, `200k/h` or `2M/day`; a bound `"> 8000"`. A
name has lower-case letters, digits, `_` and `-`, a dotted name `.` too; no file name begins with `-`."""

Place = tuple[str, Any]  # a path, and the default there; msgspec.NODEFAULT: whatever the entry says


def reference_of(kind: type[msgspec.Struct], title: str, lead: str, elsewhere: str) -> str:
    """Return the page about files of a Struct. `elsewhere`: where a file is that has every default written out."""
    standing = list(_places(kind, "", _default(kind)))
    order = {path: number for number, (_, path, _) in enumerate(standing)}
    places: dict[type[msgspec.Struct], list[Place]] = {}
    for struct, path, default in standing:
        places.setdefault(struct, []).append((path, default))
    for found in places.values():
        found.sort(key=lambda place: place[0].count("."))  # the shortest path is the section's name
    anchors = {struct: _anchor(found[0][0]) for struct, found in places.items()}
    listed = sorted(places.items(), key=lambda entry: order[entry[1][0][0]])
    told = {
        option
        for struct in places
        for name, field in fields_of(struct).items()
        if name not in described(struct)[1]
        for option in options_of(field.type)
        if is_struct(option)
    }  # their fields say what they are
    sections = [_section(struct, found, anchors, struct in told) for struct, found in listed]
    return "\n\n".join([f"# {title}", lead.strip(), _VALUES, *sections]).replace(_ELSEWHERE, elsewhere) + "\n"


def _places(kind: Any, path: str, value: Any) -> Iterator[tuple[type[msgspec.Struct], str, Any]]:
    """Every Struct below `kind`, in the order of the file, with where it stands and its default there."""
    for option in options_of(kind):
        if is_struct(option):
            struct = value if isinstance(value, option) else msgspec.NODEFAULT
            yield option, path, struct
            for name, field in fields_of(option).items():
                below = getattr(struct, field.name, msgspec.NODEFAULT)
                yield from _places(field.type, f"{path}.{name}".removeprefix("."), below)
        elif get_origin(option) is tuple:
            yield from _places(get_args(option)[0], path + ITEM, msgspec.NODEFAULT)
        elif get_origin(option) is Mapping:
            yield from _places(get_args(option)[1], f"{path}.{NAME}", msgspec.NODEFAULT)


def _default(kind: type[msgspec.Struct]) -> Any:
    """Value of an empty file; NODEFAULT if the file needs a field."""
    needed = any(field.required for field in fields_of(kind).values())
    return msgspec.NODEFAULT if needed else kind()


def _section(
    struct: type[msgspec.Struct],
    places: list[Place],
    anchors: Mapping[type[msgspec.Struct], str],
    told: bool,
) -> str:
    general, words = described(struct)
    paths = list(dict.fromkeys(path for path, _ in places))
    fields = [
        _entry(name, words.get(name) or _meaning(field.type), _form(field.type, anchors), _shown(field, places))
        for name, field in fields_of(struct).items()
    ]
    if told and len(paths) == 1 and ". " not in general:
        general = ""
    return "\n\n".join(filter(None, [_heading(paths[0]), _escaped(general), _also(paths[1:]), *fields]))


def _also(paths: list[str]) -> str:
    """Name other places of a section; of many, the first."""
    if not paths:
        return ""
    listed, more = ", ".join(f"`{path}`" for path in paths[:_ALSO]), len(paths) - _ALSO
    return f"Also at {listed} and {more} more that link here." if more > 0 else f"Also at {listed}."


def _entry(name: str, meaning: str, form: str, default: str) -> str:
    """An entry of a definition list: what the field is for, and what it takes."""
    value = form[0].upper() + form[1:]
    if default:
        value = f"{value}; {default}" if default == "required" else f"{value}; default {default}"
    return "\n: ".join([f"`{name}`", *(f"{_escaped(text.rstrip('.'))}." for text in (meaning, value) if text)])


def _meaning(kind: Any) -> str:
    """The first sentence of a field's Struct, whose section has the rest."""
    said = next((described(option)[0] for option in options_of(kind) if is_struct(option)), "")
    return said.split(". ")[0]


def _heading(path: str) -> str:
    if not path:
        return "## Top level"
    return f"{'###' if '.' in path.replace('.' + NAME, '') else '##'} `{path}`"


def _anchor(path: str) -> str:
    """Anchor that GitHub and the site make of the heading."""
    return re.sub(r"[^\w-]", "", path.lower()) if path else "top-level"


def _form(kind: Any, anchors: Mapping[type[msgspec.Struct], str]) -> str:
    """Describe what a field accepts, with links to the other sections."""
    options = [option for option in options_of(kind) if option is not types.NoneType]
    return " or ".join(_option(option, anchors) for option in sorted(options, key=is_struct))


def _short(text: str) -> str:
    """Shorten the description of a value: leave out the examples that the page gives once."""
    text = re.sub(r"(?:(?<= or )|^)an? (?!or )", "", _EXAMPLES.sub("", text))
    for said, name in _NAMES.items():
        text = text.replace(said, name)
    return re.sub(r", at least (\S+), at most (\S+)", r" from \1 to \2", text)


def _option(kind: Any, anchors: Mapping[type[msgspec.Struct], str]) -> str:
    if kind is Any:
        return "any JSON value"
    if form_of(kind) is not None:
        return _short(expected(kind))
    if get_origin(kind) is tuple:
        return f"list of: {_form(get_args(kind)[0], anchors)}"
    if get_origin(kind) is Mapping:
        key, item = get_args(kind)
        return f"mapping of {NAME} ({_short(expected(key))}) to: {_form(item, anchors)}"
    link = f"[mapping](#{anchors[kind]})"
    short = shorthand_of(kind)
    return link if short is None else f"{_form(short, anchors)} or {link}"


def _shown(field: msgspec.structs.FieldInfo, places: list[Place]) -> str:
    """The default of a field, wherever its Struct may stand."""
    texts = {_default_text(field, struct) for _, struct in places}
    return texts.pop() if len(texts) == 1 else _ELSEWHERE


def _default_text(field: msgspec.structs.FieldInfo, struct: Any) -> str:
    if struct is not msgspec.NODEFAULT:
        value = getattr(struct, field.name)
    elif field.required:
        return "required"
    else:
        value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if is_struct(type(value)) and not hasattr(value, "shorthand"):
        return ""  # its own section has the defaults
    return _text(plain(value, field.type))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    if not value:
        return "null" if value is None else "none"
    text = flow({name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value)
    return f"`{text}`" if len(text) <= _LONGEST else _ELSEWHERE


def _escaped(text: str) -> str:
    """Text that means itself in Markdown; links and code are left alone."""
    return text.replace("*", r"\*").replace("<", "&lt;")
