"""Preflight check of model and memory: a server that cannot hold its model says so in one line before it starts.

The headers of the weight files give the shapes of all parameters; the memory that they need follows from the settings,
by the arithmetic of `strata plan` (`core/device_memory.py`). Activations are not known without a trace, so this rejects
only what cannot work, and warns of what may not.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.train.core.device_memory import MemoryRecipe, MeshShape, ModelCost, cache_numbers, plan_device
from strata.train.core.quantisation import can_be_quantised, saved_bytes
from strata.train.hugging_face import CONFIG, WEIGHTS, find_folder
from strata.train.peft.layers import kind_of
from strata.train.settings import ParallelSettings, ServerSettings, check_alone, check_quantise

NVIDIA_SMI: Final = "nvidia-smi"
_LAYER: Final = re.compile(r".*?\.\d+\.")
"""The name of a layer, up to its number."""
_EXPERTS: Final = ".experts."
_UNSPLIT: Final = (".gate.weight", ".router.weight", ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight")
"""Matrices of layers that every rank of a tensor group has: routers, and what all heads of `deepseek_v3` share."""
_SPLIT_BY_INPUTS: Final = (".o_proj.weight", ".down_proj.weight")
"""Matrices of layers that a tensor group splits by their inputs; it splits the others by their outputs."""
_CONV1D_FAMILIES: Final = frozenset({"gpt2", "openai-gpt"})
"""Families (`model_type`) whose layers are `Conv1D` of transformers, which are not quantised; only the model has their
types, not its files."""
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "embed_tokens."
_MAX_HEADER: Final = 100 << 20
_log = log.get(__name__)


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes of each rank, and so of each device."""

    base: int
    """The minimum to start."""
    full: int
    """With every slot in use, a full KV cache, and several passes before a step."""


class WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]
    """The file of each weight."""


class ModelFiles(msgspec.Struct, frozen=True):
    """What the headers of a model's files say."""

    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]


def check_model(settings: ServerSettings) -> None:
    """INVALID if the model is neither in a folder nor in the local cache: a start downloads nothing."""
    path = settings.model.path
    if find_folder(path) is None:
        raise StrataError(
            Code.INVALID,
            f"there is no model in {path}",
            hint="model.path is a folder with a config.json and weights, or an id that `strata models pull` got",
        )


def check_mesh(settings: ServerSettings) -> None:
    """INVALID if the ranks do not form the mesh that `parallel` describes, or the model cannot be on it."""
    if problem := settings.parallel.problem(settings.ranks.nproc):
        raise StrataError(Code.INVALID, problem)
    model = settings.model
    check_alone(model.quantise, settings.parallel, compiles=model.compile, offloads=model.offload)
    folder = find_folder(settings.model.path)
    if folder is not None and (problem := settings.parallel.model_problem(read_config(folder))):
        raise StrataError(Code.INVALID, problem)
    if settings.parallel.pipeline > 1 and settings.inference.engine:
        raise StrataError(
            Code.INVALID,
            f"parallel.pipeline is {settings.parallel.pipeline}, and inference.engine is {settings.inference.engine}:"
            " ranks that are stages open no samplers, with an engine or without",
            hint="leave inference.engine out, and sample from saved weights elsewhere",
        )


def check_quantised(settings: ServerSettings) -> None:
    """INVALID or UNSUPPORTED if the model, or the server's work, cannot be based on quantised weights."""
    quantise = settings.model.quantise
    check_quantise(quantise, settings.model.training, settings.parallel)
    check_quantised_base(settings)
    folder = find_folder(settings.model.path)
    if not quantise or folder is None:
        return
    files, recipe = read_model_files(folder), memory_recipe(settings)
    if files.shapes and not any(_saved_bytes(files, name, recipe) for name in files.shapes):
        raise StrataError(Code.INVALID, f"{settings.model.base_model} has no layer that can be quantised to {quantise}")


def check_quantised_base(settings: ServerSettings) -> None:
    """The part of `check_quantised` that does not ask what this machine has: ranks may be on others."""
    quantise = settings.model.quantise
    if not quantise:
        return
    if settings.inference.engine:
        raise StrataError(
            Code.INVALID,
            f"model.quantise is {quantise}, and inference.engine is {settings.inference.engine}: the engine would"
            " sample from the base as it is in its files, and not from the one that is trained",
            hint="leave inference.engine out: the ranks sample",
        )
    folder = find_folder(settings.model.path)
    if folder is not None and read_config(folder).get("quantization_config"):
        raise StrataError(
            Code.INVALID,
            f"model.quantise is {quantise}, and {settings.model.base_model} is quantised already",
            hint="model.path is a model as it was before that",
        )


