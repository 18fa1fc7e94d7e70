"""Number formats for people, the same in a terminal and on a page."""

from __future__ import annotations


def seconds(value: float) -> str:
    """A duration: three digits and a unit."""
    if value <= 0.0:
        return "0"
    if value < 0.9995e-3:
        return f"{_digits(value * 1e6)} us"
    if value < 0.9995:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value)} s"


def count(value: float) -> str:
    """A number or a rate: three digits, and k, M or G where it is large."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return _digits(value / (1e3 if unit == "k" else size)) + unit
    return _digits(value)


def share(value: float) -> str:
    """Per cent, with the decimals that tell 99.9 from 100. What is not all is never called 100 %, nor 0 % what is
    not nothing."""
    per_cent = 100.0 * value
    for decimals in (1, 2, 3):
        said = f"{per_cent:.{decimals}f}"
        if float(said) in (0.0, 100.0) and per_cent not in (0.0, 100.0):
            continue
        return ("0" if not per_cent else "100" if per_cent == 100.0 else said) + " %"
    return ("> 99.999" if per_cent > 50.0 else "< 0.001") + " %"


def change(value: float, base: float) -> str:
    """Distance of `value` from `base`, signed; "" where that cannot be said."""
    if not base:
        return ""
    ratio = value / base - 1.0
    return f"{value / base:.3g}x" if ratio > 9.0 else f"{100.0 * ratio:+.1f} %"


def _digits(value: float) -> str:
    """Three significant ones, without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"
