"""The agent of this machine: membership, process, certificate, private files, the jobs' user, and its hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from strata.base.errors import Code, StrataError
from strata.cli.doctor.findings import (
    DoctorFinding,
    FindingState,
    check_clock_skew,
    check_disk_space,
    check_private,
    ok,
    problem,
    warning,
)

if TYPE_CHECKING:
    from strata.fleet.agent.identity import Membership
    from strata.fleet.agent.settings import AgentSettings


def check(state: str | None) -> Iterator[DoctorFinding]:
    from strata.base.settings import load
    from strata.fleet.agent.file_lock import is_locked
    from strata.fleet.agent.identity import FOLDER, load_membership
    from strata.fleet.agent.settings import SECTION, AgentSettings

    settings = load(AgentSettings, section=SECTION, file=None, flags={"state": state})
    folder = settings.state_folder
    try:
        member = load_membership(folder)
    except StrataError as error:
        if error.code is Code.PRECONDITION:
            yield ok("agent", "this machine has not joined a hub")
        else:
            yield problem("agent", error.message, "strata leave --force, and join again")
        return
    except PermissionError:
        yield warning("agent", f"you may not read {folder}", "run this as the agent's user")
        return
    yield check_running(member, is_locked(folder / "lock"))
    files = [folder, *(folder / FOLDER / name for name in ("hub.json", "host.key", "host.pem", "secret"))]
    yield check_private("agent's files", files)
    yield check_certificate(member)
    yield check_job_user(settings)
    work = settings.work_folder
    yield check_disk_space("work folder", next(path for path in (work, *work.parents) if path.exists()))
    yield from check_hub(folder, settings.max_skew_s)


def check_running(member: Membership, running: bool) -> DoctorFinding:  # noqa: FBT001 (an observation)
    why = f"host {member.name} of {member.url}"
    if running:
        return ok("agent", f"{why}, running")
    return warning("agent", f"{why}, not running", "systemctl start strata-agent, or strata agent")


def check_certificate(member: Membership) -> DoctorFinding:
    from strata.base.clock import SystemClock
    from strata.cli.fleet.client import format_duration

    if not member.valid_for_s:
        return ok("certificate", "none needed: this host has a secret for a hub on loopback")
    now_s = SystemClock().wall_s()
    left_s = member.certified_at_s + member.valid_for_s - now_s
    if left_s <= 0:
        return problem("certificate", "it has expired", "strata leave --force, and join again with a new invite")
    why = f"expires in {format_duration(left_s)}"
    if member.renewal_due(now_s):
        return warning(
            "certificate", f"{why}, renewal is overdue", "start the agent, and make sure that it reaches its hub"
        )
    return ok("certificate", why)


def check_job_user(settings: AgentSettings) -> DoctorFinding:
    from strata.fleet.agent.attempt_folder import find_job_user

    if not settings.run_as:
        why = "jobs run as the agent's user and can read its credentials"
        return warning("jobs' user", why, "set run_as, unless you trust everyone who submits jobs")
    try:
        job_user = find_job_user(settings.run_as)
    except StrataError as error:
        return problem("jobs' user", error.message, "run the agent as root, or remove run_as")
    return ok("jobs' user", settings.run_as if job_user else f"{settings.run_as}, the agent's own user")


def check_hub(folder: Path, max_skew_s: float) -> Iterator[DoctorFinding]:
    from strata.fleet.agent.identity import connect_to_hub
    from strata.fleet.wire import CallerReply

    try:
        with connect_to_hub(folder, timeout_s=10.0) as client:
            caller = client.call("GET", "/v1/caller", CallerReply)
            yield ok("agent's hub", f"reachable, knows this host as {caller.name}")
            if client.ahead_s is not None:
                clock = check_clock_skew("agent's clock", client.ahead_s, max_skew_s)
                if clock.state is not FindingState.OK:
                    yield clock
    except StrataError as error:
        rejected = error.code in (Code.UNAUTHENTICATED, Code.FORBIDDEN)
        fix = (
            "strata leave --force, and join again"
            if rejected
            else error.hint or "start the hub, or open the network path to it"
        )
        yield problem("agent's hub", error.message, fix)
