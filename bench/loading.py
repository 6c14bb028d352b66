"""Memory of a rank while a sharded model is loaded: `python -m bench loading`.

Two gloo ranks load a model of about 400 MB in float32 and keep it in bfloat16, sharded. The figure is the peak of
anonymous memory (`RssAnon`, sampled every 2 ms) above what the process had before, by the bytes of the rank's shard;
of two ranks the larger one. Pages of the files are not counted: the system takes them back.

- `dense`: a llama. `experts`: a mixture whose files have one tensor for each expert and whose parameters are fused.

Bare is `from_pretrained` of the whole model on each rank, then `fully_shard` of the same groups.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

import msgspec
import torch
import torch.distributed as dist

from bench.interleave import interleave
from bench.report import Report
from strata.base.settings import process_environment
from strata.train.runner.collectives import RankGroup
from strata.train.runner.mesh import make_mesh
from strata.train.runner.model.loading import RankPart, build_skeleton, load_lm, load_sharded
from strata.train.runner.model.startup_check import find_decoder
from strata.train.runner.model.tiny import TinyModel, make
from strata.train.runner.model.trained import local
from strata.train.runner.passes.logprobs import PackedModel
from strata.train.runner.settings import LOGITS_BYTES, RunnerSettings

RANKS: Final = 2
SAMPLED_S: Final = 0.002
MODELS: Final = {
    "dense": (TinyModel(family="llama", layers=10, hidden=1024, vocabulary=8192), 1.15),
    "experts": (TinyModel(family="qwen3_moe", layers=4, hidden=512, vocabulary=4096, experts=32), 2.5),
}
"""With the goal for each: the peak by the bytes of the shard."""
Way = Literal["ours", "bare"]


class Loaded(msgspec.Struct):
    peak: int
    shard: int


async def run(report: Report, *, quick: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-loading-") as folder:
        for name, (tiny, goal) in MODELS.items():
            model = Path(folder) / name
            report.progress(f"{name}: making the model")
            make(model, tiny)
            found = await interleave(
                lambda model=model: measure(model, "ours"),  # type: ignore[misc]
                lambda model=model: measure(model, "bare"),  # type: ignore[misc]
                1 if quick else 3,
                better="lower",
                warm_up=False,
            )
            size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
            report.add(name, "x shard", found, limit=goal, note=f"{size >> 20} MiB of files")


async def measure(model: Path, way: Way) -> float:
    out = model.parent / "out"
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "-m", "bench.loading"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, way, str(model), str(out),
        env={**process_environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 600)
    if process.returncode:
        raise RuntimeError(errors.decode()[-4000:])
    return max(peak_of(Path(f"{out}-{rank}")) for rank in range(RANKS))


def peak_of(file: Path) -> float:
    loaded = msgspec.json.decode(file.read_bytes(), type=Loaded)
    return loaded.peak / loaded.shard


def load(way: Way, model: str, ranks: RankGroup) -> PackedModel:
    settings = RunnerSettings(model=model, sleep_folder=Path(), dtype="bfloat16")
    mesh = make_mesh(settings.parallel, ranks.shares, ranks.device, torch.bfloat16)
    made: list[PackedModel] = []

    def distribute(lm: torch.nn.Module) -> None:
        lm.requires_grad_(requires_grad=False)
        made.append(PackedModel(lm, find_decoder(lm), mesh.stage, mesh.context, LOGITS_BYTES))  # type: ignore[arg-type]
        mesh.shard(made[0])

    if way == "ours":
        load_sharded(model, torch.bfloat16, ranks.device, RankPart(distribute, ranks.size))
    else:
        distribute(load_lm(model, torch.bfloat16))
    return made[0]


def main(way: Way, model: str, out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    ranks = RankGroup(torch.device("cpu"))
    build_skeleton(model, torch.bfloat16)
    gc.collect()
    with sampled() as peak:
        packed = load(way, model, ranks)
    held = sum(local(parameter).nbytes for parameter in packed.parameters())
    Path(f"{out}-{ranks.rank}").write_bytes(msgspec.json.encode(Loaded(peak[0], held)))
    dist.barrier()


@contextmanager
def sampled() -> Iterator[list[int]]:
    """The peak of anonymous memory meanwhile, above that at the beginning."""
    before = _anonymous()
    peak = [0]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLED_S):
            peak[0] = max(peak[0], _anonymous() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main("ours" if sys.argv[1] == "ours" else "bare", sys.argv[2], Path(sys.argv[3]))
    dist.destroy_process_group()
