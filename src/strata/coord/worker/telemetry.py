"""What the worker uses: its process by psutil, the host's network, and GPUs where NVML is installed."""

from __future__ import annotations

import importlib
from contextlib import suppress
from types import ModuleType

import psutil  # type: ignore[import-untyped]

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
            gpu_metrics=_gpus(self._nvml) if self._nvml is not None else (),
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


def _gpus(nvml: ModuleType) -> list[pb.GpuMetrics]:
    try:
        return [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


def _gpu(nvml: ModuleType, index: int) -> pb.GpuMetrics:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(device)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    found = pb.GpuMetrics(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
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
