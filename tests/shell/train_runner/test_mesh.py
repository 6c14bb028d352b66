"""Meshes of four ranks: each loads its shards, computes what one process does, and reads what another mesh wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strata.base.errors import StrataError
from strata.base.settings import process_environment
from strata.train.combinations import EXPERT_FAMILIES, PIPELINE_FAMILIES, TENSOR_FAMILIES
from strata.train.launch.preflight import check_mesh
from strata.train.parallel import ParallelSettings
from strata.train.runner.checkpoint import shards
from strata.train.runner.checkpoint.export import export
from strata.train.runner.model.pipeline_parallel import plan_steps
from strata.train.settings import (
    LimitSettings,
    ModelSettings,
    RankSettings,
    ServerSection,
    ServerSettings,
)
from tests.shell.train_runner.limited import GROUPS
from tests.shell.train_runner.mesh import Found
from tests.shell.train_runner.resharding import MOMENTS, SAMPLER, STATE, TRAININGS, bytes_of
from tests.shell.train_runner.split_mesh import WITH_EXPERTS, Dtype, SplitFound
from tests.support.torchrun import launcher

ROOT: Final = Path(__file__).parents[3]
SPLIT: Final = ParallelSettings(tensor=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    done = run([*launcher(4), "-m", "tests.shell.train_runner.mesh", str(folder)])
    assert (folder / "found.json").exists(), done.stderr[-4000:]
    return folder


def run(command: list[str], timeout_s: int = 300) -> subprocess.CompletedProcess[str]:
    environment = {
        **process_environment(),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MALLOC_MMAP_THRESHOLD_": "262144",
    }
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return msgspec.json.decode((folder / "found.json").read_bytes(), type=Found)


@pytest.mark.gpu
def test_losses_and_gradients_of_a_mesh_are_those_of_the_unmodified_model(found: Found) -> None:
    assert {each.case for each in found.parity} == {
        f"{model} {mesh}" for model in ("llama full", "llama lora", "qwen3_moe full") for mesh in ("2x2", "1x4")
    }
    for each in found.parity:
        tolerance = 1e-5 if each.case.startswith("qwen3_moe") else 1e-9
        assert each.loss <= tolerance, each
        assert each.gradient <= tolerance, each


@pytest.mark.gpu
def test_each_rank_has_its_slice_of_what_the_unmodified_loader_reads(found: Found) -> None:
    assert all(each.shards_equal for each in found.parity)


@pytest.mark.gpu
def test_what_one_mesh_wrote_another_reads_bit_for_bit(found: Found) -> None:
    names = ("snapshot", "checkpoint", "weights")
    assert found.resharded == {f"{name} {mesh}": True for name in names for mesh in ("2x2", "1x4")}


def test_of_two_copies_of_a_model_one_is_written(folder: Path) -> None:
    assert len(list((folder / "saved").glob(shards.SHARDS))) == 2
    sizes = [len(load_file(file)) for file in sorted((folder / "snapshot").glob("rank-*.safetensors"))]
    assert [bool(size) for size in sizes] == [True, True, False, False]


def test_weights_for_sampling_and_exported_ones_are_those_of_the_unmodified_loader(
    folder: Path, tmp_path: Path
) -> None:
    export(folder / "saved", tmp_path / "out", "hf")
    saved = shards.read_unsharded(folder / "saved", lambda name: not name.startswith("exp_avg"))
    for written in (folder / "sampled", tmp_path / "out"):
        lm = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
        weights = dict(lm.named_parameters())
        assert weights.keys() == saved.keys()
        assert all(torch.equal(weights[name], saved[name]) for name in saved)


DENSE_MESHES: Final = ("shard=4", "replicate=2 shard=2", "shard=2 tensor=2", "tensor=4", "shard=2 context=2")
MOE_MESHES: Final = ("shard=4", "expert=2", "expert=4", "replicate=2 expert=2", "shard=2 context=2 expert=4")


def check_resharded(folder: Path, family: str, meshes: Sequence[str], numbers: Sequence[int]) -> None:
    """What four ranks wrote on the first of these meshes is on all of them what it was, and on other numbers of ranks.
    The safetensors library alone reads the files again."""
    program = ["-m", "tests.shell.train_runner.resharding", str(folder), family]
    others = {ranks: [f"shard={ranks}"] for ranks in numbers}
    for ranks, own in {4: meshes, **others}.items():
        done = run([*launcher(ranks), *program, *own], 600)
        assert (folder / f"found-{ranks}.json").exists(), done.stderr[-4000:]
        found = msgspec.json.decode((folder / f"found-{ranks}.json").read_bytes())
        names = [f"{what} {mesh}" for mesh in own for what in ("snapshot", "checkpoint", "weights")]
        assert found == {training: dict.fromkeys(names, True) for training in TRAININGS}
    every = ["saved", *(f"again {mesh}" for mesh in (*meshes, *chain(*others.values())))]
    check_full_files(folder / "full", every)
    check_adapter_files(folder / "lora", every)


def check_full_files(folder: Path, checkpoints: Sequence[str]) -> None:
    state = load_file(folder / STATE)
    trained = {name.removeprefix("weights."): value for name, value in state.items() if name.startswith("weights.")}
    trained |= {name: value for name, value in state.items() if name.startswith(MOMENTS)}
    for name in checkpoints:
        assert_same_bits(assemble((folder / name).glob(shards.SHARDS)), trained)
    in_snapshot = {
        f"samplers.0.weights.{name.removeprefix(SAMPLER)}" if name.startswith(SAMPLER) else f"models.0.{name}": value
        for name, value in state.items()
    }
    assert_same_bits(assemble((folder / "snapshot").glob("rank-*.safetensors")), in_snapshot)


def check_adapter_files(folder: Path, checkpoints: Sequence[str]) -> None:
    state = load_file(folder / STATE)
    moments = {name: value for name, value in state.items() if name.startswith(MOMENTS)}
    assert_same_bits(load_file(folder / "saved" / "optimizer.safetensors"), moments)
    weights = load_file(folder / "saved" / "adapter_model.safetensors")
    of_layers = {
        f"base_model.model.{name.removeprefix('weights.')}.weight": value
        for name, value in state.items()
        if name.startswith("weights.") and value.ndim == 2
    }
    assert of_layers
    assert_same_bits({name: weights[name] for name in of_layers}, of_layers)
    for name in checkpoints:
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert (folder / name / file).read_bytes() == (folder / "saved" / file).read_bytes(), (name, file)


def assemble(files: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Tensors of which several files have shards, by the offsets in their headers. What no file has is not a number."""
    parts: dict[str, list[tuple[list[int], torch.Tensor]]] = defaultdict(list)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            offsets = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118
                parts[name].append((offsets[name]["saved_offsets"], opened.get_tensor(name)))
    whole: dict[str, torch.Tensor] = {}
    for name, shards_of in parts.items():
        ends = [[at + length for at, length in zip(offset, part.shape, strict=True)] for offset, part in shards_of]
        whole[name] = torch.full([max(each) for each in zip(*ends, strict=True)], torch.nan)
        for (offset, part), end in zip(shards_of, ends, strict=True):
            whole[name][tuple(slice(*each) for each in zip(offset, end, strict=True))] = part
    return whole


