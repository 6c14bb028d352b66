"""Preflight check of model and memory: a server that cannot hold its model says so in one line before it starts.

The headers of the weight files give the shapes of all parameters; the memory that they need follows from the settings.
The needs of torch and of activations are estimated, so this rejects only what cannot work, and warns of what may not.
"""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.train.settings import ServerSettings

PROCESS_BYTES: Final = 400 << 20
"""Memory of a rank with torch and transformers before it has loaded a model."""
TRAINED_BYTES: Final = 16
"""Memory of a trained parameter: weight, gradient and two moments in float32."""
_MAX_HEADER: Final = 100 << 20
_log = log.get(__name__)


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Bytes on all ranks of this machine together."""

    base: int
    """The minimum to start."""
    full: int
    """With every slot in use and the longest rows."""


def check_model(settings: ServerSettings) -> None:
    """INVALID if the model is neither in a folder nor in the local cache: a start downloads nothing."""
    path = settings.model.path
    if not (Path(path).expanduser() / "config.json").is_file() and not _is_cached(path):
        raise StrataError(
            Code.INVALID,
            f"there is no model in {path}",
            hint="model.path is a folder with a config.json and weights, or the id of a model in the local cache",
        )


def _is_cached(model_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model_id, "config.json"), str)
    except HFValidationError:
        return False


def check_memory(settings: ServerSettings) -> None:
    """INVALID if the model cannot fit. A model that is not in a local folder is not checked."""
    shapes = dict(_shapes(Path(settings.model.path)))
    if not shapes:
        _log.info("memory_check_skipped", reason="the weights are not in a local folder")
        return
    needed, available = estimate(settings, shapes), available_bytes(settings)
    if available is None:
        return
    if needed.base > available:
        raise StrataError(
            Code.INVALID,
            f"{settings.model.base_model} needs {_gb(needed.base)} GB, and there are {_gb(available)} GB",
            hint="use bfloat16, fewer ranks on this machine, LoRA instead of full training, or a smaller model",
        )
    if needed.full > available:
        _log.warning(
            "memory_may_not_suffice",
            reason="for all slots and the longest rows",
            needed_gb=_gb(needed.full),
            available_gb=_gb(available),
        )


def estimate(settings: ServerSettings, shapes: dict[str, tuple[int, ...]]) -> MemoryEstimate:
    parameters = sum(math.prod(shape) for shape in shapes.values())
    itemsize = 2 if settings.model.dtype == "bfloat16" else 4
    ranks = settings.ranks.nproc
    largest = max(math.prod(shape) for shape in shapes.values())
    hidden = min((min(shape) for shape in shapes.values() if len(shape) == 2), default=0)
    logits = 2 * 4 * settings.model.max_tokens_per_row * (largest // max(hidden, 1))
    processes = ranks * PROCESS_BYTES
    if settings.model.training == "full":
        weights = parameters * (TRAINED_BYTES + (itemsize if itemsize == 2 else 0))
        return MemoryEstimate(processes + weights, processes + weights + ranks * logits)
    weights = parameters * itemsize
    # The base is sharded over the ranks; every rank holds all adapters.
    adapters = ranks * settings.model.slots * _adapter_bytes(settings, shapes)
    return MemoryEstimate(processes + weights, processes + weights + adapters + ranks * logits)


def _adapter_bytes(settings: ServerSettings, shapes: dict[str, tuple[int, ...]]) -> int:
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 and "embed" not in name]
    return TRAINED_BYTES * settings.model.max_lora_rank * sum(rows + columns for rows, columns in matrices)


def available_bytes(settings: ServerSettings) -> int | None:
    if settings.ranks.backend != "gloo" and (on_gpus := _gpu_bytes(settings.ranks.nproc)) is not None:
        return on_gpus
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else None


def _gpu_bytes(ranks: int) -> int | None:
    """Free memory of as many devices as there are ranks; None without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        free = sorted((int(line) << 20 for line in output.split()), reverse=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return sum(free[:ranks]) or None


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in the folder's safetensors files: their headers are JSON."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
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
