"""Memory of a packed row: how many tokens fit into this rank's memory, and the record of a row that did not fit.

The limit is measured when the ranks start, by passes over rows of growing length. It is an estimate: a row beyond it is
rejected before the first collective, so all ranks continue. A rank that runs out of memory inside the model dies, since
the others may wait for it in a collective; the record in its file tells the next group, which reports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from strata.base import log
from strata.base.errors import StrataError
from strata.train.core.commands import RowOutOfMemory
from strata.train.core.model_options import LoraConfig
from strata.train.core.out_of_memory import most_likely_cause
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora import Adapter, Span
from strata.train.runner.passes.logprobs import PackedRow

if TYPE_CHECKING:
    from strata.train.runner.model.base import BaseModel

FIRST: Final = 64
LONGEST: Final = 2048
"""Tokens of the shortest and the longest row that is measured."""
GROWTH: Final = 32 << 20
"""Two rows that differ by so many bytes are enough to compute the cost of a token."""
SHARE: Final = 0.75
"""The share of the free memory for one row: adapters, moments and the KV cache come later."""
PROBE: Final = 0.9
"""The share of the memory that is free just before a row is computed."""
SMALL: Final = 64 << 20
"""A row of fewer bytes is computed without checking the free memory."""
FRESH_S: Final = 1.0
_log = log.get(__name__)


class KernelKills(msgspec.Struct, frozen=True, array_like=True):
    """How many processes the kernel has killed for lack of memory."""

    group: str
    """The control group of this process."""
    in_group: int | None
    """None: the group has no counter."""
    on_machine: int

    def may_be_since(self, before: KernelKills) -> bool:
        """Whether a process of the same group may have been killed since then.

        On the machine other jobs run out of memory too, within limits of their own. That counts only where nothing
        better is known: without a counter, and when a group was killed as a whole and this is the next one.
        """
        if self.group == before.group and self.in_group is not None and before.in_group is not None:
            return self.in_group > before.in_group
        return self.on_machine > before.on_machine


class _RowRecord(msgspec.Struct, frozen=True, array_like=True):
    exhausted: RowOutOfMemory
    kills: KernelKills
    """Before the row began. If there are more now, one may have been this rank."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_RowRecord).decode
_decode_previous: Final = msgspec.msgpack.Decoder(RowOutOfMemory | None).decode