def assert_same_bits(read: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
    assert read.keys() == written.keys()
    differing = [name for name, value in written.items() if bytes_of(read[name]) != bytes_of(value)]
    assert not differing


@pytest.mark.proves(
    "Checkpoints and snapshots that one mesh of ranks wrote are the same bits on others: weights, "
    "moments, gradients that wait for a step, samplers; of full fine-tunes and of adapters"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "meshes"),
    [("llama", ("shard=2 tensor=2", "shard=4")), ("qwen3_moe", ("expert=2", "shard=4"))],
)
def test_files_of_one_mesh_are_read_on_another_and_on_one_rank_bit_for_bit(
    family: str, meshes: tuple[str, ...], tmp_path: Path
) -> None:
    check_resharded(tmp_path, family, meshes, numbers=[1])


@pytest.mark.proves(
    "Checkpoints and snapshots that one mesh of ranks wrote are the same bits on others: weights, "
    "moments, gradients that wait for a step, samplers; of full fine-tunes and of adapters"
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "meshes", "writer"),
    [
        *(("llama", DENSE_MESHES, writer) for writer in DENSE_MESHES),
        *(("qwen3_moe", MOE_MESHES, writer) for writer in MOE_MESHES),
    ],
)
def test_files_of_any_mesh_are_read_on_six_others_bit_for_bit(
    family: str, meshes: tuple[str, ...], writer: str, tmp_path: Path
) -> None:
    check_resharded(tmp_path, family, [writer, *(mesh for mesh in meshes if mesh != writer)], numbers=[1, 3])


