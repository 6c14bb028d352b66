"""What nvidia-smi prints, and how a job is shown its cards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from strata.fleet.agent.gpu import MIB, parse_devices, read_amd_smi, read_nvml, shown, visible_devices
from strata.fleet.agent.preemption import LocalUse, local_use_reason, parse_who
from strata.fleet.core.capability import Gpu
from strata.fleet.core.samples import CardSample

PRINTED = """\
0, GPU-8f2c1d3e, NVIDIA GeForce RTX 4090, 24564, 37, 1024, 61, 212.50
1, GPU-aaaa0000, NVIDIA A100-SXM4-80GB, 81920, [N/A], 512, [N/A], [N/A]
2, GPU-bbbb0000, NVIDIA GB10, [N/A], 0, 0, 40, 10
"""


class NvmlError(Exception):
    """As nvidia-ml-py has it."""


class Nvml:
    """Answers of NVML for three devices: one in order, one that is lost, and one that is divided."""

    started = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.started -= 1

    def handle(self, number: int) -> str:
        if number == 1:
            raise NvmlError("GPU is lost")
        return f"device {number}"

    def divided(self, handle: str) -> list[int]:
        if handle == "device 0":
            raise NvmlError("Not Supported")
        return [1, 1]

    def part(self, handle: str, place: int) -> str:
        if place > 1:
            raise NvmlError("Not Found")
        return f"{handle} part {place}"

    def uuid(self, handle: str) -> str:
        return {"device 0": "GPU-0", "device 2 part 0": "MIG-a", "device 2 part 1": "MIG-b"}[handle]

    def memory(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(total=(40 if "part" in handle else 80) * 1024**3, used=2 * 1024**3)

    def utilisation(self, handle: str) -> SimpleNamespace:
        if "part" in handle:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=50)

    def library(self) -> SimpleNamespace:
        """By the names of nvidia-ml-py."""
        return SimpleNamespace(
            NVMLError=NvmlError,
            NVML_TEMPERATURE_GPU=0,
            nvmlInit=self.start,
            nvmlShutdown=self.stop,
            nvmlDeviceGetCount=lambda: 3,
            nvmlDeviceGetHandleByIndex=self.handle,
            nvmlDeviceGetMigMode=self.divided,
            nvmlDeviceGetMaxMigDeviceCount=lambda _: 7,
            nvmlDeviceGetMigDeviceHandleByIndex=self.part,
            nvmlDeviceGetUUID=self.uuid,
            nvmlDeviceGetName=lambda handle: b"NVIDIA H100 MIG 3g.40gb" if "part" in handle else b"NVIDIA H100",
            nvmlDeviceGetMemoryInfo=self.memory,
            nvmlDeviceGetUtilizationRates=self.utilisation,
            nvmlDeviceGetPowerUsage=lambda _: 250_000,
            nvmlDeviceGetTemperature=lambda _, sensor: 66 + sensor,
            nvmlSystemGetCudaDriverVersion_v2=lambda: 12040,
        )


def test_the_names_that_the_answers_have_are_those_of_the_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(Nvml().library()) if not hasattr(pynvml, name)] == []


class AmdSmiError(Exception):
    """As amdsmi has it."""


class AmdSmi:
    """The functions of amdsmi, with one device in order and one that does not answer."""

    AmdSmiException = AmdSmiError
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, str]:
        if handle:
            raise AmdSmiError("AMDSMI_STATUS_DRIVER_NOT_LOADED")
        return {"market_name": "AMD Instinct MI300X", "asic_serial": "0xA1B2C3D4E5F60718"}

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, int]:
        return {"vram_total": 196_592, "vram_used": 1024}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, int | str]:
        return {"gfx_activity": 25, "umc_activity": "N/A"}

    def amdsmi_get_temp_metric(self, handle: int, kind: int, metric: int) -> int:
        return 55

    def amdsmi_get_power_info(self, handle: int) -> dict[str, int | str]:
        return {"average_socket_power": "N/A", "current_socket_power": 300}


def test_cards_are_read_from_the_table_and_anything_else_is_not() -> None:
    first, second = parse_devices(PRINTED)
    assert first.gpu == Gpu(name="NVIDIA GeForce RTX 4090", vram_bytes=24564 * MIB, uuid="GPU-8f2c1d3e")
    assert first.sample == CardSample(card="GPU-8f2c1d3e", use=0.37, vram_used_gib=1.0, temperature_c=61, power_w=212.5)
    assert second.sample == CardSample(card="GPU-aaaa0000", vram_used_gib=0.5)
    assert list(parse_devices("No devices were found\n")) == []


def test_nvml_names_the_parts_of_a_divided_card_and_a_lost_one_hides_no_other() -> None:
    nvml = Nvml()
    found = read_nvml(nvml.library())
    assert found is not None
    assert [(gpu.uuid, gpu.vram_bytes >> 30) for gpu in found.gpus] == [("GPU-0", 80), ("MIG-a", 40), ("MIG-b", 40)]
    assert found.devices[0].sample == CardSample(
        card="GPU-0", use=0.5, vram_used_gib=2.0, temperature_c=66, power_w=250.0
    )
    assert found.devices[1].sample.use is None
    assert (found.driver_cuda, found.problems, nvml.started) == ("12.4", ("GPU 1: GPU is lost",), 0)


def test_amd_smi_names_a_card_as_rocm_does() -> None:
    found = read_amd_smi(AmdSmi())
    assert found is not None
    (device,) = found.devices
    assert device.gpu == Gpu(name="AMD Instinct MI300X", vram_bytes=196_592 * MIB, uuid="GPU-a1b2c3d4e5f60718")
    assert device.sample == CardSample(card="GPU-a1b2c3d4e5f60718", use=0.25, vram_used_gib=1.0, temperature_c=55)
    assert found.problems == ("AMD GPU 1: AMDSMI_STATUS_DRIVER_NOT_LOADED",)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-8f", [0]),
        ("GPU-", []),
        ("0,7,1", [0]),
        ("1,1", [1]),
    ],
)
def test_only_the_devices_that_the_environment_shows_count(visible: str | None, numbers: list[int]) -> None:
    assert [device.number for device in shown(list(parse_devices(PRINTED)), visible)] == numbers


def test_a_job_sees_just_its_cards_by_the_variable_of_their_maker() -> None:
    nvidia, amd = "GPU-8f2c1d3e-0000-4b4b-9c9c-0123456789ab", "GPU-00a1b2c3d4e5f607"
    assert visible_devices([nvidia, 2]) == {"CUDA_VISIBLE_DEVICES": f"{nvidia},2"}
    assert visible_devices([amd]) == {"ROCR_VISIBLE_DEVICES": amd}
    assert visible_devices([]) == {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def test_the_machine_is_wanted_back_by_strangers_on_a_card_or_people_at_it() -> None:
    assert local_use_reason(LocalUse()) == ""
    assert "4711" in local_use_reason(LocalUse(foreign_pids=(4711,)))
    assert (
        local_use_reason(LocalUse(sessions=parse_who("anna  tty2  2026-11-15 09:00 (tty2)\n")))
        == "anna tty2 is logged in"
    )
