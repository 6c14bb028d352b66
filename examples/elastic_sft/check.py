"""Judges the log of a run: is every sample in the surviving model once per epoch, and has it learnt anything?

    python examples/elastic_sft/check.py sft --epochs 3 --loss-below 3

A recovery to step S discards what earlier generations did after S; what is left is the surviving lineage. The same is
asked of the model itself: it carries a count of the samples it has seen, which is saved and restored with its weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

Line = dict[str, Any]
AT_ENDS: Final = 10
"""How many losses at the beginning and at the end a mean is taken of."""


def lines(folder: Path, pattern: str) -> list[Line]:
    """What is complete of the files: the last line may be being written."""
    found = []
    for file in sorted(folder.glob(pattern)):
        text = file.read_text(encoding="utf-8")
        found += [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return found


@dataclass(frozen=True)
class Run:
    samples: int
    log: list[Line]
    """Of all ranks; each line with its generation and step."""
    seen: list[list[int]]
    """By epoch and sample, how often it is in the model."""

    @staticmethod
    def read(folder: Path) -> Run:
        samples = len((folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines())
        model = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        return Run(samples, lines(folder, "rank-*.jsonl"), model["seen"])


@dataclass(frozen=True)
class Verdict:
    problems: list[str]
    text: str

    @property
    def holds(self) -> bool:
        return not self.problems


def survivors(log: list[Line]) -> list[Line]:
    """The steps that no recovery has discarded, in order."""
    starts = {line["generation"]: line["step"] for line in log if line["event"] == "started"}
    steps = [line for line in log if line["event"] == "step"]
    kept = [
        line
        for line in steps
        if all(line["step"] <= back_to for generation, back_to in starts.items() if generation > line["generation"])
    ]
    return sorted(kept, key=lambda line: (line["step"], line["rank"]))


def miscounted(found: Counter[tuple[int, int]], samples: int, epochs: int) -> list[str]:
    """Samples by epoch that are not there exactly once."""
    expected = {(epoch, sample) for epoch in range(epochs) for sample in range(samples)}
    wrong = {key: found[key] for key in sorted(expected | found.keys()) if found[key] != (key in expected)}
    return [f"sample {sample} is in epoch {epoch} {times} times" for (epoch, sample), times in wrong.items()]


def judge(run: Run, *, epochs: int, loss_below: float) -> Verdict:
    kept = survivors(run.log)
    in_log = Counter((line["epoch"], sample) for line in kept for sample in line["ids"])
    in_model = Counter({(e, s): n for e, row in enumerate(run.seen) for s, n in enumerate(row) if n})
    problems = [f"log: {each}" for each in miscounted(in_log, run.samples, epochs)]
    problems += [f"model: {each}" for each in miscounted(in_model, run.samples, epochs)]
    losses = [line["loss"] for line in kept if line["loss"] is not None]
    first, last = (mean(part) if part else float("inf") for part in (losses[:AT_ENDS], losses[-AT_ENDS:]))
    if not last < loss_below:
        problems.append(f"the loss is {last:.3f} at the end, not below {loss_below}")
    taken = [line for line in run.log if line["event"] == "step"]
    summary = {
        "generations": sorted({line["generation"] for line in run.log if line["event"] == "started"}),
        "steps": kept[-1]["step"] if kept else 0,
        "discarded": len(taken) - len(kept),
        "samples": f"{run.samples} x {epochs} epochs",
        "loss": f"{first:.3f} -> {last:.3f}",
        "verdict": "every sample once per epoch" if not problems else f"{len(problems)} problems",
    }
    shown = [f"{name:12}{value}" for name, value in summary.items()] + problems[:20]
    return Verdict(problems, "\n".join(shown) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--loss-below", type=float, default=3.0)
    given = parser.parse_args()
    verdict = judge(Run.read(given.folder), epochs=given.epochs, loss_below=given.loss_below)
    sys.stdout.write(verdict.text)
    sys.exit(not verdict.holds)


if __name__ == "__main__":
    main()