def check_memory(settings: ServerSettings) -> None:
    """INVALID if the model cannot fit. A model whose weights are not here is not checked."""
    folder = find_folder(settings.model.path)
    model = None if folder is None else read_model_files(folder)
    if model is None or not model.shapes:
        _log.info("memory_check_skipped", reason="the weights are not on this machine")
        return
    needed, available = estimate(settings, model), available_bytes(settings)
    if available is None:
        return
    if needed.base > available:
        ranks = settings.ranks.nproc
        room = f" on each of {ranks} ranks, and each has" if ranks > 1 else ", and there are"
        raise StrataError(
            Code.INVALID,
            f"{settings.model.base_model} needs {_gb(needed.base)} GB{room} {_gb(available)} GB",
            hint="use bfloat16, more devices, LoRA instead of full training, a quantised base, or a smaller model",
        )
    if needed.full > available:
        _log.warning(
            "memory_may_not_suffice",
            reason="for all slots and the KV cache",
            needed_gb=_gb(needed.full),
            available_gb=_gb(available),
        )


def estimate(settings: ServerSettings, model: ModelFiles) -> MemoryEstimate:
    """To start: without a LoRA model, a sample or a second pass before a step. The activations of a row come on top."""
    recipe = memory_recipe(settings)
    mesh = mesh_shape(settings.parallel, settings.ranks.nproc)
    cost = largest_stage_cost(model, recipe, settings.parallel, mesh)
    least = msgspec.structs.replace(recipe, slots=0, cached_tokens=0, accumulates=False)
    # What may work is not refused.
    start = sum(part.bytes for part in plan_device(cost, least, mesh).parts if part.name != "margin")
    return MemoryEstimate(start, plan_device(cost, recipe, mesh).total)


