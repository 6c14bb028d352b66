"""Slots: which adapters are resident on the device. The others are offloaded to the host's memory, or to its disk.

The least recently used model is evicted for one that is needed now. All ranks execute the same commands in the same
order, so they all evict the same model; and even if they did not, no number would change: a model comes back as it
went, bit for bit (see `OffloadedModel`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from strata.base import log
from strata.train.runner.model.offload import OffloadedModel
from strata.train.runner.model.trained import TrainedModel

_log = log.get(__name__)


class Slots:
    """`models` is the runner's own mapping; a model that leaves it has to leave here too (`forget`)."""

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
