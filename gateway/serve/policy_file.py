"""Policy file of one gateway: its first read, what it leaves out, and reading it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gateway.core.policy.policy import Policy
from gateway.decider.call_log import CallLog
from gateway.decider.loading import Configuration, LoadError, load
from gateway.serve.own_token import OwnToken
from gateway.serve.processes.place import Place
from gateway.serve.starting import ApplyError, Options, StartError
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.file_status import FileStatus
from gateway.shared.lines import say
from gateway.shared.watched_file import WatchedFile

DEFAULTS = Policy()


def first_read(
    path: Path | None,
    say: Callable[[str], None] = say,
    *,
    complete: Callable[[Configuration], Configuration] = lambda read: read,
    default: Policy = DEFAULTS,
) -> tuple[WatchedFile | None, Configuration]:
    """The policy file, to be watched, and what it says now. `complete` adds what it leaves out; `default` is the policy
    where there is no file. Raises StartError."""
    if path is None:
        return None, complete(Configuration(default))
    failures = (InvalidFile, LoadError, ApplyError, OSError, ValueError)
    file = WatchedFile(path, lambda read: complete(load(path, read)), say, failures=failures)
    try:
        return file, file.first()
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}") from error
    except (InvalidFile, ValueError) as error:
        raise StartError(str(error)) from error


def configured(
    options: Options, place: Place | None, tell: Callable[[str], None]
) -> tuple[WatchedFile | None, Configuration]:
    """Read the policy file, and add the tokens and secrets that it leaves out. Raises StartError."""
    beside = None if options.demo else options.sidecar or options.policy
    own_token = OwnToken(beside, tell, own=options.demo or options.sidecar is not None)

    def complete(read: Configuration) -> Configuration:
        return own_token.complete(read) if place is None else place.complete(own_token.complete(read))

    return first_read(options.policy, tell, complete=complete, default=options.default_policy)


def reload(files: Sequence[WatchedFile | None], log: CallLog | None) -> None:
    """Read these files again, changed or not, and reopen a log that was moved."""
    for file in files:
        if file is not None:
            file.ask()
    if log is not None:
        log.lines.look()


def policy_status(options: Options, file: WatchedFile | None) -> Callable[[], FileStatus]:
    """Return what gives the state of the policy file: which is in force, and why the last one is not."""
    if file is not None:
        return lambda: file.status
    return partial(FileStatus, origin="that of gateway init demo") if options.demo else FileStatus
