"""Control port of one gateway: its application, made of the gateway's parts."""

from __future__ import annotations

from functools import partial
from typing import Any

from gateway.control.app import control_app
from gateway.control.parts import ControlParts
from gateway.decider.call_log import CallLog
from gateway.serve.assembly import Gateway
from gateway.serve.cluster.port import ClusterPort
from gateway.serve.data_port import DataPort
from gateway.serve.ending import drained_by_hand
from gateway.serve.policy_file import policy_status
from gateway.serve.starting import Options, ProcessSignals
from gateway.shared.lines import LineWriter
from gateway.shared.tokens import AcceptedTokens
from gateway.shared.watched_file import WatchedFile


def app_of(
    options: Options,
    gateway: Gateway,
    port: DataPort,
    signals: ProcessSignals,
    file: WatchedFile | None,
    errors: LineWriter,
    log: CallLog | None,
    admin_tokens: AcceptedTokens,
) -> Any:
    """The control port's application."""
    parts = ControlParts(
        dispatch=gateway.dispatch,
        limits=gateway.limits,
        exposition=gateway.metrics.exposition,
        calls=port.calls,
        ended=gateway.ended_calls,
        drain=partial(drained_by_hand, gateway, signals),
        drain_engine=gateway.engines.drain,
        is_user_key=gateway.is_user_key,
        policy_status=policy_status(options, file),
        reload=None if file is None or options.policy is None else file.reload_now,
        previous=lambda: gateway.previous,
        sidecars=gateway.sidecars,
        order=gateway.waking.order,
        read_log=gateway.waking.read_log,
        count=port.count,
        processes=port.processes,
        cluster=port.cluster if isinstance(port, ClusterPort) else None,
        used=gateway.metrics.used,
        used_tokens=gateway.token_use.history,
        spent=gateway.token_use.money,
        observer=gateway.observer,
        log_trouble=lambda: _log_trouble(errors, log),
    )
    return control_app(parts, admin_tokens)


def _log_trouble(errors: LineWriter, log: CallLog | None) -> tuple[str, float] | None:
    """Reason why lines of the log or of standard error are lost, and since when; None if no line is lost."""
    for name, lines in (("standard error", errors), ("the call log", None if log is None else log.lines)):
        if lines is not None and lines.trouble is not None:
            why, since = lines.trouble
            return f"{name if lines.path is None else lines.path}: {why}", since
    return None
