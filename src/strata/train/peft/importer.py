"""Adapters that PEFT made elsewhere: what they must be like to be trained here, told from their files alone.

What PEFT can do and the ranks cannot is refused, not left out: the adapter would say something else. An adapter need
not have all layers of a kind; the ranks add the others as those of a new model when they load it. Nothing here needs
torch, or the weights of the base: only the names and shapes in its files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from strata.base.errors import Code, StrataError
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.files import read_header
from strata.train.core import ops
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, EXPERTS, HEAD, PREFIX, Kind, kind_of, target_of

CONFIG_LIMIT: Final = 1 << 20
EMBEDDINGS: Final = ("model.embed_tokens", "transformer.wte")
"""Of a model whose head is not a weight of its own."""
TURNED: Final = frozenset({"c_attn", "c_fc", "c_proj"})
"""Layers that some families store as (inputs, outputs)."""
WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "inference_mode",
        "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
        "peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules",
        "target_parameters", "task_type",
    }
)  # fmt: skip
"""Read below, or saying nothing that the names in the file do not say. Everything else must be off."""
INITIALISATIONS: Final = (True, False, None, "gaussian", "orthogonal")
"""Others change the base too."""
_EXPONENTS: Final = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The bits that are all set in what is no finite number."""
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
    """How many matrices there are in a layer, their rows and their columns."""
    other_experts: bool
    """Whether it has experts that its files hold in a form not known here, so that only the ranks can tell."""


def read_config(raw: bytes, names: Collection[str], max_rank: int) -> PeftConfig:
    """INVALID for everything that would make the matrices mean something else than ours."""
    if len(raw) > CONFIG_LIMIT:
        raise _invalid(ADAPTER_CONFIG, "it is too long")
    try:
        rest = msgspec.json.decode(raw, type=dict[str, Any])
        if rest.get("peft_type") != "LORA":
            raise _invalid(ADAPTER_CONFIG, f"peft_type {str(rest.get('peft_type'))[:80]!r} is not LORA")
        config = msgspec.json.decode(raw, type=PeftConfig)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(ADAPTER_CONFIG, f"it cannot be read: {error}") from error
    for key in sorted(rest.keys() - WITHOUT_EFFECT):
        if rest[key]:
            raise _invalid(ADAPTER_CONFIG, f"it uses {key[:80]}, which this server does not")
    _check_usual(config, max_rank)
    _check_base(config, names)
    return config


def own_config(config: PeftConfig, layers: Collection[str], base_model: str) -> bytes:
    """As it is kept: what was read and checked, in keys that are known here. Nothing is kept as it was sent: a reader
    may act on keys, such as modules to import."""
    fused = [layer for layer in layers if layer.rpartition(".")[0].endswith(EXPERTS)]
    experts = [".".join(layer.split(".")[-3:]) for layer in fused]
    said = {
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
    return msgspec.json.format(msgspec.json.encode(said))


def layers_of(file: Path) -> list[str]:
    """The layers of the base that an adapter changes."""
    return sorted({target_of(_layer(name)[0]) for name in _shapes(file)})


def _check_usual(config: PeftConfig, max_rank: int) -> None:
    if config.bias != "none":
        raise _invalid(ADAPTER_CONFIG, f"it trains biases ({config.bias[:80]!r})")
    if config.task_type not in (None, "CAUSAL_LM"):
        raise _invalid(ADAPTER_CONFIG, f"it is for {config.task_type[:80]}, not for a causal language model")
    if config.init_lora_weights not in INITIALISATIONS:
        raise _invalid(ADAPTER_CONFIG, f"it began with {str(config.init_lora_weights)[:80]!r}, which changes the base")
    if not 1 <= config.r <= max_rank:
        raise _invalid(ADAPTER_CONFIG, f"r is {config.r}, and this server takes 1 to {max_rank}")
    if not 0 < config.lora_alpha <= 1e6:
        raise _invalid(ADAPTER_CONFIG, f"lora_alpha is {config.lora_alpha:g}")


def _check_base(config: PeftConfig, names: Collection[str]) -> None:
    """By the last part of the path: the folder may be elsewhere, where it was made."""
    said = (config.base_model_name_or_path or "").rstrip("/").rpartition("/")[2]
    own = [name.rstrip("/").rpartition("/")[2] for name in names]
    if said not in own:
        raise StrataError(
            Code.INVALID,
            f"{ADAPTER_CONFIG}: it was made for {said[:200]!r}, and this server has {own[0]!r}",
            hint="if it is the same model, set base_model_name_or_path",
        )


def examine(file: Path, config: PeftConfig, base: Path) -> ops.LoraConfig:
    """What a model must be like to load this. INVALID with the first tensor that does not fit the base."""
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in _shapes(file).items():
        layer, part = _layer(name)
        layers.setdefault(target_of(layer), {})[part] = shape
    if not layers:
        raise _invalid(ADAPTER, "it holds nothing")
    kinds = {_kind(target) for target in layers}
    found = _read_base(base)
    for target, parts in sorted(layers.items()):
        if parts.keys() != set(_PARTS):
            raise _invalid(ADAPTER, f"of {target} it has only one of A and B")
        if found is not None:
            _check_shapes(target, parts, found, config.r)
    return ops.LoraConfig(
        rank=config.r,
        alpha=config.lora_alpha,
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
    )


def _shapes(file: Path) -> Mapping[str, Shape]:
    """Of whole tensors of finite numbers that fill the file."""
    try:
        tensors = read_header(file).tensors
    except StrataError as error:
        raise _invalid(ADAPTER, error.message) from error
    data = np.memmap(file, np.uint8, "r")
    at = start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].data_offsets):
        kind, exponent = _EXPONENTS.get(tensor.dtype, ("<u2", 0))
        count = math.prod(tensor.shape)
        begin, end = (start + offset for offset in tensor.data_offsets)
        fits = (begin, end) == (at, at + count * np.dtype(kind).itemsize) and end <= len(data)
        if not exponent or not fits or any(side <= 0 for side in tensor.shape):
            raise _invalid(ADAPTER, f"{name[:200]!r} is not a whole tensor of {', '.join(_EXPONENTS)}")
        bits = np.frombuffer(data, kind, count, begin)
        if bool(((bits & exponent) == exponent).any()):
            raise _invalid(ADAPTER, f"{name[:200]!r} holds what is no finite number")
        at = end
    if len(data) != at:
        raise _invalid(ADAPTER, "its tensors do not fill it")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _layer(name: str) -> tuple[str, str]:
    for part in _PARTS:
        suffix = f".{part}.weight"
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name.removeprefix(PREFIX).removesuffix(suffix), part
    hint = None if "lora_" in name else "if it is of the base, save the adapter with save_embedding_layers=False"
    raise StrataError(Code.INVALID, f"{ADAPTER}: {name[:200]!r} is no matrix of an adapter", hint=hint)


