"""What the orchestrator answers to those who ask how it is doing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, assert_never

from strata.base.errors import Code, StrataError
from strata.train.core import commands, status
from strata.train.core.views import find_future
from strata.train.orchestrator.conversation import Parts

HEALTH_S: Final = 5.0


async def tell(parts: Parts, attached: commands.Attached | None, tenant: str, asked: status.Questions) -> status.Views:
    figures = parts.ledger.figures
    match asked:
        case status.DescribeTimeline():
            find_future(parts.ledger.state, tenant, asked.future_id)
            line = figures.timelines.get(asked.future_id)
            if line is None:
                raise StrataError(Code.GONE, f"the times of {asked.future_id} are not kept any longer")
            return status.TimelineView(line)
        case status.ListTimelines():
            return status.TimelinesView(list(figures.timelines))
        case status.ReadMetrics():
            # Whoever collects numbers does so all the time: the ranks are not disturbed for it.
            own = None if asked.everything else tenant
            return status.MetricsView(figures.metrics.text(_status(parts, attached, (), own)))
        case status.DescribeStatus():
            answered = await _answered(parts, attached)
            own = None if asked.everything else tenant
            return status.StatusView(_status(parts, attached, answered, own))
        case _:
            assert_never(asked)


def _status(
    parts: Parts, attached: commands.Attached | None, answered: Sequence[int] | str, own: str | None
) -> status.Status:
    ledger = parts.ledger
    ranks = ledger.figures.ranks(ledger.state, attached, caught_up=ledger.caught_up, answered=answered)
    return ledger.figures.status(
        ledger.state,
        parts.pace,
        parts.settings,
        generation=ledger.generation,
        attached=attached,
        ranks=ranks,
        own=own,
    )


async def _answered(parts: Parts, attached: commands.Attached | None) -> Sequence[int] | str:
    """The ranks that answer, or why they do not. Those at work are not asked: they would answer when they are done."""
    ledger = parts.ledger
    if attached is None or not ledger.caught_up or ledger.state.dispatches:
        return ()
    try:
        return (await parts.backend.ask(commands.HealthCheck(), HEALTH_S)).ranks
    except StrataError as error:
        return () if ledger.state.dispatches else str(error)
