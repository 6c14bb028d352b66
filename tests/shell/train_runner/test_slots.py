"""More models than slots: those that wait in memory and on disk come back as they went, and nobody can tell."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from strata.train.core import commands, model_options, ops
from strata.train.runner.model.offload import OffloadedModel
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import local, sharded_like
from tests.shell.train_runner.driver import Driver, batch, logprobs_of, outcome
from tests.shell.train_runner.single_rank import driver_of, one_rank

MODELS = [f"m{number}" for number in range(5)]
WAIT_S = 60.0
MakeDriver = Callable[..., Driver]


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeDriver]:
    folder = tmp_path_factory.mktemp("slots")
    make(folder / "llama", TinyModel())
    with one_rank(folder) as ranks:

        def made(name: str, **options: int) -> Driver:
            return driver_of(ranks, folder / "llama", folder / name, **options)

        yield made


def create_all(driver: Driver) -> None:
    for number, name in enumerate(MODELS):
        driver.create(name, model_options.LoraConfig(rank=1 + number, alpha=8.0, seed=number))


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def life(driver: Driver, seed: int, steps: int = 40) -> list[str]:
    """All that is heard of a random life of five models, and all that is left of them at its end."""
    chance = random.Random(seed)
    create_all(driver)
    heard: list[str] = []
    for number in range(steps):
        chosen = chance.sample(MODELS, chance.randint(1, 2))
        match chance.choice(["pass", "pass", "pass", "step", "step", "abort", "sleep", "load"]):
            case "pass":
                results = driver.passes(*((name, batch(2, seed=number)) for name in chosen))
                arrays = [each.tobytes() for result in results for each in logprobs_of(outcome(result))]
                heard.append(digest(*arrays))
            case "step":
                heard.append(str(driver.step(chosen[0], learning_rate=0.02)["grad_norm"]))
            case "abort":
                driver.do(commands.ManageModel(ops.AbortGradients(chosen[0], 1)))
            case "sleep":
                driver.do(commands.ManageModel(ops.Sleep()))
                driver.do(commands.ManageModel(ops.Wake()))
            case "load":
                assert isinstance(driver.save(chosen[0], f"kept-{number}"), ops.WeightsSaved)
                assert isinstance(driver.load(chosen[-1], f"kept-{number}"), ops.WeightsLoaded | ops.Failed)
    for name in MODELS:
        state = driver.state(name)
        heard.append(digest(*(state[part].numpy().tobytes() for part in sorted(state))))
    return heard


@pytest.mark.parametrize("seed", range(2))
def test_models_that_take_turns_in_few_slots_learn_the_same_bit_for_bit(drivers: MakeDriver, seed: int) -> None:
    roomy = life(drivers(f"roomy-{seed}", slots=8), seed)
    assert life(drivers(f"cramped-{seed}", slots=2, models_in_memory=2), seed) == roomy
    assert len(set(roomy)) > len(roomy) // 2


def idle_files(driver: Driver) -> list[Path]:
    return sorted((driver.folder / "asleep").rglob("*.safetensors"))


def freed(driver: Driver) -> list[str]:
    """Models whose memory is not theirs at the moment."""
    models: dict[str, object] = dict(driver.dispatcher._runner.models)
    return [name for name, each in models.items() if not each.adapter.flat.untyped_storage().nbytes()]  # type: ignore[attr-defined]


def test_who_was_used_least_recently_makes_room_and_goes_to_disk_beyond_the_bound(drivers: MakeDriver) -> None:
    driver = drivers("order", slots=2, models_in_memory=1)
    create_all(driver)
    assert freed(driver) == ["m0", "m1", "m2"]
    assert len(idle_files(driver)) == 2
    driver.train("m0", batch())
    assert freed(driver) == ["m1", "m2", "m3"]
    assert len(idle_files(driver)) == 2
    driver.unload("m1")
    driver.unload("m2")
    assert freed(driver) == ["m3"]
    assert len(idle_files(driver)) <= 1
    driver.train("m3", batch())
    assert freed(driver) == ["m4"]


def test_a_model_too_many_is_refused_with_a_reason_and_one_that_goes_makes_room(drivers: MakeDriver) -> None:
    driver = drivers("many", slots=2, max_models=5)
    create_all(driver)
    more = commands.ManageModel(ops.CreateModel("more", "tiny", model_options.LoraConfig(rank=1, alpha=1.0, seed=0)))
    (refused,) = driver.do(more)
    assert isinstance(refused, ops.Failed)
    assert "the limit of 5 models is reached" in refused.message
    driver.unload("m1")
    assert driver.do(more) == [ops.ModelCreated("more")]


def test_a_snapshot_holds_those_that_wait_elsewhere_too(drivers: MakeDriver) -> None:
    contents, away = [], []
    for name, options in (("all-here", {"slots": 8}), ("some-away", {"slots": 1, "models_in_memory": 1})):
        driver = drivers(name, **options)
        create_all(driver)
        for model in MODELS[:4]:
            driver.train(model, batch(seed=3))
            driver.step(model, learning_rate=0.02)
        driver.train("m1", batch(seed=4))
        away = freed(driver)
        path = driver.folder / "snapshots" / "one"
        assert driver.do(commands.TakeSnapshot(str(path))) == []
        assert freed(driver) == away
        driver.dispatcher._runner.snapshots.join(WAIT_S)
        contents.append({file.name: file.read_bytes() for file in path.rglob("*.safetensors")})
    assert len(away) == 4
    assert contents[0] == contents[1]
    assert len(contents[0]) == 1


def test_how_a_snapshot_ended_is_told_once_and_until_it_could_be_sent(drivers: MakeDriver) -> None:
    driver = drivers("told", slots=8)
    assert driver.do(commands.TakeSnapshot(str(driver.folder / "snapshots" / "one"))) == []
    driver.dispatcher._runner.snapshots.join(WAIT_S)
    driver.link.full = True
    driver.dispatcher.report_snapshot()
    driver.link.full = False
    for _ in range(2):
        driver.dispatcher.report_snapshot()
    (told,) = driver.link.sent
    assert isinstance(told, commands.SnapshotWritten)
    assert told.trouble is None
    driver.link.sent.clear()
    assert driver.attach().written == told


def test_a_file_that_is_not_what_was_written_is_never_taken_for_a_model(tmp_path: Path) -> None:
    tensor = torch.arange(8.0)
    offloaded = OffloadedModel([tensor])
    offloaded.to_disk(tmp_path / "one")
    content = (tmp_path / "one").read_bytes()
    (tmp_path / "one").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RuntimeError, match="is not what was written"):
        offloaded.restore()
    (tmp_path / "one").unlink()
    with pytest.raises(RuntimeError, match="cannot be read"):
        offloaded.restore()
    (tmp_path / "one").write_bytes(content)
    offloaded.restore()
    assert torch.equal(tensor, torch.arange(8.0))
    assert not (tmp_path / "one").exists()


def test_a_disk_that_takes_nothing_leaves_the_model_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    tensor = torch.arange(8.0)
    offloaded = OffloadedModel([tensor])
    with pytest.raises(OSError, match="file"):
        offloaded.to_disk(tmp_path / "file" / "one")
    assert offloaded.in_memory
    offloaded.restore()
    assert torch.equal(tensor, torch.arange(8.0))


def test_a_shard_that_is_in_the_memory_of_the_host_stays_there() -> None:
    """Also where ranks compute on CUDA devices; no device is needed to see it."""
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size([4, 3]), (3, 1), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), meta)
    weight = DTensor(torch.zeros(2, 3), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    moments = torch.ones(2, 3)
    placed = sharded_like(weight, moments)
    assert placed.shape == weight.shape
    assert local(placed).data_ptr() == moments.data_ptr()
