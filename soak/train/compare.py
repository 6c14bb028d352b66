"""Compares a server under fault injection with an undisturbed one: every operation once, with the same result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from soak.train.outcome import Outcome
from soak.train.server import ServeProcess
from strata.train.core import facts, ops
from strata.train.core.state import INITIAL, run_folder

MANIFEST = "manifest.json"


class Saved(msgspec.Struct, frozen=True):
    """What a manifest says of a model; the rest of it names the run, which is another one on each server."""

    model_id: str
    steps: int


def final_folder(checkpoints: Path, model_id: str, name: str) -> Path | None:
    """The checkpoint of that name, if it is there."""
    found = [*(checkpoints / run_folder(model_id) / "weights").glob(f"{name}@*")]
    return found[0] if found else None


def compare_files(one: Path | None, other: Path | None, steps: int) -> str | None:
    """What is wrong, if anything: both have the same files, weights and moments, and were stepped so many times."""
    if one is None or other is None:
        return "its last checkpoint is not there"
    for folder in (one, other):
        saved = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Saved)
        if saved.steps != steps:
            return f"{steps} steps were asked for and {saved.steps} done"
    contents = [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST} for folder in (one, other)
    ]
    if len([name for name in contents[0] if name.endswith(".safetensors")]) < 2:
        return f"its checkpoint has no weights, or no moments: {sorted(contents[0])}"
    differing = sorted(name for name in {*contents[0], *contents[1]} if contents[0].get(name) != contents[1].get(name))
    return f"{', '.join(differing)} differ" if differing else None


def compare_counts(
    server: ServeProcess, applied: int, journal: Sequence[facts.Fact], wanted: int, outcome: Outcome
) -> None:
    every = [fact for fact in journal if isinstance(fact, facts.Dispatched)]
    # A snapshot may just have been ordered when the ranks were asked what they had applied.
    numbers = [fact.number for fact in every if fact.number <= applied or not fact.snapshot]
    if numbers != [*range(numbers[0], applied + 1)]:
        outcome.problems.append(f"rank 0 applied {applied} dispatches, and the journal has {numbers[0]}-{numbers[-1]}")
    outcome.snapshots += sum(isinstance(fact, facts.SnapshotCommitted) for fact in journal)
    outcome.shared += sum(len(fact.future_ids) > 1 for fact in every)
    told = Counter(future_id for fact in every for future_id in fact.future_ids)
    ended = Counter(fact.future_id for fact in journal if isinstance(fact, facts.OperationFinished))
    twice = [future_id for count in (told, ended) for future_id, times in count.items() if times > 1]
    if twice:
        outcome.problems.append(f"told or ended twice: {twice[:3]}")
    # What snapshots cover is not in the journal any more; that all of it ended is for the clients to say.
    whole = numbers[0] == 1
    if max(len(told), len(ended)) > wanted or (whole and (len(told) != wanted or len(ended) != wanted)):
        outcome.problems.append(f"{wanted} operations were asked for, {len(told)} told, {len(ended)} ended")
    failed = [
        fact for fact in journal if isinstance(fact, facts.OperationFinished) and isinstance(fact.result, ops.Failed)
    ]
    if failed or any(isinstance(fact, facts.DispatchFailed) for fact in journal):
        outcome.problems.append(f"operations failed: {failed[:1]}")
    _compare_notes(server, told, outcome)


def _compare_notes(server: ServeProcess, told: Counter[str], outcome: Outcome) -> None:
    """Ranks that pretend write down what they do: the last group has done everything, once."""
    if not server.applied_file.exists():
        return
    # What follows the name says whether it was replayed.
    lines = [line.split(" ")[:2] for line in server.applied_file.read_text(encoding="utf-8").splitlines()]
    done = Counter(name for group, name in lines if group == lines[-1][0])
    numbered = [name for name in told if name.rpartition(":")[2].isdecimal() and not name.endswith(f":{INITIAL}")]
    wrong = [name for name in numbered if done[name] != 1]
    if wrong or not numbered:
        outcome.problems.append(f"the ranks did not do once: {wrong[:3]}")


def compare_results(
    place: int, disturbed: dict[int, Any], calm: dict[int, Any], outcome: Outcome, *, metrics_within: float = 0.0
) -> None:
    """Results are equal; their metrics may differ by this part of them."""
    differing = [
        number for number, result in disturbed.items() if not _is_equal(result, calm.get(number), metrics_within)
    ]
    if differing or len(disturbed) != len(calm):
        problem = f"model {place}: operation {min(differing, default=0)} differs from the one done in peace"
        outcome.problems.append(problem)
    failed = [number for number, result in disturbed.items() if "error" in result]
    if failed:
        outcome.problems.append(f"model {place}: operation {failed[0]} failed: {disturbed[failed[0]]}")


def _is_equal(result: Any, other: Any, metrics_within: float) -> bool:
    if not metrics_within or not isinstance(result, dict) or not isinstance(other, dict):
        return bool(result == other)
    own, their = result.get("metrics") or {}, other.get("metrics") or {}
    rest = [{name: value for name, value in each.items() if name != "metrics"} for each in (result, other)]
    return (
        rest[0] == rest[1]
        and own.keys() == their.keys()
        and all(math.isclose(own[name], their[name], rel_tol=metrics_within) for name in own)
    )
