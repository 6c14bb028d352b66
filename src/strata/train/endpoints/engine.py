"""The port of an inference engine: load, unload and list versions of weights, sample; and which versions are stale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from strata.base.errors import Code, StrataError
from strata.train.core.sampling import SampledPart, SampleOperation, SampleResult

ReportPart = Callable[[SampledPart], None]
"""Reports tokens of a streamed sample while it runs."""


@dataclass(frozen=True)
class ModelVersion:
    name: str
    folder: Path
    """The folder of the saved weights. Engines must see it under the same path as the server."""
    full: bool
    """A full model, not an adapter of the base."""

    def check(self) -> None:
        """NOT_FOUND if the files are gone. Some engines crash when they are to load files that do not exist."""
        config = "config.json" if self.full else "adapter_config.json"
        if not (self.folder / config).is_file():
            raise StrataError(Code.NOT_FOUND, f"the files of {self.name} do not exist any more")


class Engine(Protocol):
    async def versions(self) -> Sequence[str]:
        """The loaded versions. UNAVAILABLE or DEADLINE if the engine does not reply."""
        ...

    async def load_version(self, version: ModelVersion) -> None:
        """Load the weights; then requests can name the version. Idempotent."""
        ...

    async def unload_version(self, name: str) -> None:
        """Unload a version. Idempotent: one that is not loaded is no error."""
        ...

    async def sample(
        self, version: ModelVersion, sample: SampleOperation, seed: int, report: ReportPart
    ) -> SampleResult:
        """Sample from exactly this version. NOT_FOUND if it is not loaded, UNSUPPORTED if the engine cannot."""
        ...

    async def close(self) -> None: ...


def stale_versions(names: Sequence[str], version: str, keep: int) -> list[str]:
    """Returns those of these versions of the same model that are older than the newest `keep`."""
    run, _, _ = version.rpartition("-v")
    numbers = {}
    for name in {*names, version}:
        before, _, number = name.rpartition("-v")
        if before == run and number.isascii() and number.isdecimal():
            numbers[int(number)] = name
    return [numbers[number] for number in sorted(numbers)[:-keep]]
