"""Checks a PEFT adapter that was made elsewhere: which options of its config are supported, ignored or refused, shapes
against the base, fused experts; with the wording of refusals.

A feature of PEFT that the ranks do not have is rejected, not ignored: the adapter would compute something else. An
adapter need not have all layers of a kind; the ranks initialise the others as in a new model when they load it. Nothing
here needs torch, or the weights of the base: only the names and shapes in its files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.base.errors import Code, StrataError
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import TensorEntry, read_header
from strata.train.core import model_options
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, EXPERTS, HEAD, PREFIX, Kind, kind_of, target_of

CONFIG_LIMIT: Final = 1 << 20
EMBEDDINGS: Final = ("model.embed_tokens", "transformer.wte")
"""Embeddings of models whose head is tied to the embedding."""
TRANSPOSED: Final = frozenset({"c_attn", "c_fc", "c_proj"})
"""Layers that some families store as (inputs, outputs)."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
        "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules",
        "target_parameters", "task_type",
    }
)  # fmt: skip
"""Keys that are read below, or that only repeat what the tensors' names say. Every other key must be off."""
INITIALISATIONS: Final = (True, False, None, "gaussian", "orthogonal")
"""Other initialisations change the base too."""
_EXPONENTS: Final = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The exponent bits, which are all set in numbers that are not finite."""
_EXPERT: Final = re.compile(rf"(.+\{EXPERTS})\.(\d+)\.(gate|up|down)_proj")
_PARTS: Final = ("lora_A", "lora_B")

Shape = tuple[int, ...]


class PeftConfig(msgspec.Struct, frozen=True):
    peft_type: str
    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    task_type: str | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True


class _Base(NamedTuple):
    targets: Mapping[str, tuple[int, int, int]]
    """The number of matrices of each layer, their rows and their columns."""
    other_experts: bool
    """Whether its files hold experts in an unknown form, so that only the ranks can check them."""


def read_config(raw: bytes, names: Collection[str], max_rank: int) -> PeftConfig:
    """INVALID for every key that would give the matrices another meaning than the ranks give them."""
    if len(raw) > CONFIG_LIMIT:
        raise _invalid(ADAPTER_CONFIG, "it is too long")
    try:
        keys = msgspec.json.decode(raw, type=dict[str, Any])
        if keys.get("peft_type") != "LORA":
            raise _invalid(ADAPTER_CONFIG, f"peft_type {str(keys.get('peft_type'))[:80]!r} is not LORA")
        config = msgspec.json.decode(raw, type=PeftConfig)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(ADAPTER_CONFIG, f"it cannot be read: {error}") from error
    for key in sorted(keys.keys() - WITHOUT_EFFECT):
        if keys[key]:
            raise _invalid(ADAPTER_CONFIG, f"it uses {key[:80]}, which this server does not support")
    _check_supported(config, max_rank)
    _check_base(config, names)
    return config


def stored_config(config: PeftConfig, layers: Collection[str], base_model: str) -> bytes:
    """The config as it is stored: only the values that were checked. Nothing is stored as it was sent: a reader may act
    on other keys, such as modules to import."""
    fused = [layer for layer in layers if layer.rpartition(".")[0].endswith(EXPERTS)]
    experts = [".".join(layer.split(".")[-3:]) for layer in fused]
    config_json = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [layer for layer in layers if layer not in fused],
        "target_parameters": sorted(set(experts)) or None,
        "inference_mode": True,
    }
    return msgspec.json.format(msgspec.json.encode(config_json))


def layers_of(file: Path) -> list[str]:
    """The layers of the base that an adapter adapts."""
    return sorted({target_of(_layer(name)[0]) for name in _shapes(file)})


def _check_supported(config: PeftConfig, max_rank: int) -> None:
    if config.bias != "none":
        raise _invalid(ADAPTER_CONFIG, f"it trains biases ({config.bias[:80]!r})")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise _invalid(ADAPTER_CONFIG, f"it is for {config.task_type[:80]}, not for a causal language model")
    if config.init_lora_weights not in INITIALISATIONS:
        raise _invalid(
            ADAPTER_CONFIG, f"it was initialised with {str(config.init_lora_weights)[:80]!r}, which changes the base"
        )
    if not 1 <= config.r <= max_rank:
        raise _invalid(ADAPTER_CONFIG, f"r is {config.r}, and this server takes 1 to {max_rank}")
    if not 0 < config.lora_alpha <= 1e6:
        raise _invalid(ADAPTER_CONFIG, f"lora_alpha is {config.lora_alpha:g}")


def _check_base(config: PeftConfig, names: Collection[str]) -> None:
    """Compare the last part of the path: the folder may have had another path where the adapter was trained."""
    named = (config.base_model_name_or_path or "").rstrip("/").rpartition("/")[2]
    own = [name.rstrip("/").rpartition("/")[2] for name in names]
    if named not in own:
        raise StrataError(
            Code.INVALID,
            f"{ADAPTER_CONFIG}: it was trained on {named[:200]!r}, and this server has {own[0]!r}",
            hint="if it is the same model, set base_model_name_or_path",
        )


def examine(file: Path, config: PeftConfig, base: Path) -> model_options.LoraConfig:
    """The LoRA config of a model that can load this. INVALID with the first tensor that does not fit the base."""
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in _shapes(file).items():
        layer, part = _layer(name)
        layers.setdefault(target_of(layer), {})[part] = shape
    if not layers:
        raise _invalid(ADAPTER, "it holds no tensors")
    kinds = {_kind(target) for target in layers}
    layers_of_base = _read_base(base)
    for target, parts in sorted(layers.items()):
        if parts.keys() != set(_PARTS):
            raise _invalid(ADAPTER, f"it has only one of A and B of {target}")
        if layers_of_base is not None:
            _check_shapes(target, parts, layers_of_base, config.r)
    return model_options.LoraConfig(
        rank=config.r,
        alpha=config.lora_alpha,
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
    )


def _shapes(file: Path) -> Mapping[str, Shape]:
    """The shapes of the tensors, which must be contiguous, fill the file, and hold only finite numbers."""
    try:
        tensors = read_header(file).tensors
    except StrataError as error:
        raise _invalid(ADAPTER, error.message) from error
    data = np.memmap(file, np.uint8, "r")
    numbers = data[8 + int.from_bytes(data[:8].tobytes(), "little") :]
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda entry: entry[1].data_offsets):
        size += _check_numbers(name, tensor, numbers, size)
    if len(numbers) != size:
        raise _invalid(ADAPTER, "its tensors do not fill it")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_numbers(name: str, tensor: TensorEntry, numbers: NDArray[np.uint8], begin: int) -> int:
    """Check a tensor that has to begin at this byte of the numbers; returns its bytes."""
    kind, exponent = _EXPONENTS.get(tensor.dtype, ("<u2", 0))
    count = math.prod(tensor.shape)
    size = count * np.dtype(kind).itemsize
    fits = tuple(tensor.data_offsets) == (begin, begin + size) and begin + size <= len(numbers)
    if not exponent or not fits or any(side <= 0 for side in tensor.shape):
        raise _invalid(ADAPTER, f"{name[:200]!r} is not a contiguous tensor of {', '.join(_EXPONENTS)}")
    bits = np.frombuffer(numbers, kind, count, begin)
    if bool(((bits & exponent) == exponent).any()):
        raise _invalid(ADAPTER, f"{name[:200]!r} holds a number that is not finite")
    return size


def _layer(name: str) -> tuple[str, str]:
    for part in _PARTS:
        suffix = f".{part}.weight"
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix), part
    hint = None if "lora_" in name else "if it is of the base, save the adapter with save_embedding_layers=False"
    raise StrataError(Code.INVALID, f"{ADAPTER}: {name[:200]!r} is not a matrix of an adapter", hint=hint)


def _kind(target: str) -> Kind:
    kind = kind_of(target)
    if kind is None:
        raise _invalid(ADAPTER, f"{target[:200]!r} is not a layer that can be adapted")
    return kind


def _read_base(base: Path) -> _Base | None:
    """The layers in the base's files; None if only the ranks can check: it is no folder, or its format is unknown."""
    targets: dict[str, tuple[int, int, int]] = {}
    other_experts = False
    for name, shape in _stored_shapes(base).items():
        if expert := _EXPERT.fullmatch(name):
            _fuse_expert(targets, expert, shape)
        elif len(shape) == 3:
            targets[name] = (shape[0], shape[1], shape[2])
        elif len(shape) == 2:
            targets[name] = (1, shape[0], shape[1])
            other_experts |= f"{EXPERTS}." in name
    for embedding in EMBEDDINGS:
        if embedding in targets:
            targets.setdefault(HEAD, targets[embedding])
    return _Base(targets, other_experts) if targets else None


