"""Fused layers, by a double, on two ranks that share the layers in different ways: `torchrun … fused_ranks FOLDER`.

Each rank writes by how much a pass is apart from one with plain layers.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import msgspec

from strata.base.settings import put_variables
from strata.train.parallel import ParallelSettings
from strata.train.plan.fused_kernels import FusedLayers
from strata.train.runner.mesh import blocks_of
from strata.train.runner.model.base import BaseModel
from strata.train.runner.model.fused_kernels import compute_row
from strata.train.runner.model.startup_check import compute_reference
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.settings import RunnerSettings
from tests.shell.train_runner.liger_double import liger_modules
from tests.support.ranks import join_ranks


def main(folder: Path) -> None:
    calls: Counter[str] = Counter()
    sys.modules.update(liger_modules(calls))
    put_variables({"TRITON_INTERPRET": "1"})
    ranks = join_ranks(120)
    with ranks.collective_errors():
        if ranks.is_rank0:
            make(folder / "model", TinyModel(family="qwen3", hidden=128))
    apart = {}
    for name, parallel in (
        ("shard", ParallelSettings()),
        ("tensor", ParallelSettings(tensor=2)),
        ("context", ParallelSettings(context=2)),
    ):
        results = []
        choices: tuple[FusedLayers, ...] = ("", "liger")
        for layers in choices:
            settings = RunnerSettings(
                model=str(folder / "model"),
                sleep_folder=folder,
                parallel=parallel,
                training="full",
                fused_layers=layers,
            )
            base = BaseModel(settings, ranks)
            calls.clear()
            row = compute_reference(base._unmodified_logits, base.vocabulary, ranks.device).row
            results.append(compute_row(base.logprobs, row, base.lm, blocks_of(base.lm)[0]))
            assert bool(calls) is bool(layers)
        plain, fused = results
        pairs = [(plain.logprobs, fused.logprobs), *zip(plain.gradients, fused.gradients, strict=True)]
        assert len(pairs) > 2
        apart[name] = max(float((own - other).norm() / own.norm()) for own, other in pairs)
    (folder / f"apart-{ranks.rank}").write_bytes(msgspec.json.encode(apart))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
