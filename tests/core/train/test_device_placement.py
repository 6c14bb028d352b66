"""Ranks and engines on devices of their own, or a refusal that says what to do."""

from __future__ import annotations

import itertools
from typing import Any, Final

import pytest

from strata.base.errors import Code, StrataError
from strata.train.plan.device_placement import DevicePlacement, engine_size, place
from strata.train.plan.devices import Hardware
from tests.core.train.machines import GB, machine, settings

VLLM: Final[dict[str, Any]] = {"inference_engine": "vllm"}


def placed(on: Hardware, **written: Any) -> tuple[str, list[str]]:
    """The devices of the ranks, and of each engine."""
    found = place(settings(**written), on)
    return _numbers(found.ranks), [_numbers(devices) for devices in found.engines.values()]


def _numbers(devices: Any) -> str:
    return ",".join(device.number for device in devices)


@pytest.mark.parametrize(
    ("on", "written", "expected"),
    [
        (machine(8, 80), {}, ("0,1,2,3,4,5,6,7", [])),
        (machine(8, 80), {"ranks_nproc": 2}, ("0,1", [])),
        (machine(4, 24), VLLM, ("0,1,2", ["3"])),
        (machine(4, 24), {**VLLM, "inference_count": 2}, ("0,1", ["2", "3"])),
        (
            machine(8, 80),
            {**VLLM, "inference_count": 2, "inference_devices_per_engine": 2},
            ("0,1,2,3", ["4,5", "6,7"]),
        ),
        (machine(8, 80), {**VLLM, "inference_arguments": ("--tensor-parallel-size", "4")}, ("0,1,2,3", ["4,5,6,7"])),
        (machine(8, 80), {**VLLM, "ranks_nproc": 3}, ("0,1,2", ["7"])),
        (machine(4, 24), {**VLLM, "inference_devices": ("0",)}, ("1,2,3", ["0"])),
        (machine(4, 24), {**VLLM, "inference_devices": ("GPU-0002,1",)}, ("0,3", ["2,1"])),
        (machine(4, 24), {**VLLM, "inference_environment": {"CUDA_VISIBLE_DEVICES": "1"}}, ("0,2,3", ["1"])),
        (machine(4, 24), {**VLLM, "inference_devices_per_engine": 0}, ("0,1,2,3", [""])),
        (machine(2, 24), {**VLLM, "inference_count": 2, "ranks_backend": "gloo"}, ("", ["0", "1"])),
        (machine(2, 24), {**VLLM, "ranks_mode": "connect"}, ("", ["1"])),
        (machine(2, 24, torch_has_cuda=False), VLLM, ("", ["1"])),
        (machine(1, 24), {**VLLM, "inference_share_devices": "memory"}, ("0", ["0"])),
        (machine(2, 24), {**VLLM, "inference_share_devices": "memory", "inference_count": 3}, ("0,1", ["1", "0", "1"])),
        (machine(4, 24), {**VLLM, "inference_share_devices": "memory", "ranks_nproc": 2}, ("0,1", ["3"])),
        (Hardware(), VLLM, ("", [])),
        (Hardware(), {}, ("", [])),
    ],
)
def test_ranks_take_the_first_devices_and_engines_the_last(
    on: Hardware, written: dict[str, Any], expected: tuple[str, list[str]]
) -> None:
    assert placed(on, **written) == expected


@pytest.mark.parametrize("count", range(1, 9))
def test_no_device_has_two_processes_unless_sharing_is_set(count: int) -> None:
    on = machine(count, 80)
    for engines, each in itertools.product(range(5), (1, 2, 3)):
        written: dict[str, Any] = {"inference_count": max(engines, 1), "inference_devices_per_engine": each}
        chosen = settings(**written, **(VLLM if engines else {}))
        if engines * each >= count and engines:
            with pytest.raises(StrataError):
                place(chosen, on)
            continue
        found = place(chosen, on)
        taken = [device.number for devices in (found.ranks, *found.engines.values()) for device in devices]
        assert sorted(taken) == [str(number) for number in range(count)]


