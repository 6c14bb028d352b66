"""Lease term (45 s), renewal interval (10 s), when a silent host is suspect (15 s), and attempt limits (`MAX_ATTEMPTS`,
`MAX_LOST`, `MAX_INFRA`); decides retry, backoff, failure and the quarantine of a host (3 jobs), each with the reason
that people read.

Every function returns its reason in words: the event log, the API and `strata why` show that same sentence.

An attempt is charged to the job (`max_attempts`) only for what the job did itself. A lost host has its own, larger cap,
because a job that kills its hosts must end as well, while a network that is down for a night must not use the job up.
What hosts could not do (`infra`, `setup_error`) has its own cap too (`max_infra`). A host that cannot set a job up is
excluded for that job, and when all eligible hosts have refused it, it fails. What a host was not allowed to finish
(`preempted`) never ends a job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from strata.base.retry import Backoff
from strata.fleet.core.job import CHARGED, Cause, JobEvent

LEASE_S: Final = 45.0
RENEW_S: Final = 10.0
SUSPECT_S: Final = 15.0
"""A host without a heartbeat for so long is shown as suspect."""
FORGET_S: Final = 3600.0
"""An ephemeral host without a heartbeat for so long has left: its credentials end."""
MAX_ATTEMPTS: Final = 3
MAX_LOST: Final = 5
MAX_INFRA: Final = 10
QUARANTINE_JOBS: Final = 3
ASLEEP: Final = "asleep: "
"""How the reason of a server begins that the hub put to sleep, and not a person cancelled."""


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_attempts: int = MAX_ATTEMPTS
    max_lost: int = MAX_LOST
    max_infra: int = MAX_INFRA


class AttemptCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ended attempts of a job since it was created or last requeued, *without* the one that is ending now."""

    charged: int = 0
    lost: int = 0
    infra: int = 0
    """What hosts could not do: `infra` and `setup_error`."""
    excused: int = 0

    @classmethod
    def of(cls, causes: Iterable[Cause]) -> AttemptCounts:
        counts = Counter(map(attempt_counter, causes))
        return cls(**counts)


def attempt_counter(cause: Cause) -> str:
    """The count of `AttemptCounts`, and the column of `job`, in which an attempt that ended so is counted."""
    if cause in CHARGED:
        return "charged"
    if cause is Cause.HOST_LOST:
        return "lost"
    return "infra" if cause in (Cause.INFRA, Cause.SETUP_ERROR) else "excused"


class RetryDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Apply `event` through the status table. `not_before_s` is the end of the backoff if the job is pending again."""

    event: JobEvent
    cause: Cause
    not_before_s: float
    reason: str


def after_failure(
    cause: Cause, before: AttemptCounts, budget: Budget, *, now_s: float, chance: float, hosts_left: int = 1
) -> RetryDecision:
    """A host reported that its attempt ended with `cause`.

    `hosts_left` counts the eligible hosts, without this one, that have not refused the job; it matters to setup errors.
    """
    backoff = Backoff()
    if cause is Cause.CANCELLED:
        return RetryDecision(
            event=JobEvent.CANCEL, cause=cause, not_before_s=now_s, reason="the host reports it cancelled"
        )
    if cause is Cause.HOST_LOST:
        return after_expiry(before, budget, now_s=now_s)
    if cause in (Cause.INFRA, Cause.SETUP_ERROR) and before.infra + 1 >= budget.max_infra:
        reason = f"{cause}: {before.infra + 1} attempts failed by their hosts, and max_infra is {budget.max_infra}"
        return RetryDecision(event=JobEvent.FAIL, cause=cause, not_before_s=now_s, reason=reason)
    if cause is Cause.SETUP_ERROR:
        return after_setup_error(hosts_left, now_s)
    if cause in CHARGED:
        used = before.charged + 1
        if used >= budget.max_attempts:
            return RetryDecision(
                event=JobEvent.FAIL,
                cause=cause,
                not_before_s=now_s,
                reason=f"{cause}: attempt {used} of {budget.max_attempts} failed",
            )
        wait_s = backoff.delay_s(used, chance)
        tried = f"{cause}: attempt {used} of {budget.max_attempts} failed"
    elif cause is Cause.INFRA:
        wait_s = backoff.delay_s(before.infra + 1, chance)
        tried = f"{cause}: the host failed, not the job ({before.infra + 1} of {budget.max_infra})"
    else:
        wait_s = backoff.delay_s(before.excused + 1, chance)
        tried = f"{cause}: not the job's fault, no attempt is charged"
    reason = f"{tried}; again in {wait_s:.0f} s"
    return RetryDecision(event=JobEvent.RETRY, cause=cause, not_before_s=now_s + wait_s, reason=reason)


def with_more_memory(decision: RetryDecision, had: str, hosts_left: int) -> RetryDecision:
    """The attempt ran out of what it had, and the next one needs more; `hosts_left` counts the hosts that have it."""
    if decision.event is not JobEvent.RETRY:
        return decision
    if hosts_left:
        return msgspec.structs.replace(decision, reason=f"{decision.reason}; it needs more than {had}")
    reason = f"{decision.cause}: it ran out of {had}, and no eligible host has more"
    return msgspec.structs.replace(decision, event=JobEvent.FAIL, reason=reason)


def with_sleep(decision: RetryDecision, error: str) -> RetryDecision:
    """The host of a server reports as its error that the hub has put it to sleep: that is why it is cancelled."""
    is_asleep = decision.event is JobEvent.CANCEL and error.startswith(ASLEEP)
    return msgspec.structs.replace(decision, reason=error) if is_asleep else decision


def after_setup_error(hosts_left: int, now_s: float) -> RetryDecision:
    """There is no backoff: the host is excluded for the job, and one of `hosts_left` may do better at once."""
    if hosts_left == 0:
        reason = "setup_error: no eligible host could set it up"
        return RetryDecision(event=JobEvent.FAIL, cause=Cause.SETUP_ERROR, not_before_s=now_s, reason=reason)
    others = "1 other eligible host" if hosts_left == 1 else f"{hosts_left} other eligible hosts"
    reason = f"setup_error: the host could not set it up and is excluded; {others} may take it"
    return RetryDecision(event=JobEvent.RETRY, cause=Cause.SETUP_ERROR, not_before_s=now_s, reason=reason)


def after_expiry(before: AttemptCounts, budget: Budget, *, now_s: float) -> RetryDecision:
    """The lease expired. There is no backoff: nothing failed yet, and another host may be free."""
    lost = before.lost + 1
    if lost >= budget.max_lost:
        reason = f"host_lost: {lost} hosts were lost while they held it, and max_lost is {budget.max_lost}"
        return RetryDecision(event=JobEvent.FAIL, cause=Cause.HOST_LOST, not_before_s=now_s, reason=reason)
    reason = f"host_lost: the lease ran out ({lost} of {budget.max_lost}); another host may take it"
    return RetryDecision(event=JobEvent.EXPIRE, cause=Cause.HOST_LOST, not_before_s=now_s, reason=reason)


def may_expire_leases(*, now_s: float, observing_since_s: float, lease_s: float = LEASE_S) -> bool:
    """Says whether leases may expire: only after a grace period, in which the hub could receive renewals for one full
    lease.

    After a start, or after an outage of the database, every lease looks expired, and that is the fault of no host.
    """
    return now_s - observing_since_s >= lease_s


class QuarantineDecision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    quarantined: bool
    reason: str


def quarantine(
    infra_jobs: Collection[str],
    *,
    serves: Collection[int],
    others_serve: Iterable[Collection[int]],
    limit: int = QUARANTINE_JOBS,
) -> QuarantineDecision:
    """Returns whether a host is taken out of service.

    `infra_jobs` are the different jobs that ended with `infra` on this host since its last success: one job that brings
    infra trouble everywhere must not take the fleet down host by host. `serves` are the requirement classes of
    unfinished jobs it is eligible for, `others_serve` the same of every other host that is online and not quarantined.
    A host that is the last one for any class stays: a broken host may recover, none at all cannot.
    """
    different = len(set(infra_jobs))
    if different < limit:
        return QuarantineDecision(
            quarantined=False, reason=f"infra failures of {different} jobs; {limit} quarantine a host"
        )
    covered: set[int] = set()
    for classes in others_serve:
        covered.update(classes)
    alone = set(serves) - covered
    if alone:
        reason = f"infra failures of {different} jobs, but no other host serves {len(alone)} of its requirement classes"
        return QuarantineDecision(quarantined=False, reason=reason)
    return QuarantineDecision(quarantined=True, reason=f"infra failures of {different} different jobs in a row")
