"""The machine and the installation: Python, extras, torch and CUDA."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from strata.cli.doctor.findings import DoctorFinding, ok, problem, warning

OLDEST: Final = (3, 11)
NEWEST_TESTED: Final = (3, 13)
EXTRAS: Final = {
    "agent": ("cryptography", "strata join"),
    "hub": ("uvicorn", "strata hub, strata up"),
    "postgres": ("psycopg", "a hub on PostgreSQL"),
    "worker": ("grpc", "strata gang, workers of a gang"),
}
"""Extra: a module that it provides, and the commands that need it."""


def check() -> Iterator[DoctorFinding]:
    yield python()
    yield extras()
    yield from trainer()


def python() -> DoctorFinding:
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


def extras() -> DoctorFinding:
    from importlib.util import find_spec

    from strata import __version__

    installed = [name for name, (module, _) in EXTRAS.items() if find_spec(module) is not None]
    absent = [f"{name} ({use})" for name, (_, use) in EXTRAS.items() if name not in installed]
    why = f"strata {__version__} with {', '.join(installed) or 'no extras'}"
    return ok("install", why + (f"; without {', '.join(absent)}" if absent else ""))


def trainer() -> Iterator[DoctorFinding]:
    """The capability that the agent of this machine would report to the hub."""
    from strata.base.settings import load, process_environment
    from strata.cli.fleet.client import format_bytes, format_count
    from strata.fleet.agent.environment import inherited_by_jobs
    from strata.fleet.agent.settings import SECTION, AgentSettings
    from strata.fleet.agent.start import probe_capability

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
