"""Lets torch compute with fake tensors of a CUDA device on a machine that has no driver for one.

Autograd asks whether the device has a context (`hooks.cpp` answers), and FSDP makes streams and events: here they do
nothing.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import device_mesh


class StreamlessDevice:
    """What FSDP and meshes of devices ask of `torch.cuda`."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_initialized() -> bool:
        return True


def install(hooks: Path) -> None:
    """For this process, once everything is imported."""
    assert torch.version.cuda is not None, "this is the CPU build of torch"
    ctypes.CDLL(str(hooks)).install()
    original: Any = vars(device_mesh)["_get_device_handle"]
    for module in list(sys.modules.values()):
        if vars(module).get("_get_device_handle") is original:
            module._get_device_handle = lambda device_type="cuda": StreamlessDevice  # type: ignore[attr-defined]
