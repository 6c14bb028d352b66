"""Checks before a server starts that model, mesh, features and memory fit, and words each problem with its remedy.

The headers of the weight files give the shapes of all parameters; the memory that they need follows from the settings,
by the arithmetic of `strata plan` (`plan/memory_plan.py`). Activations are not known without a trace, so this rejects
only what cannot work, and warns of what may not.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.base.support import report_experimental
from strata.train.combinations import Combination, assess, check_combination
from strata.train.hugging_face import find_folder
from strata.train.plan.model_cost import NVIDIA_SMI, estimate, memory_recipe, weight_saved_bytes
from strata.train.plan.model_files import read_config, read_model_files
from strata.train.settings import ServerSettings, check_quantise_package

_log = log.get(__name__)


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
    check_features(settings)
    if problem := settings.parallel.shape_problem(_config(settings) or {}):
        raise StrataError(Code.INVALID, problem)


def check_features(settings: ServerSettings) -> None:
    """INVALID if features that the settings ask for do not work together, or not with the model. It does not ask what
    this machine has: ranks may be on others."""
    check_combination(server_combination(settings))


def report_experimental_features(settings: ServerSettings) -> None:
    """Log a line for each feature of the server that is experimental, alone or in this combination."""
    combination, ranks = server_combination(settings), settings.ranks
    devices = (memory_recipe(settings).device, "nccl" if ranks.backend == "nccl" else "")
    report_experimental((*combination.features, *devices, "ranks.mode" if ranks.mode == "connect" else ""))
    verdict = assess(combination)
    if verdict.level == "experimental":
        _log.warning("experimental_feature", name=verdict.features[0], reason=verdict.why)


def server_combination(settings: ServerSettings) -> Combination:
    model = settings.model
    return Combination(
        parallel=settings.parallel,
        training=model.training,
        quantise=model.quantise,
        compile=model.compile,
        offload=model.offload,
        engine=settings.inference.engine,
        config=_config(settings),
    )


def _config(settings: ServerSettings) -> Mapping[str, Any] | None:
    """Returns the configuration of the model, if it is on this machine."""
    folder = find_folder(settings.model.path)
    return None if folder is None else read_config(folder)


def check_quantised(settings: ServerSettings) -> None:
    """INVALID if no layer of the model can be quantised, UNSUPPORTED if the package for it is not installed."""
    quantise = settings.model.quantise
    check_quantise_package(quantise)
    folder = find_folder(settings.model.path)
    if not quantise or folder is None:
        return
    files, recipe = read_model_files(folder), memory_recipe(settings)
    if files.shapes and not any(weight_saved_bytes(files, name, recipe) for name in files.shapes):
        raise StrataError(Code.INVALID, f"{settings.model.base_model} has no layer that can be quantised to {quantise}")


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


def available_bytes(settings: ServerSettings) -> int | None:
    """Returns for each rank the free memory of its device, or its share of the machine's."""
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


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}"
