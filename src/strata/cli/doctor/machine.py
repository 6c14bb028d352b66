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
"""Each with a module that it brings, and what needs it."""


def check() -> Iterator[DoctorFinding]:
    yield python()
    yield extras()
    yield from trainer()


def python() -> DoctorFinding:
    from platform import python_version

    here = sys.version_info[:2]
    told = f"{python_version()} at {sys.executable}"
    if here < OLDEST:
        return problem("python", told, f"install Python {'.'.join(map(str, OLDEST))} or newer")
    if here > NEWEST_TESTED:
        return warning("python", f"{told}: newer than what was tested", "report what does not work")
    return ok("python", told)


def extras() -> DoctorFinding:
    from importlib.util import find_spec

    from strata import __version__

    have = [name for name, (module, _) in EXTRAS.items() if find_spec(module) is not None]
    lack = [f"{name} ({use})" for name, (_, use) in EXTRAS.items() if name not in have]
    told = f"strata {__version__} with {', '.join(have) or 'no extras'}"
    return ok("install", told + (f"; without {', '.join(lack)}" if lack else ""))


def trainer() -> Iterator[DoctorFinding]:
    """As the agent of this machine would tell it to the hub."""
    from strata.base.settings import load, process_environment
    from strata.cli.fleet.client import format_bytes, format_count
    from strata.fleet.agent.environment import inherited_by_jobs
    from strata.fleet.agent.settings import SECTION, AgentSettings
    from strata.fleet.agent.start import probe_capability

    settings = load(AgentSettings, section=SECTION, file=None, flags={})
    probed = probe_capability(settings, inherited_by_jobs(process_environment(), settings.pass_env))
    found = probed.capability
    for trouble in probed.problems:
        yield warning("probe", trouble, "mend it, or jobs that need it will go elsewhere")
    yield ok(
        "machine", f"{format_count(found.cores, 'core')}, {format_bytes(found.ram_bytes)}, {found.os} on {found.arch}"
    )
    if not found.torch:
        yield ok("torch", "none in the interpreter that runs trainers which name none")
    elif found.gpus and not found.cuda:
        yield problem(
            "torch",
            f"torch {found.torch} cannot use {found.gpus[0].name}",
            "install the build of torch for CUDA, or a newer driver",
        )
    else:
        cards = ", ".join(f"{card.name} ({format_bytes(card.vram_bytes)})" for card in found.gpus)
        yield ok("torch", f"torch {found.torch}, {f'CUDA {found.cuda}: {cards}' if found.gpus else 'no GPU here'}")
