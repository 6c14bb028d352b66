"""A forward_backward pass on its way to the ranks and back: partitioned into what each rank computes, and merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import commands, ops
from strata.train.runner.passes.losses import combine_metrics
from strata.train.runner.passes.tensors import decode_pass_data


class RankPassItem(msgspec.Struct, frozen=True, array_like=True):
    """One operation of the pass, without its data."""

    model_id: str
    loss: ops.LossName
    config: Mapping[str, float]


class PackedDatum(msgspec.Struct, frozen=True, array_like=True):
    item: int
    datum: int
    content: ops.Datum


class RankPass(msgspec.Struct, frozen=True, array_like=True):
    """What one rank computes: packed rows, one after the other. Each row is a micro-batch."""

    forward_only: bool
    items: Sequence[RankPassItem]
    rows: Sequence[Sequence[PackedDatum]]
    replayed: bool = False


class ComputedDatum(msgspec.Struct, frozen=True, array_like=True):
    item: int
    datum: int
    output: ops.DatumOutput
    metrics: Mapping[str, float]


class ItemFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why an item failed; `datum` is the one it failed at, or -1."""

    item: int
    datum: int
    code: Code
    message: str
    memory: bool = False
    """It does not fit into the memory that the ranks have now."""

    @property
    def sentence(self) -> str:
        return self.message if self.datum < 0 else f"datum {self.datum}: {self.message}"


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    computed: Sequence[ComputedDatum]
    failures: Sequence[ItemFailure]


encode: Final = msgspec.msgpack.Encoder().encode
decode_pass: Final = msgspec.msgpack.Decoder(RankPass).decode
decode_report: Final = msgspec.msgpack.Decoder(RankReport).decode


class PartitionedPass(msgspec.Struct, frozen=True):
    of_ranks: Sequence[RankPass]
    failures: Sequence[ItemFailure]
    """Items whose data cannot be decoded: they are in no row."""
    datums: Sequence[int]
    """How many datums each item has."""
    tokens: int


def partition_pass(command: commands.PassCommand, ranks: int) -> PartitionedPass:
    """The rows of each rank. The orchestrator has packed them; a packing that is not sound fails the whole pass."""
    contents: list[Sequence[ops.Datum]] = []
    failures: list[ItemFailure] = []
    for number, item in enumerate(command.items):
        try:
            contents.append(decode_pass_data(item.data).datums)
        except StrataError as error:
            contents.append(())
            failures.append(ItemFailure(number, -1, error.code, error.message))
    _check_packing(command, contents, {failure.item for failure in failures}, ranks)
    items = [RankPassItem(item.model_id, item.loss, item.config) for item in command.items]
    of_ranks = [
        RankPass(
            command.forward_only,
            items,
            [
                [
                    PackedDatum(segment.item, segment.datum, contents[segment.item][segment.datum])
                    for segment in row
                    if contents[segment.item]
                ]
                for row in rows
            ],
            command.replayed,
        )
        for rows in command.rows
    ]
    tokens = sum(datum.length for datums in contents for datum in datums)
    return PartitionedPass(of_ranks, failures, [len(datums) for datums in contents], tokens)


def _check_packing(
    command: commands.PassCommand, contents: Sequence[Sequence[ops.Datum]], undecoded: set[int], ranks: int
) -> None:
    if len(command.rows) != ranks or len({len(rows) for rows in command.rows}) != 1:
        raise StrataError(Code.INTERNAL, f"the pass does not have equally many rows for each of {ranks} ranks")
    packed = Counter((segment.item, segment.datum) for rows in command.rows for row in rows for segment in row)
    expected = {(item, datum) for item, datums in enumerate(contents) for datum in range(len(datums))}
    if {place for place in packed if place[0] not in undecoded} != expected or any(n > 1 for n in packed.values()):
        raise StrataError(Code.INTERNAL, "the rows of the pass do not hold each datum once")


def merge_reports(partitioned: PartitionedPass, reports: Sequence[RankReport]) -> list[ops.Result]:
    """The results in the order of the items, each with its outputs in the order of its datums."""
    failures: dict[int, ItemFailure] = {}
    reported = (*partitioned.failures, *(failure for report in reports for failure in report.failures))
    for failure in sorted(reported, key=lambda failure: failure.datum):
        failures.setdefault(failure.item, failure)
    computed = {(datum.item, datum.datum): datum for report in reports for datum in report.computed}
    results: list[ops.Result] = []
    for item, count in enumerate(partitioned.datums):
        if item in failures:
            failure = failures[item]
            out_of_memory = ops.Failed("user", failure.sentence, memory=True)
            results.append(out_of_memory if failure.memory else failed(failure.code, failure.sentence))
            continue
        datums = [computed[item, datum] for datum in range(count)]
        metrics = combine_metrics([datum.metrics for datum in datums])
        result = ops.PassResult([datum.output for datum in datums], metrics)
        results.append(ops.PassDone(ops.InlinePayload(encode(result))))
    return results


SERVER_ERRORS: Final = frozenset(
    {Code.INTERNAL, Code.UNAVAILABLE, Code.EXHAUSTED, Code.CORRUPT, Code.DEADLINE, Code.PRECONDITION}
)
"""Codes of failures for which the same request may succeed when it is retried."""


def failed(code: Code, message: str) -> ops.Failed:
    return ops.Failed("server" if code in SERVER_ERRORS else "user", message)
