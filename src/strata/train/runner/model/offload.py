"""Offload: which adapters stay on the device (`Slots`, least recently used), which go to host memory or disk, and sleep
and wake of a whole rank, which gives the memory of its device back to others.

The storage of a tensor is resized to nothing and later resized back, so that the engine's own references, and its
views into one storage, stay valid. `SleepOffload` offloads a whole rank. `Slots` decides which adapters are resident on
the device; the others are offloaded to the host's memory, or to its disk (`OffloadedModel`). All ranks execute the same
commands in the same order, so they all evict the same model; and even if they did not, no number would change.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file

from strata.base import log
from strata.train.runner.model.process_memory import pinned_bytes, trim_heap
from strata.train.runner.model.trained import TrainedModel

CHUNK_BYTES: Final = 256 << 20
"""Host copies are pinned in chunks of this size: torch rounds what it pins up to a power of two."""
_log = log.get(__name__)


class DeviceMemory(Protocol):
    """The memory of a rank's device, as sleep needs it: `CudaMemory`, or one that records its calls."""

    device_type: str

    def free_bytes(self) -> int:
        """Returns what other processes could have of the device."""
        ...

    def pinned(self, size: int) -> torch.Tensor:
        """Returns so many bytes of the host, from which and to which the device copies by itself."""
        ...

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        """Give the memory that the allocator holds without using it back to the device."""
        ...

    def empty_host_cache(self) -> None:
        """Give pinned memory that is not used back to the host."""
        ...


