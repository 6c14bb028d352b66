"""A rank that sleeps gives memory back: to the system on a CPU, to the other processes of its device on CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from strata.train.runner.model import offload
from strata.train.runner.model.offload import SleepOffload
from tests.shell.train_runner.sleeping import Slept

GIVEN_BACK = 0.9


class RecordedMemory:
    """Takes the host for a device. It counts what the tensors of a test hold as what is not free, and a block that was
    resized as the allocator's until its cache is emptied."""

    device_type = "cpu"

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.calls: list[tuple[str, bool]] = []
        """Each call, and whether the tensors had their memory then."""
        self._tensors = tensors
        self._free = 0

    def _held(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def _record(self, name: str) -> None:
        self.calls.append((name, self._held() > 0))

    def free_bytes(self) -> int:
        return self._free

    def pinned(self, size: int) -> torch.Tensor:
        self._record("pinned")
        return torch.empty(size, dtype=torch.uint8)

    def synchronize(self) -> None:
        self._record("synchronize")

    def empty_cache(self) -> None:
        self._record("empty_cache")
        self._free = -self._held()

    def empty_host_cache(self) -> None:
        self._record("empty_host_cache")


def tensors_of(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]


def test_storages_are_resized_between_two_synchronisations_and_then_the_cache_is_emptied(tmp_path: Path) -> None:
    tensors = tensors_of(100, 7)
    memory = RecordedMemory(tensors)
    SleepOffload(tensors, tmp_path / "no-file", memory)
    assert memory.calls == [("pinned", True), ("synchronize", True), ("synchronize", False), ("empty_cache", False)]
    assert not (tmp_path / "no-file").exists()


def test_what_is_reported_is_what_the_device_has_more_and_not_what_the_tensors_held(tmp_path: Path) -> None:
    tensors = tensors_of(1000)
    memory = RecordedMemory(tensors)
    memory._free = -10_000
    assert SleepOffload(tensors, tmp_path / "no-file", memory).freed == 10_000
    memory = RecordedMemory(others := tensors_of(1000))
    assert SleepOffload(others, tmp_path / "no-file", memory).freed == 0


@pytest.mark.parametrize("chunk", [1, 16, 28, 1 << 20])
def test_tensors_come_back_as_they_were_whatever_chunk_they_were_in(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", chunk)
    whole = tensors_of(7, 1, 12)
    tensors = [*whole, whole[2][3:5], torch.empty(0)]
    before = [tensor.clone() for tensor in tensors]
    memory = RecordedMemory(tensors)
    slept = SleepOffload(tensors, tmp_path / "no-file", memory)
    del memory.calls[:]
    slept.restore()
    assert all(map(torch.equal, tensors, before))
    # Pinned memory is given back when the device has copied from it.
    assert memory.calls == [("synchronize", True), ("empty_host_cache", True)]


@pytest.mark.parametrize("count", [3, 400])
def test_the_resident_memory_of_a_process_falls_by_what_is_reported(count: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.shell.train_runner.sleeping", str(tmp_path / "asleep"), str(count)],
        capture_output=True,
        timeout=60,
        check=True,
    )
    slept = msgspec.json.decode(done.stdout, type=Slept)
    assert slept.freed == slept.held
    assert slept.resident_before - slept.resident_asleep >= GIVEN_BACK * slept.freed
    assert slept.equal
