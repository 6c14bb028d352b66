"""`strata gang events` and `strata gang goodput`: their columns and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from strata.cli.gang.format import age, clock, names
from strata.cli.output import Format
from strata.cli.rows import Column, Rows

if TYPE_CHECKING:
    from strata.coord.view import GangEventsView, GangEventView, GoodputView

EVENT_COLUMNS: Final = (
    Column("number", number=True),
    Column("at"),
    Column("kind"),
    Column("generation", number=True),
    Column("workers", cut=40),
    Column("cost", number=True),
    Column("message", cut=80),
)
GOODPUT_COLUMNS: Final = (Column("part"), Column("seconds", number=True), Column("share", number=True), Column("now"))
PARTS: Final = ("useful", "waiting", "checkpoint", "detect", "restart", "rolled_back")


def print_events(found: GangEventsView, now_ms: int, output: Format) -> None:
    from msgspec import structs

    with Rows(output, EVENT_COLUMNS) as rows:
        for event in found.events:
            rows.add(_shown(event, now_ms) if not output.for_programs else structs.asdict(event))


def _shown(event: GangEventView, now_ms: int) -> dict[str, Any]:
    more = max(0, event.worker_count - len(event.workers))
    workers = names(event.workers, 3) + (f" of {event.worker_count}" if more else "")
    return {
        "number": event.number,
        "at": clock(event.at_unix_ms, now_ms),
        "kind": event.kind,
        "generation": event.generation,
        "workers": workers,
        "cost": age(event.cost_ms) if event.cost_ms else "",
        "message": event.message,
    }


def print_goodput(found: GoodputView, output: Format) -> None:
    spent_ms = {part: int(getattr(found, f"{part}_ms")) for part in PARTS}
    total_ms = sum(spent_ms.values())
    with Rows(output, GOODPUT_COLUMNS) as rows:
        for part, ms in spent_ms.items():
            share = ms / total_ms if total_ms else 0.0
            is_now = part.upper() == found.phase
            if not output.for_programs:
                cells = {"seconds": f"{ms / 1000:.1f}", "share": f"{share:.1%}", "now": "now" if is_now else ""}
                rows.add({"part": part.replace("_", " "), **cells})
            else:
                rows.add({"part": part, "seconds": ms / 1000, "share": round(share, 4), "now": is_now})