@pytest.fixture(scope="module")
def split_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_split_mesh(tmp_path_factory.mktemp("split"), "2x2", "llama", "qwen3")


def run_split_mesh(folder: Path, mesh: str, *families: str, dtype: Dtype = "float64", ranks: int = 4) -> Path:
    program = [*launcher(ranks), "-m", "tests.shell.train_runner.split_mesh"]
    done = run([*program, str(folder), mesh, dtype, *families], 75 * ranks)
    assert (folder / "found.json").exists(), done.stderr[-4000:]
    return folder


def check_split_mesh(folder: Path, mesh: str, *families: str, dtype: Dtype = "float64") -> None:
    found = msgspec.json.decode((folder / "found.json").read_bytes(), type=SplitFound)
    assert [each.case for each in found.parity] == [
        f"{family} {training} {mesh}" for family in families for training in TRAININGS
    ]
    for each in found.parity:
        # The norms of gemma3, and so their gradients, are computed in float32; so are experts, and sinks by the oracle.
        is_exact = dtype == "float64" and each.case.startswith(("llama", "qwen3 "))
        tolerance = 1e-9 if is_exact else 1e-5
        assert max(each.loss, each.gradient, each.norm, each.step) <= tolerance, each
        assert each.shards_equal, each
    names = ("snapshot", "checkpoint", "weights")
    assert found.resharded == {f"{name} {on}": True for name in names for on in (mesh, "one rank", "two shards")}
    assert found.sampled <= 1e-5


@pytest.mark.gpu
def test_losses_gradients_steps_and_files_of_tensor_groups_are_those_of_one_process(split_folder: Path) -> None:
    check_split_mesh(split_folder, "2x2", "llama", "qwen3")


def test_a_checkpoint_of_tensor_groups_is_exported_as_the_model_that_was_trained(
    split_folder: Path, tmp_path: Path
) -> None:
    check_export(split_folder, tmp_path / "out")


def check_export(folder: Path, out: Path) -> None:
    export(folder / "saved", out, "hf")
    lm = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    sampled = AutoModelForCausalLM.from_pretrained(folder / "sampled", dtype=torch.float32)
    for (name, weight), (other, same) in zip(lm.named_parameters(), sampled.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(weight, same)


@pytest.mark.gpu
@pytest.mark.parametrize("mesh", ["2x2", "1x4", "2x1x2"])
def test_every_family_whose_layers_can_be_split_computes_what_one_process_does(mesh: str, tmp_path: Path) -> None:
    families = ("llama", *sorted(TENSOR_FAMILIES - EXPERT_FAMILIES - {"llama"}))
    check_split_mesh(run_split_mesh(tmp_path, mesh, *families), mesh, *families)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mesh",
    [
        "experts 2x2",
        "experts 1x4",
        "experts 2x1x2",
        "tensor 2 experts 2",
        "tensor 2 experts 4",
        "tensor 4 experts 4",
        "replicate 2 tensor 2 experts 2",
        "context 2 tensor 2 experts 4",
    ],
)
def test_ranks_that_hold_different_experts_compute_what_one_process_does(mesh: str, tmp_path: Path) -> None:
    families = sorted(EXPERT_FAMILIES)
    assert families == sorted(WITH_EXPERTS)
    check_split_mesh(run_split_mesh(tmp_path, mesh, *families), mesh, *families)


