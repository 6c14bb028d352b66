"""A pass on its way to the ranks and back: cut into what each rank computes, and put together again in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import commands, ops
from strata.train.runner.passes.losses import combine
from strata.train.runner.passes.tensors import decode_pass_data


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One client's part of the pass, without its data."""

    model_id: str
    loss: ops.LossName
    config: Mapping[str, float]


class Placed(msgspec.Struct, frozen=True, array_like=True):
    item: int
    datum: int
    content: ops.Datum


class RankPass(msgspec.Struct, frozen=True, array_like=True):
    """What one rank computes, row after row."""

    forward_only: bool
    items: Sequence[Item]
    rows: Sequence[Sequence[Placed]]
    replayed: bool = False


class Computed(msgspec.Struct, frozen=True, array_like=True):
    item: int
    datum: int
    output: ops.DatumOutput
    metrics: Mapping[str, float]


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """Why an item failed; `datum` is the one it failed at, -1 if it is none of them."""

    item: int
    datum: int
    code: Code
    message: str
    memory: bool = False
    """It does not fit into the memory of the ranks, as it is now."""

    @property
    def sentence(self) -> str:
        return self.message if self.datum < 0 else f"datum {self.datum}: {self.message}"


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    computed: Sequence[Computed]
    refused: Sequence[Refused]


encode: Final = msgspec.msgpack.Encoder().encode
decode_pass: Final = msgspec.msgpack.Decoder(RankPass).decode
decode_report: Final = msgspec.msgpack.Decoder(RankReport).decode


class Cut(msgspec.Struct, frozen=True):
    parts: Sequence[RankPass]
    refused: Sequence[Refused]
    """Items whose data cannot be read: they are in no row."""
    datums: Sequence[int]
    """Of each item."""
    tokens: int


def cut(whole: commands.PassCommand, ranks: int) -> Cut:
    """What each rank gets. The composition is the orchestrator's; one that does not fit is refused as a whole."""
    contents: list[Sequence[ops.Datum]] = []
    refused: list[Refused] = []
    for number, item in enumerate(whole.items):
        try:
            contents.append(decode_pass_data(item.data).datums)
        except StrataError as error:
            contents.append(())
            refused.append(Refused(number, -1, error.code, error.message))
    _check_composition(whole, contents, {one.item for one in refused}, ranks)
    items = [Item(item.model_id, item.loss, item.config) for item in whole.items]
    parts = [
        RankPass(
            whole.forward_only,
            items,
            [
                [
                    Placed(place.item, place.datum, contents[place.item][place.datum])
                    for place in row
                    if contents[place.item]
                ]
                for row in rows
            ],
            whole.replayed,
        )
        for rows in whole.rows
    ]
    tokens = sum(datum.length for datums in contents for datum in datums)
    return Cut(parts, refused, [len(datums) for datums in contents], tokens)


def _check_composition(
    whole: commands.PassCommand, contents: Sequence[Sequence[ops.Datum]], unread: set[int], ranks: int
) -> None:
    if len(whole.rows) != ranks or len({len(rows) for rows in whole.rows}) != 1:
        raise StrataError(Code.INTERNAL, f"the pass does not have equally many rows for each of {ranks} ranks")
    placed = Counter((place.item, place.datum) for rows in whole.rows for row in rows for place in row)
    expected = {(item, datum) for item, datums in enumerate(contents) for datum in range(len(datums))}
    if {place for place in placed if place[0] not in unread} != expected or any(n > 1 for n in placed.values()):
        raise StrataError(Code.INTERNAL, "the rows of the pass do not hold each datum once")


def put_together(made: Cut, reports: Sequence[RankReport]) -> list[ops.Result]:
    """The results in the order of the items, and in each the outputs in the order of its datums."""
    refused: dict[int, Refused] = {}
    for one in sorted(
        (*made.refused, *(one for report in reports for one in report.refused)), key=lambda one: one.datum
    ):
        refused.setdefault(one.item, one)
    computed = {(one.item, one.datum): one for report in reports for one in report.computed}
    results: list[ops.Result] = []
    for item, count in enumerate(made.datums):
        if item in refused:
            found = refused[item]
            memory = ops.Failed("user", found.sentence, memory=True)
            results.append(memory if found.memory else failed(found.code, found.sentence))
            continue
        own = [computed[item, datum] for datum in range(count)]
        result = ops.PassResult([one.output for one in own], combine([one.metrics for one in own]))
        results.append(ops.PassDone(ops.InlinePayload(encode(result))))
    return results


OURS: Final = frozenset(
    {Code.INTERNAL, Code.UNAVAILABLE, Code.EXHAUSTED, Code.CORRUPT, Code.DEADLINE, Code.PRECONDITION}
)
"""Codes of failures that the same request may get over another time."""


def failed(code: Code, message: str) -> ops.Failed:
    return ops.Failed("server" if code in OURS else "user", message)
