"""Resolves the settings that depend on the device: `strata serve`, `strata plan` and `strata models check` call
`resolve_settings` and print what it chose, each value with its reason. A value that is set stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from strata.train.plan.device_placement import DevicePlacement, computes_on_devices, place
from strata.train.plan.device_values import DeviceValues, Dtype
from strata.train.plan.devices import Device, Hardware
from strata.train.plan.memory_plan import is_replicated
from strata.train.plan.model_cost import DeviceKind, memory_recipe, mesh_shape, model_cost
from strata.train.plan.model_files import ModelFiles
from strata.train.settings import ServerSettings

MOST_ROW_TOKENS: Final = 16_384
"""Tokens of a row on CUDA devices, if the ranks find when they start that so many fit."""
REPLICATED_SHARE: Final = 0.5
"""The share of a device's free memory that a frozen base may take on every rank. The rest is for adapters, activations
and the KV cache."""
GRADIENT_SHARE: Final = 0.1
"""The share of a device's free memory that gradients of all weights may take on every rank until they are reduced."""
FIRST_PASS_TIMEOUT_S: Final = 300.0
"""A first pass connects the devices, and loads and tunes kernels."""
COLLECTIVE_TIMEOUT_S: Final = 120.0
BFLOAT16_CAPABILITY: Final = 8.0
"""The compute capability from which on devices multiply bfloat16 in hardware, and have fused attention."""
SETTINGS: Final[Mapping[str, str]] = {
    "nproc": "ranks",
    "threads": "ranks",
    "dtype": "model",
    "replicated_mb": "model",
    "max_tokens_per_row": "model",
    "first_pass_timeout_s": "ranks",
    "collective_timeout_s": "ranks",
}
"""The section of each setting that depends on the device."""
SET: Final = "set"


class Choice(msgspec.Struct, frozen=True):
    """A setting that depends on the device, its value, and why it has that."""

    setting: str
    value: int | float | str
    reason: str
    """`set`: the settings say it."""


class ResolvedSettings(msgspec.Struct, frozen=True, kw_only=True):
    settings: ServerSettings
    """Those that were given, with a value of every setting that depends on the device."""
    machine: Hardware
    placement: DevicePlacement
    choices: tuple[Choice, ...]

    @property
    def device(self) -> DeviceKind:
        """Returns what the ranks compute on."""
        return "cuda" if self.placement.ranks else "cpu"

    @property
    def rank_bytes(self) -> int | None:
        """Returns the free memory for each rank: of its device, or its share of the host's."""
        if self.placement.ranks:
            return self.placement.rank_bytes
        memory = self.machine.memory_bytes
        return None if memory is None else memory // self.settings.by_device.nproc

    @property
    def variables(self) -> dict[str, str]:
        """Returns the variables by which processes that read the same file get the same values."""
        chosen = {choice.setting: str(choice.value) for choice in self.choices}
        if self.placement.ranks:
            # A rank that finds no device then says so, and does not compute in another way than was said here.
            chosen["ranks.backend"] = "nccl"
        return {f"STRATA_{setting.replace('.', '_').upper()}": value for setting, value in chosen.items()}

    def sentences(self) -> Iterator[str]:
        """Says to people where ranks and engines compute, and the settings."""
        for name, devices in self.placement.engines.items():
            yield f"{name} on {_shown(devices) if devices else 'CPUs'}"
        if self.placement.ranks:
            yield f"ranks on {_shown(self.placement.ranks)}"
        yield from settings_lines(self.choices)
        model = self.settings.model
        for name, kernel in (("fused_layers", model.fused_layers), ("attention", model.attention)):
            if kernel:
                yield f"model.{name} = {kernel} (experimental: ranks refuse it unless it agrees with the plain path)"


def settings_lines(choices: Sequence[Choice]) -> Iterator[str]:
    """Words choices for people, those with the same reason in one line."""
    for reason in dict.fromkeys(choice.reason for choice in choices):
        same = (f"{each.setting} = {_value(each.value)}" for each in choices if each.reason == reason)
        yield f"{', '.join(same)} ({reason})"


def resolve_settings(settings: ServerSettings, machine: Hardware, files: ModelFiles | None) -> ResolvedSettings:
    """Pure: the machine was read before. Without the model's files its size is in no reason. INVALID if ranks and
    engines cannot be placed."""
    placement = place(settings, machine)
    chosen = dict(_on_cuda(settings, machine, placement, files) if placement.ranks else _on_cpus(settings, machine))
    is_set = {name for name in SETTINGS if _written(settings, name) is not None}
    if "collective_timeout_s" in is_set:
        is_set.add("first_pass_timeout_s")
    own = settings.by_device
    each = {name: getattr(own, name) if name in is_set else chosen[name][0] for name in SETTINGS}
    values = msgspec.convert(each, DeviceValues)
    resolved = with_values(settings, values)
    if placement.ranks:
        resolved = _replace(resolved, "ranks", backend="nccl")
    choices = tuple(
        Choice(f"{section}.{name}", getattr(values, name), SET if name in is_set else chosen[name][1])
        for name, section in SETTINGS.items()
    )
    return ResolvedSettings(settings=resolved, machine=machine, placement=placement, choices=choices)