class RowMemory:
    """The row memory of one rank. `limit` is the same on all ranks, 0 if it could not be measured."""

    def __init__(self, base: BaseModel, ranks: RankGroup, file: Path) -> None:
        self._ranks = ranks
        self._configured = base.settings.row_tokens
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        previous = _read_record(self._file)
        self.exhausted = most_likely_cause(_decode_previous(data) for data in ranks.all_gather_bytes(_encode(previous)))
        """The row at which the previous group ran out of memory, if it did."""
        self._kills, self._kills_at_s = kernel_kills(), perf_counter()
        self._per_token, self.limit = measure(base, ranks)
        _log.info("row_memory_measured", bytes_per_token=self._per_token, tokens=self.limit)

    @property
    def row_tokens(self) -> int:
        return self._configured or self.limit

    def fits(self, tokens: int) -> bool:
        """Whether there is memory now for a row of so many tokens. A limit from the settings is not checked."""
        if self._configured is not None or not self._per_token:
            return True
        needed = tokens * self._per_token
        if needed < SMALL:
            return True
        free = free_bytes(self._ranks)
        if free is None or needed <= PROBE * free:
            return True
        release_memory()
        free = free_bytes(self._ranks)
        return free is None or needed <= PROBE * free

    @contextmanager
    def computing(self, model_id: str, tokens: int) -> Iterator[None]:
        """Compute a row. If this process dies meanwhile, the next one of this rank finds the record."""
        if perf_counter() - self._kills_at_s > FRESH_S:
            self._kills, self._kills_at_s = kernel_kills(), perf_counter()
        row = RowOutOfMemory(self._ranks.rank, model_id, tokens, self.limit)
        self._write(_RowRecord(row, self._kills))
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self._write(_RowRecord(msgspec.structs.replace(row, sure=True), self._kills))
                _log.error("out_of_memory", tokens=tokens, limit=self.limit, reason=str(error).partition("\n")[0])
            else:
                os.ftruncate(self._file, 0)
            raise
        os.ftruncate(self._file, 0)

    def _write(self, record: _RowRecord) -> None:
        data = _encode(record)
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator has no exception type of its own.
    phrases = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc", "not enough memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def measure(base: BaseModel, ranks: RankGroup) -> tuple[int, int]:
    """Bytes per token and the tokens that fit, measured by real passes; zeros if they cannot be measured here."""
    adapter = _measuring_adapter(base, ranks.device)
    longest = min(LONGEST, base.max_context)
    tokens = min(FIRST, longest)
    peak = _peak_of(base, adapter, ranks, tokens)
    per_token, enough = 0, False
    while tokens < longest and not enough:
        shorter, smaller = tokens, peak
        tokens = min(2 * tokens, longest)
        peak = _peak_of(base, adapter, ranks, tokens)
        growth = peak - smaller
        per_token = max(growth // (tokens - shorter), 1) if smaller else 0
        free = free_bytes(ranks) or 0
        # The next row grows by twice as much.
        enough = ranks.all_reduce_any([growth >= GROWTH or 4 * growth > free])[0]
    if base.adapters is not None:
        base.adapters.row = base.adapters.in_pass = ()
    release_memory()
    costs = ranks.all_gather_int(per_token)
    per_token = max(costs) if min(costs) else 0
    # Stages have the activations of several rows at once.
    costs_of_rows = per_token * base.settings.parallel.pipeline
    fitting = ranks.all_gather_int(int(SHARE * (free_bytes(ranks) or 0) / costs_of_rows) if per_token else 0)
    return per_token, min(fitting)


def _measuring_adapter(base: BaseModel, device: torch.device) -> Adapter | None:
    """An adapter with every target: its activations are what a row costs. Its LoRA rank hardly matters."""
    if base.adapters is None:
        return None
    try:
        config = LoraConfig(rank=1, alpha=1.0)
        return base.new_adapter(config, device)
    except StrataError:
        return None


def _peak_of(base: BaseModel, adapter: Adapter | None, ranks: RankGroup, tokens: int) -> int:
    """The peak memory of this process during a pass over one row; 0 if the system does not report it."""
    content = torch.arange(tokens, device=ranks.device) % base.vocabulary
    logit_indices = torch.arange(tokens, device=ranks.device)
    row = PackedRow(
        tokens=content, documents=[tokens], spans=[Span(adapter, tokens)], logit_indices=logit_indices, targets=content
    )
    _trim()
    measurable = _reset_peak(ranks.device)
    if base.adapters is not None:
        base.adapters.in_pass = [] if adapter is None else [adapter]
    if adapter is not None:
        adapter.begin()
    base.logprobs(row).sum().backward()  # type: ignore[no-untyped-call]
    if adapter is not None:
        adapter.discard()
    for parameter in base.packed.parameters():
        parameter.grad = None
    return _peak(ranks.device) if measurable else 0


def _reset_peak(device: torch.device) -> bool:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status("VmHWM")


def release_memory() -> None:
    """Return freed memory to the system: the allocator keeps it, and it would count as used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _trim()


def _trim() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(ranks: RankGroup) -> int | None:
    """Free memory for this rank: of its device, or the least of the limits of process, control group and machine."""
    if ranks.device.type == "cuda":
        return _cuda_bytes(ranks.device)
    available = [free for free in (_machine_bytes(), _cgroup_bytes()) if free is not None]
    shares = [free // ranks.local_size for free in available]
    for limit, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            shares.append(max(soft - _status(used), 0))
    return min(shares, default=None)


def _cuda_bytes(device: torch.device) -> int:
    """Memory that torch's allocator holds without using it is free too: a pass leaves all that it needed there."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - used
    return max(min(free + torch.cuda.memory_reserved(device) - used, allowed), 0)


def _machine_bytes() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable")


def _cgroup_bytes() -> int | None:
    """What the control group of this process still allows, in cgroup version 1 or 2."""
    free: int | None = None
    for group in _memory_groups():
        is_v2 = (group / "memory.max").exists()
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with contextlib.suppress(OSError, ValueError, KeyError):
            # "max" is not a number: there is no limit then.
            limit, used = (int((group / name).read_text(encoding="ascii")) for name in names)
            left = max(limit - used + _cached_bytes(group), 0)
            free = left if free is None else min(free, left)
    return free


def _memory_groups() -> list[Path]:
    """The control groups of this process that may limit its memory, in cgroup version 1 or 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(Path("/sys/fs/cgroup") / path.lstrip("/"))
        elif "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/"))
    return found


def _cached_bytes(group: Path) -> int:
    """File cache of a control group, which the kernel reclaims when memory is needed."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    prefix = "total_" if "total_active_file" in stat else ""
    return int(stat[f"{prefix}active_file"]) + int(stat[f"{prefix}inactive_file"])


def _status(name: str) -> int:
    return _field(Path("/proc/self/status"), name) or 0


def _field(file: Path, name: str) -> int | None:
    """A number of kilobytes, in bytes."""
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return None


def kernel_kills() -> KernelKills:
    for group in _memory_groups():
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if (count := _count_kills(group / name)) is not None:
                return KernelKills(str(group), count, _count_kills(Path("/proc/vmstat")) or 0)
    return KernelKills("", None, _count_kills(Path("/proc/vmstat")) or 0)


def _count_kills(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _read_record(file: int) -> RowOutOfMemory | None:
    data = os.pread(file, 1 << 16, 0)
    os.ftruncate(file, 0)
    try:
        record = _decode(data)
    except msgspec.MsgspecError:
        # Empty: the previous process did not die inside a row.
        return None
    return record.exhausted if record.exhausted.sure or kernel_kills().may_be_since(record.kills) else None
