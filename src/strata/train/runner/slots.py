"""Which adapters are on the device: as many as there are slots. The others wait in the host's memory, or on its disk.

Who was used least recently makes room for who is needed now. All ranks are told the same in the same order, so they
all choose the same; and even if they did not, nothing would be computed differently: what comes back is what went, bit
for bit, to the same addresses in Python (see `Asleep`). A file is of this process alone and is worth nothing after it:
ranks that start anew have a snapshot.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save

from strata.base import log
from strata.train.runner.asleep import bytes_of
from strata.train.runner.trained import Trained

_log = log.get(__name__)


class Parked:
    """The memory of these tensors, taken away under them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        self._storages = list(found.values())
        self._kept: list[torch.Tensor] = [bytes_of(storage).to("cpu", copy=True) for storage in self._storages]
        self._file: Path | None = None
        self._digest = b""
        for storage in self._storages:
            storage.resize_(0)

    @property
    def in_memory(self) -> bool:
        return self._file is None

    def to_disk(self, file: Path) -> None:
        """OSError if that cannot be; it is in memory then as before."""
        content = save({str(number): kept for number, kept in enumerate(self._kept)})
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_bytes(content)
        except OSError:
            file.unlink(missing_ok=True)
            raise
        self._file, self._digest, self._kept = file, hashlib.sha256(content).digest(), []

    def put_back(self) -> None:
        """A rank that cannot get its weights back has lost them: it dies, and the group starts anew."""
        if self._file is not None:
            try:
                content = self._file.read_bytes()
            except OSError as error:
                # Not as an error of the disk: the operation would fail, and the rank go on with a model of nothing.
                raise RuntimeError(f"{self._file} cannot be read: a model that waited there is lost") from error
            if hashlib.sha256(content).digest() != self._digest:
                raise RuntimeError(f"{self._file} is not what was written: a model that waited there is lost")
            found = load(content)
            self._kept = [found[str(number)] for number in range(len(self._storages))]
        for storage, kept in zip(self._storages, self._kept, strict=True):
            storage.resize_(kept.numel())
            bytes_of(storage).copy_(kept)
        self.forget()

    def forget(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
        self._kept = []


class Slots:
    """`models` is the runner's own mapping; what is not in it any longer is not here either (`forget`)."""

    def __init__(self, models: Mapping[str, Trained], folder: Path, *, slots: int, in_memory: int) -> None:
        self._models = models
        self._folder = folder
        self._slots = slots
        self._in_memory = in_memory
        self._used: dict[str, None] = {}
        """All models, the least recently used first."""
        self._parked: dict[str, Parked] = {}
        self._files = 0
        # Those of a process that had this rank before.
        shutil.rmtree(folder, ignore_errors=True)

    def use(self, names: Iterable[str]) -> None:
        """They are on the device when this returns. Only if they alone are more than there are slots do they share."""
        wanted = dict.fromkeys(names)
        for name in wanted:
            self._used.pop(name, None)
            self._used[name] = None
        coming = [name for name in wanted if name in self._parked]
        idle = [name for name in self._used if name not in self._parked and name not in wanted]
        over = len(self._used) - len(self._parked) + len(coming) - self._slots
        for name in idle[: max(over, 0)]:
            self._parked[name] = Parked(self._models[name].tensors())
        for name in coming:
            self._parked.pop(name).put_back()
        self._make_room()

    def forget(self, name: str) -> None:
        self._used.pop(name, None)
        parked = self._parked.pop(name, None)
        if parked is not None:
            parked.forget()

    def resident(self) -> Iterator[Trained]:
        return (model for name, model in self._models.items() if name not in self._parked)

    def each(self) -> Iterator[Trained]:
        """All models, one after the other; one that waits elsewhere is here only until the next is asked for."""
        for name, model in self._models.items():
            parked = self._parked.get(name)
            if parked is None:
                yield model
                continue
            on_disk = not parked.in_memory
            self._parked.pop(name).put_back()
            try:
                yield model
            finally:
                self._parked[name] = Parked(model.tensors())
                if on_disk:
                    self._to_disk(self._parked[name])

    def _make_room(self) -> None:
        """Who has waited longest goes to the disk, if the memory has its share already."""
        waiting = [parked for parked in self._parked.values() if parked.in_memory]
        for parked in waiting[: max(len(waiting) - self._in_memory, 0)]:
            self._to_disk(parked)

    def _to_disk(self, parked: Parked) -> None:
        self._files += 1
        try:
            parked.to_disk(self._folder / f"{self._files}.safetensors")
        except OSError as error:
            _log.warning("a model that is not in use stays in memory", reason=str(error))
