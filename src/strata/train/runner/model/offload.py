"""Offload: which adapters stay on the device (`Slots`, least recently used), which go to host memory or disk, and sleep
and wake of a whole rank.

The storage of a tensor is resized to nothing and later resized back, so that the engine's own references, and its
views into one storage, stay valid. `SleepOffload` offloads a whole rank. `Slots` decides which adapters are resident on
the device; the others are offloaded to the host's memory, or to its disk (`OffloadedModel`). All ranks execute the same
commands in the same order, so they all evict the same model; and even if they did not, no number would change.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save, save_file

from strata.base import log
from strata.train.runner.model.trained import TrainedModel

_log = log.get(__name__)


class SleepOffload:
    """Everything large of a rank: memory of its device goes to the host; without a device, memory of the host goes to a
    file."""

    def __init__(self, tensors: Iterable[torch.Tensor], file: Path) -> None:
        """Take away the memory of these tensors. `freed` says how many bytes that was."""
        self._file = file
        storages = _storages_of(tensors)
        on_device = [storage for storage in storages if storage.device.type != "cpu"]
        self._storages = on_device or storages
        self._host: list[torch.Tensor] = []
        self._sizes = [storage.nbytes() for storage in self._storages]
        self.freed = sum(self._sizes)
        if not on_device:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            save_file({str(number): _bytes_of(storage) for number, storage in enumerate(self._storages)}, file)
        else:
            self._host = [_bytes_of(storage).cpu() for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        if self._host:
            for storage, size, content in zip(self._storages, self._sizes, self._host, strict=True):
                storage.resize_(size)
                _bytes_of(storage).copy_(content)
            return
        if not self._storages:
            return
        with safe_open(self._file, framework="pt") as contents:
            for number, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
                storage.resize_(size)
                _bytes_of(storage).copy_(contents.get_tensor(str(number)))
        self._file.unlink(missing_ok=True)


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
