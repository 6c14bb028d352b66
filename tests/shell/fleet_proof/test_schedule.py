"""The promises of the scheduler over random histories, and reservations are needed for them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.fleet.store.sqlite import claims
from tests.shell.fleet_proof.schedule import schedule_history

pytestmark = pytest.mark.slow

CAUGHT_WITHIN = 20


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_all_is_shared_out_as_promised_and_all_jobs_end(seed: int) -> None:
    assert asyncio.run(schedule_history(seed)) is None


def test_the_histories_notice_claims_that_ignore_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "grant_reserved", lambda *_: [])
    for seed in range(CAUGHT_WITHIN):
        if asyncio.run(schedule_history(seed)) is not None:
            return
    pytest.fail(f"{CAUGHT_WITHIN} histories found nothing")
