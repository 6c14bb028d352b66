"""Packs datums into rows of a token limit, as few and as equal as possible and the same number on every rank, unpacks
them, and words the errors of too long datums.

The ranks of a sharded model run collectives in every layer of every row, so the n-th row of all ranks takes as long as
the longest of them: rows of similar length run in the same round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from strata.base.errors import Code, StrataError
from strata.train.core.commands import Row, Segment

Output = TypeVar("Output")
Rows = Sequence[Sequence[Row]]
"""`rows[rank]` are those of a rank, in order."""


class Packed(NamedTuple):
    rows: Rows
    efficiency: float
    """Tokens, divided by the capacity of the ranks in the time of the longest rows."""


class _Piece(NamedTuple):
    """Datums that stay in one row."""

    length: int
    segments: tuple[Segment, ...]


def pack(
    items: Sequence[Sequence[int]],
    *,
    ranks: int,
    max_tokens_per_row: int,
    max_context: int,
    group_sizes: Sequence[int] | None = None,
    one_document_per_row: bool = False,
) -> Packed:
    """`items[i]` are the lengths of the datums of operation i. INVALID if one is longer than the model can take.

    The datums of a group stay together if a row holds them all.
    """
    check_lengths(items, max_context)
    if one_document_per_row:
        # A row is full with any datum, so each gets one of its own.
        max_tokens_per_row = 1
    pieces = [
        piece
        for item, lengths in enumerate(items)
        for piece in _pieces(item, lengths, group_sizes[item] if group_sizes else 1, max_tokens_per_row)
    ]
    # Long ones first; equal ones in the order asked for, so that the same operations always make the same rows.
    pieces.sort(key=lambda piece: (-piece.length, piece.segments[0].item, piece.segments[0].datum))
    bins = _fewest_rounds(pieces, ranks, max_tokens_per_row)
    length_of = {(i, d): length for i, lengths in enumerate(items) for d, length in enumerate(lengths)}
    return _distribute(bins, length_of, ranks)


def _pieces(item: int, lengths: Sequence[int], group_size: int, capacity: int) -> Iterator[_Piece]:
    for start in range(0, len(lengths), group_size):
        group = [
            _Piece(lengths[datum], (Segment(item, datum),))
            for datum in range(start, min(start + group_size, len(lengths)))
        ]
        total = sum(piece.length for piece in group)
        if total <= capacity:
            yield _Piece(total, tuple(segment for piece in group for segment in piece.segments))
        else:
            yield from group


def check_lengths(items: Sequence[Sequence[int]], max_context: int, row_tokens: int = 0) -> None:
    """INVALID if a datum is longer than the model can take, or than the memory of a rank holds (0: any length)."""
    for lengths in items:
        if not lengths:
            raise StrataError(Code.INVALID, "there is nothing to train on: the batch is empty")
        for datum, length in enumerate(lengths):
            if length < 1:
                raise StrataError(Code.INVALID, f"datum {datum} has no tokens", datum=datum)
            if length > max_context:
                raise StrataError(
                    Code.INVALID,
                    f"datum {datum} has {length:,} tokens, and the model takes at most {max_context:,}",
                    datum=datum,
                )
            if row_tokens and length > row_tokens:
                raise StrataError(
                    Code.INVALID,
                    f"datum {datum} has {length:,} tokens, and the memory of the ranks holds about {row_tokens:,}",
                    datum=datum,
                )


def redistribute(rows: Rows, items: Sequence[Sequence[int]], ranks: int) -> Rows:
    """The same rows over another number of ranks: for the replay on a group of another size."""
    length_of = {(i, d): length for i, lengths in enumerate(items) for d, length in enumerate(lengths)}
    return _distribute([list(row) for rank in rows for row in rank if row], length_of, ranks).rows


def unpack(rows: Rows, outputs: Sequence[Sequence[Sequence[Output]]]) -> list[list[Output]]:
    """`outputs[rank][row][segment]` into `[item][datum]`: the output of each datum, in the order of the request."""
    found: dict[int, dict[int, Output]] = {}
    for of_rank, outputs_of_rank in zip(rows, outputs, strict=True):
        for row, outputs_of_row in zip(of_rank, outputs_of_rank, strict=True):
            for segment, output in zip(row, outputs_of_row, strict=True):
                found.setdefault(segment.item, {})[segment.datum] = output
    return [[found[item][datum] for datum in range(len(found[item]))] for item in range(len(found))]


def _fewest_rounds(pieces: Sequence[_Piece], ranks: int, capacity: int) -> list[list[Segment]]:
    """Rows that fill the ranks evenly: the smallest capacity that needs no more rounds than the one allowed."""
    bins = _best_fit(pieces, capacity)
    rounds = -(-len(bins) // ranks)
    total, longest = sum(piece.length for piece in pieces), pieces[0].length
    low, high = min(max(longest, -(-total // (rounds * ranks))), capacity), capacity
    while low < high:
        middle = (low + high) // 2
        tighter = _best_fit(pieces, middle)
        if len(tighter) <= rounds * ranks:
            bins, high = tighter, middle
        else:
            low = middle + 1
    return bins


def _best_fit(pieces: Sequence[_Piece], capacity: int) -> list[list[Segment]]:
    """Each into the fullest row that has room for it. One that is longer than a row gets one of its own."""
    bins: list[list[Segment]] = []
    room: list[tuple[int, int]] = []
    for length, segments in pieces:
        place = bisect_left(room, (length, -1))
        if place == len(room):
            bins.append(list(segments))
            left, index = capacity - length, len(bins) - 1
        else:
            left, index = room.pop(place)
            bins[index] += segments
            left -= length
        if left > 0:
            insort(room, (left, index))
    return bins


def _distribute(bins: list[list[Segment]], length_of: dict[tuple[int, int], int], ranks: int) -> Packed:
    weight = [sum(length_of[segment.item, segment.datum] for segment in row) for row in bins]
    order = sorted(range(len(bins)), key=lambda index: (-weight[index], index))
    rows: list[list[Row]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    time = 0
    for start in range(0, len(order), ranks):
        together = order[start : start + ranks]
        time += weight[together[0]]
        # The heaviest of a round goes to the rank that had the least so far.
        lightest = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for place, rank in enumerate(lightest):
            index = together[place] if place < len(together) else None
            rows[rank].append(tuple(bins[index]) if index is not None else ())
            load[rank] += weight[index] if index is not None else 0
    return Packed(rows, sum(weight) / (time * ranks) if time else 1.0)
