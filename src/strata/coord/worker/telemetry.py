"""Measures what a worker uses: CPU, memory and disk of its process, network of the host, and its own GPUs where NVML is
installed.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil  # type: ignore[import-untyped]

from strata.base.settings import process_environment
from strata.coord.pb import coordinator_pb2 as pb


class Telemetry:
    """Counts since it was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._rx_bytes, self._tx_bytes = _network()
        self._nvml = _nvml()

    def close(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            # A driver that was taken away meanwhile must not spoil the worker's end.
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def usage(self) -> pb.ResourceUsage:
        rx_bytes, tx_bytes = _network()
        read_bytes, written_bytes = self._disk()
        return pb.ResourceUsage(
            cpu_percent=self._process.cpu_percent(),
            memory_used_bytes=self._process.memory_info().rss,
            disk_read_bytes=read_bytes,
            disk_write_bytes=written_bytes,
            network_rx_bytes=max(0, rx_bytes - self._rx_bytes),
            network_tx_bytes=max(0, tx_bytes - self._tx_bytes),
            gpu_metrics=_gpus(self._nvml, self._process.pid) if self._nvml is not None else (),
        )

    def _disk(self) -> tuple[int, int]:
        try:
            counted = self._process.io_counters()
        except (psutil.Error, AttributeError):
            # Not every system counts, or lets a process see it.
            return 0, 0
        return counted.read_bytes, counted.write_bytes


def _network() -> tuple[int, int]:
    counted = psutil.net_io_counters()
    return (counted.bytes_recv, counted.bytes_sent) if counted is not None else (0, 0)


def _nvml() -> ModuleType | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError):
        # No driver, or a library that cannot be loaded.
        return None
    return nvml


def _gpus(nvml: ModuleType, pid: int) -> list[pb.GpuMetrics]:
    """Those that this process computes on; as long as there are none, or it is not known, those that it may use."""
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:
        return []
    found: list[pb.GpuMetrics] = []
    own: list[int] = []
    for index in range(count):
        uuid = ""
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(device))
            gpu = _gpu(nvml, index, device)
            if any(each.pid == pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)):
                own.append(index)
        except nvml.NVMLError as error:
            # Only this one: a device that fell off the bus must not hide the others.
            gpu = pb.GpuMetrics(index=index, error=str(error))
        if is_visible(index, uuid):
            found.append(gpu)
    return [gpu for gpu in found if gpu.index in own or gpu.error] if own else found


def is_visible(index: int, uuid: str) -> bool:
    """Says whether CUDA may use a device, by the variable that says which; numbers are taken in the order of the
    bus."""
    visible = process_environment().get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    for each in visible.split(","):
        name = each.strip()
        if not (name.isdecimal() or name.startswith("GPU-")):
            # What comes after it CUDA does not see either.
            return False
        if name == str(index) or uuid.startswith(name):
            return True
    return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: ModuleType, index: int, device: Any) -> pb.GpuMetrics:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    found = pb.GpuMetrics(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(device)),
        utilization_percent=float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
        memory_used_bytes=memory.used,
        memory_total_bytes=memory.total,
    )
    try:
        found.temperature_celsius = float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))
        found.power_watts = nvml.nvmlDeviceGetPowerUsage(device) / 1000
    except nvml.NVMLError:
        # A device without these sensors.
        pass
    return found
