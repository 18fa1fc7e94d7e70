"""Tokens of the control port, in a file that is watched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.serve.starting import Options, admin_tokens_of
from gateway.shared.tokens import AcceptedTokens

OLD, NEW = "the-old-one-of-the-operator", "the-new-one-of-the-operator"


def play(folder: Path, scene: Callable[[Path, AcceptedTokens], Awaitable[None]], text: str) -> None:
    """A process that was given OLD by the command line, and finds `text` in the file when it starts."""
    file = folder / "admin.token"
    file.write_text(text)

    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(60):
            given = Options(announce=print, admin_tokens=(OLD,), admin_token_file=file)  # type: ignore[arg-type]
            watched, accepted = admin_tokens_of(given, stack)
            assert watched is not None
            await scene(file, accepted)

    asyncio.run(main())


def written(file: Path, text: str) -> None:
    file.write_text(text)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_both_tokens_of_the_file_are_accepted_and_none_that_it_no_longer_has(tmp_path: Path) -> None:
    async def scene(file: Path, accepted: AcceptedTokens) -> None:
        written(file, f"{NEW}\n{OLD}\n")
        await until(lambda: accepted.accepts(NEW.encode()))
        assert accepted.accepts(OLD.encode())
        assert not accepted.accepts(f"{NEW}\n{OLD}".encode())

    play(tmp_path, scene, OLD)


def test_a_process_that_starts_later_takes_what_the_file_has_then(tmp_path: Path) -> None:
    async def scene(_: Path, accepted: AcceptedTokens) -> None:
        assert (accepted.accepts(NEW.encode()), accepted.accepts(OLD.encode())) == (True, False)

    play(tmp_path, scene, NEW)


def test_a_file_that_cannot_be_used_at_a_later_start_lets_nobody_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """OLD may have been taken from somebody before the process started."""

    async def scene(file: Path, accepted: AcceptedTokens) -> None:
        assert accepted, "else the port would take itself for one without a token"
        assert not accepted.accepts(OLD.encode())
        written(file, NEW)
        await until(lambda: accepted.accepts(NEW.encode()))

    play(tmp_path, scene, "short")
    assert "lets nobody in until this is mended" in capsys.readouterr().err
