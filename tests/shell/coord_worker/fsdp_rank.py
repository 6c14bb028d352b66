"""One rank of an FSDP2 job on gloo that survives a change of members in its process, for the tests."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import strata.coord.worker as strata

WIDTH: Final = 8
SILENCE: Final = timedelta(seconds=60)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The same on every rank: then the mean of the gradients is that of one process."""
    chance = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=chance), torch.randn(4, WIDTH, generator=chance)


def new_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def learn(model: nn.Linear, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs, targets = batch(step)
    functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Linear) -> Tensor:
    """Collective: the weights of all ranks."""
    weight = model.weight
    assert isinstance(weight, DTensor)
    return weight.full_tensor().detach()


def train(worker: strata.Worker, folder: Path, start: strata.Manifest | None, more: int, every: int) -> None:
    """Until it is drained or members change; after a recovery so many steps more. Reports every n-th step."""
    store = folder / f"store-{worker.generation}"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=worker.rank, world_size=worker.world_size, timeout=SILENCE
    )
    try:
        model, step = new_model(), 0
        if start is not None:
            model.weight.data.copy_(load_file(start.parts[0].uri)["weight"])
            step = start.step
        until = step + more if start is not None else None
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while step != until and not worker.should_stop:
            step += 1
            learn(model, optimizer, step)
            print(json.dumps({"step": step, "world_size": dist.get_world_size()}), flush=True)
            if step % every:
                continue
            worker.step(step)
            if worker.checkpoint_due():
                part = folder / f"{worker.generation}-{step}-{worker.rank}.safetensors"
                save_file({"weight": whole(model)}, part)
                worker.checkpoint(step, part, commit_within_s=SILENCE.seconds)
        if step == until:
            save_file({"weight": whole(model)}, folder / f"final-{worker.worker_id}.safetensors")
    finally:
        dist.destroy_process_group()


def main() -> None:
    folder, members, more, every = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    with strata.join(wait_for=members, patience_s=120) as worker:
        worker.run(lambda start: train(worker, folder, start, more, every))


if __name__ == "__main__":
    main()
