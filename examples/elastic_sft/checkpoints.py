"""Checkpoints of all ranks together: torch's DCP writes them, the coordinator says which one counts.

A rank's part is a list of the files it wrote, with their digests. The coordinator keeps the digest of the list, so that
every byte is verified before torch reads any: DCP's own table of contents is a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import LanguageModel
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import strata.coord.worker as strata
from strata.base.digest import file_digest


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    seen: Tensor

    def as_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "seen": self.seen}


def save(folder: Path, state: Saved) -> Path:
    """This rank's part."""
    dcp_save(state.as_dict(), checkpoint_id=folder)
    rank = dist.get_rank()
    written = [*folder.glob(f"__{rank}_*.distcp"), *([folder / ".metadata"] if rank == 0 else [])]
    part = folder / f"part-{rank}.json"
    part.write_text(json.dumps({file.name: file_digest(file) for file in written}), encoding="utf-8")
    return part


def load(manifest: strata.Manifest, state: Saved) -> None:
    """Into any number of ranks, whatever the number that wrote it."""
    found = state.as_dict()
    dcp_load(found, checkpoint_id=Path(manifest.parts[0].uri).parent)
    set_state_dict(state.model, state.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


def is_intact(manifest: strata.Manifest) -> bool:
    try:
        for part in manifest.parts:
            strata.verify_part(part.uri, part.digest)
            for name, digest in json.loads(Path(part.uri).read_bytes()).items():
                strata.verify_part(Path(part.uri).with_name(name), digest)
    except strata.StrataError as error:
        if error.code is not strata.Code.CORRUPT:
            raise
        return False
    return True


def agree_on_start(worker: strata.Worker) -> strata.Manifest | None:
    """The last checkpoint of which every rank finds every byte as it was written. All ranks start from the same one."""
    manifest = worker.start
    while True:
        intact = torch.tensor(manifest is None or is_intact(manifest), dtype=torch.long)
        dist.all_reduce(intact, dist.ReduceOp.MIN)
        if intact:
            return manifest
        manifest = worker.recover("damaged", bad_checkpoint_id=manifest.checkpoint_id if manifest else "")


def bury(root: Path, tombstones: Iterable[str]) -> None:
    """Delete what no recovery needs any more, as far as it is ours. The worker may have deleted the list already."""
    for part in map(Path, tombstones):
        if part.is_relative_to(root.absolute()):
            rank = part.stem.removeprefix("part-")
            files = [
                part,
                *part.parent.glob(f"__{rank}_*.distcp"),
                *([part.with_name(".metadata")] if rank == "0" else []),
            ]
            for file in files:
                file.unlink(missing_ok=True)
            with suppress(OSError):
                # The last rank to delete its part finds the folder empty.
                part.parent.rmdir()
