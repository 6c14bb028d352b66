"""What this host is: found out, not configured. Limits of a container count, and not what the machine below it has."""

from __future__ import annotations

import datetime
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from strata.fleet.agent import cgroup, gpu
from strata.fleet.core.capability import Capability

TORCH_S: Final = 120.0
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_TORCH: Final = """
import json, platform, sys
from importlib import metadata
told = {"python": platform.python_version(), "torch": "", "cuda": "", "asked": False}
try:
    told["torch"] = metadata.version("torch")
except metadata.PackageNotFoundError:
    pass
if told["torch"] and sys.argv[1] == "cards":
    import torch
    told["asked"] = True
    told["cuda"] = (torch.version.cuda or "") if torch.cuda.is_available() else ""
print(json.dumps(told))
"""
"""Importing torch takes seconds, so it is done only where there is a card to ask it about."""


class Interpreter(msgspec.Struct, frozen=True, kw_only=True):
    python: str = ""
    torch: str = ""
    cuda: str = ""
    asked: bool = False
    """There is a torch, and it was asked for CUDA."""
    problem: str = ""


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    capability: Capability
    problems: tuple[str, ...] = ()
    """What could not be found out, and why."""


def probe(
    environ: Mapping[str, str],
    *,
    interpreter: str = "",
    source: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> Probed:
    """`environ` is what children get. Takes seconds where there are cards and torch."""
    seen = gpu.cards(environ)
    python = ask_interpreter(interpreter or sys.executable, environ, cards=bool(seen.gpus))
    # A torch that sees no CUDA has the last word; where there is none, the driver has.
    cuda = python.cuda if python.asked else seen.driver_cuda
    capability = Capability(
        hostname=hostname(),
        os=platform.system().lower(),
        arch=platform.machine().lower().replace("amd64", "x86_64"),
        cores=cores(cgroup.cpu_quota()),
        ram_bytes=ram_bytes(cgroup.memory_limit()),
        cuda=cuda if seen.gpus else "",
        gpus=seen.gpus,
        torch=python.torch[:256],
        python=python.python[:256],
        git_commit=commit_of(source, environ) if source is not None else "",
        labels=dict(labels or {}),
        utc_offset_min=utc_offset_min(),
    )
    return Probed(capability=capability, problems=tuple(filter(None, (seen.problem, python.problem))))


def hostname() -> str:
    """In the letters that names of hosts have here."""
    spelled = _NOT_IN_NAMES.sub("-", socket.gethostname()).strip("-._")[:64]
    return spelled or "host"


def cores(quota: float | None) -> int:
    """What this process may use: its CPU set, and the quota of its container rounded down, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable if quota is None else min(usable, int(quota)))


def ram_bytes(limit: int | None) -> int:
    physical = _physical_bytes()
    return physical if limit is None else min(physical, limit)


def utc_offset_min() -> int:
    offset = datetime.datetime.now(tz=datetime.UTC).astimezone().utcoffset()
    return round(offset.total_seconds() / 60) if offset is not None else 0


def commit_of(source: Path, environ: Mapping[str, str]) -> str:
    """The commit of a checkout, marked if there are changes; empty if it is none."""
    where = ["git", "-C", str(source), "-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false"]
    head = _output([*where, "rev-parse", "HEAD"], environ, 10.0)
    if not head:
        return ""
    changed = _output([*where, "status", "--porcelain", "--untracked-files=no"], environ, 30.0)
    return head.strip() + ("-dirty" if changed else "")


def ask_interpreter(interpreter: str, environ: Mapping[str, str], *, cards: bool) -> Interpreter:
    """A child asks: what torch does while it is imported must not happen to the agent."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _TORCH, "cards" if cards else "none"],
            env=dict(environ),
            cwd="/" if os.name == "posix" else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TORCH_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Interpreter(problem=f"{interpreter} cannot be asked for torch: {error}")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Interpreter)
    except (msgspec.DecodeError, IndexError):
        said = done.stderr.decode(errors="replace").strip()[-300:]
        return Interpreter(problem=f"{interpreter} cannot be asked for torch: {said or done.returncode}")


def _physical_bytes() -> int:
    if sys.platform == "win32":
        from strata.fleet.agent.windows import physical_bytes

        return physical_bytes()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _output(command: list[str], environ: Mapping[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(
            command,
            env=dict(environ) | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.decode(errors="replace")
