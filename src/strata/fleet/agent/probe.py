"""Probes what this host is (cores, memory, GPUs, Python, torch, CUDA, limits of its container), and samples its use."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from strata.fleet.agent import cgroup, gpu
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.core.capability import Capability, Gpu
from strata.fleet.core.requirement import LimitsLevel, SandboxLevel
from strata.fleet.core.samples import HostSample

INTERPRETER_TIMEOUT_S: Final = 120.0
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_TORCH: Final = """
import json, platform, sys
from importlib import metadata
result = {"python": platform.python_version(), "torch": "", "cuda": "", "cards": [], "problem": ""}
try:
    result["torch"] = metadata.version("torch")
except metadata.PackageNotFoundError:
    pass
if result["torch"] and sys.argv[1] == "cuda":
    import torch
    if torch.cuda.is_available():
        result["cuda"] = torch.version.cuda or ""
    for number in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(64, 64, device=f"cuda:{number}")
            assert float((ones @ ones).sum()) == 64 ** 3, "it computes wrongly"
            uuid = getattr(torch.cuda.get_device_properties(number), "uuid", "")
            result["cards"].append(str(uuid))
        except Exception as error:
            result["problem"] = f"torch cannot use card {number}: {str(error)[:200]}"
print(json.dumps(result))
"""
"""Importing torch takes seconds, so it happens only where there is a GPU. Each card has to multiply two matrices."""


class InterpreterProbe(msgspec.Struct, frozen=True, kw_only=True):
    python: str = ""
    torch: str = ""
    cuda: str = ""
    cards: tuple[str, ...] = ()
    """The cards that torch computed on, by UUID; an older torch does not tell it."""
    problem: str = ""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    capability: Capability
    problems: tuple[str, ...] = ()
    """What could not be determined, and why."""
    unproven: str = ""
    """Why CUDA is not offered although there are cards."""


def probe_host(
    environ: Mapping[str, str],
    settings: AgentSettings,
    sandbox: SandboxLevel = "none",
    lacks: Sequence[str] = (),
    limits: LimitsLevel = "none",
) -> ProbeResult:
    """`environ` is the environment of jobs, `lacks` what its sandbox cannot do. Takes seconds with GPUs and torch."""
    inventory = gpu.query_gpus(environ)
    python = query_interpreter(settings.interpreter or sys.executable, environ, with_cuda=bool(inventory.gpus))
    unproven = _unproven(inventory.gpus, python)
    capability = Capability(
        hostname=hostname(),
        os=platform.system().lower(),
        arch=platform.machine().lower().replace("amd64", "x86_64"),
        cores=cores(cgroup.cpu_quota()),
        ram_bytes=ram_bytes(cgroup.memory_limit()),
        cuda=python.cuda if inventory.gpus and not unproven else "",
        gpus=inventory.gpus,
        torch=python.torch[:256],
        python=python.python[:256],
        git_commit=commit_of(settings.source, environ) if settings.source is not None else "",
        sandbox=sandbox,
        sandbox_lacks=tuple(lack[:256] for lack in lacks[:16]),
        limits=limits,
        job_ram_bytes=int(settings.sandbox.memory_gib * 1024**3) if limits != "none" else 0,
        labels=settings.labels,
        slots=settings.slots,
        utc_offset_min=utc_offset_min(),
    )
    problems = tuple(filter(None, (*inventory.problems, python.problem, unproven)))
    return ProbeResult(capability=capability, problems=problems, unproven=unproven)


def _unproven(gpus: Sequence[Gpu], python: InterpreterProbe) -> str:
    """Says why this host does not offer CUDA although it has cards: no torch, or one that computes on too few of
    them."""
    if not gpus:
        return ""
    if not python.torch:
        return "the interpreter has no torch that could use the cards: this host offers no CUDA"
    if len(python.cards) < len(gpus):
        return f"torch {python.torch} computes on {len(python.cards)} of {len(gpus)} cards: this host offers no CUDA"
    return ""


class CpuMeter:
    """Measures the use of the processors since it was asked last, from the counters of the kernel."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._before = self._read()

    def use(self) -> float | None:
        """The share of the time in which they computed, 0 to 1; None where the system does not tell."""
        before, self._before = self._before, self._read()
        if before is None or self._before is None or self._before[1] <= before[1]:
            return None
        return min(1.0, max(0.0, (self._before[0] - before[0]) / (self._before[1] - before[1])))

    def _read(self) -> tuple[int, int] | None:
        """Ticks of all processors: those that they computed, and all."""
        try:
            # user nice system idle iowait irq softirq steal; what follows is part of user and nice.
            ticks = [int(each) for each in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
            return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
        except (OSError, ValueError, IndexError):
            return None


def sample_host(environ: Mapping[str, str], meter: CpuMeter, *, with_cards: bool) -> HostSample:
    """Returns what this host does; what the system does not tell is left out."""
    return HostSample(
        cpu_use=meter.use(),
        ram_used_gib=_used_memory_gib(),
        cards=tuple(device.sample for device in gpu.query_gpus(environ).devices) if with_cards else (),
    )


def _used_memory_gib(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    try:
        kib = {
            name: int(rest.split()[0])
            for name, _, rest in (line.partition(":") for line in meminfo.read_text().splitlines())
        }
        return (kib["MemTotal"] - kib["MemAvailable"]) / 1024**2
    except (OSError, KeyError, ValueError):
        return None


def hostname() -> str:
    """The host's name, reduced to the letters that names of hosts may have."""
    spelled = _NOT_IN_NAMES.sub("-", socket.gethostname()).strip("-._")[:64]
    return spelled or "host"


def new_incarnation() -> str:
    """Names this process among all agents, so that a person finds its machine."""
    boot = ""
    with suppress(OSError):
        boot = f" booted as {Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
    return f"{hostname()}{boot}, process {os.getpid()} ({secrets.token_hex(4)})"


def cores(quota: float | None) -> int:
    """The cores this process may use: its CPU set, or the quota of its container rounded down; at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable if quota is None else min(usable, int(quota)))


def ram_bytes(limit: int | None) -> int:
    physical = _physical_bytes()
    return physical if limit is None else min(physical, limit)


def utc_offset_min() -> int:
    offset = datetime.datetime.now(tz=datetime.UTC).astimezone().utcoffset()
    return round(offset.total_seconds() / 60) if offset is not None else 0


def commit_of(source: Path, environ: Mapping[str, str]) -> str:
    """The commit of a checkout, with `-dirty` if there are changes; empty if it is no checkout."""
    where = ["git", "-C", str(source), "-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false"]
    head = _output([*where, "rev-parse", "HEAD"], environ, 10.0)
    if not head:
        return ""
    changed = _output([*where, "status", "--porcelain", "--untracked-files=no"], environ, 30.0)
    return head.strip() + ("-dirty" if changed else "")


def query_interpreter(interpreter: str, environ: Mapping[str, str], *, with_cuda: bool) -> InterpreterProbe:
    """Queries the interpreter in a child process, so that importing torch cannot affect the agent."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _TORCH, "cuda" if with_cuda else "none"],
            env=dict(environ),
            cwd="/" if os.name == "posix" else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return InterpreterProbe(problem=f"{interpreter} cannot be queried for torch: {error}")
    try:
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=InterpreterProbe)
    except (msgspec.DecodeError, IndexError):
        stderr = done.stderr.decode(errors="replace").strip()[-300:]
        return InterpreterProbe(problem=f"{interpreter} cannot be queried for torch: {stderr or done.returncode}")


def _physical_bytes() -> int:
    if sys.platform == "win32":
        # MEMORYSTATUSEX: its own size, the bytes of memory, and six more numbers.
        status = (ctypes.c_uint64 * 8)(64)
        ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(ctypes.byref(status))
        return status[1]
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