def _stored_shapes(base: Path) -> Mapping[str, Shape]:
    """The shapes of the weights in the base's files; none if a file cannot be read."""
    try:
        return {
            name.removesuffix(".weight"): tuple(tensor.shape)
            for file in sorted(base.glob("*.safetensors"))
            for name, tensor in read_header(file).tensors.items()
        }
    except StrataError:
        return {}


def _fuse_expert(targets: dict[str, tuple[int, int, int]], expert: re.Match[str], shape: Shape) -> None:
    """The ranks have one fused weight for all experts, with the gate and up matrices in one."""
    above, number, part = expert.groups()
    target = f"{above}.{'down' if part == 'down' else 'gate_up'}_proj"
    count, rows, _ = targets.get(target, (0, 0, 0))
    targets[target] = (count + (part != "up"), rows + (shape[0] if number == "0" else 0), shape[1])


def _check_shapes(target: str, parts: Mapping[str, Shape], base: _Base, rank: int) -> None:
    if target not in base.targets:
        if base.other_experts and f"{EXPERTS}." in target:
            return
        raise _invalid(ADAPTER, f"the base has no layer {target[:200]!r}")
    count, rows, columns = base.targets[target]
    expected = {"lora_A": (rank * count, columns), "lora_B": (rows, rank * count)}
    transposed = {"lora_A": (rank * count, rows), "lora_B": (columns, rank * count)}
    # Families store fused experts as (out, in) or as (in, out); the ranks know which.
    either = count > 1 or target.rpartition(".")[2] in TRANSPOSED
    if parts != expected and not (either and parts == transposed):
        raise _invalid(ADAPTER, f"{target} is {dict(parts)}, and the base needs {expected} for r = {rank}")


def stage(folder: Path, manifest: checkpoint.CheckpointManifest, files: Mapping[str, bytes]) -> None:
    """Write the adapter as a checkpoint; it is complete and durable when this returns."""

    def fill(part: Path) -> None:
        for name, content in files.items():
            (part / name).write_bytes(content)

    checkpoint.write(folder, manifest, fill, overwrite=False)


def _invalid(file: str, why: str) -> StrataError:
    return StrataError(Code.INVALID, f"{file}: {why}")
