"""The promises of the scheduler over random histories, and the histories notice a scheduler that breaks one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.fleet.core import amounts, fair_share, reservation
from strata.fleet.core.job import Cause, JobEvent
from strata.fleet.core.lease import RetryDecision, after_failure
from strata.fleet.store import leases
from strata.fleet.store.sqlite import claims
from tests.shell.fleet_proof.schedule import schedule_history

CAUGHT_WITHIN = 20
_owners_offers: Final = claims._owners_offers


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_all_is_shared_out_as_promised_and_all_jobs_end(seed: int) -> None:
    assert asyncio.run(schedule_history(seed)) is None


def _decide_preempted(**changes: Any) -> Any:
    """What becomes of a job that was preempted, with something else in its place."""

    def decide(cause: Cause, *before: Any, now_s: float, **rest: Any) -> RetryDecision:
        decision = after_failure(cause, *before, now_s=now_s, **rest)
        return msgspec.structs.replace(decision, **changes) if cause is Cause.PREEMPTED else decision

    return decide


def _offers_of_one(*wanted: Any) -> list[fair_share.JobOffer]:
    return [each for each in _owners_offers(*wanted) if each.owner != "bert"]


async def _forget(*_: Any) -> None:
    return None


_PLANTED: Final[Mapping[str, tuple[Any, str, Any]]] = {
    "a card is given twice": (amounts.Room, "_card_has", lambda self, card, share, vram_gib: card in self._cards),
    "a host is given twice": (
        claims,
        "open_rooms",
        lambda hosts, _: ({h: amounts.Room(c) for h, c in hosts.items()}, []),
    ),
    "claims ignore reservations": (claims, "grant_reserved", lambda *_: []),
    "a gang keeps a part of its hosts": (reservation, "_incomplete_gangs", lambda *_: {}),
    "two members of a gang share a host": (reservation._Draft, "_has_member", lambda *_: False),
    "an owner is skipped": (claims, "_owners_offers", _offers_of_one),
    "owners are served by age": (fair_share, "_dominant", lambda *_: 0.0),
    "a preempted job fails": (leases, "after_failure", _decide_preempted(event=JobEvent.FAIL)),
    "a preempted job never comes back": (leases, "after_failure", _decide_preempted(not_before_s=1e12)),
    "a checkpoint is forgotten": (leases, "record_checkpoint", _forget),
}


@pytest.mark.parametrize("fault", _PLANTED)
def test_the_histories_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*_PLANTED[fault])
    for seed in range(CAUGHT_WITHIN):
        if asyncio.run(schedule_history(seed)) is not None:
            return
    pytest.fail(f"{CAUGHT_WITHIN} histories found nothing")