def mesh_shape(parallel: ParallelSettings, ranks: int) -> MeshShape:
    shard = max(parallel.shards(ranks) // parallel.context, 1)
    return MeshShape(parallel.replicate, shard, parallel.tensor, parallel.expert, parallel.context, parallel.pipeline)


def memory_recipe(settings: ServerSettings) -> MemoryRecipe:
    model = settings.model
    return MemoryRecipe(
        training=model.training,
        dtype=model.dtype,
        quantise=model.quantise,
        lora_rank=model.max_lora_rank,
        slots=model.slots,
        row_tokens=model.max_tokens_per_row,
        cached_tokens=settings.sampling.cached_tokens,
        checkpointing=int(model.activation_checkpointing),
        offload=model.offload,
        replicated_bytes=model.replicated_mb << 20,
        device="cpu" if settings.ranks.backend == "gloo" or shutil.which(NVIDIA_SMI) is None else "cuda",
    )


def largest_stage_cost(
    model: ModelFiles, recipe: MemoryRecipe, parallel: ParallelSettings, mesh: MeshShape
) -> ModelCost:
    """Of the stage that has most parameters, with the adapters of its layers; ranks that are stages have no KV cache.
    Without stages, of the model."""
    whole = model_cost(model, recipe, mesh)
    if mesh.pipeline == 1:
        return whole
    stages = [
        model_cost(ModelFiles(_stage_shapes(model, parallel, stage), model.config), recipe, mesh)
        for stage in range(mesh.pipeline)
    ]
    return msgspec.structs.replace(
        max(stages, key=lambda cost: cost.rank_parameters),
        parameters=whole.parameters,
        cache_numbers=0,
    )


def _stage_shapes(model: ModelFiles, parallel: ParallelSettings, stage: int) -> dict[str, tuple[int, ...]]:
    """A tied head is on the last stage too."""
    own = parallel.stage_layers(stage, int(model.config.get("num_hidden_layers", 0)))
    is_last, is_tied = stage == parallel.pipeline - 1, _HEAD not in model.shapes
    shapes = {}
    for name, shape in model.shapes.items():
        if (match := _LAYER.match(name)) is not None:
            is_own = int(match.group().split(".")[-2]) in own
        elif _EMBEDDING in name:
            is_own = stage == 0 or (is_last and is_tied)
        else:
            is_own = is_last
        if is_own:
            shapes[name] = shape
    return shapes


def model_cost(model: ModelFiles, recipe: MemoryRecipe, mesh: MeshShape) -> ModelCost:
    """The sizes of a model by the headers of its files, without a trace of a pass."""
    of_rank = {name: _rank_parameters(model, name, mesh.tensor) for name in model.shapes}
    layers: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    saved: Counter[str] = Counter()
    for name, size in of_rank.items():
        match = _LAYER.match(name)
        layer = match.group() if match else ""
        (experts if _EXPERTS in name else layers)[layer] += size
        saved[layer] += _saved_bytes(model, name, recipe)
    root = layers.pop("", 0)
    adapted = {name: _adapted(name, shape) for name, shape in model.shapes.items()}
    blocks = layers.keys() | experts.keys()
    return ModelCost(
        parameters=sum(map(math.prod, model.shapes.values())),
        rank_parameters=sum(of_rank.values()),
        expert_parameters=experts.total(),
        blocks=len(blocks),
        expert_blocks=len(experts),
        block_parameters=max((layers[name] + experts[name] * mesh.tensor // mesh.expert for name in blocks), default=0),
        root_parameters=root,
        adapter_parameters=recipe.lora_rank * sum(adapted.values()),
        adapter_split_parameters=recipe.lora_rank * sum(_split_adapted(model, name, mesh.tensor) for name in adapted),
        adapter_expert_parameters=recipe.lora_rank * sum(adapted[name] for name in adapted if _EXPERTS in name),
        cache_numbers=cache_numbers(model.config),
        saved_bytes=saved.total(),
        block_saved_bytes=max(saved.values(), default=0),
    )


def _rank_parameters(model: ModelFiles, name: str, tensor: int) -> int:
    """What a rank of a tensor group has of a weight. Matrices of layers are split, if no rank needs them in full, and a
    head that is not tied, if it can be divided."""
    return math.prod(model.shapes[name]) // (tensor if _is_split(model, name, tensor) else 1)


def _is_split(model: ModelFiles, name: str, tensor: int) -> bool:
    shape = model.shapes[name]
    is_head = name == _HEAD and not model.config.get("tie_word_embeddings") and shape[0] % tensor == 0
    in_layer = _LAYER.match(name) is not None and not name.endswith(_UNSPLIT)
    return is_head or (len(shape) > 1 and in_layer)


def _saved_bytes(model: ModelFiles, name: str, recipe: MemoryRecipe) -> int:
    """By which a weight is smaller if it is quantised. Experts are not, nor are `Conv1D` layers."""
    shape = model.shapes[name]
    if not recipe.quantise or len(shape) != 2 or _EXPERTS in name or model.config.get("model_type") in _CONV1D_FAMILIES:
        return 0
    rows, columns = shape
    if not can_be_quantised(recipe.quantise, kind_of(name.removesuffix(".weight")), columns):
        return 0
    return saved_bytes(recipe.quantise, rows, columns, recipe.item_bytes)


def _adapted(name: str, shape: tuple[int, ...]) -> int:
    """Rows and columns of a weight that an adapter has, for each expert that it is of."""
    target = name.removesuffix(".weight")
    if len(shape) < 2 or kind_of(target) is None:
        return 0
    *experts, rows, columns = shape
    # Files may have the two matrices apart that are one weight in memory, with one adapter.
    shared = _EXPERTS in name and target.endswith((".up_proj", ".w3"))
    return math.prod(experts) * (rows + (0 if shared else columns))


def _split_adapted(model: ModelFiles, name: str, tensor: int) -> int:
    """The rows or the columns of a weight, whose part of its adapter is split over a tensor group."""
    shape = model.shapes[name]
    if tensor == 1 or _EXPERTS in name or not _adapted(name, shape) or not _is_split(model, name, tensor):
        return 0
    return shape[1] if name.endswith(_SPLIT_BY_INPUTS) else shape[0]


def available_bytes(settings: ServerSettings) -> int | None:
    """Of each rank: the free memory of its device, or its share of the machine's."""
    ranks = settings.ranks.nproc
    if settings.ranks.backend != "gloo" and (on_gpu := _gpu_bytes(ranks)) is not None:
        return on_gpu
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return (int(fields["MemAvailable"].split()[0]) << 10) // ranks if "MemAvailable" in fields else None


def _gpu_bytes(ranks: int) -> int | None:
    """Free memory of the fullest of as many devices as there are ranks; None without a driver."""
    tool = shutil.which(NVIDIA_SMI)
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if shown := process_environment().get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={shown}")
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        free = [int(line) << 20 for line in output.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    # Rank n has device n of those that it is shown.
    return min(free[:ranks], default=0) or None


def read_model_files(folder: Path) -> ModelFiles:
    shapes, config = dict(_weight_shapes(folder)), read_config(folder)
    if config.get("tie_word_embeddings") and list(shapes.values()).count(shapes.get(_HEAD, ())) > 1:
        # Some files have a copy of the embeddings as the head; in memory they are one.
        del shapes[_HEAD]
    return ModelFiles(shapes, config)


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise StrataError(Code.INVALID, f"{folder / CONFIG} cannot be read: {error}") from None


def _weight_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in the folder's safetensors files: their headers are JSON."""
    index = folder / "model.safetensors.index.json"
    # A folder may have the same weights in another format beside them.
    named = msgspec.json.decode(index.read_bytes(), type=WeightIndex).weight_map.values() if index.is_file() else None
    for file in sorted(folder.glob(WEIGHTS)):
        if named is not None and file.name not in named:
            continue
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > _MAX_HEADER:
                raise StrataError(Code.CORRUPT, f"{file} is not a file of weights")
            try:
                header: dict[str, dict[str, Any]] = msgspec.json.decode(
                    opened.read(size), type=dict[str, dict[str, Any]]
                )
            except msgspec.MsgspecError as error:
                raise StrataError(Code.CORRUPT, f"{file} is not a file of weights: {error}") from error
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}"