@pytest.mark.gpu
def test_ranks_that_share_layers_and_experts_compute_what_one_process_does(tmp_path: Path) -> None:
    mesh, family = "tensor 2 experts 4", "qwen3_moe"
    check_split_mesh(run_split_mesh(tmp_path, mesh, family), mesh, family)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["2x2x2", "context 2x2x2", "stages 2x2 tensor 2"])
def test_eight_ranks_in_three_dimensions_compute_what_one_process_does(mesh: str, tmp_path: Path) -> None:
    families = ("llama", "qwen3")
    check_split_mesh(run_split_mesh(tmp_path, mesh, *families, ranks=8), mesh, *families)


STAGE_FAMILIES: Final = ("llama", *sorted(PIPELINE_FAMILIES - {"llama"}))
CONTEXT_FAMILIES: Final = ("llama", "qwen3", "gemma3_text", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe")


@pytest.mark.gpu
def test_documents_that_are_cut_between_ranks_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    families = ("llama", "qwen3")
    check_split_mesh(run_split_mesh(tmp_path, "context 2x2", *families), "context 2x2", *families)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("mesh", "families"),
    [
        ("context 2x2", CONTEXT_FAMILIES),
        ("context 1x4", CONTEXT_FAMILIES),
        ("context 2x1x2", CONTEXT_FAMILIES),
        ("context 2 tensor 2", ("llama", "gemma3_text", "qwen3")),
        ("context 2 experts 2", ("qwen3_moe",)),
        ("context 2 experts 4", ("qwen3_moe",)),
    ],
)
def test_context_groups_of_every_mesh_and_kind_of_attention_give_the_numbers_of_one_process(
    mesh: str, families: tuple[str, ...], dtype: Dtype, tmp_path: Path
) -> None:
    check_split_mesh(run_split_mesh(tmp_path, mesh, *families, dtype=dtype), mesh, *families, dtype=dtype)


@pytest.mark.gpu
def test_stages_give_the_numbers_and_the_files_of_one_process(tmp_path: Path) -> None:
    families = ("llama", "qwen3")
    folder = run_split_mesh(tmp_path, "stages 2x2", *families)
    check_split_mesh(folder, "stages 2x2", *families)
    check_export(folder, tmp_path / "out")
    # Of the tied embedding, which two stages have, one is written.
    written = [name for file in (folder / "saved").glob(shards.SHARDS) for name in load_file(file)]
    assert written.count("model.embed_tokens.weight") == 2
    assert len(set(written)) == len(written) / 2


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("mesh", "families"),
    [
        ("stages 2", STAGE_FAMILIES),
        ("stages 2x2", STAGE_FAMILIES),
        ("stages 2x2x1", STAGE_FAMILIES),
        ("stages 4", ("llama", "qwen3", "qwen3_moe")),
        ("stages 2 tensor 2", ("llama", "gemma3_text", "qwen3")),
        ("stages 2 context 2", STAGE_FAMILIES),
    ],
)
def test_stages_of_every_mesh_and_family_give_the_numbers_of_one_process(
    mesh: str, families: tuple[str, ...], dtype: Dtype, tmp_path: Path
) -> None:
    ranks = 2 if mesh == "stages 2" else 4
    folder = run_split_mesh(tmp_path, mesh, *families, dtype=dtype, ranks=ranks)
    check_split_mesh(folder, mesh, *families, dtype=dtype)


def test_each_rank_of_a_context_group_has_its_part_of_the_activations_of_a_row(tmp_path: Path) -> None:
    program = "tests.shell.train_runner.context_memory"
    done = run([*launcher(4), "-m", program, str(tmp_path), "4096"])
    assert (tmp_path / "peaks.json").exists(), done.stderr[-4000:]
    peaks = msgspec.json.decode((tmp_path / "peaks.json").read_bytes(), type=dict[int, int])
    assert peaks[2] < 0.6 * peaks[1]
    assert peaks[4] < 0.35 * peaks[1]


