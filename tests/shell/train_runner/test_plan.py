"""The planned memory of a device: arithmetic, traced sizes, and plans beside what training really takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal

import msgspec
import pytest
import torch
from click.testing import CliRunner

from bench.plan import OVER, UNDER
from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.cli.plan import plan
from strata.train.plan.memory_plan import (
    CollectiveCost,
    MemoryRecipe,
    MeshShape,
    ModelCost,
    PassMemory,
    cache_numbers,
    plan_device,
    smallest_plan,
)
from strata.train.plan.model_cost import model_cost
from strata.train.plan.model_files import read_model_files
from strata.train.plan.quantisation import QuantisedKind
from strata.train.runner.model.memory_trace import trace_cost, trace_pass
from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner.reference import bitsandbytes_model

COST: Final = ModelCost(
    parameters=70_000_000_000,
    rank_parameters=70_000_000_000,
    expert_parameters=0,
    blocks=80,
    expert_blocks=0,
    block_parameters=850_000_000,
    root_parameters=2_000_000_000,
    adapter_parameters=400_000_000,
    adapter_expert_parameters=0,
    cache_numbers=163_840,
    activations=PassMemory(8_000_000_000, 2_000_000_000),
    gathered=PassMemory(5_000_000_000, 6_000_000_000),
    copied=PassMemory(5_000_000_000, 6_000_000_000),
)
LLAMA_70B: Final = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B: Final = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151_936, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
"""As published, without what changes no size."""


def parts_of(recipe: MemoryRecipe, mesh: MeshShape) -> dict[str, int]:
    return {part.name: part.bytes for part in plan_device(COST, recipe, mesh).parts}


def test_the_fewest_devices_hold_it_and_half_of_them_do_not() -> None:
    for training in ("lora", "full"):
        recipe = msgspec.convert({"training": training}, MemoryRecipe)
        found = smallest_plan(COST, recipe, 80 * 10**9)
        assert found is not None
        half = MeshShape(shard=found.mesh.shard // 2)
        assert found.total <= 80 * 10**9 < plan_device(COST, recipe, half).total
    assert smallest_plan(COST, MemoryRecipe(), 8 * 10**9) is None


def test_full_training_has_twenty_bytes_of_a_parameter_among_the_devices_of_a_copy() -> None:
    recipe = MemoryRecipe(training="full")
    for mesh in (MeshShape(1, 8), MeshShape(4, 8)):
        parts = parts_of(recipe, mesh)
        assert sum(parts[name] for name in ("weights", "gradients", "optimizer")) == 20 * COST.parameters // 8
        assert "adapters" not in parts
    once = parts_of(msgspec.structs.replace(recipe, accumulates=False), MeshShape(1, 8))
    assert once["gradients"] == 4 * COST.parameters // 8


def test_offloaded_weights_take_no_memory_of_a_device_but_what_is_gathered_of_them() -> None:
    mesh = MeshShape(1, 8)
    full = parts_of(MemoryRecipe(training="full", offload=True), mesh)
    assert not full.keys() & {"weights", "gradients", "optimizer"}
    # What of a group is copied to the device before the group is gathered: of a layer, or of embeddings and head.
    gathered = parts_of(MemoryRecipe(training="full"), mesh)["gathered weights"]
    assert full["gathered weights"] == gathered + 4 * COST.root_parameters // 8
    lora, kept = parts_of(MemoryRecipe(offload=True), mesh), parts_of(MemoryRecipe(), mesh)
    for name in ("adapters", "gradients", "optimizer", "activations"):
        assert lora[name] == kept[name]
    assert "weights" not in lora
    # The memory of the host is that of the device.
    of_cpu = MemoryRecipe(device="cpu")
    assert parts_of(msgspec.structs.replace(of_cpu, offload=True), mesh) == parts_of(of_cpu, mesh)


def test_every_slot_has_values_and_gradients_of_a_pass_on_each_device_and_a_share_of_sums_and_moments() -> None:
    parts = parts_of(MemoryRecipe(slots=3), MeshShape(shard=4))
    assert parts["weights"] == COST.parameters * 2 // 4
    each = 4 + 4 + (4 + 8) // 4
    assert sum(parts[name] for name in ("adapters", "gradients", "optimizer")) == 3 * each * COST.adapter_parameters


def test_each_device_has_the_adapters_of_its_experts_and_shares_them_with_those_that_hold_the_same() -> None:
    cost = msgspec.structs.replace(COST, adapter_expert_parameters=320_000_000)
    for mesh, others in ((MeshShape(shard=8, expert=4), 2), (MeshShape(shard=4, expert=4), 1)):
        planned = plan_device(cost, MemoryRecipe(slots=3), mesh)
        parts = {part.name: part.bytes for part in planned.parts}
        held = 80_000_000 + 320_000_000 // 4
        stepped = 400_000_000 // mesh.devices
        assert parts["adapters"] == 3 * 4 * held
        assert parts["gradients"] == 3 * 4 * (held + stepped)
        assert parts["optimizer"] == 3 * 8 * stepped
        reduced = {each.over: each.bytes for each in planned.collectives if each.name == "reduce-scatter"}
        own = {"same experts": 3 * 4 * 80_000_000} if others > 1 else {}
        assert reduced == {"all": 3 * 4 * 80_000_000, **own}


def test_each_device_has_its_part_of_adapters_that_are_split_and_shares_it_with_those_that_hold_the_same() -> None:
    cost = msgspec.structs.replace(COST, adapter_split_parameters=240_000_000)
    for mesh, others in (
        (MeshShape(shard=2, tensor=4), 2),
        (MeshShape(replicate=2, tensor=2), 2),
        (MeshShape(tensor=4), 1),
    ):
        planned = plan_device(cost, MemoryRecipe(slots=3), mesh)
        parts = {part.name: part.bytes for part in planned.parts}
        own, stepped = 240_000_000 // mesh.tensor, 400_000_000 // mesh.devices
        held = 160_000_000 + own
        assert parts["adapters"] == 3 * 4 * held
        assert parts["gradients"] == 3 * 4 * (held + stepped)
        assert parts["optimizer"] == 3 * 8 * stepped
        for name in ("reduce-scatter", "all-gather"):
            moved = {each.over: each.bytes for each in planned.collectives if each.name == name and each.per == "step"}
            assert moved == {"all": 3 * 4 * 160_000_000, **({"same parts": 3 * 4 * own} if others > 1 else {})}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_a_trace_and_the_files_of_a_model_say_alike_how_much_of_an_adapter_is_split(
    family: Literal["llama", "qwen3", "qwen3_moe"], tmp_path: Path
) -> None:
    make(tmp_path, TinyModel(family=family, layers=2, hidden=128))
    recipe, mesh = MemoryRecipe(row_tokens=64), MeshShape(tensor=2, expert=2 if family == "qwen3_moe" else 1)
    traced, of_files = trace_cost(str(tmp_path), recipe, mesh), model_cost(read_model_files(tmp_path), recipe, mesh)
    assert traced.adapter_split_parameters == of_files.adapter_split_parameters
    assert 0.3 < traced.adapter_split_parameters / (traced.adapter_parameters - traced.adapter_expert_parameters) < 0.8
    alone = trace_cost(str(tmp_path), recipe, MeshShape(shard=2))
    assert alone.adapter_split_parameters == 0
    assert alone.adapter_parameters == traced.adapter_parameters


def test_a_small_frozen_base_is_on_every_device_and_is_not_gathered() -> None:
    recipe = MemoryRecipe(replicated_bytes=2 * COST.parameters)
    found = plan_device(COST, recipe, MeshShape(shard=4))
    parts = {part.name: part.bytes for part in found.parts}
    assert parts["weights"] == 2 * COST.parameters
    assert "gathered weights" not in parts
    assert {(each.over, each.per) for each in found.collectives} == {("all", "step")}


def test_each_layer_is_gathered_twice_and_reduced_once() -> None:
    collectives = plan_device(COST, MemoryRecipe(training="full"), MeshShape(2, 4)).collectives
    assert collectives == (
        CollectiveCost("all-gather", "shard", "row", 161, 2 * (2 * 68_000_000_000 + 2_000_000_000)),
        CollectiveCost("reduce-scatter", "shard", "row", 81, 4 * COST.parameters),
        CollectiveCost("all-reduce", "replicate", "row", 81, COST.parameters),
        CollectiveCost("all-reduce", "all", "step", 1, 8),
    )


def test_experts_are_gathered_from_the_devices_that_hold_the_same_ones() -> None:
    """64 of 70 billion numbers are of experts. Of 8 devices, two hold the same ones if a group has 4."""
    cost = msgspec.structs.replace(COST, expert_parameters=64_000_000_000, expert_blocks=80)
    recipe = MemoryRecipe(training="full")

    def gathered(expert: int) -> CollectiveCost:
        return plan_device(cost, recipe, MeshShape(shard=8, expert=expert)).collectives[0]

    assert gathered(4) == CollectiveCost("all-gather", "shard", "row", 321, 2 * (2 * 22_000_000_000 - 2_000_000_000))
    assert gathered(8) == CollectiveCost("all-gather", "shard", "row", 161, 2 * (2 * 6_000_000_000 - 2_000_000_000))
    in_place = {part.name: part.bytes for part in plan_device(cost, recipe, MeshShape(shard=8, expert=4)).parts}
    assert in_place["weights"] == 4 * COST.parameters // 8


def test_the_kv_cache_follows_from_the_configuration() -> None:
    assert cache_numbers(LLAMA_70B) == 2 * 80 * 8 * 128
    assert cache_numbers({"text_config": {**LLAMA_70B, "head_dim": None}}) == 2 * 80 * 8 * 128
    assert cache_numbers({}) == 0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_weights_of_a_quantised_base_are_counted_as_bitsandbytes_has_them(
    family: Literal["llama", "qwen3_moe"], kind: QuantisedKind, tmp_path: Path
) -> None:
    """Embeddings, norms, the head and fused experts stay in bfloat16."""
    make(tmp_path, TinyModel(family=family, layers=4, hidden=128))
    theirs = bitsandbytes_model(tmp_path, kind, torch.bfloat16)
    held = sum(parameter.nbytes for parameter in theirs.parameters())
    for module in theirs.modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            held += (module.weight.quant_state.absmax if kind == "nf4" else module.weight.SCB).nbytes
    recipe, mesh = MemoryRecipe(row_tokens=64, quantise=kind, replicated_bytes=0), MeshShape(shard=2)
    traced, of_files = trace_cost(str(tmp_path), recipe, mesh), model_cost(read_model_files(tmp_path), recipe, mesh)
    assert of_files.parameters == traced.parameters
    assert of_files.saved_bytes == traced.saved_bytes
    assert of_files.block_saved_bytes == traced.block_saved_bytes
    for devices in (1, 2):
        parts = {part.name: part.bytes for part in plan_device(traced, recipe, MeshShape(shard=devices)).parts}
        assert parts["weights"] == held // devices
    assert plan_device(traced, msgspec.structs.replace(recipe, replicated_bytes=held), mesh).parts[0].bytes == held


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", MeshShape(shard=2, tensor=2)),
        ("qwen3_moe", MeshShape(shard=4, expert=2)),
        ("qwen3_moe", MeshShape(shard=2, tensor=2, expert=2)),
    ],
)
def test_files_and_configuration_give_the_same_sizes(
    family: Literal["llama", "qwen3_moe"], mesh: MeshShape, tmp_path: Path
) -> None:
    """So `strata serve` refuses by the figures of `strata plan`. On groups each layer of one kind exchanges as much."""
    make(tmp_path, TinyModel(family=family, layers=4, hidden=128))
    recipe = MemoryRecipe(row_tokens=64)
    traced = trace_cost(str(tmp_path), recipe, mesh)
    untraced = msgspec.structs.replace(traced, activations=None, gathered=None, copied=None, exchanges=())
    assert model_cost(read_model_files(tmp_path), recipe, mesh) == untraced
    row, logits, pairs = 64 * 128 * 2, 64 * 512 * 2, 64 * 2 * 2
    if family == "llama":
        # The tokens of attention and MLP are gathered and their sums scattered, forward and backward; before the first
        # and after the last layer tokens are gathered too, and the gradient before the head is summed.
        assert sorted(traced.exchanges, key=lambda cost: cost.name) == [
            CollectiveCost("all-gather", "tensor", "row", 4 * 4 + 3, (4 * 4 + 2) * row + logits),
            CollectiveCost("all-reduce", "tensor", "row", 1, row),
            CollectiveCost("reduce-scatter", "tensor", "row", 4 * 4, 4 * 4 * row),
        ]
        matrices = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
        assert traced.rank_parameters == 512 * 128 * 3 // 2 + 4 * (matrices // 2 + 2 * 128) + 128
        return
    # Both ways, forward and backward; and how many pairs there are for each of four experts, with the adapter and
    # without.
    sent = 2 * pairs // mesh.tensor * (128 + 128)
    numbers = CollectiveCost("all-to-all", "expert", "row", 4 * 5, 4 * (sent + 2 * 4 * 8))
    if mesh.tensor == 1:
        assert traced.exchanges == [numbers]
        return
    # A layer that is recomputed sends its pairs again, but not their numbers.
    again = trace_cost(str(tmp_path), msgspec.structs.replace(recipe, checkpointing=1), mesh)
    assert CollectiveCost("all-to-all", "expert", "row", 4 * 7, 4 * (sent * 3 // 2 + 2 * 4 * 8)) in again.exchanges
    # The ranks of both groups are the same here, and so is their name.
    assert numbers in traced.exchanges
    # Experts compute this rank's tokens: only those of attention are gathered.
    gathered = [(cost.calls, cost.bytes) for cost in traced.exchanges if cost.name == "all-gather"]
    assert gathered == [(4 * 2 + 3, (4 * 2 + 2) * row + logits)]


def test_a_deep_model_gathers_no_less_than_a_few_of_its_layers(tmp_path: Path) -> None:
    """With an expert group of all devices and recomputation, the peak of many layers is at another moment."""
    recipe, mesh = MemoryRecipe(checkpointing=1), MeshShape(shard=64, expert=64)
    gathered = []
    for layers in (3, 94):
        folder = tmp_path / str(layers)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**QWEN3_235B, "num_hidden_layers": layers}))
        gathered.append(trace_cost(str(folder), recipe, mesh).gathered)
    assert gathered[0] is not None
    assert gathered[0].end > 10**9
    assert gathered[1] == gathered[0]


def test_devices_of_a_tensor_group_keep_slices_of_hidden_states_between_blocks(tmp_path: Path) -> None:
    make(tmp_path, TinyModel(layers=4, hidden=128))
    recipe = MemoryRecipe(row_tokens=2048, checkpointing=1)
    alone, sliced, odd = (
        trace_cost(str(tmp_path), each, mesh).activations
        for each, mesh in (
            (recipe, MeshShape(shard=4)),
            (recipe, MeshShape(shard=2, tensor=2)),
            (msgspec.structs.replace(recipe, row_tokens=2047), MeshShape(shard=2, tensor=2)),
        )
    )
    assert alone is not None
    assert sliced is not None
    assert odd is not None
    # A row of one token less is not sliced, and would otherwise take as much.
    assert sliced.beginning < 0.96 * odd.beginning
    assert sliced.end < 0.9 * odd.end
    assert odd.end < 0.9 * alone.end


def test_devices_that_share_a_row_have_their_part_of_its_activations_and_exchange_the_rest(tmp_path: Path) -> None:
    make(tmp_path, TinyModel(layers=4, hidden=128))
    recipe = MemoryRecipe(row_tokens=1024)
    alone, shared = (trace_cost(str(tmp_path), recipe, mesh) for mesh in (MeshShape(shard=4), MeshShape(context=4)))
    assert alone.activations is not None
    assert shared.activations is not None
    assert 0.2 < shared.activations.beginning / alone.activations.beginning < 0.35
    # There, queries of 4 heads, and keys and values of 2 that are sent to two ranks each; back, 4 heads: and gradients.
    sent = 256 * 32 * 2 * (4 + 2 * 4 + 4)
    assert shared.exchanges == [CollectiveCost("all-to-all", "context", "row", 4 * 4, 4 * 2 * sent)]
    for name in ("parameters", "rank_parameters", "block_parameters", "adapter_parameters"):
        assert getattr(shared, name) == getattr(alone, name)
    plans = [
        plan_device(shared, MemoryRecipe(training="full"), mesh)
        for mesh in (MeshShape(shard=4), MeshShape(1, 2, 1, 1, 2))
    ]
    assert plans[0].parts == plans[1].parts


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_few_layers_give_the_cost_of_all(family: Literal["llama", "qwen3_moe"], tmp_path: Path) -> None:
    make(tmp_path, TinyModel(family=family, layers=6))
    recipe = MemoryRecipe(row_tokens=256)

    def whole(shards: int = 0, **changes: int) -> PassMemory:
        return trace_pass(str(tmp_path), msgspec.structs.replace(recipe, **changes), set(range(6)), shards).memory

    cost, in_place, sharded = trace_cost(str(tmp_path), recipe), whole(), whole(shards=2)
    assert cost.activations == in_place
    assert cost.gathered == PassMemory(sharded.beginning - in_place.beginning, sharded.end - in_place.end)
    assert whole(checkpointing=1).beginning < 0.8 * in_place.beginning
    assert whole(row_tokens=128).beginning < 0.6 * in_place.beginning


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match="cannot load the model") as caught:
        trace_cost(str(tmp_path), MemoryRecipe())
    assert caught.value.code is Code.INVALID


def test_settings_of_a_server_are_planned_with_lines_for_a_manifest(tmp_path: Path) -> None:
    make(tmp_path / "model", TinyModel())
    file = tmp_path / "train.toml"
    settings = (
        f'[model]\npath = "{tmp_path / "model"}"\ntraining = "full"\nmax_tokens_per_row = 64\n[ranks]\nnproc = 2\n'
    )
    file.write_text(settings, "utf-8")
    runner = CliRunner()
    shown = runner.invoke(plan, [str(file)], catch_exceptions=False)
    assert shown.stdout.splitlines()[-2:] == ["min_gpus = 2", "min_vram_gib = 1"]
    assert shown.stderr.startswith(f"tracing a row of 64 tokens through {tmp_path / 'model'}")
    found = json.loads(
        runner.invoke(plan, [str(file), "--training", "lora", "-o", "json"], catch_exceptions=False).stdout
    )
    assert found["mesh"] == {"replicate": 1, "shard": 2, "tensor": 1, "expert": 1, "context": 1, "pipeline": 1}
    assert found["total"] == sum(part["bytes"] for part in found["parts"])
    assert found["manifest"]["min_gpus"] == 2


def test_stages_are_not_planned(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[model]\npath = "model"\n[ranks]\nnproc = 2\n[parallel]\npipeline = 2\n', "utf-8")
    with pytest.raises(StrataError, match="a plan does not count what is on a stage"):
        CliRunner().invoke(plan, [str(file)], catch_exceptions=False)


@pytest.mark.timeout(1800)
def test_training_takes_what_was_planned() -> None:
    """With its margin, a plan is at most 5 % too small and 15 % too large."""
    bench = subprocess.run(
        [sys.executable, "-m", "bench", "plan", "--json-only"],
        env={**process_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=1750,
    )
    ratios = {line["case"]: line["ratio"] for line in map(json.loads, bench.stdout.splitlines())}
    assert len(ratios) == 13
    outside = {case: ratio for case, ratio in ratios.items() if not UNDER <= ratio <= OVER}
    assert not outside


@pytest.mark.timeout(300)
@pytest.mark.parametrize("training", ["lora", "full"])
@pytest.mark.parametrize("config", [LLAMA_70B, QWEN3_235B], ids=["70B", "235B-A22B"])
def test_large_models_are_planned_within_a_minute(config: dict[str, Any], training: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    recipe = MemoryRecipe(training=training, checkpointing=1, cached_tokens=0)
    began = perf_counter()
    cost = trace_cost(str(tmp_path), recipe)
    assert perf_counter() - began < 60
    assert cost.parameters == {"llama": 70_553_706_496, "qwen3_moe": 235_093_634_560}[config["model_type"]]
    assert plan_device(cost, recipe, MeshShape(shard=64)).total < plan_device(cost, recipe, MeshShape(shard=8)).total
