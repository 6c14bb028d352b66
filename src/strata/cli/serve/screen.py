"""The screen of `strata serve status`: ranks, alerts, running operations, tenants (6), recoveries, ended operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from strata.cli.fleet.client import format_bytes, format_count
from strata.cli.gang.format import age, names, took
from strata.cli.layout import Cell, Screen, ScreenColumn, Table

if TYPE_CHECKING:
    from strata.train.status.reports import DeviceTurnStatus, RunningStatus, ServerStatus, TenantStatus, Timeline

TENANTS: Final = 6
"""Rows of tenants where all has to fit one screen."""
LEAST: Final = 3
NAME: Final = 16
"""Characters of a name in a sentence."""
LINE: Final = 80
"""Characters of a line that another program wrote a part of."""
_QUIET: Final = ("ready", "busy")
_TENANT: Final = (
    ScreenColumn("TENANT", cuts=True),
    ScreenColumn("WAITING", number=True),
    ScreenColumn("HELD", number=True),
    ScreenColumn("TOKENS", number=True),
    ScreenColumn("RUNNING", number=True),
    ScreenColumn("SAMPLES", number=True),
    ScreenColumn("MODELS", number=True),
    ScreenColumn("ETA", number=True),
)
_ENDED: Final = (
    ScreenColumn("AGO", number=True),
    ScreenColumn("OPERATION", cuts=True),
    ScreenColumn("TENANT", cuts=True),
    ScreenColumn("WAITED", number=True),
    ScreenColumn("PACK", number=True),
    ScreenColumn("FWD", number=True),
    ScreenColumn("BWD", number=True),
    ScreenColumn("OTHER", number=True),
)
"""What is neither forward nor backward is what the operation is called: a step of the optimizer, saving, sampling."""
_WIDE: Final = (ScreenColumn("TOKENS", number=True), ScreenColumn("DISPATCH", number=True), ScreenColumn("FUTURE"))


def screen(status: ServerStatus, *, wide: bool = False, rows: int | None = None) -> Screen:
    """`rows`: how high it may be; then there are fewer of those that ended."""
    lines = [Cell(_head(status), "bold"), *_alerts(status), *map(Cell, _sentences(status))]
    most = len(status.tenants) if rows is None else TENANTS
    left_out = len(status.tenants) - most
    more = f"… and {left_out} more: -o wide shows all" if left_out > 0 else ""
    tenants = Table(_TENANT, [_tenant(each) for each in status.tenants[:most]], more)
    room = len(status.recent)
    if rows is not None:
        room = max(LEAST, rows - len(lines) - (tenants.height + 1 if tenants.rows else 0) - 3)
    recent = [_ended(status, each, wide=wide) for each in status.recent[:room]]
    ended = Table((*_ENDED, *(_WIDE if wide else ())), recent)
    return Screen(lines, [table for table in (tenants, ended) if table.rows])


def _head(status: ServerStatus) -> str:
    described = [status.arch, status.training, _parameters(status.parameters)] if status.arch else [status.training]
    described += ["one document per row"] if status.one_document_per_row else []
    return f"{status.base_model} ({', '.join(described)}): {_ranks(status)}"


def _ranks(status: ServerStatus) -> str:
    ranks = status.ranks
    return f"{format_count(ranks.size, 'rank')} {ranks.state}" if ranks.size else f"the ranks are {ranks.state}"


def _parameters(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit} parameters"
    return format_count(number, "parameter")


def _alerts(status: ServerStatus) -> list[Cell]:
    ranks = status.ranks
    sleeps_in_turn = ranks.state == "asleep" and status.device_turn is not None and status.device_turn.side == "engines"
    alerts = [] if ranks.state in _QUIET or sleeps_in_turn else [Cell(f"! {ranks.reason}", "bold red")]
    if ranks.state == "ready" and len(ranks.answered) < ranks.size:
        missing = sorted(set(range(ranks.size)) - set(ranks.answered))
        alerts.append(Cell(f"! no answer from rank {names([str(each) for each in missing])}", "bold red"))
    if status.high_gaps:
        worst = max(status.high_gaps, key=lambda each: each.gap.mean)
        others = f"; {len(status.high_gaps) - 1} more" if len(status.high_gaps) > 1 else ""
        limit = f"alarm above {status.gap_alarm_nats:g}"
        words = f"! sampler and trainer differ by {worst.gap.mean:.3g} nats per token ({limit}){others}"
        alerts += [Cell(words[:LINE], "bold red"), Cell(f"  model {worst.model_id}", "red")]
    if status.stopped:
        first = status.stopped[0]
        others = f"; {len(status.stopped) - 1} more" if len(status.stopped) > 1 else ""
        alerts += [
            Cell(f"! a model is stopped: the replay of dispatch {first.dispatch} differs{others}", "bold red"),
            Cell(f"  {first.differences.describe()}"[:LINE], "red"),
            Cell(f"  strata serve resolve {first.model_id} --accept, or --roll-back", "red"),
        ]
    return alerts + [
        Cell(f"! {each.name} is {each.state}: {each.reason}"[:LINE], "bold red")
        for each in status.engines
        if each.state not in ("ready", "waiting")
    ]


def _sentences(status: ServerStatus) -> list[str]:
    since_s = status.now_s - (status.ranks.attached_at_s or status.now_s)
    group = f"group {status.ranks.group[:8]} for {age(since_s * 1000)}, " if status.ranks.group else ""
    return [
        f"running    {_running(status)}",
        f"queue      {status.waiting} of {status.max_waiting} operations wait; "
        f"{status.samples_running} samples run, {status.samples_waiting} wait",
        f"speed      {status.trained_tokens_per_s:,.0f} tokens/s trained, "
        f"{status.sampled_tokens_per_s:,.0f} sampled, in the last minute",
        f"places     {status.models} of {status.slots} models, {status.samplers} of {status.sampler_places} samplers",
        f"ranks      {group}{_recoveries(status)}",
        *([f"replay     {found}"] if (found := _replay(status)) else []),
        *([f"engines    {_engines(status)}"] if status.engines else []),
        *([f"not routed {_unroutable(status)}"] if status.unroutable else []),
        *([f"devices    {_devices(status, status.device_turn)}"] if status.device_turn is not None else []),
        f"snapshot   {_snapshot(status)}",
        f"journal    {status.dispatched} {'dispatch' if status.dispatched == 1 else 'dispatches'}, "
        f"generation {status.generation}, led for {age((status.now_s - status.leading_since_s) * 1000)}",
    ]


def _running(status: ServerStatus) -> str:
    if not status.running:
        return "nothing"
    if not status.ranks.size:
        return f"nothing; {len(status.running)} to be replayed when ranks are attached"
    first, *others = status.running
    then = f"; {len(others)} behind" if others else ""
    since = f", {took(max(status.now_s - first.since_s, 0.0))}" if first.since_s is not None else ""
    return f"{_describe_running(first)}{since}{then}"


def _describe_running(running: RunningStatus) -> str:
    tokens = f", {running.tokens:,} tokens" if running.tokens else ""
    return f"{running.kind}{_whose(running.tenants)}{tokens}"


def _whose(tenants: Sequence[str]) -> str:
    """Cut to fit a line of 80 columns."""
    if len(tenants) != 1:
        return f" of {len(tenants)} tenants" if tenants else ""
    name = _name(tenants[0])
    return f" of {name if len(name) <= NAME else name[: NAME - 1] + '…'}"


def _recoveries(status: ServerStatus) -> str:
    if not status.recoveries:
        return "no recoveries"
    last = f", the last in {took(status.recovery_s)}" if status.recovery_s is not None else ""
    return f"recovered {format_count(status.recoveries, 'time')}{last}"


def _replay(status: ServerStatus) -> str:
    """Says how far the last replay was from the first run; empty if it was the same, all of it."""
    found = status.recovered[0].differences if status.recovered else None
    if found is None:
        return ""
    lost = f"{found.not_compared} passes and steps not compared" if found.not_compared else ""
    differs = found.describe() if found.loss or found.gradient_norm or found.logprobs else ""
    return "; ".join(each for each in (differs, lost) if each)


def _engines(status: ServerStatus) -> str:
    ready = sum(each.state == "ready" for each in status.engines)
    restarts = sum(max(each.starts - 1, 0) for each in status.engines)
    again = f", restarted {format_count(restarts, 'time')}" if restarts else ""
    return f"{ready} of {len(status.engines)} ready{again}"


def _unroutable(status: ServerStatus) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(status.unroutable.items()))
    return f"{format_count(sum(status.unroutable.values()), 'sample')} drawn by the ranks: {reasons}"


def _devices(status: ServerStatus, turn: DeviceTurnStatus) -> str:
    since = f" for {age((status.now_s - turn.since_s) * 1000)}" if turn.since_s is not None else ""
    return f"{turn.side} have them{since}{f', {turn.next_side} are next' if turn.next_side else ''}"


def _snapshot(status: ServerStatus) -> str:
    snapshot = status.snapshot
    if snapshot is None:
        return "none yet: restarted ranks replay everything"
    parts = [f"of dispatch {snapshot.number}", f"{snapshot.behind} changes since"]
    if snapshot.at_s is not None:
        parts.insert(1, f"{age((status.now_s - snapshot.at_s) * 1000)} old")
    if snapshot.size is not None and snapshot.held_s is not None:
        parts += [format_bytes(snapshot.size), f"held {took(snapshot.held_s)}"]
    return ", ".join(parts)


def _tenant(row: TenantStatus) -> list[Cell]:
    numbers = (row.waiting, row.held, row.tokens, row.running, row.samples, row.models)
    eta = "-" if row.eta_s is None else f"~{age(row.eta_s * 1000)}"
    return [Cell(_name(row.tenant)), *(Cell(f"{number:,}" if number else "-") for number in numbers), Cell(eta)]


def _ended(status: ServerStatus, ended: Timeline, *, wide: bool) -> list[Cell]:
    phases = ended.phases()

    def spent(*names: str) -> str:
        seconds = sum(phases.get(name, 0.0) for name in names)
        return took(seconds) if seconds else "-"

    style = {"failed": "red", "cancelled": "yellow"}.get(ended.outcome, "")
    other = spent("optimizer", "publish", "sample", "other") if ended.outcome == "finished" else ended.outcome
    cells = [
        Cell(age((status.now_s - (ended.ended_at_s or status.now_s)) * 1000)),
        Cell(ended.kind, style),
        Cell(_name(ended.tenant)),
        Cell(spent("held", "queue", "behind")),
        *(Cell(spent(name)) for name in ("pack", "forward", "backward")),
        Cell(other, style),
    ]
    return [*cells, *([Cell(f"{ended.tokens:,}"), Cell(str(ended.number)), Cell(ended.future_id)] if wide else [])]


def _name(tenant: str) -> str:
    return tenant.removeprefix("key:")