def _kind(target: str) -> Kind:
    kind = kind_of(target)
    if kind is None:
        raise _invalid(ADAPTER, f"{target[:200]!r} is no layer that is trained here")
    return kind


def _read_base(base: Path) -> _Base | None:
    """None if only the ranks can tell: it is no folder, or its files are of a form not known here."""
    found: dict[str, tuple[int, int, int]] = {}
    other_experts = False
    try:
        stored = {
            name.removesuffix(".weight"): tuple(tensor.shape)
            for file in sorted(base.glob("*.safetensors"))
            for name, tensor in read_header(file).tensors.items()
        }
    except StrataError:
        return None
    for name, shape in stored.items():
        if expert := _EXPERT.fullmatch(name):
            # The ranks have one weight for all of them, with the first two matrices in one.
            above, number, part = expert.groups()
            target = f"{above}.{'down' if part == 'down' else 'gate_up'}_proj"
            count, rows, _ = found.get(target, (0, 0, 0))
            found[target] = (count + (part != "up"), rows + (shape[0] if number == "0" else 0), shape[1])
        elif len(shape) == 3:
            found[name] = (shape[0], shape[1], shape[2])
        elif len(shape) == 2:
            found[name] = (1, shape[0], shape[1])
            other_experts |= f"{EXPERTS}." in name
    for embedding in EMBEDDINGS:
        if embedding in found:
            found.setdefault(HEAD, found[embedding])
    return _Base(found, other_experts) if found else None


def _check_shapes(target: str, parts: Mapping[str, Shape], base: _Base, rank: int) -> None:
    if target not in base.targets:
        if base.other_experts and f"{EXPERTS}." in target:
            return
        raise _invalid(ADAPTER, f"the base has no layer {target[:200]!r}")
    count, rows, columns = base.targets[target]
    expected = {"lora_A": (rank * count, columns), "lora_B": (rows, rank * count)}
    turned = {"lora_A": (rank * count, rows), "lora_B": (columns, rank * count)}
    if parts != expected and not (target.rpartition(".")[2] in TURNED and parts == turned):
        raise _invalid(ADAPTER, f"{target} is {dict(parts)}, and the base needs {expected} for r = {rank}")


def stage(folder: Path, manifest: checkpoint.CheckpointManifest, files: Mapping[str, bytes]) -> None:
    """A checkpoint like every other, whole and on the disk when this returns."""

    def fill(part: Path) -> None:
        for name, content in files.items():
            (part / name).write_bytes(content)

    checkpoint.write(folder, manifest, fill, overwrite=False)


def _invalid(file: str, why: str) -> StrataError:
    return StrataError(Code.INVALID, f"{file}: {why}")
