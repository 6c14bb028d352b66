"""The torch dataset against a real coordinator: what counts as consumed, and where it may be read."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import pytest
from torch.utils.data import DataLoader, Dataset, Subset

import strata.coord.worker as strata
from strata.coord.worker.readers import MapStyle
from strata.coord.worker.torch_dataset import Position, ShardDataset, ShardLoader
from tests.shell.coord_worker.running import Site, acked, every_sample, site

SAMPLES: Final = 20
SHARD: Final = 8


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.fixture
async def found(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as running:
        await running.coordinator.serving()
        yield running


def join(found: Site, worker_id: str = "w", **settings: Any) -> strata.Worker:
    return strata.join(address=found.coordinator.address, id=worker_id, patience_s=20, **settings)


def corpus(found: Site, worker: strata.Worker) -> None:
    """Sample n is the number n; not shuffled, so that tests can name samples."""
    path = found.folder / "numbers.jsonl"
    path.write_text("".join(f"{number}\n" for number in range(SAMPLES)), encoding="utf-8")
    worker.dataset("corpus", [path], shard_size=SHARD, options=strata.DatasetOptions(shuffle=False, buckets=1))


def loader(dataset: ShardDataset, batch_size: int) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, collate_fn=list, num_workers=0)


async def test_an_epoch_in_batches_that_fit_no_shard_has_every_sample_once(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        for epoch in range(2):
            dataset = ShardDataset(worker, "corpus", epoch)
            batches = []
            while not dataset.is_over:
                for batch in loader(dataset, 7):
                    batches.append(batch)
                    dataset.consumed()
            assert [sample for batch in batches for sample in batch] == list(range(SAMPLES))
            assert [len(batch) for batch in batches] == [7, 7, 6]
    samples, _ = acked(await found.facts())
    assert samples == every_sample(2, SAMPLES)


async def test_a_batch_that_was_taken_and_not_consumed_is_for_whoever_reads_next(found: Site) -> None:
    with join(found, "first", elastic=True) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        batches = iter(loader(dataset, 5))
        assert next(batches) == [0, 1, 2, 3, 4]
        dataset.consumed()
        # Taken from two shards, and then the worker goes.
        assert next(batches) == [5, 6, 7, 8, 9]
    with join(found, "second", elastic=True) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        left = [sample for batch in loader(dataset, 5) for sample in batch]
        dataset.consumed()
    assert sorted(left) == list(range(5, SAMPLES))


async def test_an_iteration_begins_with_what_the_one_before_did_not_consume(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        broken_off = iter(dataset)
        assert [next(broken_off) for _ in range(3)] == [0, 1, 2]
        dataset.consumed()
        assert [next(broken_off) for _ in range(7)] == list(range(3, 10))
        again = list(dataset)
        assert again == list(range(3, SAMPLES))
        with pytest.raises(strata.StrataError, match="another iteration"):
            next(broken_off)


async def test_the_position_says_of_each_lease_how_far_the_model_has_learnt_from_it(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        samples = iter(dataset)
        taken = [next(samples) for _ in range(10)]
        assert taken == list(range(10))
        assert {each.consumed_until for each in dataset.position} == {0, SHARD}
        dataset.consumed()
        next(samples)
        # The first shard is consumed but not acked yet, so it belongs to the position as well.
        assert [each.consumed_until for each in dataset.position] == [SHARD, 10]
        capture = worker.begin_checkpoint(1)
        assert {Position(each.lease_id, each.consumed_until) for each in capture.consumed} == {*dataset.position}
        worker.give_up_checkpoint(capture)
        worker.flush()
        assert [each.consumed_until for each in dataset.position] == [10]


async def test_recovery_hands_out_again_what_was_consumed_after_the_checkpoint(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        samples = iter(dataset)
        for _ in range(11):
            next(samples)
        dataset.consumed()
        part = found.folder / "part"
        part.write_bytes(b"weights")
        assert worker.checkpoint(1, part).committed
        for _ in range(6):
            next(samples)
        dataset.consumed()
        worker.flush()
        manifest = worker.recover("test")
        assert manifest is not None
        assert dataset.position == ()
        assert sorted(dataset) == list(range(11, SAMPLES))


async def test_without_waiting_an_iteration_ends_while_another_worker_holds_the_rest(found: Site) -> None:
    with join(found, "other", elastic=True) as other, join(found, "w", elastic=True) as worker:
        for each in (other, worker):
            corpus(found, each)
        held = other.next_shard("corpus", 0)
        assert held is not None
        dataset = ShardDataset(worker, "corpus", wait=False)
        mine = list(dataset)
        dataset.consumed()
        assert len(mine) == SAMPLES - len(held)
        assert list(dataset) == []
        assert not dataset.is_over
        held.done()
        other.flush()
        assert list(dataset) == []
        assert dataset.is_over


async def test_a_loop_that_never_says_consumed_is_told_so(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        assert len(list(dataset)) == SAMPLES
        with pytest.raises(strata.StrataError, match=r"call consumed\(\)") as raised:
            iter(dataset)
        assert raised.value.code is strata.Code.PRECONDITION
        dataset.consumed()
        assert list(dataset) == []
        assert dataset.is_over


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_loader_processes_read_every_sample_once_in_whole_batches(found: Site, num_workers: int) -> None:
    with join(found) as worker:
        corpus(found, worker)
        for epoch in range(2):
            dataset = ShardDataset(worker, "corpus", epoch)
            batches = []
            # Numbers become tensors, as torch's own collation does.
            loader = ShardLoader(dataset, 3, num_workers=num_workers)
            while not dataset.is_over:
                for batch in loader:
                    batches.append(batch.tolist())
                    dataset.consumed()
            assert sorted(sample for batch in batches for sample in batch) == list(range(SAMPLES))
            assert sorted(len(batch) for batch in batches) == [2, 3, 3, 3, 3, 3, 3]
    samples, _ = acked(await found.facts())
    assert samples == every_sample(2, SAMPLES)


async def test_a_dataset_of_a_library_is_read_by_itself(found: Site) -> None:
    # Torch's own: with `__getitems__` the one, without the other.
    sources: tuple[MapStyle, ...] = (Subset(Squares(), range(SAMPLES)), Squares())
    with join(found) as worker:
        for number, source in enumerate(sources):
            assert worker.dataset(f"squares-{number}", source=source, shard_size=SHARD) == 3
            dataset = ShardDataset(worker, f"squares-{number}")
            first = next(iter(dataset))
            batches = list(ShardLoader(dataset, 7, collate_fn=list))
            dataset.consumed()
            assert sorted(chain.from_iterable(batches)) == [each * each for each in range(SAMPLES)]
            assert first in batches[0]


async def test_samples_that_lie_nowhere_and_data_that_is_named_twice_are_errors(found: Site) -> None:
    with join(found) as worker:
        with pytest.raises(strata.StrataError, match="says itself which samples") as twice:
            worker.dataset("corpus", samples=5, source=Squares())
        assert twice.value.code is strata.Code.INVALID
        worker.dataset("corpus", samples=5)
        shard = worker.next_shard("corpus", 0)
        assert shard is not None
        with pytest.raises(strata.StrataError, match="lie in no file"):
            list(shard.open())


async def test_what_loader_processes_read_ahead_is_not_consumed(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        batches = iter(ShardLoader(dataset, 3, collate_fn=list, num_workers=2, prefetch_factor=3))
        first = next(batches)
        assert first == [0, 1, 2]
        assert {each.consumed_until for each in dataset.position} == {0, SHARD, 2 * SHARD}
        dataset.consumed()
        next(batches)
        capture = worker.begin_checkpoint(1)
        assert sorted(each.consumed_until for each in capture.consumed) == [3, SHARD, 2 * SHARD]
        worker.give_up_checkpoint(capture)
        rest = [sample for batch in ShardLoader(dataset, 3, collate_fn=list) for sample in batch]
        assert sorted(rest) == list(range(3, SAMPLES))
        with pytest.raises(strata.StrataError, match="another iteration"):
            next(batches)


async def test_a_loader_process_that_is_killed_loses_no_sample(found: Site) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        trained: list[int] = []
        kills = 0
        while not dataset.is_over:
            loader = ShardLoader(dataset, 2, collate_fn=list, num_workers=2)
            try:
                for batch in loader:
                    trained += batch
                    dataset.consumed()
                    if len(trained) == 6:
                        victim = multiprocessing.active_children()[kills]
                        victim.kill()
                        victim.join()
            except RuntimeError:
                # That is how torch reports a dead loader process.
                kills += 1
        assert kills == 1
        assert sorted(trained) == list(range(SAMPLES))
    samples, _ = acked(await found.facts())
    assert samples == every_sample(1, SAMPLES)


@pytest.mark.timeout(300)
async def test_a_worker_that_is_killed_takes_its_loader_processes_with_it_and_loses_no_sample(found: Site) -> None:
    files = found.corpus(300)
    given: dict[str, Any] = {"files": files, "shard_size": 40, "batch_size": 4, "epochs": 2, "out": str(found.folder)}
    first = await found.start("train-with-loader", "w", hold_at=33, **given)
    # In the middle of an epoch, of a shard and between two checkpoints.
    loaders = (await first.event("loaders", 120))["pids"]
    assert len(loaders) == 2
    first.signal(signal.SIGKILL)
    await first.process.wait()
    async with asyncio.timeout(30):
        while any(psutil.pid_exists(each) for each in loaders):
            await asyncio.sleep(0.05)
    second = await found.start("train-with-loader", "w", hold_at=-1, **given)
    assert (await second.event("started", 120))["step"] == 30
    model = (await second.event("trained", 120))["model"]
    lines = [line for file in files for line in Path(file).read_text("utf-8").splitlines()]
    assert Counter(model) == Counter(f"{epoch} {line}" for epoch in range(2) for line in lines)


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_a_plain_loader_with_processes_of_its_own_is_refused(found: Site, start: str) -> None:
    with join(found) as worker:
        corpus(found, worker)
        dataset = ShardDataset(worker, "corpus")
        many: DataLoader[Any] = DataLoader(dataset, num_workers=1, multiprocessing_context=start, timeout=60)
        # Of a forked process torch keeps the words and not the type; and gRPC's threads, which do not follow it there,
        # may end it before it can say a word.
        said = "ShardLoader" if start == "spawn" else "ShardLoader|killed by signal|exited unexpectedly"
        with pytest.raises((strata.StrataError, RuntimeError), match=said):
            next(iter(many))
        # Nothing was consumed by the attempt.
        assert list(dataset) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"drop_last": True}, "come again for ever"),
        ({"shuffle": True}, "the coordinator shuffles"),
        ({"persistent_workers": True}, "end with their iteration"),
        ({"multiprocessing_context": "fork"}, "gRPC does not survive"),
        ({"batch_size": 0}, "at least one sample"),
    ],
)
async def test_an_argument_that_would_break_the_count_is_refused(
    found: Site, given: dict[str, Any], reason: str
) -> None:
    with join(found) as worker, pytest.raises(strata.StrataError, match=reason):
        ShardLoader(ShardDataset(worker, "corpus"), **given)


def test_the_sdk_alone_does_not_import_torch() -> None:
    code = "import sys, strata.coord.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
