"""The canonical order is a bijection, shuffles well, is frozen by published vectors and fast for millions."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.coord.core.permutation import MAX_ITEMS, Order, Slice, key_of, mix, order_of, slice_of

VECTORS: Final = Path(__file__).parents[3] / "docs" / "vectors" / "permutation.json"
TOP: Final = 2**64 - 1

words = st.integers(0, TOP)
sizes = st.one_of(st.integers(1, 70), st.integers(1, 3000))


class OrderVector(msgspec.Struct, forbid_unknown_fields=True):
    dataset_id: str
    seed: str
    epoch: str
    n: int
    half: int
    fnv: str
    key: str
    round_keys: list[str]
    positions: list[int]
    items: list[int]


class SliceVector(msgspec.Struct, forbid_unknown_fields=True):
    step: int
    rank: int
    world_size: int
    global_batch: int
    n: int
    epoch: int
    start: int
    stop: int


class Vectors(msgspec.Struct, forbid_unknown_fields=True):
    about: str
    version: int
    orders: list[OrderVector]
    slices: list[SliceVector]


def vectors() -> Vectors:
    return msgspec.json.decode(VECTORS.read_bytes(), type=Vectors)


def test_the_published_orders_are_what_the_code_computes() -> None:
    published = vectors().orders
    assert {1, 2, 3, 7, 64, 1000, 1_000_003} <= {vector.n for vector in published}
    for vector in published:
        order = order_of(vector.dataset_id, int(vector.seed), int(vector.epoch), vector.n)
        assert order.key == int(vector.key, 16)
        assert order.half == vector.half
        assert list(order.round_keys) == [int(key, 16) for key in vector.round_keys]
        assert [order.at(position) for position in vector.positions] == vector.items
        assert [order.position_of(item) for item in vector.items] == vector.positions


def test_the_published_slices_are_what_the_code_computes() -> None:
    for v in vectors().slices:
        found = slice_of(v.step, v.rank, v.world_size, global_batch=v.global_batch, n=v.n)
        assert found == Slice(v.epoch, v.start, v.stop)


def test_the_building_blocks_are_the_well_known_ones() -> None:
    golden = 0x9E3779B97F4A7C15
    splitmix64_from_1234567 = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(1234567 + step * golden) for step in (1, 2, 3)] == splitmix64_from_1234567
    fnv_of_foobar = 0x85944171F73967E8
    key = mix(fnv_of_foobar + golden)
    key = mix((key ^ 5) + golden)
    assert key_of("foobar", 5, 9) == mix((key ^ 9) + golden)


@given(n=sizes, key=words)
def test_an_order_is_a_bijection_with_an_inverse(n: int, key: int) -> None:
    order = Order(n, key)
    items = order.items(0, n)
    assert sorted(items.tolist()) == list(range(n))
    assert order.positions(items).tolist() == list(range(n))


@given(n=sizes, key=words, data=st.data())
def test_scalar_and_vectorised_agree(n: int, key: int, data: st.DataObject) -> None:
    order = Order(n, key)
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, min(n, start + 50)))
    items = order.items(start, stop).tolist()
    assert items == [order.at(position) for position in range(start, stop)]
    assert order.positions(items).tolist() == [order.position_of(item) for item in items] == list(range(start, stop))


@given(n=st.integers(1, MAX_ITEMS), key=words, data=st.data())
def test_a_huge_order_has_an_inverse_too(n: int, key: int, data: st.DataObject) -> None:
    order = Order(n, key)
    position = data.draw(st.integers(0, n - 1))
    item = order.at(position)
    assert 0 <= item < n
    assert order.position_of(item) == position
    assert order.items(position, position + 1).tolist() == [item]


def test_without_shuffling_the_order_is_the_identity() -> None:
    order = order_of("corpus", 3, 1, 10, shuffle=False)
    assert [order.at(position) for position in range(10)] == order.items(0, 10).tolist() == list(range(10))
    assert order.position_of(7) == 7
    assert order.positions([9, 0]).tolist() == [9, 0]


def test_dataset_seed_and_epoch_each_change_the_order() -> None:
    variants = [("a", 1, 1), ("b", 1, 1), ("a", 2, 1), ("a", 1, 2), ("a", 2, 2), ("ä", 1, 1), ("a" + chr(0x308), 1, 1)]
    found = {tuple(order_of(*variant, 100).items(0, 100).tolist()) for variant in variants}
    assert len(found) == len(variants)


def test_positions_do_not_correlate_with_items_neighbours_or_the_next_epoch() -> None:
    n = 50_021
    limit = 4 / n**0.5
    for epoch in range(8):
        items = order_of("corpus", 1, epoch, n).items(0, n).astype(np.float64)
        following = order_of("corpus", 1, epoch + 1, n).items(0, n).astype(np.float64)
        assert abs(np.corrcoef(np.arange(n), items)[0, 1]) < limit
        assert abs(np.corrcoef(items[:-1], items[1:])[0, 1]) < limit
        assert abs(np.corrcoef(items, following)[0, 1]) < limit


@pytest.mark.parametrize(
    ("n", "epochs", "critical"), [(2, 2000, 10.8), (3, 3000, 20.5), (4, 4800, 49.7), (5, 6000, 173.6)]
)
def test_every_permutation_of_a_few_items_is_equally_likely(n: int, epochs: int, critical: float) -> None:
    """Chi-square at p = 0.001 over all n! permutations."""
    seen = Counter(tuple(order_of("corpus", 11, epoch, n).at(p) for p in range(n)) for epoch in range(epochs))
    every = list(itertools.permutations(range(n)))
    expected = epochs / len(every)
    assert sum((seen[one] - expected) ** 2 / expected for one in every) < critical


def test_every_item_is_equally_likely_at_the_first_and_the_last_position() -> None:
    n, epochs, critical = 50, 5000, 85.4
    for position in (0, n - 1):
        seen = Counter(order_of("corpus", 5, epoch, n).at(position) for epoch in range(epochs))
        expected = epochs / n
        assert sum((seen[item] - expected) ** 2 / expected for item in range(n)) < critical


def test_a_million_items_take_a_moment() -> None:
    """0.1 to 0.3 s where it was measured; the bound only tells a vector from a loop. 2^20 + 1 is the longest walk."""
    for n in (1_000_000, 2**20 + 1):
        order = order_of("corpus", 1, 0, n)
        before_s = time.process_time()
        items = order.items(0, n)
        assert time.process_time() - before_s < 2.0
        assert np.array_equal(np.sort(items), np.arange(n, dtype=np.uint64))


def test_a_worker_needs_no_numpy() -> None:
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "from strata.coord.core.permutation import order_of, slice_of\n"
        "order = order_of('corpus', 1, 0, 7)\n"
        "print([order.at(p) for p in range(7)], slice_of(0, 0, 1, global_batch=4, n=7).stop, order.position_of(6))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[6, 5, 1, 2, 3, 4, 0] 4 0"


@given(n=st.integers(1, 200), per_rank=st.integers(1, 6), world_size=st.integers(1, 8), epochs=st.integers(1, 3))
def test_the_slices_of_every_epoch_cover_each_position_once(
    n: int, per_rank: int, world_size: int, epochs: int
) -> None:
    batch = per_rank * world_size
    steps = -(-n // batch)
    for epoch in range(epochs):
        seen: list[int] = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            slices = [slice_of(step, rank, world_size, global_batch=batch, n=n) for rank in range(world_size)]
            assert {one.epoch for one in slices} == {epoch}
            sizes_of_ranks = [one.stop - one.start for one in slices]
            assert max(sizes_of_ranks) - min(sizes_of_ranks) <= 1
            assert sizes_of_ranks == sorted(sizes_of_ranks, reverse=True)
            for one in slices:
                seen += range(one.start, one.stop)
        assert seen == list(range(n))


@given(n=st.integers(1, 200), step=st.integers(0, 500))
def test_a_step_is_the_same_global_batch_for_every_world_size_that_divides_it(n: int, step: int) -> None:
    batches = set()
    for world_size in (1, 2, 3, 4, 6, 8, 12, 24):
        slices = [slice_of(step, rank, world_size, global_batch=24, n=n) for rank in range(world_size)]
        batches.add((slices[0].epoch, tuple(p for one in slices for p in range(one.start, one.stop))))
    assert len(batches) == 1


def test_the_last_batch_of_an_epoch_is_short_and_the_next_epoch_starts_afresh() -> None:
    of_step = [[slice_of(step, rank, 2, global_batch=4, n=5) for rank in range(2)] for step in range(3)]
    assert of_step == [
        [Slice(0, 0, 2), Slice(0, 2, 4)],
        [Slice(0, 4, 5), Slice(0, 5, 5)],
        [Slice(1, 0, 2), Slice(1, 2, 4)],
    ]


def test_what_has_no_meaning_is_refused() -> None:
    order = Order(5, 1)
    for refused in (
        lambda: order.at(5),
        lambda: order.at(-1),
        lambda: order.position_of(5),
        lambda: order.items(0, 6),
        lambda: order.items(3, 2),
        lambda: order.positions([0, 5]),
        lambda: order.positions([-1]),
        lambda: order.positions(np.array([0.5])),
        lambda: Order(0, 1).at(0),
        lambda: Order(-1, 1),
        lambda: Order(MAX_ITEMS + 1, 1),
        lambda: Order(5, 2**64),
        lambda: key_of("corpus", 2**64, 0),
        lambda: key_of("corpus", 0, -1),
        lambda: slice_of(0, 0, 3, global_batch=4, n=10),
        lambda: slice_of(0, 0, 0, global_batch=4, n=10),
        lambda: slice_of(0, 2, 2, global_batch=4, n=10),
        lambda: slice_of(-1, 0, 2, global_batch=4, n=10),
        lambda: slice_of(0, 0, 1, global_batch=4, n=0),
        lambda: slice_of(0, 0, 1, global_batch=0, n=4),
    ):
        with pytest.raises(StrataError) as error:
            refused()
        assert error.value.code is Code.INVALID
    assert order.positions([]).tolist() == Order(0, 1).items(0, 0).tolist() == []
