"""What the settings that depend on the device become on machines that nobody has here, and why."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from strata.base.errors import StrataError
from strata.train.launch.preflight import check_kernels
from strata.train.plan.defaults import SET, SETTINGS, ResolvedSettings
from strata.train.plan.device_values import DeviceValues
from strata.train.plan.devices import Device, Hardware, parse_devices, planned_machine, visible
from strata.train.plan.model_cost import estimate
from strata.train.settings import load_settings
from tests.core.train.machines import GB, llama_8b, machine, resolve, settings


def values(resolution: ResolvedSettings) -> dict[str, Any]:
    return msgspec.structs.asdict(resolution.settings.by_device)


def reason(resolution: ResolvedSettings, setting: str) -> str:
    (found,) = (choice.reason for choice in resolution.choices if choice.setting == setting)
    return found


def test_one_device_of_24_gb_has_the_whole_base_in_bfloat16() -> None:
    found = resolve(machine(1, 24, free=23))
    assert values(found) == {
        "nproc": 1,
        "threads": 1,
        "dtype": "bfloat16",
        "replicated_mb": 23 * GB >> 20,
        "max_tokens_per_row": 16_384,
        "first_pass_timeout_s": 300.0,
        "collective_timeout_s": 120.0,
    }
    assert found.settings.ranks.backend == "nccl"
    assert reason(found, "model.replicated_mb") == "one rank: shards would save no memory"


def test_eight_devices_of_80_gb_have_a_rank_each_and_the_whole_base() -> None:
    found = resolve(machine(8, 80, free=79))
    assert (values(found)["nproc"], values(found)["dtype"]) == (8, "bfloat16")
    assert values(found)["replicated_mb"] == int(0.5 * 79 * GB) >> 20
    assert reason(found, "model.replicated_mb") == (
        "50% of the 79 GB that are free on each device; the base has 16.1 GB: replicated"
    )


def test_of_four_devices_of_24_gb_the_ranks_get_what_the_engine_leaves_and_shard_the_base() -> None:
    found = resolve(machine(4, 24), inference_engine="vllm")
    assert values(found)["nproc"] == 3
    assert reason(found, "ranks.nproc") == "one on each CUDA device that no engine has"
    assert reason(found, "model.replicated_mb").endswith("the base has 16.1 GB: sharded")


def test_the_fullest_device_decides_what_is_replicated() -> None:
    free, full = machine(2, 80).devices
    one_is_full = Hardware(devices=[free, msgspec.structs.replace(full, free_bytes=20 * GB)])
    assert values(resolve(one_is_full))["replicated_mb"] == 10 * GB >> 20


def test_gradients_of_a_full_fine_tune_get_a_smaller_share() -> None:
    found = resolve(machine(8, 80), model_training="full")
    assert values(found)["replicated_mb"] == 8 * GB >> 20
    assert reason(found, "model.replicated_mb") == "10% of the 80 GB that are free on each device, for gradients"


def test_without_the_files_of_a_model_the_share_is_the_limit_all_the_same() -> None:
    found = resolve(machine(8, 80), type(llama_8b())({}, {}))
    assert values(found)["replicated_mb"] == 40 * GB >> 20
    assert reason(found, "model.replicated_mb") == "50% of the 80 GB that are free on each device"


def test_a_device_that_does_not_multiply_bfloat16_has_float32() -> None:
    new, old = machine(2, 16).devices
    old = msgspec.structs.replace(old, capability=7.5, name="NVIDIA Old")
    found = resolve(Hardware(devices=[new, old]))
    assert values(found)["dtype"] == "float32"
    assert reason(found, "model.dtype") == "NVIDIA Old does not multiply bfloat16 in hardware"
    unknown = [msgspec.structs.replace(each, capability=None) for each in (new, old)]
    assert values(resolve(Hardware(devices=unknown)))["dtype"] == "bfloat16"


def test_offloaded_weights_are_stepped_by_a_share_of_the_cores() -> None:
    assert values(resolve(machine(8, 80, cores=30), model_offload=True))["threads"] == 3
    assert values(resolve(machine(8, 80, cores=4), model_offload=True))["threads"] == 1
    assert values(resolve(machine(8, 80, cores=64)))["threads"] == 1


def test_layers_that_are_compiled_in_later_passes_have_the_time_of_the_first() -> None:
    assert values(resolve(machine(1, 80), model_compile=True))["collective_timeout_s"] == 300.0


@pytest.mark.parametrize(
    ("on", "written", "why"),
    [
        (Hardware(), {}, "on CPUs: nvidia-smi shows no CUDA device"),
        (machine(2, 24, torch_has_cuda=False), {}, "the installed torch is not built for CUDA: ranks compute on CPUs"),
        (machine(2, 24), {"ranks_backend": "gloo"}, "ranks.backend is gloo: ranks compute on CPUs"),
        (
            machine(2, 24),
            {"ranks_mode": "connect"},
            "ranks.mode is connect: ranks that are started elsewhere have the values of CPUs unless these are set",
        ),
    ],
)
def test_on_cpus_nothing_changed(on: Hardware, written: dict[str, Any], why: str) -> None:
    found = resolve(on, **written)
    assert values(found) == {
        "nproc": 1,
        "threads": 1,
        "dtype": "float32",
        "replicated_mb": 256,
        "max_tokens_per_row": 4096,
        "first_pass_timeout_s": 1800.0,
        "collective_timeout_s": 1800.0,
    }
    assert {choice.reason for choice in found.choices} == {why}
    assert not found.placement.rank_variables
    assert found.settings.ranks.backend == written.get("ranks_backend", "auto")


SET_VALUES: Final[dict[str, Any]] = {
    "ranks_nproc": 2,
    "ranks_threads": 5,
    "model_dtype": "float32",
    "model_replicated_mb": 0,
    "model_max_tokens_per_row": 100,
    "ranks_first_pass_timeout_s": 7.0,
    "ranks_collective_timeout_s": 6.0,
}


@pytest.mark.parametrize("on", [Hardware(), machine(8, 80)])
@pytest.mark.parametrize("name", SET_VALUES)
def test_a_value_that_is_set_wins_and_is_shown_as_set(on: Hardware, name: str) -> None:
    found = resolve(on, **{name: SET_VALUES[name]})
    section, _, setting = name.partition("_")
    assert values(found)[setting] == SET_VALUES[name]
    assert reason(found, f"{section}.{setting}") == SET
    assert any(line.endswith("(set)") and f"{section}.{setting} = " in line for line in found.sentences())


def test_one_timeout_that_is_set_is_that_of_the_first_pass_too() -> None:
    found = resolve(machine(1, 80), ranks_collective_timeout_s=60.0)
    assert (values(found)["first_pass_timeout_s"], values(found)["collective_timeout_s"]) == (60.0, 60.0)


def test_processes_that_read_the_same_file_with_the_variables_have_the_same_settings(tmp_path: Any) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[model]\npath = "m"\n[ranks]\nthreads = 3\n')
    for on in (Hardware(), machine(8, 80)):
        found = resolve(on, ranks_threads=3)
        read = load_settings(file, environ=found.variables)
        assert (read.model, read.ranks) == (found.settings.model, found.settings.ranks)
        assert read.by_device == found.settings.by_device


def test_every_setting_that_depends_on_the_device_is_optional_and_resolved() -> None:
    assert set(SETTINGS) == set(DeviceValues.__struct_fields__)
    unset = settings()
    assert [name for name, section in SETTINGS.items() if getattr(getattr(unset, section), name) is not None] == []
    assert unset.by_device == DeviceValues()


def test_lines_for_people_say_where_everything_is_and_why() -> None:
    lines = list(resolve(machine(4, 24, free=23.5), inference_engine="vllm", model_dtype="float32").sentences())
    assert lines == [
        "engine-0 on CUDA device 3 (NVIDIA Double; 23.5 GB free)",
        "ranks on CUDA devices 0 to 2 (NVIDIA Double; 23.5 GB free on each)",
        "ranks.nproc = 3 (one on each CUDA device that no engine has)",
        "ranks.threads = 1 (the devices compute)",
        "model.dtype = float32 (set)",
        f"model.replicated_mb = {int(11.75 * GB) >> 20} (50% of the 23.5 GB that are free on each device; the base has"
        " 32.1 GB: sharded)",
        "model.max_tokens_per_row = 16384 (the bound of what the ranks measure when they start)",
        "ranks.first_pass_timeout_s = 300 (a first pass connects devices and loads kernels)",
        "ranks.collective_timeout_s = 120 (a device that takes longer hangs)",
    ]


def test_fused_kernels_are_named_and_refused_where_they_cannot_run() -> None:
    on_device = resolve(machine(1, 80), model_fused_layers="liger", model_attention="FA3")
    assert list(on_device.sentences())[-2:] == [
        f"model.{setting} (experimental: ranks refuse it unless it agrees with the plain path)"
        for setting in ("fused_layers = liger", "attention = FA3")
    ]
    with pytest.raises(StrataError, match="is not installed") as refused:
        check_kernels(on_device)
    assert refused.value.hint == "pip install liger-kernel"
    with pytest.raises(StrataError, match=r"model\.fused_layers is liger, which needs CUDA devices"):
        check_kernels(resolve(Hardware(), model_fused_layers="liger"))
    check_kernels(resolve(Hardware()))


def test_a_base_that_is_chosen_to_be_replicated_counts_in_full_in_the_plan() -> None:
    few, many = (resolve(machine(count, 80)) for count in (2, 8))
    for each in (few, many):
        assert estimate(each.settings, llama_8b(), each.device).base > 16 * GB
    sharded = resolve(machine(8, 24))
    assert estimate(sharded.settings, llama_8b(), sharded.device).base < 8 * GB


# What `nvidia-smi` prints

LISTING = """0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 81004, 9.0
1, GPU-aaab-2, "NVIDIA, with a comma", 24564, 100, 8.6
2, GPU-bbbb-3, NVIDIA Old, 16384, [N/A], 7.5
3, GPU-cccc-4, NVIDIA Unknown, 16384, 16000, [N/A]
"""


def test_devices_are_read_from_a_table_with_their_memory_in_mebibytes() -> None:
    devices = list(parse_devices(LISTING))
    assert devices[0] == Device("0", "GPU-aaaa-1", "NVIDIA H100 80GB HBM3", 81_559 << 20, 81_004 << 20, 9.0)
    assert [(each.number, each.capability) for each in devices] == [("0", 9.0), ("1", 8.6), ("3", None)]
    assert [each.capability for each in parse_devices("0, GPU-a, NVIDIA Old driver, 10, 9\n")] == [None]


@pytest.mark.parametrize(
    ("shown", "numbers"),
    [
        (None, ["0", "1", "3"]),
        ("3,0", ["3", "0"]),
        (" 1 , 3 ", ["1", "3"]),
        ("GPU-cccc,GPU-aaab-2", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["0"]),
        ("0,0", ["0"]),
        ("GPU-aaa", []),
        ("MIG-1", []),
    ],
)
def test_only_devices_that_are_shown_count_in_the_order_in_which_they_are_shown(
    shown: str | None, numbers: list[str]
) -> None:
    assert [device.number for device in visible(list(parse_devices(LISTING)), shown)] == numbers


def test_a_planned_machine_has_all_of_its_memory_free() -> None:
    assert [each.free_bytes for each in planned_machine(3, 24 * GB).devices] == [24 * GB] * 3
