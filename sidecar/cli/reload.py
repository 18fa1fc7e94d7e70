"""`sidecar reload`: an edited file takes effect in the sidecar that runs."""

from __future__ import annotations

import argparse

from sidecar.cli.errors import Mistake
from sidecar.cli.files import File, add_config
from sidecar.core.status import Reloaded

DESCRIPTION = "Have an edited file take effect."
EXAMPLES = """\
The sidecar reads its file again by itself when it is saved; this waits for that, and says what it changes. SIGHUP does
the same without an answer. A file with mistakes changes nothing.

Models that are not concerned go on. One whose engine would be started otherwise (model_path, flags, gpu_memory, ...)
gets no new calls, and once those that run have ended (after 10 min at most) its engine ends; it is started with the new
settings when it is wanted, or at once if it is pinned. One that is gone ends in the same way. Times to sleep or to stop
(sleep.after, stop_after), max_starvation, warmup, aliases and load_* count at once and restart nothing. id,
gpus, gateways, token_file, listen, engine_addresses, state_file and log_dir count once the sidecar is
started again.

examples:
  sidecar reload
  sidecar check sidecar.yaml && sidecar reload   the mistakes first"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)


def command(given: argparse.Namespace) -> int:
    """Read the file again, and say what changes. Raises Mistake, Impossible."""
    file = File(given.config)
    reloaded = file.read(Reloaded, "/reload", "POST")
    if reloaded.file.error is not None:
        raise Mistake(reloaded.file.error)
    status = reloaded.file
    if not status.reloads:
        print(f"{status.file} has not changed since the sidecar was started")
        return 0
    print(f"{status.file} is active, version {status.version}, since {status.loaded_at}")
    for line in reloaded.changes.lines:
        print(f"  {line}")
    return 0
