"""Units of numbers as people write them: `250ms`, `16MiB`, `200k`, `80%`. Only this module knows their suffixes.

A `Unit` is metadata of a type (`Annotated[float, SECONDS]`), so a field says in one line what it holds and how it is
written. A text that is not exactly a number with a known suffix is refused. Nothing is guessed, and signs do not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated

import msgspec

MIB, GIB = 1 << 20, 1 << 30  # bytes
WHOLE = "(?:0|[1-9][0-9]{0,14})"  # 010 is 8 in YAML 1.1, and 10 in YAML 1.2
_NUMBER = re.compile(rf"({WHOLE}(?:\.[0-9]{{1,9}})?)([A-Za-z%]*)", re.ASCII)


# How people write suffixes that are not ours; "": where they leave one out.
_SPELLINGS = {
    "ms": ("msec", "millis", "millisecond", "milliseconds"),
    "s": ("", "sec", "secs", "second", "seconds"),
    "m": ("min", "mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "d": ("day", "days"),
    "KiB": ("k", "kb"),
    "MiB": ("m", "mb"),
    "GiB": ("g", "gb"),
    "k": ("thousand",),
    "M": ("million",),
    "%": ("", "percent", "pct"),
    "x": ("", "times"),
}
_LOOSE = re.compile(r"[>\s]*([0-9][0-9_,]{0,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z%]*)", re.ASCII)


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """Notation of one kind of number.

    `scales` maps a suffix to its worth in the unit that the code uses; the suffix to prefer in print is last, and the
    empty suffix is a bare number. `before` is the text before the number. `words` are names for values. `whole` numbers
    are returned as int, others as float.
    """

    what: str
    scales: tuple[tuple[str, Decimal], ...]
    whole: bool = False
    before: str = ""
    words: tuple[tuple[str, float], ...] = ()

    def parse(self, text: str) -> float | None:
        """The value of `text`, or None where it is not a number of this kind."""
        named = dict(self.words).get(text)
        if named is not None:
            return named
        match = _NUMBER.fullmatch(text.removeprefix(self.before)) if text.startswith(self.before) else None
        scale = dict(self.scales).get(match[2]) if match else None
        if match is None or scale is None:
            return None
        value = Decimal(match[1]) * scale
        if not self.whole:
            return float(value)
        return int(value) if value == int(value) else None

    def meant(self, text: str) -> Iterator[str]:
        """Yield texts that a person may have meant by text that is not of this kind: another spelling, no suffix."""
        loose = _LOOSE.fullmatch(text.strip())
        if loose is not None:
            number, word = re.sub("[_,]|^0+(?=[0-9])", "", loose[1]), loose[2].lower()
            for suffix, _ in self.scales:
                if word == suffix.lower() or word in _SPELLINGS.get(suffix, ()):
                    yield f"{self.before}{number}{suffix}"

    @property
    def pattern(self) -> str:
        """A regular expression that text of this kind matches in full."""
        suffixes = "|".join(suffix for suffix, _ in self.scales)
        words = "".join(f"|{word}" for word, _ in self.words)
        return f"{self.before}{WHOLE}([.][0-9]{{1,9}})?({suffixes}){words}"

    def show(self, value: float) -> str:
        """Text that parses to `value`: in the last suffix that needs no fraction, else the last; 0 in the first."""
        exact = Decimal(repr(value))
        scales = reversed(self.scales) if value else self.scales
        texts = [f"{self.before}{(exact / scale).normalize():f}{suffix}" for suffix, scale in scales]
        return min((text for text in texts if self.parse(text) == value), key=_fractional, default=repr(value))


def _fractional(text: str) -> bool:
    return "." in text


def _scales(**scales: str) -> tuple[tuple[str, Decimal], ...]:
    return tuple((suffix, Decimal(scale)) for suffix, scale in scales.items())


_BARE = (("", Decimal(1)),)

SECONDS = Unit(what="a time such as 250ms, 10s, 5m", scales=_scales(ms="0.001", s="1", m="60", h="3600", d="86400"))
BYTES = Unit(
    what="a size such as 512, 64KiB, 16MiB",
    scales=_BARE + _scales(B="1", KiB="1024", MiB="1048576", GiB="1073741824"),
    whole=True,
)
COUNT = Unit(what="a number such as 256, 200k, 1M", scales=_BARE + _scales(k="1000", M="1000000"), whole=True)
SHARE = Unit(what="a share such as 80%", scales=(*_BARE, ("%", Decimal("0.01"))))
SAMPLE = Unit(what="true, false or a share such as 10%", scales=SHARE.scales, words=(("true", 1.0), ("false", 0.0)))
FACTOR = Unit(what="a number such as 1.5", scales=_BARE)
TIMES = Unit(what="a multiple such as 1.2x, 2x", scales=(("x", Decimal(1)),))
ABOVE = Unit(what='a bound such as "> 8000"', scales=COUNT.scales, whole=True, before="> ")

Seconds = Annotated[float, SECONDS]
Bytes = Annotated[int, BYTES]
Count = Annotated[int, COUNT]
Share = Annotated[float, SHARE]
Factor = Annotated[float, FACTOR]
