"""Reads the CUDA devices of this machine by `nvidia-smi` (10 s), which of them CUDA_VISIBLE_DEVICES shows, its cores
and its memory. Nothing here initialises CUDA: the ranks' parent could not fork after that.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

NVIDIA_SMI: Final = "nvidia-smi"
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_TIMEOUT_S: Final = 10.0
_COLUMNS: Final = ("index", "uuid", "name", "memory.total", "memory.free")
_CAPABILITY: Final = "compute_cap"
"""A column that drivers before 2021 do not know."""


class Device(msgspec.Struct, frozen=True):
    """A CUDA device."""

    number: str
    """Its number for `nvidia-smi`, which is the order of the bus."""
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    capability: float | None = None
    """Compute capability: 8.0 and above multiply bfloat16 in hardware."""

    def is_named(self, name: str) -> bool:
        """Says whether CUDA_VISIBLE_DEVICES would mean this device by the name: a number, or a UUID's beginning."""
        return name == self.number if name.isdecimal() else bool(name) and self.uuid.startswith(name)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has: of this machine, or of one that somebody plans for."""

    devices: Sequence[Device] = ()
    """Those that the server is shown, in this order."""
    without: str = f"{NVIDIA_SMI} shows no CUDA device"
    """Why there are none, if there are none."""
    torch_has_cuda: bool = True
    """Whether ranks can compute on them: the build of torch may be one for CPUs."""
    cores: int = 1
    memory_bytes: int | None = None
    """Memory of the host that is available."""


def planned_machine(count: int, device_bytes: int, cores: int = 1) -> Hardware:
    """A machine with so many equal devices, of which all memory is free."""
    devices = [Device(str(n), f"GPU-{n}", "a planned device", device_bytes, device_bytes) for n in range(count)]
    return Hardware(devices=devices, cores=cores)


def repeated(devices: Sequence[Device], count: int) -> list[Device]:
    """So many devices, as if there were more of these."""
    more = [
        msgspec.structs.replace(devices[n % len(devices)], number=str(n), uuid=f"GPU-{n}")
        for n in range(len(devices), count)
    ]
    return [*devices, *more]


def read_machine(environment: Mapping[str, str]) -> Hardware:
    every = read_devices()
    shown = environment.get(VISIBLE)
    devices = visible(every, shown)
    machine = Hardware(
        devices=devices,
        torch_has_cuda=torch_has_cuda(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=available_memory(),
    )
    if every and not devices:
        return msgspec.structs.replace(
            machine, without=f"{VISIBLE} is {shown!r}, which shows no device of this machine"
        )
    return machine


def read_devices() -> list[Device]:
    """All devices; none without a driver, and none if it does not answer."""
    listing = _query((*_COLUMNS, _CAPABILITY))
    if listing is None:
        listing = _query(_COLUMNS) or ""
    return list(parse_devices(listing))


def parse_devices(listing: str) -> Iterator[Device]:
    """Parses the table that `nvidia-smi` prints. What it does not know is `[N/A]` there."""
    for row in csv.reader(listing.splitlines(), skipinitialspace=True):
        cells = [cell.strip() for cell in row]
        if len(cells) < len(_COLUMNS) or not all(cells[at].isdecimal() for at in (0, 3, 4)):
            continue
        capability = cells[5] if len(cells) > len(_COLUMNS) else ""
        number, uuid, name, total, free = cells[: len(_COLUMNS)]
        is_known = capability.replace(".", "", 1).isdecimal()
        yield Device(number, uuid, name, int(total) << 20, int(free) << 20, float(capability) if is_known else None)


def visible(devices: Sequence[Device], shown: str | None) -> list[Device]:
    """Those that CUDA_VISIBLE_DEVICES shows, in its order. As in CUDA, a name that means none ends the list."""
    if shown is None:
        return list(devices)
    found: list[Device] = []
    for name in (part.strip() for part in shown.split(",")):
        matches = [device for device in devices if device.is_named(name)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def torch_has_cuda() -> bool:
    """Says whether the installed torch is built for CUDA, by its file of versions: an import would take seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        lines = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.startswith("cuda") and not line.endswith("None") for line in lines)


def available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else None


def _query(columns: Sequence[str]) -> str | None:
    """None if it fails."""
    tool = shutil.which(NVIDIA_SMI)
    if tool is None:
        return None
    query = [tool, f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
