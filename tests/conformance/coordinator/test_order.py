"""The canonical order and the slices of DETERMINISTIC datasets: the published vectors, and what is handed out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conformance.coordinator.drivers import ROOT
from tests.conformance.coordinator.fleet import MARKS, Fleet

pytestmark = MARKS

VECTORS: dict[str, Any] = json.loads((ROOT / "docs" / "vectors" / "permutation.json").read_text(encoding="utf-8"))


async def test_the_published_orders_are_reproduced(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    for vector in VECTORS["orders"]:
        given = {name: vector[name] for name in ("dataset_id", "seed", "epoch", "n", "positions")}
        found = await driver.ask("order", **given)
        assert found == {name: vector[name] for name in ("key", "half", "round_keys", "items")}


async def test_the_published_slices_are_reproduced(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    for vector in VECTORS["slices"]:
        given = {name: vector[name] for name in ("step", "rank", "world_size", "global_batch", "n")}
        assert await driver.ask("slice", **given) == {name: vector[name] for name in ("epoch", "start", "stop")}


async def test_an_order_that_is_not_shuffled_is_the_identity(fleet: Fleet, sdk: str) -> None:
    driver = await fleet.start(sdk)
    found = await driver.ask("order", dataset_id="d", seed="1", epoch="0", n=9, positions=[8, 0, 3], shuffle=False)
    assert found["items"] == [8, 0, 3]


@pytest.mark.parametrize(
    "given",
    [
        {"step": 0, "rank": 2, "world_size": 2, "global_batch": 4, "n": 9},
        {"step": 0, "rank": 0, "world_size": 3, "global_batch": 4, "n": 9},
        {"step": 0, "rank": 0, "world_size": 1, "global_batch": 4, "n": 0},
    ],
    ids=["no such rank", "does not divide", "no items"],
)
async def test_a_slice_that_cannot_be_is_refused(fleet: Fleet, sdk: str, given: dict[str, int]) -> None:
    assert (await (await fleet.start(sdk)).refused("slice", **given)).code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
async def test_a_step_has_the_slices_that_every_language_computes(
    fleet: Fleet, pair: tuple[str, str], shuffle: bool
) -> None:
    workers = await fleet.join_all(*pair)
    for worker in workers:
        found = await worker.ask(
            "dataset",
            dataset_id="corpus",
            samples=95,
            shard_size=5,
            seed="11",
            shuffle=shuffle,
            global_batch_shards=4,
        )
        assert found["num_shards"] == 19
    seen: list[int] = []
    for step in range(7):
        for worker in workers:
            rank = (await worker.ask("state"))["rank"]
            cut = await worker.ask("slice", step=step, rank=rank, world_size=2, global_batch=4, n=19)
            positions = list(range(cut["start"], cut["stop"]))
            order = await worker.ask(
                "order",
                dataset_id="corpus",
                seed="11",
                epoch=str(cut["epoch"]),
                n=19,
                positions=positions,
                shuffle=shuffle,
            )
            shards = (await worker.ask("step_shards", dataset_id="corpus", step=step))["shards"]
            assert [shard["start"] // 5 for shard in shards] == order["items"]
            if cut["epoch"] == 0:
                seen += order["items"]
    assert sorted(seen) == list(range(19))