@pytest.mark.parametrize(
    ("parallel", "config", "problem"),
    [
        (
            SPLIT,
            {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96},
            "",
        ),
        (
            ParallelSettings(expert=4),
            {"model_type": "qwen3_moe", "num_experts": 6},
            "parallel.expert is 4, which does not divide the num_experts of the model, 6",
        ),
        (
            ParallelSettings(expert=4),
            {"model_type": "llama"},
            "parallel.expert is 4: experts of llama cannot be spread, only those of deepseek_v3, gpt_oss, qwen3_moe",
        ),
        (
            ParallelSettings(expert=4),
            {"model_type": "deepseek_v3", "n_routed_experts": 6},
            "parallel.expert is 4, which does not divide the n_routed_experts of the model, 6",
        ),
        (
            SPLIT,
            {"model_type": "qwen3_moe", "num_experts": 8},
            "parallel.tensor is 4: experts of qwen3_moe are not split, but spread over tensor groups: set parallel.",
        ),
        (
            SPLIT,
            {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2},
            "parallel.tensor is 4, which does not divide the num_key_value_heads of the model, 2",
        ),
        (
            SPLIT,
            {"model_type": "mixtral"},
            "parallel.tensor is 4: layers of mixtral cannot be split, only those of deepseek_v3, gemma3_text, gpt_oss,",
        ),
        (ParallelSettings(context=4), {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2}, ""),
        (
            ParallelSettings(context=4),
            {"model_type": "gemma3", "text_config": {"num_attention_heads": 6}},
            "parallel.context is 4, which does not divide the num_attention_heads of the model, 6",
        ),
        (
            ParallelSettings(context=2, tensor=2),
            {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2},
            "parallel.context is 2, times parallel.tensor 2 is 4, which does not divide the num_attention_heads of the",
        ),
        (
            ParallelSettings(context=2),
            {"model_type": "phi3", "num_attention_heads": 8, "rope_scaling": {"type": "longrope"}},
            "parallel.context is 2: rotary embeddings of type longrope depend on the length of a row, and a rank has a",
        ),
        (
            ParallelSettings(context=2),
            {"model_type": "x", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "parallel.context is 2: rotary embeddings of type dynamic depend on the length of a row, and a rank has a",
        ),
        (
            ParallelSettings(context=2),
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            "parallel.context is 2: attn_temperature_tuning scales by the place in a row, and a rank has a slice",
        ),
        (ParallelSettings(context=2), {"model_type": "llama4_text", "attn_temperature_tuning": False}, ""),
        (ParallelSettings(pipeline=4), {"model_type": "qwen3", "num_hidden_layers": 4}, ""),
        (
            ParallelSettings(pipeline=4),
            {"model_type": "llama", "num_hidden_layers": 3},
            "parallel.pipeline is 4, which is more than the num_hidden_layers of the model, 3",
        ),
        (
            ParallelSettings(pipeline=2),
            {"model_type": "gemma2", "num_hidden_layers": 4},
            "parallel.pipeline is 2: gemma2 cannot be on several stages, only gemma3_text, llama, qwen3, qwen3_moe",
        ),
        (
            ParallelSettings(pipeline=2, expert=2),
            {"model_type": "qwen3_moe"},
            "parallel.expert is 2, and parallel.pipeline is 2: this version has no stages with expert groups",
        ),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_anything_starts(
    parallel: ParallelSettings, config: dict[str, object], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = ServerSettings(
        server=ServerSection(),
        model=ModelSettings(path=str(tmp_path)),
        ranks=RankSettings(nproc=4),
        limits=LimitSettings(),
        parallel=parallel,
    )
    if not problem:
        check_mesh(settings)
        return
    with pytest.raises(StrataError, match="^" + re.escape(problem)):
        check_mesh(settings)


@pytest.mark.parametrize(
    ("parallel", "ranks", "problem"),
    [
        (ParallelSettings(), 3, ""),
        (ParallelSettings(replicate=2), 4, ""),
        (ParallelSettings(replicate=2, shard=2), 4, ""),
        (ParallelSettings(tensor=2), 4, ""),
        (ParallelSettings(replicate=2, shard=1, tensor=2), 4, ""),
        (ParallelSettings(replicate=3), 4, "parallel.replicate 3 does not divide the number of ranks, 4"),
        (
            ParallelSettings(replicate=2, tensor=4),
            4,
            "parallel.replicate 2 times parallel.tensor 4 is 8, which does not divide the number of ranks, 4",
        ),
        (
            ParallelSettings(shard=4, tensor=2),
            4,
            "parallel.tensor 2 times parallel.shard 4 is 8, and there are 4 ranks",
        ),
        (
            ParallelSettings(replicate=2, shard=4),
            4,
            "parallel.replicate 2 times parallel.shard 4 is 8, and there are 4 ranks",
        ),
        (ParallelSettings(expert=4), 4, ""),
        (
            ParallelSettings(replicate=2, expert=4),
            4,
            "parallel.expert 4 does not divide the ranks that hold one copy of the model, 2",
        ),
        (ParallelSettings(tensor=2, expert=2), 4, ""),
        (ParallelSettings(tensor=2, expert=4), 4, ""),
        (ParallelSettings(tensor=4, expert=2), 4, "parallel.expert 2 is no multiple of parallel.tensor 4"),
        (ParallelSettings(context=2), 4, ""),
        (ParallelSettings(replicate=2, shard=1, context=2), 4, ""),
        (ParallelSettings(context=4, expert=2), 4, ""),
        (ParallelSettings(context=3), 4, "parallel.context 3 does not divide the number of ranks, 4"),
        (
            ParallelSettings(shard=4, context=2),
            4,
            "parallel.context 2 times parallel.shard 4 is 8, and there are 4 ranks",
        ),
        (ParallelSettings(pipeline=2), 4, ""),
        (ParallelSettings(pipeline=2, replicate=2, shard=1), 4, ""),
        (ParallelSettings(pipeline=2, context=2), 4, ""),
        (
            ParallelSettings(pipeline=3),
            4,
            "parallel.pipeline 3 does not divide the number of ranks, 4",
        ),
        (
            ParallelSettings(pipeline=2, shard=4),
            4,
            "parallel.pipeline 2 times parallel.shard 4 is 8, and there are 4 ranks",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_a_reason(parallel: ParallelSettings, ranks: int, problem: str) -> None:
    assert parallel.problem(ranks) == problem


def written_steps(stages: int, stage: int, rows: int) -> str:
    return " ".join(f"{'B' if step.is_backward else 'F'}{step.row}" for step in plan_steps(stages, stage, rows))


@pytest.mark.parametrize(
    ("rows", "of_stages"),
    [
        (3, ["F0 B0 F1 B1 F2 B2"]),
        (4, ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (4, ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (1, ["F0 B0", "F0 B0", "F0 B0"]),
    ],
)
def test_a_schedule_is_the_order_in_which_each_stage_computes_rows(rows: int, of_stages: list[str]) -> None:
    assert [written_steps(len(of_stages), stage, rows) for stage in range(len(of_stages))] == of_stages


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Path]:
    if not os.access(GROUPS / "cgroup.procs", os.W_OK):
        pytest.skip("memory is limited by control groups of version 1, which need root")
    yield tmp_path
    for file in tmp_path.glob("group-*"):
        Path(file.read_text(encoding="utf-8")).rmdir()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("training", "ranks"), [("lora", 2), ("full", 8)])
def test_a_model_larger_than_the_memory_of_a_rank_is_trained_sampled_saved_and_exported(
    limited: Path, training: str, ranks: int
) -> None:
    program = "tests.shell.train_runner.limited"
    done = run([*launcher(ranks), "-m", program, str(limited), training], 800)
    assert (limited / "done").exists(), done.stderr[-4000:]
    exported = run([sys.executable, "-m", program, str(limited), "export"])
    assert exported.returncode == 0, exported.stderr[-4000:]
    AutoModelForCausalLM.from_pretrained(limited / "exported", dtype=torch.float32)
