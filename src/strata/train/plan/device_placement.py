"""Places ranks and engines on the CUDA devices of a machine: ranks on the first, engines on the last, and no two
processes on one unless sharing is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.inference_settings import InferenceSettings
from strata.train.plan.devices import VISIBLE, Device, Hardware
from strata.train.settings import ServerSettings

ENGINE_SHARE: Final = 0.9
"""The share of a device's memory that vLLM takes unless its arguments say another."""
_SHARE: Final = ("--gpu-memory-utilization",)
_SIZES: Final = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)
"""Arguments of vLLM whose product is the number of its devices."""


class DevicePlacement(msgspec.Struct, frozen=True, kw_only=True):
    ranks: Sequence[Device] = ()
    """The device of each rank; none if they compute on CPUs."""
    engines: Mapping[str, Sequence[Device]] = {}
    """The devices of each engine, by its name."""
    engine_share: float = 0.0
    """The share of the memory of each of its devices that an engine takes."""
    in_turns: bool = False
    """While ranks compute, engines sleep and take nothing."""

    @property
    def rank_bytes(self) -> int:
        """Returns the free memory of the fullest device of a rank, without what engines take there."""
        share = 0.0 if self.in_turns else self.engine_share
        engines = Counter(device.number for devices in self.engines.values() for device in devices)
        return min(
            max(device.free_bytes - int(engines[device.number] * share * device.total_bytes), 0)
            for device in self.ranks
        )

    @property
    def rank_variables(self) -> dict[str, str]:
        return _variables(self.ranks) if self.ranks else {}

    def engine_variables(self, name: str) -> dict[str, str]:
        return _variables(self.engines[name]) if name in self.engines else {}


