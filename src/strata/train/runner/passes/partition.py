"""Partitions a pass into what each rank computes, and merges outputs, metrics and failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import commands, model_options, ops
from strata.train.core.loss_graph import CustomLoss
from strata.train.core.router_replay import decode_pass_routing
from strata.train.core.sampling import SampledRouting
from strata.train.status.pass_metrics import combine_metrics


class RankPassItem(msgspec.Struct, frozen=True, array_like=True):
    """One operation of the pass, without its data."""

    model_id: str
    loss: model_options.LossName
    config: Mapping[str, float]
    custom: CustomLoss | None = None
    split: bool = False
    """A group of its datums is in several rows, so that no row alone has all that its loss needs."""
    datums: int = 1
    """How many it has, on all ranks together."""
    replays: bool = False
    """Whether any of its datums replays routing."""

    @property
    def group_size(self) -> int:
        return ops.group_size_of(self.loss, self.config)

    @property
    def groups(self) -> int:
        return -(-self.datums // self.group_size)


class PackedDatum(msgspec.Struct, frozen=True, array_like=True):
    item: int
    datum: int
    content: ops.Datum
    routing: SampledRouting | None = None


class RankPass(msgspec.Struct, frozen=True, array_like=True):
    """What one rank computes: packed rows, one after the other. Each row is a micro-batch."""

    forward_only: bool
    items: Sequence[RankPassItem]
    rows: Sequence[Sequence[PackedDatum]]
    replayed: bool = False
    images: Sequence[int] = ()
    """The most images that a rank has in each row, if any has one: a sharded model runs collectives for each."""


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

    def result(self) -> ops.Failed:
        sentence = self.message if self.datum < 0 else f"datum {self.datum}: {self.message}"
        return ops.Failed("user", sentence, memory=True) if self.memory else failed(self.code, sentence)


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
    payloads, failures = _decode_items(command.items)
    contents = [payload.datums for payload in payloads]
    routing = [_decode_routing(item, len(datums)) for item, datums in zip(command.items, contents, strict=True)]
    _check_packing(command, contents, {failure.item for failure in failures}, ranks)
    split = _split_items(command)
    items = [
        RankPassItem(
            item.model_id,
            item.loss,
            item.config,
            payload.custom,
            number in split,
            len(payload.datums),
            any(routing[number]),
        )
        for number, (item, payload) in enumerate(zip(command.items, payloads, strict=True))
    ]
    rows_of_ranks = [[_packed_datums(row, contents, routing) for row in rows] for rows in command.rows]
    images = _count_images(rows_of_ranks)
    of_ranks = [RankPass(command.forward_only, items, rows, command.replayed, images) for rows in rows_of_ranks]
    tokens = sum(datum.length for datums in contents for datum in datums)
    return PartitionedPass(of_ranks, failures, [len(datums) for datums in contents], tokens)


def _split_items(command: commands.PassCommand) -> set[int]:
    """Items of which a group is not in one row."""
    rows_of: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for rank, rows in enumerate(command.rows):
        for place, row in enumerate(rows):
            for segment in row:
                item = command.items[segment.item]
                group = segment.datum // ops.group_size_of(item.loss, item.config)
                rows_of[segment.item, group].add((rank, place))
    return {item for (item, _), places in rows_of.items() if len(places) > 1}


def _decode_items(items: Sequence[commands.PassItem]) -> tuple[list[ops.PassData], list[ItemFailure]]:
    """The data of each item; none of an item that cannot be decoded."""
    contents: list[ops.PassData] = []
    failures: list[ItemFailure] = []
    for number, item in enumerate(items):
        try:
            contents.append(ops.decode_pass_data(item.data))
        except msgspec.MsgspecError as error:
            contents.append(ops.PassData(()))
            message = f"the payload cannot be decoded as the data of a pass: {error}"
            failures.append(ItemFailure(number, -1, Code.INVALID, message))
    return contents, failures


def _decode_routing(item: commands.PassItem, datums: int) -> Sequence[SampledRouting | None]:
    """The routing of each datum. The orchestrator wrote it: what cannot be read fails the whole pass."""
    if not item.routing:
        return [None] * datums
    try:
        routing = decode_pass_routing(item.routing).datums
    except msgspec.MsgspecError as error:
        raise StrataError(Code.INTERNAL, f"the routing of a pass cannot be decoded: {error}") from error
    if len(routing) != datums:
        raise StrataError(Code.INTERNAL, f"there is routing of {len(routing)} datums for a pass of {datums}")
    return routing


def _packed_datums(
    row: commands.Row,
    contents: Sequence[Sequence[ops.Datum]],
    routing: Sequence[Sequence[SampledRouting | None]],
) -> list[PackedDatum]:
    return [
        PackedDatum(
            segment.item,
            segment.datum,
            contents[segment.item][segment.datum],
            routing[segment.item][segment.datum],
        )
        for segment in row
        if contents[segment.item]
    ]


def _count_images(rows_of_ranks: Sequence[Sequence[Sequence[PackedDatum]]]) -> list[int]:
    together = zip(*rows_of_ranks, strict=True)
    most = [max(sum(len(packed.content.images) for packed in row) for row in rows) for rows in together]
    return most if any(most) else []


def _check_packing(
    command: commands.PassCommand, contents: Sequence[Sequence[ops.Datum]], undecoded: set[int], ranks: int
) -> None:
    if len(command.rows) != ranks or len({len(rows) for rows in command.rows}) != 1:
        raise StrataError(Code.INTERNAL, f"the pass does not have equally many rows for each of {ranks} ranks")
    segments = chain.from_iterable(chain.from_iterable(command.rows))
    packed = Counter((segment.item, segment.datum) for segment in segments)
    decoded = {place for place in packed if place[0] not in undecoded}
    expected = {(item, datum) for item, datums in enumerate(contents) for datum in range(len(datums))}
    if decoded != expected or packed.total() != len(packed):
        raise StrataError(Code.INTERNAL, "the rows of the pass do not hold each datum once")


def merge_reports(partitioned: PartitionedPass, reports: Sequence[RankReport]) -> list[ops.Result]:
    """The results in the order of the items, each with its outputs in the order of its datums."""
    failures = _first_failures([*partitioned.failures, *chain.from_iterable(report.failures for report in reports)])
    computed = {(datum.item, datum.datum): datum for report in reports for datum in report.computed}
    results: list[ops.Result] = []
    for item, count in enumerate(partitioned.datums):
        if item in failures:
            results.append(failures[item].result())
        else:
            results.append(_merge_datums([computed[item, datum] for datum in range(count)]))
    return results


def _first_failures(failures: Iterable[ItemFailure]) -> dict[int, ItemFailure]:
    """Returns the failure of each failed item at its first datum."""
    first: dict[int, ItemFailure] = {}
    for failure in sorted(failures, key=lambda failure: failure.datum):
        first.setdefault(failure.item, failure)
    return first


def _merge_datums(datums: Sequence[ComputedDatum]) -> ops.PassDone:
    metrics = combine_metrics([datum.metrics for datum in datums])
    result = ops.PassResult([datum.output for datum in datums], metrics)
    return ops.PassDone(ops.InlinePayload(encode(result)))


SERVER_ERRORS: Final = frozenset(
    {Code.INTERNAL, Code.UNAVAILABLE, Code.EXHAUSTED, Code.CORRUPT, Code.DEADLINE, Code.PRECONDITION}
)
"""Codes of failures for which the same request may succeed when it is retried."""


def failed(code: Code, message: str) -> ops.Failed:
    return ops.Failed("server" if code in SERVER_ERRORS else "user", message)
