"""Checks of `strata doctor` about this machine: Python versions, extras, torch and CUDA, agent, its certificate and
user.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

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

OLDEST: Final = (3, 11)
NEWEST_TESTED: Final = (3, 13)
EXTRAS: Final = {
    "agent": ("cryptography", "strata join"),
    "hub": ("uvicorn", "strata hub, strata up"),
    "postgres": ("psycopg", "a hub on PostgreSQL"),
    "worker": ("grpc", "strata gang, workers of a gang"),
}
"""Extra: a module that it provides, and the commands that need it."""


def check_install() -> Iterator[DoctorFinding]:
    yield check_python()
    yield check_extras()
    yield from check_trainer()


def check_python() -> DoctorFinding:
    from platform import python_version

    version = sys.version_info[:2]
    why = f"{python_version()} at {sys.executable}"
    if version < OLDEST:
        return problem(
            "python",
            f"{why}: older than {'.'.join(map(str, OLDEST))}",
            f"install Python {'.'.join(map(str, OLDEST))} or newer",
        )
    if version > NEWEST_TESTED:
        return warning("python", f"{why}: newer than the versions that were tested", "report what does not work")
    return ok("python", why)


def check_extras() -> DoctorFinding:
    from importlib.util import find_spec

    from strata import __version__

    installed = [name for name, (module, _) in EXTRAS.items() if find_spec(module) is not None]
    absent = [f"{name} ({use})" for name, (_, use) in EXTRAS.items() if name not in installed]
    why = f"strata {__version__} with {', '.join(installed) or 'no extras'}"
    return ok("install", why + (f"; without {', '.join(absent)}" if absent else ""))


def check_trainer() -> Iterator[DoctorFinding]:
    """The capability that the agent of this machine would report to the hub."""
    from strata.base.settings import load, process_environment
    from strata.cli.fleet.client import format_bytes, format_count
    from strata.fleet.agent.settings import SECTION, AgentSettings
    from strata.fleet.agent.start import probe_capability
    from strata.fleet.core.job_command import inherited_by_jobs

    settings = load(AgentSettings, section=SECTION, file=None, flags={})
    probed = probe_capability(settings, inherited_by_jobs(process_environment(), settings.pass_env))
    host = probed.capability
    for reason in probed.problems:
        yield warning("probe", reason, "fix it, or jobs that need it run on other hosts only")
    yield ok("machine", f"{format_count(host.cores, 'core')}, {format_bytes(host.ram_bytes)}, {host.os} on {host.arch}")
    if not host.torch:
        yield ok("torch", "not installed in the interpreter that runs trainers without one of their own")
    elif host.gpus and not host.cuda:
        yield problem(
            "torch",
            f"torch {host.torch} cannot use {host.gpus[0].name}",
            "install the CUDA build of torch, or a newer driver",
        )
    else:
        gpus = ", ".join(f"{gpu.name} ({format_bytes(gpu.vram_bytes)})" for gpu in host.gpus)
        yield ok("torch", f"torch {host.torch}, {f'CUDA {host.cuda}: {gpus}' if host.gpus else 'no GPU here'}")


def check_agent(state: str | None) -> Iterator[DoctorFinding]:
    """The agent: membership, process, certificate, private files, the jobs' user, and its hub."""
    from strata.base.file_lock import is_locked
    from strata.base.settings import load
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
    yield from check_hub_of_agent(folder)


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
    from strata.fleet.agent.sandbox import job_user_of

    try:
        job_user = job_user_of(settings)
    except StrataError as error:
        return problem("jobs' user", error.message, "run the agent as root, or remove run_as")
    if job_user is not None:
        return ok("jobs' user", settings.run_as or f"uid {job_user.uid}")
    if settings.run_as:
        return ok("jobs' user", f"{settings.run_as}, the agent's own user")
    why = "jobs run as the agent's user: only a sandbox with namespaces keeps them from its credentials"
    return warning("jobs' user", why, "see 'strata agent check', and set run_as unless you trust all who submit")


def check_hub_of_agent(folder: Path) -> Iterator[DoctorFinding]:
    from strata.fleet.agent.identity import connect_to_hub
    from strata.fleet.wire.identities import CallerReply

    try:
        with connect_to_hub(folder, timeout_s=10.0) as client:
            caller = client.call("GET", "/v1/caller", CallerReply)
            yield ok("agent's hub", f"reachable, knows this host as {caller.name}")
            if client.ahead_s is not None:
                clock = check_clock_skew("agent's clock", client.ahead_s)
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
