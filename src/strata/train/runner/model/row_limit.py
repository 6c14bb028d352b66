"""Measures how many tokens a row may have in this rank's memory (share of free memory, growing probes), and records a
row that ran out of memory.

The limit is measured when the ranks start, by passes over rows of growing length. It is an estimate: a row beyond it is
rejected before the first collective, so all ranks continue. A rank that runs out of memory inside the model dies, since
the others may wait for it in a collective; the record in its file tells the next group, which reports it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
import torch

from strata.base import log
from strata.base.errors import StrataError
from strata.train.core.commands import RowOutOfMemory
from strata.train.core.model_options import LoraConfig
from strata.train.core.out_of_memory import most_likely_cause
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.process_memory import (
    KernelKills,
    free_bytes,
    is_out_of_memory,
    kernel_kills,
    peak_bytes,
    release_memory,
    reset_peak,
    trim_heap,
)
from strata.train.runner.passes.logprobs import PackedRow

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


class _RowRecord(msgspec.Struct, frozen=True, array_like=True):
    exhausted: RowOutOfMemory
    kills: KernelKills
    """Kills before the row began. If there are more now, one may have been this rank."""


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
        """Says whether there is memory now for a row of so many tokens. A limit from the settings is not checked."""
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
    if base.settings.full:
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
    trim_heap()
    measurable = reset_peak(ranks.device)
    base.adapters.in_pass = [] if adapter is None else [adapter]
    if adapter is not None:
        adapter.begin()
    base.logprobs(row).sum().backward()  # type: ignore[no-untyped-call]
    if adapter is not None:
        adapter.discard()
    for parameter in base.packed.parameters():
        parameter.grad = None
    return peak_bytes(ranks.device) if measurable else 0


def _read_record(file: int) -> RowOutOfMemory | None:
    data = os.pread(file, 1 << 16, 0)
    os.ftruncate(file, 0)
    try:
        record = _decode(data)
    except msgspec.MsgspecError:
        # Empty: the previous process did not die inside a row.
        return None
    return record.exhausted if record.exhausted.sure or kernel_kills().may_be_since(record.kills) else None
