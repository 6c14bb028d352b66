"""One rank: FSDP2 on gloo, samples and checkpoints through the coordinator. Started by torchrun; see run.py.

A rank that fails ends its process. torchrun then starts all ranks again, and each of them begins by going back with the
others to the last committed checkpoint: the first start is the same with no checkpoint to go back to.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from checkpoints import Saved, agree_on_start, bury, load, save
from model import PADDING, LanguageModel, Shape
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

import strata.coord.worker as strata
from strata.coord.worker.torch_dataset import ShardDataset

CORPUS: Final = "corpus"
SHARD_SIZE: Final = 8
SILENCE: Final = timedelta(seconds=30)
"""A rank that waits longer for the others takes them for dead. A restart of the coordinator must fit in."""


@dataclass(frozen=True)
class Batch:
    ids: list[int]
    tokens: Tensor
    targets: Tensor
    """The token after each one, or PADDING where nothing is to be learnt: in the prompt and beyond the end."""

    @property
    def learnt(self) -> int:
        return int((self.targets != PADDING).sum())


EMPTY: Final = Batch([], torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), PADDING))
"""For a rank that has no samples while others do: it takes part in the step with a loss of weight zero."""


def collate(samples: list[dict[str, Any]]) -> Batch:
    context = Shape.context
    rows = torch.full((len(samples), context + 1), PADDING)
    targets = torch.full((len(samples), context), PADDING)
    for row, sample in enumerate(samples):
        prompt = sample["prompt"].encode()
        text = (prompt + sample["completion"].encode())[: context + 1]
        rows[row, : len(text)] = torch.tensor(list(text))
        targets[row, len(prompt) - 1 :] = rows[row, len(prompt) :]
    return Batch([sample["id"] for sample in samples], rows[:, :-1], targets)


def rounds(dataset: ShardDataset, batch_size: int) -> Iterator[Batch]:
    """A batch for each step, EMPTY whenever there is nothing for this rank."""
    loader = DataLoader(dataset, batch_size=batch_size, collate_fn=collate, num_workers=0)
    while True:
        yield from loader
        yield EMPTY


@dataclass(frozen=True)
class Agreed:
    """What the ranks bring to a step, all together."""

    seen: Tensor
    """How often each sample is in it."""
    learnt: int
    all_over: bool
    anybody_stops: bool


def agree(batch: Batch, samples: int, *, over: bool, stops: bool) -> Agreed:
    told = torch.zeros(samples + 3, dtype=torch.long)
    told.index_add_(0, torch.tensor(batch.ids, dtype=torch.long), torch.ones(len(batch.ids), dtype=torch.long))
    told[-3:] = torch.tensor([batch.learnt, over, stops])
    dist.all_reduce(told)
    learnt, are_over, stop = told[-3:].tolist()
    return Agreed(told[:-3], learnt, are_over == dist.get_world_size(), stop > 0)


class Training:
    def __init__(self, worker: strata.Worker, given: argparse.Namespace) -> None:
        self.worker = worker
        self.given = given
        self.samples = strata.count_samples(given.corpus)
        torch.manual_seed(given.seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = LanguageModel(Shape())
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
        # How often each sample of each epoch is in the model. It is saved and goes back with the weights.
        seen = torch.zeros(given.epochs, self.samples, dtype=torch.long)
        self.state = Saved(model, optimizer, seen)
        self.step = 0
        self.saved = -1
        self.drained = False
        self.log = (given.out / f"rank-{dist.get_rank()}.jsonl").open("a", encoding="utf-8")

    def say(self, event: str, **fields: Any) -> None:
        line = {"event": event, "rank": dist.get_rank(), "generation": self.worker.generation, "step": self.step}
        self.log.write(json.dumps(line | fields) + "\n")
        self.log.flush()

    def run(self) -> None:
        manifest = agree_on_start(self.worker)
        if manifest is not None:
            load(manifest, self.state)
            self.step = self.saved = manifest.step
        self.say("started", pid=os.getpid(), world_size=self.worker.world_size)
        self.worker.dataset(CORPUS, [self.given.corpus], shard_size=SHARD_SIZE)
        for epoch in range(self.given.epochs):
            if not self.worker.is_finished(CORPUS, epoch) and not self.train(epoch):
                break
        if self.drained:
            # The others go on from the last checkpoint, and wait for nobody.
            self.say("drained")
            return
        self.save()
        # Nobody leaves before all are done: that would begin another generation.
        dist.barrier()
        if dist.get_rank() == 0:
            result = {"step": self.step, "seen": self.state.seen.tolist()}
            (self.given.out / "model.json").write_text(json.dumps(result), encoding="utf-8")
        self.say("finished")

    def train(self, epoch: int) -> bool:
        """Until all samples of the epoch are consumed; False if an operator wants the job to end before that."""
        dataset = ShardDataset(self.worker, CORPUS, epoch, wait=False)
        for batch in rounds(dataset, self.given.batch_size):
            agreed = agree(batch, self.samples, over=dataset.is_over, stops=self.worker.should_stop)
            if agreed.learnt:
                loss = self.learn(batch, agreed.learnt)
                dataset.consumed()
                self.state.seen[epoch] += agreed.seen
                self.step += 1
                self.say("step", epoch=epoch, ids=batch.ids, loss=loss)
                self.worker.step(self.step)
                if self.worker.checkpoint_due() or self.step % self.given.checkpoint_every == 0:
                    self.save()
                if self.drained:
                    return False
            if agreed.anybody_stops:
                return False
            if agreed.all_over:
                return True
        raise AssertionError("rounds never end")

    def learn(self, batch: Batch, learnt: int) -> float | None:
        """A step of all ranks. Every token weighs the same, whichever rank has it; the loss of this rank's, if any."""
        logits = self.state.model(batch.tokens)
        total = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        # FSDP takes the mean over the ranks.
        (total * dist.get_world_size() / learnt).backward()  # type: ignore[no-untyped-call]
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        return total.item() / batch.learnt if batch.ids else None

    def save(self) -> None:
        if self.step == self.saved:
            return
        # Of all ranks the same folder; a fleet says where, and carries it from host to host.
        root = Path(self.worker.checkpoint_root or self.given.out / "checkpoints")
        folder = root / f"{self.worker.generation}-{self.step}"
        reported = self.worker.checkpoint(self.step, save(folder, self.state), commit_within_s=SILENCE.seconds)
        self.saved = self.step
        self.drained = reported.drained
        bury(root, reported.tombstones)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    # First the coordinator: it lets all ranks in together, and its ranks are torch's.
    with strata.join(patience_s=SILENCE.seconds) as worker:
        dist.init_process_group("gloo", timeout=SILENCE)
        assert (worker.rank, worker.world_size) == (dist.get_rank(), dist.get_world_size())
        Training(worker, given).run()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
