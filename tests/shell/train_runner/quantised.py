"""A quantised base on two ranks, sharded and on every rank in full: `torchrun … quantised FOLDER`.

A base that every rank has in full is that of one rank alone. Each rank has a row of its own and writes whether the two
differ, and which part of the quantised weights it holds. The sampler gathers the sharded weights layer by layer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch.distributed.tensor import DTensor

from strata.train.plan.quantisation import QuantisedKind
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.quantised import quantised_layers
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import local
from strata.train.runner.sampling.inference_model import InferenceModel, verify_decode_matches_training
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.replicated import TOKENS, compute
from tests.support.ranks import join_ranks

KINDS: Final[tuple[QuantisedKind, ...]] = ("nf4", "int8")


class Compared(msgspec.Struct):
    equal: bool
    difference: float
    held_bytes: int
    """Of quantised weights, by a rank of two that share them."""
    all_bytes: int
    unsampled: str
    """Why the sharded base cannot be sampled."""


def main(folder: Path) -> None:
    ranks = join_ranks(120)
    with ranks.collective_errors():
        if ranks.is_rank0:
            make(folder / "model", TinyModel(hidden=128))
    for kind in KINDS:
        bases = [
            BaseModel(
                RunnerSettings(model=str(folder / "model"), sleep_folder=folder, replicated_bytes=size, quantise=kind),
                ranks,
            )
            for size in (0, 1 << 30)
        ]
        held = []
        for base, is_sharded in zip(bases, (True, False), strict=True):
            weights = [weight for _, layer in quantised_layers(base.lm) for weight in (layer.codes, layer.scales)]
            assert all(isinstance(weight, DTensor) is is_sharded for weight in weights)
            held.append(sum(local(weight).nbytes for weight in weights))
        one, other = (compute(base, ranks) for base in bases)
        assert float(one[TOKENS:].abs().max()) > 0
        unsampled = verify_decode_matches_training(InferenceModel(bases[0], ranks), bases[0], ranks.device)
        difference = float((one - other).abs().max())
        compared = Compared(torch.equal(one, other), difference, held[0], held[1], unsampled)
        (folder / f"{kind}-{ranks.rank}").write_bytes(msgspec.json.encode(compared))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