@pytest.mark.parametrize(
    ("on", "written", "says", "hints"),
    [
        (
            machine(1, 24),
            VLLM,
            "1 engine with 1 CUDA device in all and 1 rank, each on devices of its own, are more than this server is"
            " shown: 1 CUDA device (0)",
            ["inference.share_devices", "CUDA_VISIBLE_DEVICES"],
        ),
        (machine(2, 24), {"ranks_nproc": 4}, "4 ranks", ["lower ranks.nproc", 'ranks.backend to "gloo"']),
        (
            machine(4, 24),
            {**VLLM, "ranks_nproc": 4},
            "1 engine with 1 CUDA device in all and 4 ranks",
            ["lower ranks.nproc"],
        ),
        (machine(2, 24), {**VLLM, "inference_devices_per_engine": 3}, "an engine is to have 3 CUDA devices", ["lower"]),
        (
            machine(4, 24),
            {**VLLM, "inference_count": 2, "inference_devices": ("1", "1")},
            "device 1 is of engine-0 and engine-1",
            ["inference.share_devices"],
        ),
        (machine(4, 24), {**VLLM, "inference_devices": ("1,1",)}, "device 1 is of engine-0 twice", ["of its own"]),
        (
            machine(4, 24),
            {**VLLM, "inference_devices": ("1", "2")},
            "2 entries, and inference.count is 1",
            ["entry for each"],
        ),
        (
            machine(2, 24),
            {**VLLM, "inference_devices": ("5",)},
            "engine-0 is to have device 5, and this server is shown 2 CUDA devices (0, 1)",
            ["nvidia-smi -L"],
        ),
        (
            machine(4, 24),
            {**VLLM, "inference_devices_per_engine": 2, "inference_arguments": ("-tp", "4")},
            "inference.devices_per_engine is 2, and inference.arguments ask for 4 CUDA devices",
            ["leave one"],
        ),
        (
            machine(4, 24),
            {**VLLM, "inference_devices": ("1",), "inference_environment": {"CUDA_VISIBLE_DEVICES": "1"}},
            "CUDA_VISIBLE_DEVICES in inference.environment",
            ["leave one"],
        ),
        (
            Hardware(),
            {**VLLM, "inference_devices": ("0",)},
            "there are none: nvidia-smi shows no CUDA device",
            ["leave"],
        ),
        (
            machine(2, 24),
            {**VLLM, "inference_share_devices": "memory", "ranks_nproc": 3},
            "ranks.nproc is 3, each rank takes a CUDA device",
            ["lower ranks.nproc"],
        ),
    ],
)
def test_what_cannot_be_placed_is_refused_with_what_to_do(
    on: Hardware, written: dict[str, Any], says: str, hints: list[str]
) -> None:
    with pytest.raises(StrataError) as refused:
        place(settings(**written), on)
    assert refused.value.code is Code.INVALID
    assert says in refused.value.message
    for hint in hints:
        assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((), None),
        (("--max-model-len", "4096"), None),
        (("--tensor-parallel-size=2",), 2),
        (("-tp", "2", "--pipeline-parallel-size", "2", "-dp=2"), 8),
    ],
)
def test_the_arguments_of_an_engine_say_how_many_devices_it_takes(arguments: tuple[str, ...], size: int | None) -> None:
    assert engine_size(arguments) == size


def test_a_rank_on_a_shared_device_has_what_the_engines_leave() -> None:
    def left(**written: Any) -> DevicePlacement:
        return place(settings(**VLLM, inference_share_devices="memory", **written), machine(1, 24, free=23))

    assert left().rank_bytes == pytest.approx(23 * GB - 0.9 * 24 * GB, abs=1)
    less = ("--gpu-memory-utilization", "0.4")
    assert left(inference_arguments=less).rank_bytes == pytest.approx(23 * GB - 0.4 * 24 * GB, abs=1)
    assert left(inference_arguments=less, inference_count=3).rank_bytes == 0


def test_ranks_that_take_turns_with_engines_have_all_of_a_device() -> None:
    found = place(settings(**VLLM, inference_share_devices="turns", inference_count=2), machine(1, 24, free=23))
    assert found.rank_bytes == 23 * GB
    assert [each.number for devices in found.engines.values() for each in devices] == ["0", "0"]


def test_processes_are_shown_their_devices_in_the_order_of_the_bus() -> None:
    found = place(settings(**VLLM, inference_count=2), machine(4, 24))
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.rank_variables == {"CUDA_VISIBLE_DEVICES": "0,1", **order}
    assert [found.engine_variables(name)["CUDA_VISIBLE_DEVICES"] for name in found.engines] == ["2", "3"]
    on_cpus = place(settings(**VLLM, inference_devices_per_engine=0), machine(1, 24))
    assert on_cpus.engine_variables("engine-0") == {"CUDA_VISIBLE_DEVICES": "", **order}
    assert place(settings(**VLLM), Hardware()).engine_variables("engine-0") == {}
