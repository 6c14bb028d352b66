"""Decides whether a host may take a requirement class by its static properties: every check with its reason and
smallest fix, and the score of which host fits better.

All reasons and not the first one: an operator who lowers `min_vram_gib` must not learn only then that the host has no
CUDA. Each reason says what is needed, what the host has, and the smallest change that would help. Only static
properties are matched here; whether the host is busy, paused or offline is for `why` and the service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from strata.fleet.core.capability import Profile
from strata.fleet.core.requirement import LIMITS_LEVELS, SANDBOX_LEVELS, RequirementClass

_FAR: Final = 1.0
"""The distance of what cannot be nearly fulfilled: a name, a yes or no."""


class MismatchReason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    constraint: str
    """The constraint as the manifest names it."""
    needed: str
    has: str
    fix: str
    distance: float = _FAR
    """How much is missing, as a share of what is needed: it finds the host that is nearest."""

    def __str__(self) -> str:
        return f"{self.constraint}: needs {self.needed}, has {self.has}"


class MatchResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    reasons: tuple[MismatchReason, ...] = ()

    @property
    def eligible(self) -> bool:
        return not self.reasons


def eligible(requirement: RequirementClass, host: Profile) -> MatchResult:
    return MatchResult(host.host, tuple(reason for check in _CHECKS for reason in check(requirement, host)))


def eligible_classes(host: Profile, classes: Mapping[int, RequirementClass]) -> frozenset[int]:
    """Returns those of `classes`, by their numbers in the store, that `host` may serve."""
    return frozenset(
        number
        for number, requirement in classes.items()
        if not any(next(check(requirement, host), None) for check in _CHECKS)
    )


def score(requirement: RequirementClass, host: Profile) -> float:
    """The share of the job's wishes (`prefer_*`) that the host fulfils; 1.0 as well if there are none."""
    needs = requirement.needs
    wishes = [host.cuda] if needs.prefer_cuda else []
    if needs.prefer_hosts:
        wishes.append(_matches(needs.prefer_hosts, host.host))
    labels = host.own_labels | host.labels
    wishes += [_has_label(labels, label, value) for label, value in needs.prefer_labels.items()]
    return sum(wishes) / len(wishes) if wishes else 1.0


def holds_back(requirement: RequirementClass, host: Profile, *, waited_s: float, best_online: float) -> bool:
    """Says whether `host` leaves the job to a better one: for `prefer_wait_s` at most, and only if there is a better
    one.

    `best_online` is the highest score among the eligible hosts that are online.
    """
    return waited_s < requirement.needs.prefer_wait_s and score(requirement, host) < best_online


def is_better_fit(requirement: RequirementClass, host: Profile, than: Profile) -> bool:
    """Says whether a job leaves more to others on `host` than on the other one; by `shape` alone.

    It compares the memory of the cards that the job would take, or that it would only run beside; of hosts that are
    alike in this the one with half the memory or less. Both hosts are eligible.
    """
    ours, theirs = _card_gib(requirement, host), _card_gib(requirement, than)
    return ours < theirs or (ours == theirs and 2 * host.ram_gib <= than.ram_gib)


def shape(host: Profile) -> tuple[tuple[float, ...], float]:
    """Returns what `is_better_fit` looks at: hosts of one shape fit all jobs equally well."""
    return host.vram_gib, host.ram_gib


def _card_gib(requirement: RequirementClass, host: Profile) -> float:
    """Returns the memory of the largest card that a job takes, where it takes the smallest ones; of the largest of all
    if it takes none, or the whole host."""
    needs = requirement.needs
    enough = sorted(card for card in host.vram_gib if card >= needs.min_vram_gib)
    return enough[needs.gpus - 1] if 0 < needs.gpus <= len(enough) else max(host.vram_gib, default=0.0)