class CudaMemory:
    device_type: str = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def pinned(self, size: int) -> torch.Tensor:
        return pinned_bytes(size)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def empty_cache(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()

    def empty_host_cache(self) -> None:
        torch.accelerator.empty_host_cache()


class SleepOffload:
    """Everything large of a rank: memory of its device goes to the host; without a device, memory of the host goes to a
    file."""

    def __init__(self, tensors: Iterable[torch.Tensor], file: Path, memory: DeviceMemory | None = None) -> None:
        """Take away the memory of these tensors. `freed` says how many bytes of the device, or of this process, others
        have now. Unless it is given, the memory is that of the device on which the first of the tensors are."""
        self._file = file
        storages = _storages_of(tensors)
        self._memory = memory or _device_memory(storages)
        self._chunks: list[torch.Tensor] = []
        if self._memory is None:
            self._storages = storages
            self._sizes = [storage.nbytes() for storage in storages]
            self.freed = self._to_file()
        else:
            self._storages = [each for each in storages if each.device.type == self._memory.device_type]
            self._sizes = [storage.nbytes() for storage in self._storages]
            self.freed = self._to_host(self._memory)

    def restore(self) -> None:
        if self._memory is not None:
            self._from_host(self._memory)
        elif self._storages:
            self._from_file()

    def _to_host(self, memory: DeviceMemory) -> int:
        before = memory.free_bytes()
        total = sum(self._sizes)
        self._chunks = [memory.pinned(min(CHUNK_BYTES, total - at)) for at in range(0, total, CHUNK_BYTES)]
        for on_host, on_device in self._copies():
            on_host.copy_(on_device, non_blocking=True)
        # A storage that is resized before its copy has ended would be copied from what others write there.
        memory.synchronize()
        for storage in self._storages:
            storage.resize_(0)
        # The allocator would keep the memory, and blocks that a stream still waits for are not given back.
        memory.synchronize()
        memory.empty_cache()
        return max(memory.free_bytes() - before, 0)

    def _from_host(self, memory: DeviceMemory) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for on_host, on_device in self._copies():
            on_device.copy_(on_host, non_blocking=True)
        memory.synchronize()
        self._chunks = []
        memory.empty_host_cache()

    def _copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of the chunks, each with the part of a storage that belongs there."""
        at = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            content, done = _bytes_of(storage), 0
            while done < size:
                chunk = self._chunks[at // CHUNK_BYTES]
                begin = at % CHUNK_BYTES
                length = min(size - done, CHUNK_BYTES - begin)
                yield chunk[begin : begin + length], content[done : done + length]
                done, at = done + length, at + length

    def _to_file(self) -> int:
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_file({str(number): _bytes_of(storage) for number, storage in enumerate(self._storages)}, self._file)
        for storage in self._storages:
            storage.resize_(0)
        trim_heap()
        return sum(self._sizes)

    def _from_file(self) -> None:
        with safe_open(self._file, framework="pt") as contents:
            for number, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
                storage.resize_(size)
                _bytes_of(storage).copy_(contents.get_tensor(str(number)))
        self._file.unlink(missing_ok=True)


def _device_memory(storages: Sequence[torch.UntypedStorage]) -> DeviceMemory | None:
    on_device = next((storage.device for storage in storages if storage.device.type == "cuda"), None)
    return None if on_device is None else CudaMemory(on_device)


class OffloadedModel:
    """One model's tensors, offloaded to the host's memory and from there, if that is short, to its disk.

    The file belongs to this process and is worthless after it: ranks that restart have a snapshot.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = _storages_of(tensors)
        self._contents: list[torch.Tensor] = [_bytes_of(storage).to("cpu", copy=True) for storage in self._storages]
        self._file: Path | None = None
        self._digest = b""
        for storage in self._storages:
            storage.resize_(0)

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def to_disk(self, file: Path) -> None:
        """OSError if the file cannot be written; the model then stays in memory."""
        data = save({str(number): content for number, content in enumerate(self._contents)})
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_bytes(data)
        except OSError:
            file.unlink(missing_ok=True)
            raise
        self._file, self._digest, self._contents = file, hashlib.sha256(data).digest(), []

    def restore(self) -> None:
        """A rank that cannot get its weights back has lost them: it dies, and the group restarts."""
        if self._file is not None:
            try:
                data = self._file.read_bytes()
            except OSError as error:
                # Not as an OSError: the operation would fail, and the rank would continue with an empty model.
                raise RuntimeError(f"{self._file} cannot be read: the model offloaded there is lost") from error
            if hashlib.sha256(data).digest() != self._digest:
                raise RuntimeError(f"{self._file} is not what was written: the model offloaded there is lost")
            tensors = load(data)
            self._contents = [tensors[str(number)] for number in range(len(self._storages))]
        for storage, content in zip(self._storages, self._contents, strict=True):
            storage.resize_(content.numel())
            _bytes_of(storage).copy_(content)
        self.discard()

    def discard(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        self._contents = []


class Slots:
    """The adapters that are resident: the least recently used is evicted for one that is needed now.

    `models` is the runner's own mapping; a model that leaves it has to leave here too (`forget`).
    """

    def __init__(self, models: Mapping[str, TrainedModel], folder: Path, *, slots: int, in_memory: int) -> None:
        self._models = models
        self._folder = folder
        self._slots = slots
        self._in_memory = in_memory
        self._recency: dict[str, None] = {}
        """All models, the least recently used first."""
        self._offloaded: dict[str, OffloadedModel] = {}
        self._files = 0
        # Files of an earlier process of this rank.
        shutil.rmtree(folder, ignore_errors=True)

    def use(self, names: Iterable[str]) -> None:
        """Make these models resident. If they alone are more than there are slots, they exceed the slots."""
        wanted = dict.fromkeys(names)
        for name in wanted:
            self._recency.pop(name, None)
            self._recency[name] = None
        loading = [name for name in wanted if name in self._offloaded]
        idle = [name for name in self._recency if name not in self._offloaded and name not in wanted]
        excess = len(self._recency) - len(self._offloaded) + len(loading) - self._slots
        for name in idle[: max(excess, 0)]:
            self._offloaded[name] = OffloadedModel(self._models[name].tensors())
        for name in loading:
            self._offloaded.pop(name).restore()
        self._spill_to_disk()

    def forget(self, name: str) -> None:
        self._recency.pop(name, None)
        offloaded = self._offloaded.pop(name, None)
        if offloaded is not None:
            offloaded.discard()

    def resident(self) -> Iterator[TrainedModel]:
        return (model for name, model in self._models.items() if name not in self._offloaded)

    def each_loaded(self) -> Iterator[TrainedModel]:
        """All models, one after the other; an offloaded one is loaded only until the next one is requested."""
        for name, model in self._models.items():
            offloaded = self._offloaded.get(name)
            if offloaded is None:
                yield model
                continue
            on_disk = not offloaded.in_memory
            self._offloaded.pop(name).restore()
            try:
                yield model
            finally:
                self._offloaded[name] = OffloadedModel(model.tensors())
                if on_disk:
                    self._to_disk(self._offloaded[name])

    def _spill_to_disk(self) -> None:
        """If the memory holds its share already, the models that were offloaded first go to the disk."""
        in_memory = [offloaded for offloaded in self._offloaded.values() if offloaded.in_memory]
        for offloaded in in_memory[: max(len(in_memory) - self._in_memory, 0)]:
            self._to_disk(offloaded)

    def _to_disk(self, offloaded: OffloadedModel) -> None:
        self._files += 1
        try:
            offloaded.to_disk(self._folder / f"{self._files}.safetensors")
        except OSError as error:
            _log.warning("offload_to_disk_failed", reason=str(error))


def _storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory behind these tensors, each block once."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage.data_ptr(), storage)
    return list(storages.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
