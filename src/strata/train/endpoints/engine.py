"""What every engine promises: it takes weights under a name, once, lets go of them, and says what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import Sample, SampleResult


@dataclass(frozen=True)
class Version:
    name: str
    folder: Path
    """Of the saved weights, as the server sees it. Engines must see it under the same path."""
    whole: bool
    """A whole model, and not an adapter of the base."""

    def check(self) -> None:
        """NOT_FOUND if the files are gone. Engines that are told of files which are not there may die of it."""
        wanted = "config.json" if self.whole else "adapter_config.json"
        if not (self.folder / wanted).is_file():
            raise StrataError(Code.NOT_FOUND, f"the files of {self.name} are not there any more")


class Engine(Protocol):
    async def versions(self) -> Sequence[str]:
        """The names that a request can give now. UNAVAILABLE or DEADLINE if it does not answer."""
        ...

    async def take(self, version: Version) -> None:
        """When this returns, the weights can be asked for by their name. Doing it again changes nothing."""
        ...

    async def drop(self, name: str) -> None:
        """Let go of a version; of one that is not there, too."""
        ...

    async def sample(self, version: Version, sample: Sample, seed: int) -> SampleResult:
        """Of exactly this version: NOT_FOUND if the engine does not have it. UNSUPPORTED if it cannot sample so."""
        ...

    async def close(self) -> None: ...


def stale(names: Sequence[str], version: str, keep: int) -> list[str]:
    """Which of these versions of the same model are older than the newest `keep`."""
    run, _, _ = version.rpartition("-v")
    numbers = {}
    for name in {*names, version}:
        before, _, number = name.rpartition("-v")
        if before == run and number.isascii() and number.isdecimal():
            numbers[int(number)] = name
    return [numbers[number] for number in sorted(numbers)[:-keep]]
