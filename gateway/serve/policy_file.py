"""Policy file of one gateway: its first read, the token that it leaves out, its reload."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gateway.core.policy.policy import Policy, SidecarsPolicy
from gateway.decider.call_log import CallLog
from gateway.decider.loading import Configuration, LoadError, Read, load
from gateway.serve.processes.place import Place
from gateway.serve.starting import ApplyError, Options, StartError
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.file_status import FileStatus
from gateway.shared.lines import say
from gateway.shared.new_file import write_new
from gateway.shared.tokens import MAX_SECRET, Tokens, tokens_in
from gateway.shared.watched_file import WatchedFile, words

DEFAULTS = Policy()


def first_read(
    path: Path | None,
    say: Callable[[str], None] = say,
    *,
    complete: Callable[[Configuration, Read], Configuration] = lambda configuration, _: configuration,
    default: Policy = DEFAULTS,
    token: Path | None = None,
    before: Configuration | None = None,
) -> tuple[WatchedFile | None, Configuration]:
    """The policy file, to be watched, and what it says now. `complete` adds what it leaves out; `default` is the policy
    where there is no file, and then the file of a `token` is watched. `before`: what counts where the file is faulty.
    Raises StartError."""

    def completed(read: Read) -> Configuration:
        return complete(Configuration(default) if path is None else load(path, read), read)

    watched = path or token
    if watched is None:
        return None, completed(Path.read_bytes)
    failures = (InvalidFile, LoadError, ApplyError, OSError, ValueError)
    name = "sidecar-token" if path is None else "policy"
    file = WatchedFile(watched, completed, say, failures=failures, name=name)
    try:
        return file, file.first()
    except failures as error:
        if before is None:
            raise StartError(words(error)) from error
    file.refuse()  # so that the fault is told
    return file, before


def configured(
    options: Options, place: Place | None, tell: Callable[[str], None]
) -> tuple[WatchedFile | None, Configuration]:
    """Read the policy file, and add the tokens and secrets that it leaves out. Raises StartError."""
    before = None if place is None else place.before
    beside = None if options.demo else options.sidecar or options.policy
    known = before is not None and bool(before.sidecar_tokens)
    own_token = OwnToken(beside, tell, own=options.demo or options.sidecar is not None, known=known)

    def complete(configuration: Configuration, read: Read) -> Configuration:
        completed = own_token.complete(configuration, read)
        return completed if place is None else place.complete(completed)

    return first_read(
        options.policy,
        tell,
        complete=complete,
        default=options.default_policy,
        token=own_token.file,
        before=before,
    )


def applying(
    place: Place | None, apply: Callable[[Configuration], None], configuration: Configuration
) -> Callable[[Configuration], None]:
    """Return what applies a configuration after this one, and saves it for the next process of this place."""
    return apply if place is None or place.last is None else place.last.saving(apply, configuration)


def reload(files: Sequence[WatchedFile | None], log: CallLog | None) -> None:
    """Read these files again, changed or not, and reopen a log that was moved."""
    for file in files:
        if file is not None:
            file.ask()
    if log is not None:
        log.lines.look()


def policy_status(options: Options, file: WatchedFile | None) -> Callable[[], FileStatus]:
    """Return what gives the state of the policy file: which is in force, and why the last one is not."""
    if file is not None and options.policy is not None:
        return lambda: file.status
    return partial(FileStatus, origin="that of gateway init demo") if options.demo else FileStatus


# -- the token that the file leaves out -------------------------------------------------------------------------------

# Where the policy names no token_file, sidecars still show a token: no report is ever taken without one.
#
# With `--engine demo` the token is made in memory, for the one sidecar that the gateway starts itself. Else it is in
# a file beside the policy. `sidecar init` makes that file, or else the gateway does. In a cluster it is not made:
# sidecars show one token to all members.
TOKEN_FILE = "sidecar.token"  # noqa: S105 # a name of a file
NO_TOKEN_FILE = "fleet.sidecars without a token_file"  # noqa: S105 # words


class OwnToken:
    """Completes configurations with the token. `path`: the file beside which the token's file is, the policy's or that
    of a sidecar of our own; None: there is none. `own`: the sidecar is ours, and is heard also where the policy says
    nothing of sidecars. `known`: sidecars have a token already. `say` takes a line for the operator."""

    def __init__(self, path: Path | None, say: Callable[[str], None], *, own: bool, known: bool = False) -> None:
        self.file = None if path is None else path.parent / TOKEN_FILE
        self._own = own
        self._say = say
        self._made = secrets.token_urlsafe(32)
        self._said, self._known = False, known

    def complete(self, configuration: Configuration, read: Read) -> Configuration:
        """Complete a configuration whose files `read` reads. Raises LoadError."""
        policy = configuration.policy
        if self._own and policy.fleet.sidecars is None:
            fleet = msgspec.structs.replace(policy.fleet, sidecars=SidecarsPolicy())
            configuration = msgspec.structs.replace(configuration, policy=msgspec.structs.replace(policy, fleet=fleet))
        elif policy.fleet.sidecars is None:
            return configuration
        if configuration.sidecar_tokens:
            return configuration
        if policy.cluster is not None and not self._own:
            self._say_once(
                f"{NO_TOKEN_FILE}: no sidecar is heard; name one, with the same token for all members of the cluster"
            )
            return configuration
        tokens = (self._made,) if self.file is None else self._read(self.file, read)
        return msgspec.structs.replace(configuration, sidecar_tokens=tokens)

    def _read(self, file: Path, read: Read) -> Tokens:
        """The tokens; empty: there is none, and none can be made, so no sidecar is heard. A file that was there is not
        made again: sidecars have its token."""
        created = True
        try:
            if self._known:
                read(file)
            write_new(file, self._made + "\n", 0o600)
        except FileExistsError:
            created = False
        except OSError as error:
            if self._own or self._known:
                raise LoadError(f"{NO_TOKEN_FILE}: {file}: {error.strerror}: name a token_file") from error
            self._say_once(
                f"{NO_TOKEN_FILE}: {file} cannot be made ({error.strerror}): no sidecar is heard; name a token_file"
            )
            return ()
        try:
            read(file)  # so that it is watched
            with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as opened:
                seen = os.fstat(opened.fileno())
                if not stat.S_ISREG(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
                    raise LoadError(f"{NO_TOKEN_FILE}: {file}: expected a file of this user's alone: chmod 600 {file}")
                tokens = tokens_in(opened.read(MAX_SECRET + 1))
        except OSError as error:
            raise LoadError(f"{NO_TOKEN_FILE}: {file}: {error.strerror}: name a token_file") from error
        except ValueError as error:
            raise LoadError(f"{NO_TOKEN_FILE}: {file}: {error}") from None
        made = f"was made; a sidecar on this machine names it: token_file: {file.absolute()}"
        self._say_once(f"sidecars show a token: {file} {made if created else 'is theirs'}")
        self._known = True
        return tokens

    def _say_once(self, line: str) -> None:
        if not self._said:
            self._said = True
            self._say(line)
