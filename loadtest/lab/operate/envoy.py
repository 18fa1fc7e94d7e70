"""Real Envoy in front of engines, with the configuration that `deploy/envoy/` ships; `make envoy` installs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from loadtest.lab.layout import ROOT
from loadtest.lab.operate.debian import NoProgram, cache

CONFIGURATION = ROOT / "deploy" / "envoy" / "epp.yaml"
PORT, PICKER, ENGINES = 8080, 9002, (9101, 9102)  # ports of the configuration, all on 127.0.0.1
_FILTER = re.compile(r" +- name: envoy\.filters\.http\.ext_proc\n.*?(?= +- name: envoy\.filters\.http\.router\n)", re.S)


def envoy_command(
    file: Path, port: int, engines: Sequence[int], picker: int | None, *, allow: bool = False, mode: str = ""
) -> list[str]:
    """Return the command of an Envoy on `port` whose configuration is written to `file`. Raises NoProgram.

    `engines`: ports of one or two. `picker`: its port; None: Envoy asks none. `allow`: the failure mode. `mode`: of
    bodies, in place of FULL_DUPLEX_STREAMED.
    """
    program = cache() / "envoy" / "envoy" / "_bin" / "envoy"
    if not program.exists():
        raise NoProgram("no Envoy on this machine: `make envoy` installs it outside the tree")
    text = CONFIGURATION.read_text()
    ports = {PORT: port, PICKER: picker or PICKER, ENGINES[0]: engines[0], ENGINES[1]: engines[-1]}
    text = re.sub(r"(?<=port_value: )\d+", lambda found: str(ports[int(found[0])]), text)
    if picker is None:
        text = _FILTER.sub("", text)
    if allow:
        text = text.replace("failure_mode_allow: false", "failure_mode_allow: true")
    if mode:
        text = text.replace("FULL_DUPLEX_STREAMED\n", f"{mode}\n")
    file.write_text(text)
    flags = ("--use-dynamic-base-id", "--concurrency", "1", "--log-level", "error", "-c", str(file))
    return [str(program), *flags]
