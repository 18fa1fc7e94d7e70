"""Latency profiles in files: the known engines (`profiles.yaml`), and files that `gateway calibrate` writes.

A flag that takes a profile's name takes the path of a file, too. The gateway's reader reads both, so that every mistake
names its line and what was probably meant. Times have a unit: `7.4ms`, `32.5us`, `86ns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.kinds import Text
from gateway.shared.files.plain_file import open_plain
from gateway.shared.files.yaml_file import MAX_BYTES, read_file, written
from loadtest.engine.latency import Profile

KNOWN = Path(__file__).with_name("profiles.yaml")
ProfileName = Annotated[str, Text(r"[a-z0-9][a-z0-9-]{0,63}", "a lower-case name of letters, digits and -")]
DIGITS = 4  # significant ones, of what was fitted


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """Latency profile of an engine.

    `version`: of this format; `what`: which engine it is of, and when it was fitted; `profile`: its constants.
    """

    version: Literal[1] = 1
    what: Annotated[str, Text(r"[^\x00-\x1f]{0,200}", "one line of at most 200 characters")] = ""
    profile: Profile


class KnownProfiles(msgspec.Struct, frozen=True, kw_only=True):
    """Latency profiles of known engines. `version`: of this format; `profiles`: by name."""

    version: Literal[1] = 1
    profiles: Mapping[ProfileName, Profile]


def profiles() -> Mapping[str, Profile]:
    """The known engines by name, read anew each time."""
    return read_file(KNOWN.read_bytes(), str(KNOWN), KnownProfiles).good().profiles


def profile_of(name: str) -> Profile:
    """A known profile by its name, or the one in a file. Raises ValueError, with every mistake of the file."""
    known = profiles()
    if name in known:
        return known[name]
    if not Path(name).is_file():
        raise ValueError(f"there is no profile {name!r}: neither a file nor one of {', '.join(known)}")
    try:
        with open_plain(Path(name)) as file:
            return decode(file.read(MAX_BYTES + 1), name).profile
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from error
    except InvalidFile as error:
        raise ValueError(str(error)) from error


def decode(data: bytes, name: str = "profile") -> ProfileFile:
    """The profile in YAML. `name` is how messages call the file. Raises InvalidFile."""
    return read_file(data, name, ProfileFile).good()


def text_of(file: ProfileFile, comment: Iterable[str] = ()) -> str:
    """The file, times and shares rounded to DIGITS. It decodes to what is left then of an equal one."""
    fields = msgspec.structs.asdict(file.profile).items()
    rounded = {name: float(f"{value:.{DIGITS}g}") for name, value in fields if isinstance(value, float)}
    profile = msgspec.structs.replace(file.profile, **rounded)
    lines = [*(f"# {line}".rstrip() for line in comment), ""]
    return "\n".join(lines).lstrip("\n") + written(msgspec.structs.replace(file, profile=profile), ProfileFile)
