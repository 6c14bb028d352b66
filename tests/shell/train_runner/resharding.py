"""Checkpoints and snapshots between meshes: `torchrun … -m tests.shell.train_runner.resharding FOLDER FAMILY MESH …`.

A mesh is given as `shard=2 tensor=2`. If FOLDER is empty, the ranks train a full fine-tune and an adapter on the first
mesh, and write checkpoints and snapshots of them. All meshes then read these. The program may be run again in the same
FOLDER with another number of ranks. It writes what was found into `found-RANKS.json`; beside it, each mesh leaves a
checkpoint of what it has read (`again MESH`), for readers that are not ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file, save, save_file

from strata.train.core import model_options, ops
from strata.train.core.model_options import LoraConfig
from strata.train.parallel import ParallelSettings
from strata.train.runner.collectives import RankGroup
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Span
from strata.train.runner.model.tiny import Family, TinyModel, make
from strata.train.runner.model.trained import LoraModel, sharded_like
from strata.train.runner.model_runner import ModelRunner, run_interleaved
from strata.train.runner.passes.logprobs import PackedRow
from strata.train.runner.settings import RunnerSettings
from tests.support.ranks import join_ranks

LENGTHS = (9, 14, 6, 11)
"""Tokens of the row of each rank."""
LORA = LoraConfig(rank=4, alpha=8.0)
STATE = "state.safetensors"
"""What was written, gathered by torch from the ranks that wrote it."""
DIGEST = "digest.txt"
GRADIENT = "gradient."
SAMPLER = "sampler."
MOMENTS = ("exp_avg.", "exp_avg_sq.")
Training = Literal["full", "lora"]
TRAININGS: tuple[Training, ...] = ("full", "lora")
State = dict[str, torch.Tensor]


def parse_mesh(text: str) -> ParallelSettings:
    return msgspec.convert(dict(part.split("=") for part in text.split()), ParallelSettings, strict=False)


def row_of(rank: int, vocabulary: int, adapter: Adapter | None, device: torch.device | None = None) -> PackedRow:
    indices = torch.arange(LENGTHS[rank], device=device)
    tokens = (indices * (7 + rank) + rank) % vocabulary
    spans = [Span(adapter, len(tokens))] if adapter is not None else ()
    return PackedRow(tokens=tokens, documents=[len(tokens)], spans=spans, logit_indices=indices, targets=tokens.flip(0))


def reshard(
    folder: Path, model: Path, ranks: RankGroup, meshes: Mapping[str, ParallelSettings], training: Training = "full"
) -> dict[str, bool]:
    """Whether a snapshot, a checkpoint and weights for sampling in `folder` are on each mesh what was written, bit by
    bit. The first mesh writes them if they are not there."""
    found: dict[str, bool] = {}
    for name, parallel in meshes.items():
        settings = RunnerSettings(
            model=str(model),
            name=model.name,
            training=training,
            sleep_folder=folder / "asleep",
            row_tokens=64,
            cached_tokens=512,
            prefix_tokens=128,
            parallel=parallel,
        )
        runner = ModelRunner(settings, ranks)
        if parallel.pipeline == 1:
            runner.sampler.check_architecture()
        if not (folder / STATE).exists():
            _write(folder, runner)
        runner.restore(folder / "snapshot", (folder / DIGEST).read_text(encoding="utf-8"))
        found[f"snapshot {name}"] = _is_equal(folder, runner, "weights.", *MOMENTS, GRADIENT, SAMPLER)
        runner.load(ops.LoadWeights("m", 3, "run", "weights", "a", optimizer=True), folder / "saved")
        found[f"checkpoint {name}"] = _is_equal(folder, runner, "weights.", *MOMENTS)
        runner.save(ops.SaveWeights("m", 4, "weights", "c"), folder / f"again {name}")
        runner.load(ops.LoadWeights("m", 5, "run", "sampler_weights", "b", optimizer=False), folder / "sampled")
        found[f"weights {name}"] = _is_equal(folder, runner, "weights.")
    return found


def _write(folder: Path, runner: ModelRunner) -> None:
    ranks, parallel = runner.ranks, runner.settings.parallel
    runner.create_model(ops.CreateModel("m", runner.settings.name, None if runner.settings.full else LORA))
    model = runner.models["m"]
    adapter = model.adapter if isinstance(model, LoraModel) else None
    row = row_of(data_rank(ranks, parallel), runner.base.vocabulary, adapter, ranks.device)
    if adapter is not None:
        runner.base.adapters.in_pass = [adapter]
    # The gradient of the last pass waits for a step.
    for number in range(3):
        model.begin()
        runner.base.logprobs(row).sum().backward()  # type: ignore[no-untyped-call]
        model.commit()
        if number < 2:
            run_interleaved([model.step(model_options.AdamParams(learning_rate=0.01))])
    if parallel.pipeline == 1:
        runner.make_sampler(ops.SaveSampler("m", 1, "copy"), Path(), ())
    runner.save(ops.SaveWeights("m", 1, "weights", "a"), folder / "saved")
    runner.save(ops.SaveWeights("m", 2, "sampler_weights", "b"), folder / "sampled")
    assert runner.take_snapshot(1, folder / "snapshot") is None
    runner.snapshots.join(60)
    state = gathered(runner)
    with ranks.collective_errors():
        if ranks.is_rank0:
            result = runner.snapshots.take()
            assert result is not None
            (folder / DIGEST).write_text(result.digest, encoding="utf-8")
            save_file({name: value.contiguous() for name, value in state.items()}, folder / STATE)
    runner.models.clear()
    if parallel.pipeline == 1:
        runner.sampler.close("copy")


def data_rank(ranks: RankGroup, parallel: ParallelSettings) -> int:
    """Which of the rows this rank has."""
    return ranks.rank % parallel.stage_ranks(ranks.size) // parallel.row_ranks


def on_all_stages(own: State, ranks: RankGroup) -> State:
    gathered = ranks.all_gather_bytes(save({name: tensor.contiguous() for name, tensor in own.items()}))
    return {name: tensor for data in gathered for name, tensor in load(data).items()}


def whole_of(adapter: Adapter, shares: Sequence[torch.Tensor], ranks: RankGroup) -> torch.Tensor:
    """A flat block of the whole adapter, of which each rank has shares. Each number is in one of them."""
    own = {
        str(piece.start): share[piece.place].cpu().contiguous()
        for block, share in zip(adapter.blocks, shares, strict=True)
        for piece in block.pieces(block.share)
    }
    whole = torch.full((adapter.size,), torch.nan, dtype=shares[0].dtype)
    for data in ranks.all_gather_bytes(save(own)):
        for start, numbers in load(data).items():
            place = whole[int(start) : int(start) + len(numbers)]
            assert place.isnan().all()
            place.copy_(numbers)
    assert not whole.isnan().any()
    return whole


def assert_held(adapter: Adapter, whole: Mapping[str, torch.Tensor]) -> None:
    """This rank holds its part of these values."""
    for name, held in adapter.values().items():
        assert torch.equal(held.cpu(), adapter.take_own(name, whole[name]))


def gathered(runner: ModelRunner) -> State:
    """Weights, moments, gradients and the sampler's weights, if there is a sampler, of the model, in full."""
    model: Any = runner.models["m"]
    _, sampled, full, _ = next(runner.sampler.entries(), ("", None, None, None))
    if isinstance(model, LoraModel):
        own = model.adapter
        shares = {f"{name}.": parts for name, parts in model.shares(optimizer=True).items()}
        gradients = [torch.zeros_like(part) for part in model.optimizer.parameters]
        shares[GRADIENT] = model.own_shares(model.gradients or gradients)
        flat = {name: whole_of(own, parts, runner.ranks) for name, parts in shares.items()}
        assert_held(own, own.views(flat["weights."]))
        if sampled is not None:
            # Each rank samples with all layers, of which it holds all but experts.
            assert all(value.ndim == 3 or value.shape == own.shapes[name] for name, value in sampled.values().items())
            values = [block.flat[block.share] for block in sampled.blocks]
            flat[SAMPLER] = whole_of(sampled, values, runner.ranks)
            assert_held(sampled, sampled.views(flat[SAMPLER]))
        return {
            f"{kind}{name}": view.cpu().clone()
            for kind, block in flat.items()
            for name, view in own.views(block).items()
        }
    state: dict[str, Any] = {f"{SAMPLER}{name}": value for name, value in (full or {}).items()}
    for (name, parameter), own_moments in zip(model.parameters.items(), model.optimizer.moments(), strict=True):
        state[f"weights.{name}"] = parameter
        state |= {f"{moment}.{name}": sharded_like(parameter, value) for moment, value in own_moments.items()}
        if parameter.grad is not None:
            state[f"{GRADIENT}{name}"] = parameter.grad
    tensors = {name: value.full_tensor().detach().cpu().clone() for name, value in state.items()}
    return on_all_stages(tensors, runner.ranks)


