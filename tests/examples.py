"""Numbers of examples that hypothesis tries: all of them, or a quarter under the profile of `make check`."""

from __future__ import annotations

from hypothesis import settings

WHOLE = "whole"  # the profile of `make test`
QUICK = "quick"  # the profile of `make check`
USUAL = 100  # hypothesis' own number, where a test names none


def examples(count: int) -> int:
    """`count`, or a quarter of it under the profile `quick`; for `max_examples`, which would overrule a profile."""
    return count // 4 if settings.get_current_profile_name() == QUICK else count