def with_values(settings: ServerSettings, values: DeviceValues) -> ServerSettings:
    for section in ("ranks", "model"):
        names = (name for name, of in SETTINGS.items() if of == section)
        settings = _replace(settings, section, **{name: getattr(values, name) for name in names})
    return settings


def _replace(settings: ServerSettings, section: str, **values: object) -> ServerSettings:
    changed = msgspec.structs.replace(getattr(settings, section), **values)
    return msgspec.structs.replace(settings, **{section: changed})


def _written(settings: ServerSettings, name: str) -> int | float | str | None:
    written: int | float | str | None = getattr(getattr(settings, SETTINGS[name]), name)
    return written


def _on_cpus(settings: ServerSettings, machine: Hardware) -> Iterator[tuple[str, tuple[int | float | str, str]]]:
    if settings.ranks.mode == "connect":
        reason = "ranks.mode is connect: ranks that are started elsewhere have the values of CPUs unless these are set"
    elif settings.ranks.backend == "gloo":
        reason = "ranks.backend is gloo: ranks compute on CPUs"
    elif machine.devices and not computes_on_devices(settings, machine):
        reason = "the installed torch is not built for CUDA: ranks compute on CPUs"
    else:
        reason = f"on CPUs: {machine.without}"
    for name, value in msgspec.structs.asdict(DeviceValues()).items():
        yield name, (value, reason)


def _on_cuda(
    settings: ServerSettings, machine: Hardware, placement: DevicePlacement, files: ModelFiles | None
) -> Iterator[tuple[str, tuple[int | float | str, str]]]:
    ranks = len(placement.ranks)
    of_engines = (
        " that no engine has" if any(placement.engines.values()) and settings.inference.share_devices == "no" else ""
    )
    yield "nproc", (ranks, f"one on each CUDA device{of_engines}")
    threads = max(machine.cores // ranks, 1) if settings.model.offload else 1
    offloaded = f"{machine.cores} cores for {ranks} ranks, which step offloaded weights on the host"
    yield "threads", (threads, offloaded if settings.model.offload else "the devices compute")
    dtype, why = _dtype(placement)
    yield "dtype", (dtype, why)
    dtype = settings.model.dtype or dtype
    yield "replicated_mb", _replicated(settings, placement, dtype, files)
    yield "max_tokens_per_row", (MOST_ROW_TOKENS, "the bound of what the ranks measure when they start")
    yield "first_pass_timeout_s", (FIRST_PASS_TIMEOUT_S, "a first pass connects devices and loads kernels")
    # New shapes are compiled in later passes too.
    compiles = settings.model.compile
    later = FIRST_PASS_TIMEOUT_S if compiles else COLLECTIVE_TIMEOUT_S
    yield (
        "collective_timeout_s",
        (later, "later passes compile too" if compiles else "a device that takes longer hangs"),
    )


def _dtype(placement: DevicePlacement) -> tuple[Dtype, str]:
    known = [device for device in placement.ranks if device.capability is not None]
    oldest = min(known, key=lambda device: device.capability or 0.0, default=None)
    if oldest is not None and (oldest.capability or 0.0) < BFLOAT16_CAPABILITY:
        return "float32", f"{oldest.name} does not multiply bfloat16 in hardware"
    return "bfloat16", "CUDA devices; weights that are trained are in float32"


def _replicated(
    settings: ServerSettings, placement: DevicePlacement, dtype: Dtype, files: ModelFiles | None
) -> tuple[int, str]:
    free, ranks, full = placement.rank_bytes, len(placement.ranks), settings.model.training == "full"
    share = GRADIENT_SHARE if full else REPLICATED_SHARE
    limit = int(share * free) >> 20
    reason = f"{share:.0%} of the {_gb(free)} GB that are free on each device"
    if full:
        return limit, f"{reason}, for gradients"
    if ranks == 1:
        return free >> 20, "one rank: shards would save no memory"
    if files is None or not files.shapes:
        return limit, reason
    values = DeviceValues(nproc=ranks, dtype=dtype, replicated_mb=limit)
    recipe = memory_recipe(with_values(settings, values), "cuda")
    mesh = mesh_shape(settings.parallel, ranks * settings.hosts.count)
    cost = model_cost(files, recipe, mesh)
    size = f"the base has {_gb(cost.parameters * recipe.item_bytes - cost.saved_bytes)} GB"
    return limit, f"{reason}; {size}: {'replicated' if is_replicated(cost, recipe, mesh) else 'sharded'}"


def _shown(devices: Sequence[Device]) -> str:
    numbers, names = [device.number for device in devices], dict.fromkeys(device.name for device in devices)
    first, last, count = numbers[0], numbers[-1], len(numbers)
    is_run = count > 2 and first.isdecimal() and numbers == [str(int(first) + place) for place in range(count)]
    listed = f"{first} to {last}" if is_run else ", ".join(numbers)
    least = min(device.free_bytes for device in devices)
    plural = "devices" if len(devices) > 1 else "device"
    return f"CUDA {plural} {listed} ({', '.join(names)}; {_gb(least)} GB free{' on each' if len(devices) > 1 else ''})"


def _value(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g}"