def _variables(devices: Sequence[Device]) -> dict[str, str]:
    """Numbers and no UUIDs, which vLLM does not read. They are those of `nvidia-smi` in the order of the bus alone."""
    return {VISIBLE: ",".join(device.number for device in devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def place(settings: ServerSettings, machine: Hardware) -> DevicePlacement:
    """INVALID if there are too few devices, or if two processes would have the same one and sharing is not set."""
    inference, devices = settings.inference, machine.devices
    shares = inference.share_devices != "no"
    on_devices = bool(devices) and computes_on_devices(settings, machine)
    if not devices:
        _refuse_devices(inference, machine)
        return DevicePlacement()
    named = _named(inference, devices)
    each = 0 if named or not inference.engine else _devices_per_engine(inference)
    if each > len(devices):
        raise _invalid(
            f"an engine is to have {_count(each)}, and this server is shown {_list(devices)}",
            "lower inference.devices_per_engine or the sizes in inference.arguments, or show more devices",
        )
    taken = each * len(inference.engines)
    engines = named or _automatic(inference, devices, each)
    used = {device.number for of_engine in engines.values() for device in of_engine}
    if shares:
        left = devices
    else:
        _refuse_shared(engines)
        left = [device for device in devices if device.number not in used]
    ranks: Sequence[Device] = ()
    if on_devices:
        needed = settings.ranks.nproc or 1
        if not shares and (len(left) < needed or taken >= len(devices)):
            raise _too_few(settings, devices, max(taken, len(used)), needed)
        if len(left) < needed:
            raise _invalid(
                f"ranks.nproc is {needed}, each rank takes a CUDA device, and this server is shown {_list(devices)}",
                f'lower ranks.nproc, show more devices ({VISIBLE}), or set ranks.backend to "gloo"',
            )
        ranks = left[: settings.ranks.nproc or len(left)]
    elif taken > len(devices) and not shares:
        raise _too_few(settings, devices, taken, 0)
    return DevicePlacement(
        ranks=ranks,
        engines=engines,
        engine_share=_engine_share(inference) if engines else 0.0,
        in_turns=inference.takes_turns,
    )


def computes_on_devices(settings: ServerSettings, machine: Hardware) -> bool:
    """Says whether ranks that this server starts compute on the CUDA devices, if there are any."""
    return settings.ranks.mode == "auto" and settings.ranks.backend != "gloo" and machine.torch_has_cuda


def _automatic(inference: InferenceSettings, devices: Sequence[Device], each: int) -> dict[str, list[Device]]:
    """Engines take the last devices, in the order of both. With sharing they begin again at the last."""
    taken = each * len(inference.engines)
    if taken > len(devices) and inference.share_devices == "no":
        return {name: [] for name in inference.engines}
    order = [devices[(len(devices) - taken + place) % len(devices)] for place in range(taken)]
    return {name: order[number * each : (number + 1) * each] for number, name in enumerate(inference.engines)}


def _named(inference: InferenceSettings, devices: Sequence[Device]) -> dict[str, list[Device]]:
    """The devices that the settings name for each engine; nothing if they name none."""
    written, setting = inference.devices, "inference.devices"
    if VISIBLE in inference.environment:
        if written:
            raise _invalid(f"inference.devices and {VISIBLE} in inference.environment are set", "leave one of them out")
        written = (inference.environment[VISIBLE],) * inference.count
        setting = f"{VISIBLE} in inference.environment"
    if not inference.engine or not written:
        return {}
    if len(written) != inference.count:
        raise _invalid(
            f"inference.devices has {len(written)} entries, and inference.count is {inference.count}",
            'write an entry for each engine: inference.devices = ["2", "3"]',
        )
    return {
        name: [_find(each.strip(), devices, name, setting) for each in names.split(",") if each.strip()]
        for name, names in zip(inference.engines, written, strict=True)
    }


def _find(name: str, devices: Sequence[Device], engine: str, setting: str) -> Device:
    found = [device for device in devices if device.is_named(name)]
    if len(found) != 1:
        raise _invalid(
            f"{engine} is to have device {name}, and this server is shown {_list(devices)}",
            f"{setting} names devices by their number or UUID in `nvidia-smi -L`",
        )
    return found[0]


def _devices_per_engine(inference: InferenceSettings) -> int:
    """Returns what the settings or the engine's arguments say. INVALID if both say it and differ."""
    asked = engine_size(inference.arguments)
    set_here = inference.devices_per_engine
    if set_here and asked is not None and asked != set_here:
        raise _invalid(
            f"inference.devices_per_engine is {set_here}, and inference.arguments ask for {_count(asked)}",
            "leave one of them out",
        )
    return (asked or 1) if set_here is None else set_here


def engine_size(arguments: Sequence[str]) -> int | None:
    """Returns the number of devices that an engine's arguments ask for; None if they do not say it."""
    sizes = [int(value) for names in _SIZES for value in _values(arguments, names) if value.isdecimal()]
    product = 1
    for size in sizes:
        product *= size
    return product if sizes else None


def _engine_share(inference: InferenceSettings) -> float:
    for value in _values(inference.arguments, _SHARE):
        try:
            return float(value)
        except ValueError:
            continue
    return ENGINE_SHARE


def _values(arguments: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yields what follows an argument, behind `=` or as the next one."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            yield value if equals else next(iter(arguments[at + 1 : at + 2]), "")


def _refuse_devices(inference: InferenceSettings, machine: Hardware) -> None:
    if inference.engine and (inference.devices or inference.devices_per_engine):
        raise _invalid(
            f"engines are to have CUDA devices, and there are none: {machine.without}",
            "leave inference.devices and inference.devices_per_engine out: the engines compute on CPUs then",
        )


def _refuse_shared(engines: Mapping[str, Sequence[Device]]) -> None:
    owners: dict[str, str] = {}
    for name, devices in engines.items():
        for device in devices:
            if device.number in owners:
                both = f"{owners[device.number]} and {name}"
                both = f"{name} twice" if owners[device.number] == name else both
                raise _invalid(
                    f"device {device.number} is of {both}",
                    "give each engine devices of its own (inference.devices), or set inference.share_devices",
                )
            owners[device.number] = name


def _too_few(settings: ServerSettings, devices: Sequence[Device], taken: int, ranks: int) -> StrataError:
    engines = len(settings.inference.engines)
    of_engines = f"{engines} engine{'s' if engines > 1 else ''} with {_count(taken)} in all"
    of_ranks = f"{ranks} rank{'s' if ranks > 1 else ''}"
    needed = " and ".join(part for part, is_there in ((of_engines, engines), (of_ranks, ranks)) if is_there)
    hints = ["show more devices (CUDA_VISIBLE_DEVICES)"]
    if ranks > 1:
        hints.append("lower ranks.nproc")
    if engines:
        hints.append("lower inference.count")
        hints.append('set inference.share_devices to "memory", and divide it (--gpu-memory-utilization), or to "turns"')
    else:
        hints.append('set ranks.backend to "gloo"')
    return _invalid(
        f"{needed}, each on devices of its own, are more than this server is shown: {_list(devices)}",
        f"{', '.join(hints[:-1])}, or {hints[-1]}",
    )


def _count(number: int) -> str:
    return f"{number} CUDA device{'' if number == 1 else 's'}"


def _list(devices: Sequence[Device]) -> str:
    return f"{_count(len(devices))} ({', '.join(device.number for device in devices)})"


def _invalid(message: str, hint: str) -> StrataError:
    return StrataError(Code.INVALID, message, hint=hint)
