"""Frame of a view: lines for a terminal of a given width and, where it has a bottom, height."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from gateway.control.view import SidecarModelView, SidecarView
from gateway.top.grid import Column, Glyphs, bar, cell, clean, count, gib, rate, seconds, spark, table
from gateway.top.view import ClassRow, EngineRow, ModelRow, TenantRow, View

WIDE = 110  # cells from which on there are more columns
WIDEST = 160  # and more again
KINDS = {"ok": "green", "refused": "yellow", "failed": "red", "caller": "dim", "tokens": "cyan"}
MODES = {"normal": "green", "tight": "yellow", "brownout": "red", "closed": "red"}
STATES = {"up": "green", "draining": "yellow"}  # any other is trouble
SPARK = 120  # cells of a sparkline, at most
LEAST = 20  # cells, below which nothing is drawn in columns

Rows = list[list[Text | str]]


class Section(msgspec.Struct):
    """One table of a frame."""

    columns: list[Column]
    rows: Rows

    def drawn(self, width: int, shown: int, glyphs: Glyphs) -> list[RenderableType]:
        """`shown` lines of rows: where there are more, the last line says how many."""
        if len(self.rows) <= shown:
            return [table(self.columns, self.rows, width)]
        left = len(self.rows) - max(0, shown - 1)
        return [table(self.columns, self.rows[: max(0, shown - 1)], width), cell(f"{glyphs.more} {left} more", "dim")]


def frame(view: View, where: str, trouble: str, width: int, height: int | None, glyphs: Glyphs) -> RenderableType:
    """One frame. `where`: the gateway's URL; `trouble`: why there is nothing newer, empty: there is. `height` None: as
    many lines as there are."""
    width = max(LEAST, width)
    top = heading(view, where, trouble)
    sections = [
        part
        for part in (
            _flows(view, width, glyphs),
            _classes(view.classes),
            _tenants(view.tenants),
            _models(view.models),
            _engines(view.engines, width, glyphs),
            _sidecars(view.sidecars),
            _asleep(view.asleep),
        )
        if part.rows
    ]
    lines = [len(part.rows) for part in sections]
    room = None if height is None else height - len(top) - len(sections)  # each has a heading
    airy = room is None or sum(lines) + len(sections) <= room
    if room is not None and not airy:
        lines = share(lines, room)
    parts: list[RenderableType] = [*top]
    for part, shown in zip(sections, lines, strict=True):
        parts += [Text()] if airy else []
        parts += part.drawn(width, shown, glyphs)
    return Group(*parts)


def heading(view: View | None, where: str, trouble: str) -> list[Text]:
    """The first lines: which gateway, which policy, and what is wrong. `view` None: nothing was ever heard of it."""
    first = Text.assemble(("weir ", "bold"), clean(where))
    if view is not None:
        first.append(f"   {clean(view.gateway)}   {clean(view.policy)}", "dim")
    lines = [first]
    if trouble:
        lines.append(cell(trouble, "bold red"))
    lines += [cell(note, "bold yellow") for note in (view.notes if view else ())]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def share(lines: Sequence[int], room: int) -> list[int]:
    """Lines for each section: the longest give way first, none below one."""
    given = list(lines)
    while sum(given) > room and max(given, default=0) > 1:
        given[given.index(max(given))] -= 1
    return given


# -- the sections -----------------------------------------------------------------------------------------------------


def _flows(view: View, width: int, glyphs: Glyphs) -> Section:
    since = f"of the last {seconds(view.seconds)}, and look by look" if view.seconds else ""
    columns = [Column("CALLS ENDED", 20, right=False), Column("A SECOND", 8), Column(since, right=False, most=SPARK)]
    room = min(SPARK, max(1, width - 20 - 8 - 4))
    rows: Rows = []
    for flow in (*view.flows, *view.tokens):
        name = f"{flow.name} tokens" if flow.kind == "tokens" else flow.name.replace("_", " ")
        style = KINDS.get(flow.kind, "")
        rows.append(
            [
                cell(name, style),
                rate(flow.rate),
                cell(spark(flow.history, room, glyphs) if len(flow.history) > 1 else "", style),
            ]
        )
    return Section(columns, rows)


def _classes(classes: Sequence[ClassRow]) -> Section:
    columns = [
        Column("CLASS", max(12, min(20, max((len(row.name) for row in classes), default=0))), right=False),
        Column("QUEUED", 6),
        Column("OLDEST", 6, since=WIDE),
        Column("RUNNING", 7),
        Column("STREAM", 6, since=WIDE),
        Column("WAIT p50", 8),
        Column("p99", 6),
        Column("TARGET", 6, since=WIDE),
        Column("NEXT", 6, since=WIDE),
        Column("OK/s", 6),
        Column("REFUSED, FAILED/s", right=False),
    ]
    rows: Rows = []
    for row in classes:
        late = row.target is not None and row.wait_p99 is not None and row.wait_p99 > row.target
        rows.append([
            row.name,
            cell(count(row.queued), "yellow" if row.queued else ""),
            seconds(row.oldest),
            count(row.running),
            count(row.streaming),
            seconds(row.wait_p50),
            cell(seconds(row.wait_p99), "red" if late else ""),
            seconds(row.target),
            seconds(row.newcomer),
            rate(row.ok),
            _reasons(row),
        ])  # fmt: skip
    return Section(columns, rows)


def _reasons(row: ClassRow) -> Text:
    """What was not answered, a second, the most first."""

    def told(rates: Mapping[str, float], style: str) -> list[Text]:
        most = sorted(rates.items(), key=lambda each: -each[1])
        return [cell(f"{name.replace('_', ' ')} {rate(value)}", style) for name, value in most]

    return Text(", ").join([*told(row.refused, "yellow"), *told(row.failed, "red")])


def _tenants(tenants: Sequence[TenantRow]) -> Section:
    columns = [
        Column("TENANT", right=False, most=40),
        Column("QUEUED", 6),
        Column("RUNNING", 7),
        Column("CALLS/s", 7),
        Column("TOKENS/s", 8),
    ]
    rows: Rows = [
        [row.name, count(row.queued), count(row.running), rate(row.calls), rate(row.tokens)] for row in tenants
    ]
    return Section(columns, rows)


def _models(models: Sequence[ModelRow]) -> Section:
    columns = [
        Column("MODEL", right=False, most=40),
        Column("MODE", 8, right=False),
        Column("ENGINES", 7),
        Column("WANTED", 6, since=WIDE),
        Column("WAIT", 6),
        Column("TTFT", 6, since=WIDE),
        Column("ROOM", 5, since=WIDE),
        Column("SPARE", 6, since=WIDE),
        Column("TOKENS", 6),
        Column("QUEUED", 26, right=False),
    ]
    rows: Rows = [
        [
            row.id,
            cell(row.mode, MODES.get(row.mode, "red")),
            cell(count(row.engines), "" if row.engines else "red"),
            count(row.wanted),
            seconds(row.wait),
            seconds(row.predicted_ttft),
            count(row.headroom),
            count(row.spare_tokens),
            count(row.queued_tokens),
            ", ".join(f"{name} {count(calls)}" for name, calls in row.queued.items()) or "0",
        ]
        for row in models
    ]
    return Section(columns, rows)


def _engines(engines: Sequence[EngineRow], width: int, glyphs: Glyphs) -> Section:
    cells = 20 if width < WIDE else 32
    key = f"{glyphs.both}used {glyphs.held}held {glyphs.budget}budget"
    columns = [
        Column("ENGINE", right=False, most=36, tail=True),
        Column("STATE", 12, right=False),
        Column("CALLS", 9),
        Column("RUNS", 5, since=WIDE),
        Column("WAITS", 5, since=WIDE),
        Column(key, cells, right=False),
        Column("HELD", 5),
        Column("KV", 4),
        Column("TRIM", 5, since=WIDE),
        Column("AGE", 6, since=WIDE),
        Column("MODELS", 30, right=False, since=WIDEST),
    ]
    rows: Rows = []
    for row in engines:
        whole = max(row.capacity, row.budget, row.held, 1)
        used = row.used or 0
        rows.append([
            row.id,
            cell(row.state, STATES.get(row.state, "bold red")),
            f"{count(row.in_flight)}/{count(row.slots)}",
            count(row.running),
            count(row.waiting),
            bar(row.held / whole, used / whole, row.budget / whole, cells, glyphs),
            count(row.held),
            "-" if row.used is None else f"{row.used / max(row.capacity, 1):.0%}",
            f"{row.trim:.2f}",
            seconds(row.age),
            ", ".join(row.models),
        ])  # fmt: skip
    return Section(columns, rows)


def _sidecars(sidecars: Sequence[SidecarView]) -> Section:
    columns = [
        Column("SIDECAR", right=False, most=36),
        Column("HEARD", 6),
        Column("MODELS", 6),
        Column("GPU MEMORY", 24),
        Column("REFUSED", 24, right=False, since=WIDE),
    ]
    rows: Rows = []
    for row in sidecars:
        memory = f"{gib(row.memory_used)} of {gib(row.memory_total)} GiB"
        refused = ", ".join(f"{what}: {why}" for what, why in row.refused.items())
        heard = cell(seconds(row.heard_s), "bold red" if row.stale else "")
        rows.append([row.id, heard, count(len(row.models)), memory, cell(refused, "red")])
    return Section(columns, rows)


def _asleep(asleep: Sequence[tuple[str, SidecarModelView]]) -> Section:
    columns = [
        Column("NOT AWAKE", 24, right=False),
        Column("ON", 16, right=False, since=WIDE),
        Column("STATE", 16, right=False),
        Column("READY IN", 8),
        Column("WHY", right=False, most=80),
    ]
    rows: Rows = []
    for sidecar, model in asleep:
        state = model.state + (f", {model.pending}" if model.pending else "")
        style = "red" if model.state == "error" else "yellow" if model.pending else ""
        why = model.last_error if model.state == "error" and model.last_error else model.why
        rows.append([model.profile, sidecar, cell(state, style), seconds(model.ready_in_s), why])
    return Section(columns, rows)
