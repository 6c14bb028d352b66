"""Whom the gate lets in, and for how long it remembers."""

from __future__ import annotations

import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import Secret
from strata.coord.server import authenticator as gates
from strata.coord.server.authenticator import ANY, OPERATOR, WORKER, Metadata, TokenAuthenticator
from strata.coord.server.tokens import ALL_JOBS, Claims, TokenRole, Tokens
from tests.support.manual_clock import ManualClock

TTL_S = 60


def guarded() -> tuple[TokenAuthenticator, Tokens, ManualClock]:
    clock = ManualClock()
    tokens = Tokens(Secret("s" * 32))
    return TokenAuthenticator(tokens, clock), tokens, clock


def bearing(tokens: Tokens, clock: ManualClock, role: TokenRole = TokenRole.WORKER, worker: str = "") -> Metadata:
    claims = Claims(job="a", role=role, expires_s=round(clock.wall_s()) + TTL_S, worker=worker)
    return (("authorization", f"Bearer {tokens.issue(claims)}"),)


async def test_a_token_that_was_let_in_is_refused_when_it_has_expired() -> None:
    authenticator, tokens, clock = guarded()
    metadata = bearing(tokens, clock)
    assert authenticator.identify(metadata, WORKER).token_job == "a"
    await clock.advance(TTL_S - 1)
    assert authenticator.identify(metadata, WORKER).token_job == "a"
    await clock.advance(1)
    for _ in range(2):
        with pytest.raises(StrataError) as refused:
            authenticator.identify(metadata, WORKER)
        assert refused.value.code is Code.UNAUTHENTICATED


def test_a_known_token_opens_only_what_its_role_may_do() -> None:
    authenticator, tokens, clock = guarded()
    metadata = bearing(tokens, clock)
    authenticator.identify(metadata, WORKER)
    authenticator.identify(metadata, ANY)
    with pytest.raises(StrataError) as refused:
        authenticator.identify(metadata, OPERATOR)
    assert refused.value.code is Code.FORBIDDEN


def test_a_known_token_with_other_metadata_is_looked_at_again() -> None:
    authenticator, tokens, clock = guarded()
    metadata = bearing(tokens, clock, worker="w1")
    authenticator.identify(metadata, WORKER)
    for contradiction in (("strata-job", "b"), ("strata-worker", "w2")):
        with pytest.raises(StrataError) as refused:
            authenticator.identify((*metadata, contradiction), WORKER)
        assert refused.value.code is Code.FORBIDDEN


def test_a_refused_token_is_not_remembered() -> None:
    authenticator, _, clock = guarded()
    forged = bearing(Tokens(Secret("x" * 32)), clock)
    for _ in range(2):
        with pytest.raises(StrataError) as refused:
            authenticator.identify(forged, WORKER)
        assert refused.value.code is Code.UNAUTHENTICATED


def test_whoever_sends_other_metadata_every_time_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "CACHE_SIZE", 4)
    authenticator = TokenAuthenticator(None, ManualClock())
    for number in range(10):
        assert authenticator.identify((("strata-worker", f"w{number}"),), WORKER).worker_id == f"w{number}"
        assert len(authenticator._cache) <= 4


def test_a_token_is_for_its_job_and_for_the_launchers_of_that_job() -> None:
    authenticator, tokens, clock = guarded()
    identity = authenticator.identify(bearing(tokens, clock), WORKER)
    assert [identity.job_of(job) for job in ("a", "a/nodes")] == ["a", "a/nodes"]
    for other in ("b", "a/nodes/nodes", "b/nodes", "a/node"):
        with pytest.raises(StrataError) as refused:
            identity.job_of(other)
        assert refused.value.code is Code.FORBIDDEN


def test_the_token_of_an_operator_may_be_for_all_jobs_and_no_other_can() -> None:
    tokens = Tokens(Secret("s" * 32))
    every = tokens.issue(Claims(job=ALL_JOBS, role=TokenRole.OPERATOR, expires_s=10**10))
    authenticator = TokenAuthenticator(tokens, ManualClock())
    identity = authenticator.identify((("authorization", f"Bearer {every}"), ("strata-job", "one")), OPERATOR)
    assert (identity.job_of(""), identity.job_of("two")) == ("one", "two")
    with pytest.raises(StrataError, match="only an operator's token"):
        tokens.issue(Claims(job=ALL_JOBS, role=TokenRole.WORKER, expires_s=10**10))