def _policy(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    names = (requirement.model, requirement.label)
    if host.allow_jobs is not None and not any(_matches(host.allow_jobs, name) for name in names):
        yield MismatchReason(
            constraint="allow_jobs",
            needed=requirement.label,
            has=f"only {', '.join(host.allow_jobs)}" if host.allow_jobs else "nothing is allowed",
            fix=f'add "{requirement.model}" to allow_jobs of [hosts.{host.host}]',
        )
    denied = [pattern for pattern in host.deny_jobs if any(fnmatchcase(name, pattern) for name in names)]
    if denied:
        yield MismatchReason(
            constraint="deny_jobs",
            needed=requirement.label,
            has=f"denied by {', '.join(denied)}",
            fix=f"remove {', '.join(denied)} from deny_jobs of [hosts.{host.host}]",
        )


def _names(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    allowed = requirement.needs.allowed_hosts
    if allowed and not _matches(allowed, host.host):
        fix = f'add "{host.host}" to allowed_hosts'
        needed, has = f"the name {' or '.join(allowed)}", f"the name {host.host}"
        yield MismatchReason(constraint="allowed_hosts", needed=needed, has=has, fix=fix)


def _pool(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    """A host in a pool runs the jobs that name it and no others, so that a pool is kept for somebody."""
    needed = requirement.needs.pool
    if needed != host.pool:
        yield MismatchReason(
            constraint="pool",
            needed=f"a host of the pool {needed}" if needed else "a host that is in no pool",
            has=f"the pool {host.pool}" if host.pool else "no pool",
            fix=f'set pool = "{host.pool}"' if host.pool else "remove pool, or strata invite --pool " + needed,
        )


def _system(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    needs = requirement.needs
    for constraint, needed, has in (
        ("require_os", needs.require_os.lower(), host.os),
        ("require_arch", needs.require_arch.lower(), host.arch),
    ):
        if needed and needed != has:
            yield MismatchReason(constraint=constraint, needed=needed, has=has or "unknown", fix=f"remove {constraint}")
    for label, value in needs.require_labels.items():
        if not _has_label(host.labels, label, value):
            own = "no such label" if label not in host.own_labels else "only its agent's word for it"
            yield MismatchReason(
                constraint=f"require_labels.{label}",
                needed="any value" if value == "*" else f'"{value}"',
                has=f'"{host.labels[label]}"' if label in host.labels else own,
                fix=f"label the host, in labels of [hosts.{host.host}]",
            )


def _levels(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    needs = requirement.needs
    for constraint, levels, needed, has in (
        ("require_sandbox", SANDBOX_LEVELS, needs.require_sandbox, host.sandbox),
        ("require_limits", LIMITS_LEVELS, needs.require_limits, host.limits),
    ):
        if levels.index(has) < levels.index(needed):
            fix = f"see 'strata agent check' on {host.host}, or set {constraint} = \"{has}\""
            yield MismatchReason(constraint=constraint, needed=needed, has=has, fix=fix)


def _gpus(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    needs = requirement.needs
    if needs.require_cuda and not host.cuda:
        yield MismatchReason(
            constraint="require_cuda",
            needed="CUDA",
            has="GPUs without usable CUDA" if host.vram_gib else "no GPU",
            fix="set require_cuda = false (prefer_cuda = true keeps the wish)",
        )
    largest = max(host.vram_gib, default=0.0)
    if needs.min_vram_gib > largest:
        yield _short("min_vram_gib", needs.min_vram_gib, largest, " GiB")
    enough = sum(card >= needs.min_vram_gib for card in host.vram_gib)
    if needs.min_gpus > enough:
        yield _short("min_gpus", needs.min_gpus, enough, "")
    if needs.gpu_share and not host.vram_gib:
        yield MismatchReason(constraint="gpu_share", needed="a GPU", has="no GPU", fix="remove gpu_share")


def _memory(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    """Hosts at most as large as one on which the job ran out of memory."""
    needs = requirement.needs
    for constraint, above, has in (
        ("above_ram_gib", needs.above_ram_gib, host.job_ram_gib),
        ("above_vram_gib", needs.above_vram_gib, max(host.vram_gib, default=0.0)),
    ):
        if above and has <= above:
            yield MismatchReason(
                constraint=constraint,
                needed=f"more than {above:g} GiB, with which it ran out of memory",
                has=f"{has:g} GiB",
                fix="add a host with more memory, or make the job smaller and requeue it",
                distance=1 - has / (above + 1),
            )


def _amounts(requirement: RequirementClass, host: Profile) -> Iterator[MismatchReason]:
    needs = requirement.needs
    if needs.min_ram_gib > host.ram_gib:
        yield _short("min_ram_gib", needs.min_ram_gib, host.ram_gib, " GiB")
    elif needs.min_ram_gib > host.job_ram_gib:
        yield _short("min_ram_gib", needs.min_ram_gib, host.job_ram_gib, " GiB", " for one job (sandbox.memory_gib)")
    if needs.min_cores > host.cores:
        yield _short("min_cores", needs.min_cores, host.cores, "")
    if host.slots is not None and needs.slots > host.slots:
        yield MismatchReason(
            constraint="slots",
            needed=str(needs.slots),
            has=str(host.slots),
            fix=f"set slots = {needs.slots} in [hosts.{host.host}]",
            distance=1 - host.slots / needs.slots,
        )


_CHECKS: Final[tuple[Callable[[RequirementClass, Profile], Iterator[MismatchReason]], ...]] = (
    _policy,
    _names,
    _pool,
    _system,
    _levels,
    _gpus,
    _memory,
    _amounts,
)


def _short(constraint: str, needed: float, has: float, unit: str, because: str = "") -> MismatchReason:
    return MismatchReason(
        constraint=constraint,
        needed=f"{needed:g}{unit}",
        has=f"{has:g}{unit}{because}",
        fix=f"set {constraint} = {has:g} or less" if has else f"remove {constraint}",
        distance=1 - has / needed,
    )


def _has_label(labels: Mapping[str, str], label: str, value: str) -> bool:
    return label in labels and value in ("*", labels[label])


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