def _is_equal(folder: Path, runner: ModelRunner, *kinds: str) -> bool:
    written = {name: value for name, value in load_file(folder / STATE).items() if name.startswith(kinds)}
    state = gathered(runner)
    differing = [name for name, value in written.items() if not _is_same(state[name], value)]
    return not runner.ranks.all_reduce_any([bool(differing) or not written])[0]


def _is_same(read: torch.Tensor, written: torch.Tensor) -> bool:
    return read.shape == written.shape and bytes_of(read) == bytes_of(written)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def main(folder: Path, family: Family, meshes: Sequence[str]) -> None:
    ranks = join_ranks(120)
    with ranks.collective_errors():
        if ranks.is_rank0 and not (folder / family).exists():
            # No number of ranks divides the vocabulary.
            make(folder / family, TinyModel(family=family, hidden=256, vocabulary=515, experts=8))
            for training in TRAININGS:
                (folder / training).mkdir()
    found = {
        training: reshard(
            folder / training, folder / family, ranks, {mesh: parse_mesh(mesh) for mesh in meshes}, training
        )
        for training in TRAININGS
    }
    if ranks.is_rank0:
        (folder / f"found-{ranks.size}.json").write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), msgspec.convert(sys.argv[2], Family), sys.argv[3:])
    # A rank that ends with the threads of its group aborts when the other rank has gone first.
    dist.destroy_process_group()
