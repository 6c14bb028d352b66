"""Reads GPUs, their memory, use and processes: by NVML, AMD SMI or `nvidia-smi` (20 s), MIG devices, and which ones
CUDA_VISIBLE_DEVICES shows.

A device that cannot be read is a problem of its own and hides no other one. Only devices that the agent's environment
shows count (CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES): jobs see no others. Without library and program: no GPUs.
"""

from __future__ import annotations

import csv
import importlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from strata.fleet.core.capability import Gpu
from strata.fleet.core.samples import CardSample

MIB: Final = 1024 * 1024
NVIDIA_SMI_TIMEOUT_S: Final = 20.0
_AMD_UUID: Final = re.compile(r"GPU-[0-9a-f]{16}")
"""How ROCm writes one; NVIDIA's have dashes."""
_CUDA: Final = re.compile(r"CUDA Version:\s*([0-9.]+)")
_COLUMNS: Final = "index,uuid,name,memory.total,utilization.gpu,memory.used,temperature.gpu,power.draw"


@dataclass(frozen=True, slots=True)
class GpuDevice:
    gpu: Gpu
    number: int
    """The number among the devices of its maker on this host."""
    sample: CardSample


@dataclass(frozen=True, slots=True)
class GpuInventory:
    devices: tuple[GpuDevice, ...] = ()
    driver_cuda: str = ""
    """The newest CUDA version that the driver supports."""
    problems: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(device.gpu for device in self.devices)


def query_gpus(environ: Mapping[str, str]) -> GpuInventory:
    """All GPUs that jobs can see, with what they do at this moment."""
    nvidia = _read_library("pynvml", read_nvml) or read_nvidia_smi(environ)
    amd = _read_library("amdsmi", read_amd_smi) or GpuInventory()
    return GpuInventory(
        (
            *shown(nvidia.devices, environ.get("CUDA_VISIBLE_DEVICES")),
            *shown(amd.devices, environ.get("ROCR_VISIBLE_DEVICES")),
        ),
        nvidia.driver_cuda,
        nvidia.problems + amd.problems,
    )


def shown(devices: Sequence[GpuDevice], visible: str | None) -> list[GpuDevice]:
    """Those that the variable names, by number or by the beginning of a UUID. As in CUDA, a wrong one ends the list."""
    if visible is None:
        return list(devices)
    found: list[GpuDevice] = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        matches = [
            device
            for device in devices
            if (device.number == int(name) if name.isdecimal() else device.gpu.uuid.startswith(name))
        ]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def visible_devices(cards: Sequence[int | str]) -> dict[str, str]:
    """The variables that show a job just these cards: by UUID, which stays the same when another card is lost."""
    amd = [str(card) for card in cards if _AMD_UUID.fullmatch(str(card))]
    others = [str(card) for card in cards if str(card) not in amd]
    variables = {"ROCR_VISIBLE_DEVICES": ",".join(amd)} if amd or not cards else {}
    return variables | ({"CUDA_VISIBLE_DEVICES": ",".join(others)} if others or not cards else {})


def _read_library(name: str, read: Callable[[Any], GpuInventory | None]) -> GpuInventory | None:
    """None: it is not installed, or finds no driver."""
    try:
        library = importlib.import_module(name)
    except (ImportError, OSError, KeyError):
        # AMD SMI loads its shared library when it is imported, and fails in its own ways without one.
        return None
    return read(library)


