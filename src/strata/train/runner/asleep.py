"""Sleep: everything large leaves the device, and comes back as it was, bit for bit, to the same addresses in Python.

The memory of a tensor is taken away under it (its storage is resized to nothing) and given back later, so that the
engine's own references, and its views into one storage, stay right. A device's memory goes to the host; the memory of
a host goes to a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


class Asleep:
    def __init__(self, tensors: Iterable[torch.Tensor], file: Path) -> None:
        """Take away the memory of these tensors. `freed` says how much it was."""
        self._file = file
        self._storages: list[torch.UntypedStorage] = []
        self._host: list[torch.Tensor] = []
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self._storages.append(storage)
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.freed = sum(self._sizes)
        if any(storage.device.type == "cpu" for storage in self._storages):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_file({str(number): bytes_of(storage) for number, storage in enumerate(self._storages)}, file)
        else:
            self._host = [bytes_of(storage).cpu() for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)

    def wake(self) -> None:
        if self._host:
            for storage, size, kept in zip(self._storages, self._sizes, self._host, strict=True):
                storage.resize_(size)
                bytes_of(storage).copy_(kept)
            return
        if not self._storages:
            return
        with safe_open(self._file, framework="pt") as kept:
            for number, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
                storage.resize_(size)
                bytes_of(storage).copy_(kept.get_tensor(str(number)))
        self._file.unlink(missing_ok=True)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
