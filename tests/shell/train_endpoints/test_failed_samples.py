"""What becomes of a sample that an endpoint failed to draw."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strata.base.errors import Code, StrataError
from strata.train.core import ops
from strata.train.core.inputs import CompleteRouted, RequeueRouted
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.endpoints.publisher import MAX_FAILURES, SUSPECT, Publisher
from strata.train.settings import load_settings
from tests.shell.train_orchestrator.leaders import leading
from tests.support.manual_clock import ManualClock
from tests.support.memory_journal import MemoryJournal

DIED = StrataError(Code.UNAVAILABLE, "it died", connected=True)
DOWN = StrataError(Code.UNAVAILABLE, "it is down", connected=False)


async def publisher(folder: Path, inference: str) -> Publisher:
    file = folder / "server.toml"
    file.write_text(f'[server]\ndata = "{folder}"\n[model]\npath = "tiny"\n[inference]\n{inference}', encoding="utf-8")
    clock = ManualClock()

    async def keep(result: ops.Result) -> ops.Result:
        return result

    return Publisher(load_settings(file, environ={}), await leading(MemoryJournal(clock), clock), keep)


async def test_a_sample_waits_for_its_engine_and_fails_when_engines_died_of_it_too_often(tmp_path: Path) -> None:
    found = await publisher(tmp_path, 'engine = "vllm"')
    for _ in range(3 * MAX_FAILURES):
        assert found._after_failure("f", "engine-0", DOWN) == RequeueRouted("f", again=True)
    for _ in range(MAX_FAILURES - 1):
        assert found._after_failure("f", "engine-0", DIED) == RequeueRouted("f", again=True)
    assert found._after_failure("other", "engine-0", DIED) == RequeueRouted("other", again=True)
    last = found._after_failure("f", "engine-0", DIED)
    assert isinstance(last, CompleteRouted)
    assert isinstance(last.result, ops.Failed)
    assert "it died" in last.result.message


async def test_a_sample_that_engines_may_die_of_is_drawn_alone(tmp_path: Path) -> None:
    """Two engines that fail with every sample beside the poisonous one: it fails in the end, and no other does."""
    found = await publisher(tmp_path, 'engine = "vllm"')
    routed = found._store.state.routed
    samples = {
        name: SampleOperation("sampler", number, b"\1\0\0\0", SampleParams()) for number, name in enumerate("abcp")
    }
    routed |= {name: ("engine-0", sample) for name, sample in samples.items()}
    failed: list[str] = []
    drawn: list[str] = []
    deaths = 0
    while routed:
        batch = [future_id for future_id, _, _ in found._due_samples()]
        assert batch, "no sample is due, and none is under way"
        if "p" not in batch:
            drawn += batch
            for name in batch:
                del routed[name]
            continue
        deaths += 1
        for name in batch:
            if isinstance(found._after_failure(name, "engine-0", DIED), CompleteRouted):
                failed.append(name)
                del routed[name]
        assert not list(found._due_samples()), "the engine has not replied since"
        found._down.clear()
    assert failed == ["p"]
    assert sorted(drawn) == ["a", "b", "c"]
    assert deaths == MAX_FAILURES


async def test_beside_a_sample_that_is_drawn_alone_none_is_started(tmp_path: Path) -> None:
    found = await publisher(tmp_path, 'engine = "vllm"')
    sample = SampleOperation("sampler", 1, b"\1\0\0\0", SampleParams())
    found._store.state.routed |= {
        "suspect": ("engine-0", sample),
        "new": ("engine-0", sample),
        "other": ("engine-1", sample),
    }
    for _ in range(SUSPECT):
        found._after_failure("suspect", "engine-0", DIED)
    assert [name for name, _, _ in found._due_samples()] == ["other"], "engine-0 has not replied since"
    found._down.clear()
    assert [name for name, _, _ in found._due_samples()] == ["suspect", "other"]
    under_way = asyncio.create_task(asyncio.sleep(0))
    found._tasks["sample suspect"] = under_way
    assert [name for name, _, _ in found._due_samples()] == ["other"]
    await under_way
    found._on_task_done("sample suspect", under_way)
    assert found._store.publishable.is_set()


@pytest.mark.parametrize(
    ("inference", "endpoint", "error"),
    [
        ('engine = "vllm"\nfallback = true', "engine-0", DIED),
        ('engine = "vllm"', "added-by-an-operator", DIED),
        ('engine = "vllm"', "engine-0", StrataError(Code.NOT_FOUND, "newer weights have replaced these")),
        ('engine = "vllm"', "engine-0", StrataError(Code.UNSUPPORTED, "the engine rejects it")),
        ('engine = "vllm"', "engine-0", StrataError(Code.DEADLINE, "it did not reply within 300 seconds")),
    ],
)
async def test_the_ranks_draw_it_where_the_settings_say_so_or_no_engine_can(
    tmp_path: Path, inference: str, endpoint: str, error: StrataError
) -> None:
    found = await publisher(tmp_path, inference)
    assert found._after_failure("f", endpoint, error) == RequeueRouted("f")


async def test_where_the_ranks_draw_nothing_of_engines_a_rejected_sample_fails_with_the_engines_reason(
    tmp_path: Path,
) -> None:
    found = await publisher(tmp_path, 'engine = "vllm"\nunroutable = "refuse"')
    rejected = StrataError(Code.UNSUPPORTED, "the engine rejects it: too long")
    for error, category in ((rejected, "user"), (StrataError(Code.DEADLINE, "too slow"), "server")):
        failed = found._after_failure("f", "engine-0", error)
        assert isinstance(failed, CompleteRouted)
        assert failed.result == ops.Failed(category, f"an inference engine failed to draw it: {error}")  # type: ignore[arg-type]
    assert found._after_failure("f", "engine-0", DOWN) == RequeueRouted("f", again=True)


async def test_a_sample_that_was_routed_again_before_its_task_had_ended_is_started(tmp_path: Path) -> None:
    found = await publisher(tmp_path, 'engine = "vllm"')
    store = found._store
    sample = SampleOperation("sampler", 1, b"\1\0\0\0", SampleParams())
    store.state.routed["f"] = ("engine-1", sample)
    ended = asyncio.create_task(asyncio.sleep(0))
    await ended
    found._tasks |= {"sample f": ended, "sample other": ended}
    for name, due in (("sample other", False), ("sample f", True)):
        store.publishable.clear()
        found._on_task_done(name, ended)
        assert store.publishable.is_set() == due