def read_nvml(nvml: Any) -> GpuInventory | None:
    """Reads GPUs by the functions of nvidia-ml-py. A GPU that is divided into MIG devices counts as those."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    devices: list[GpuDevice] = []
    problems: list[str] = []
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                devices += [_nvml_device(nvml, each, number) for each in _mig_handles(nvml, handle) or [handle]]
            except nvml.NVMLError as error:
                problems.append(f"GPU {number}: {error}")
        version = _supported(nvml.NVMLError, nvml.nvmlSystemGetCudaDriverVersion_v2)
    finally:
        nvml.nvmlShutdown()
    return GpuInventory(tuple(devices), _cuda_version(version), tuple(problems))


def _nvml_device(nvml: Any, handle: Any, number: int) -> GpuDevice:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    gpu = Gpu(name=_text(nvml.nvmlDeviceGetName(handle))[:256], vram_bytes=int(memory.total), uuid=uuid[:256])
    failing = nvml.NVMLError
    use = _supported(failing, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    milliwatts = _supported(failing, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    sample = CardSample(
        card=gpu.uuid or str(number),
        use=None if use is None else use / 100,
        vram_used_gib=memory.used / 1024**3,
        temperature_c=_supported(failing, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        power_w=None if milliwatts is None else milliwatts / 1000,
    )
    return GpuDevice(gpu, number, sample)


def _mig_handles(nvml: Any, handle: Any) -> list[Any]:
    mode = _supported(nvml.NVMLError, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if not mode:
        return []
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return found


def read_amd_smi(smi: Any) -> GpuInventory | None:
    """Reads GPUs by the functions of amdsmi, which come with ROCm."""
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException:
        return None
    devices: list[GpuDevice] = []
    problems: list[str] = []
    try:
        for number, handle in enumerate(handles):
            try:
                devices.append(_amd_device(smi, handle, number))
            except smi.AmdSmiException as error:
                problems.append(f"AMD GPU {number}: {error}")
    finally:
        smi.amdsmi_shut_down()
    return GpuInventory(tuple(devices), problems=tuple(problems))


def _amd_device(smi: Any, handle: Any, number: int) -> GpuDevice:
    asic = smi.amdsmi_get_gpu_asic_info(handle)
    memory = smi.amdsmi_get_gpu_vram_usage(handle)
    serial = str(asic.get("asic_serial", "")).removeprefix("0x").lower()
    uuid = f"GPU-{serial.zfill(16)}" if re.fullmatch(r"[0-9a-f]{1,16}", serial) else ""
    gpu = Gpu(name=str(asic["market_name"])[:256], vram_bytes=int(memory["vram_total"]) * MIB, uuid=uuid)
    failing = smi.AmdSmiException
    use = _number(_supported(failing, lambda: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]))
    kinds, metrics = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric
    sample = CardSample(
        card=gpu.uuid or str(number),
        use=None if use is None else use / 100,
        vram_used_gib=int(memory["vram_used"]) / 1024,
        temperature_c=_number(
            _supported(failing, lambda: smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, metrics.CURRENT))
        ),
        power_w=_number(_supported(failing, lambda: smi.amdsmi_get_power_info(handle)["average_socket_power"])),
    )
    return GpuDevice(gpu, number, sample)


def read_nvidia_smi(environ: Mapping[str, str]) -> GpuInventory:
    listing, problem = _run_nvidia_smi([f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits"], environ)
    devices = tuple(parse_devices(listing))
    if not devices:
        return GpuInventory(problems=(problem,) if problem else ())
    banner, _ = _run_nvidia_smi([], environ)
    match = _CUDA.search(banner)
    return GpuInventory(devices, match[1] if match else "")


def parse_devices(listing: str) -> Iterator[GpuDevice]:
    """Parses the table that `nvidia-smi` prints; what it does not know is `[N/A]` there."""
    for row in csv.reader(listing.splitlines(), skipinitialspace=True):
        if len(row) != len(_COLUMNS.split(",")) or not (row[0].isdecimal() and row[3].strip().isdecimal()):
            continue
        number, uuid, name, total, use, used, temperature, power = (cell.strip() for cell in row)
        gpu = Gpu(name=name[:256], vram_bytes=int(total) * MIB, uuid=uuid[:256])
        percent, used_mib = _number(use), _number(used)
        sample = CardSample(
            card=gpu.uuid or number,
            use=None if percent is None else percent / 100,
            vram_used_gib=None if used_mib is None else used_mib / 1024,
            temperature_c=_number(temperature),
            power_w=_number(power),
        )
        yield GpuDevice(gpu, int(number), sample)


def compute_pids(environ: Mapping[str, str]) -> frozenset[int]:
    """Processes that compute on a GPU."""
    listing, _ = _run_nvidia_smi(["--query-compute-apps=pid", "--format=csv,noheader,nounits"], environ)
    return frozenset(int(line) for line in listing.split() if line.isdecimal())


def _run_nvidia_smi(args: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Its output, and the problem if it failed. A hung driver must not hang the agent."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *args],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return "", ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi: {error}"
    if done.returncode:
        message = (done.stdout or done.stderr).decode(errors="replace").strip()
        return "", f"nvidia-smi: {message[:200] or done.returncode}"
    return done.stdout.decode(errors="replace"), ""


def _supported(failing: type[Exception], read: Callable[[], Any]) -> Any:
    """None for what this device cannot tell."""
    try:
        return read()
    except failing:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _number(value: object) -> float | None:
    """AMD SMI and `nvidia-smi` say `N/A` where there is no number."""
    try:
        return float(str(value))
    except ValueError:
        return None


def _cuda_version(number: int | None) -> str:
    """12040 is 12.4."""
    return "" if not number else f"{number // 1000}.{number % 1000 // 10}"
