"""Checks before a server starts that model, mesh, features and memory fit, and words each problem with its remedy.

The headers of the weight files give the shapes of all parameters; the memory that they need follows from the settings,
by the arithmetic of `strata plan` (`plan/memory_plan.py`). Activations are not known without a trace, so this rejects
only what cannot work, and warns of what may not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.support import report_experimental
from strata.train.combinations import assess, check_combination, combination_of
from strata.train.hugging_face import find_folder
from strata.train.plan.defaults import ResolvedSettings
from strata.train.plan.device_placement import DevicePlacement
from strata.train.plan.fused_kernels import check_fused_kernels
from strata.train.plan.model_cost import estimate, memory_recipe, weight_saved_bytes
from strata.train.plan.model_files import ModelFiles, find_model_files, read_config, read_model_files
from strata.train.settings import ServerSettings, check_quantise_package, count_ranks

SMALLER_SHARE: Final = (
    "lower --gpu-memory-utilization in inference.arguments (vLLM takes 0.9 of a device unless it is set), or give"
    " engines devices of their own"
)
_LISTEN: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,3}){3}:[0-9]{1,5}")
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
    if problem := settings.parallel.problem(count_ranks(settings)):
        raise StrataError(Code.INVALID, problem)
    check_features(settings)
    if problem := settings.parallel.shape_problem(_config(settings) or {}):
        raise StrataError(Code.INVALID, problem)


def check_hosts(settings: ServerSettings) -> None:
    """INVALID if hosts are to join that cannot."""
    hosts = settings.hosts
    if hosts.listen and _LISTEN.fullmatch(hosts.listen) is None:
        raise StrataError(Code.INVALID, f"hosts.listen is {hosts.listen!r}, not IP:PORT with an IPv4 address")
    if hosts.count > 1 and not hosts.listen:
        raise StrataError(Code.INVALID, f"hosts.count is {hosts.count}, and hosts.listen says nothing")
    if hosts.listen and settings.ranks.mode == "connect":
        raise StrataError(Code.INVALID, 'hosts.listen is for ranks that the server starts: ranks.mode = "auto"')


def check_features(settings: ServerSettings) -> None:
    """INVALID if features that the settings ask for do not work together, or not with the model. It does not ask what
    this machine has: ranks may be on others."""
    check_combination(combination_of(settings, _config(settings)))
    if settings.inference.takes_turns and settings.ranks.mode != "auto":
        raise StrataError(
            Code.INVALID,
            'inference.share_devices is "turns", and ranks.mode "connect": only ranks of the launcher take turns',
            hint="leave ranks.mode out",
        )
    if settings.inference.takes_turns and settings.hosts.listen:
        raise StrataError(
            Code.INVALID,
            'inference.share_devices is "turns", and hosts.listen is set: only ranks of one host take turns',
            hint="give the engine devices of its own",
        )


def report_experimental_features(resolution: ResolvedSettings) -> None:
    """Log a line for each feature of the server that is experimental, alone or in this combination."""
    settings, ranks = resolution.settings, resolution.settings.ranks
    combination = combination_of(settings, _config(settings))
    devices = (resolution.device, "nccl" if ranks.backend == "nccl" else "")
    turns = "inference.share_devices" if resolution.settings.inference.takes_turns else ""
    hosts = "hosts.listen" if resolution.settings.hosts.listen else ""
    connect = "ranks.mode" if ranks.mode == "connect" else ""
    report_experimental((*combination.features, *devices, turns, connect, hosts))
    verdict = assess(combination)
    if verdict.level == "experimental":
        _log.warning("experimental_feature", name=verdict.features[0], reason=verdict.why)


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


def check_kernels(resolution: ResolvedSettings) -> None:
    """UNSUPPORTED if this machine cannot run the fused kernels that the settings name."""
    model, dtype = resolution.settings.model, resolution.settings.by_device.dtype
    check_fused_kernels(model.fused_layers, model.attention, dtype, on_cuda=resolution.device == "cuda")


def check_memory(resolution: ResolvedSettings) -> None:
    """INVALID if the model cannot fit, on ranks or engines. A model whose weights are not here is not checked."""
    settings = resolution.settings
    model = find_model_files(settings.model.path)
    if model is None:
        _log.info("memory_check_skipped", reason="the weights are not on this machine")
        return
    _check_engines(resolution, model)
    needed, available = estimate(settings, model, resolution.device), resolution.rank_bytes
    if available is None:
        return
    if needed.base > available:
        ranks = count_ranks(settings)
        room = f" on each of {ranks} ranks, and each has" if ranks > 1 else ", and there are"
        beside = ", beside what the engines take of the same devices" if _is_shared(resolution.placement) else ""
        raise StrataError(
            Code.INVALID,
            f"{settings.model.base_model} needs {_gb(needed.base)} GB{room} {_gb(available)} GB{beside}",
            hint=SMALLER_SHARE
            if beside
            else "use bfloat16, more devices, LoRA instead of full training, a quantised base, or a smaller model",
        )
    if needed.full > available:
        _log.warning(
            "memory_may_not_suffice",
            reason="for all slots and the KV cache",
            needed_gb=_gb(needed.full),
            available_gb=_gb(available),
        )


def _check_engines(resolution: ResolvedSettings, model: ModelFiles) -> None:
    """INVALID if the weights alone are more than an engine takes of its devices, or if engines are to take more than
    there is. An engine that computes on CPUs is not checked."""
    settings, placement = resolution.settings, resolution.placement
    item_bytes = memory_recipe(settings, resolution.device).item_bytes
    weights = sum(map(math.prod, model.shapes.values())) * item_bytes
    share = placement.engine_share
    on_device = Counter(device.number for devices in placement.engines.values() for device in devices)
    for name, devices in placement.engines.items():
        for device in devices:
            taken = int(share * device.total_bytes)
            if weights / len(devices) > taken:
                raise StrataError(
                    Code.INVALID,
                    f"{name} needs {_gb(weights // len(devices))} GB for weights on each of its devices, and takes "
                    f"{_gb(taken)} GB of device {device.number}",
                    hint="give it more devices (inference.devices_per_engine), or a larger --gpu-memory-utilization",
                )
            if taken * on_device[device.number] > device.free_bytes:
                raise StrataError(
                    Code.INVALID,
                    f"engines are to take {share * on_device[device.number]:.0%} of device {device.number}, which is "
                    f"{_gb(taken * on_device[device.number])} GB, and {_gb(device.free_bytes)} GB are free",
                    hint=SMALLER_SHARE,
                )


def _is_shared(placement: DevicePlacement) -> bool:
    engines = {device.number for devices in placement.engines.values() for device in devices}
    return any(device.number in engines for device in placement.ranks)


def _gb(size: int | float) -> str:
    return f"{size / 1e9:.3g}"
