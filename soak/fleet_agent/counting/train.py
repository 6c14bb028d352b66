"""A trainer with deterministic output: numbered lines, metrics, checkpoints and a result.

It records outside of its work folder how often it was started and what it has written, so that the hub's copy can be
compared with the original.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from strata.fleet.trainer import assigned, hyper, new_checkpoint, output_folder, progress, report, resume_from

MODULUS = 2**31 - 1


def after(state: int, step: int) -> int:
    """Depends on every step before, in order: a run that skipped or repeated one ends somewhere else."""
    return (state * 48_271 + step) % MODULUS


def step_lines(step: int, lines: int) -> str:
    return "".join(f"step {step} line {line} {'.' * (line % 60)}\n" for line in range(lines))


def final_lines(lines: int) -> str:
    """Many lines just before the end: the tail that must not be lost."""
    return "".join(f"end {line}\n" for line in range(lines))


def weights(number: int, state: int) -> dict[str, bytes]:
    """Several files, so that an upload can be interrupted between two of them."""
    return {f"layer-{layer}.bin": f"{number} {state} {layer} ".encode() * 4_000 for layer in range(3)}


class MarkedOutput:
    """Writes to the log first, then to the mark: text in the mark is surely in the log."""

    def __init__(self, marks: Path) -> None:
        self._said = os.open(marks.with_suffix(".said"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, text: str) -> None:
        left = memoryview(text.encode())
        while left:
            left = left[os.write(1, left) :]
        os.write(self._said, text.encode())


def main() -> None:
    settings: dict[str, Any] = hyper()
    job, epoch = json.loads(Path(os.environ["STRATA_SPEC"]).read_text())["id"], os.environ["STRATA_EPOCH"]  # noqa: TID251
    marks = Path(settings["marks"]) / f"{job}-{epoch}"
    with marks.with_suffix(".starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    output = MarkedOutput(marks)
    resumed = resume_from()
    begin, state = 0, assigned().seed
    if resumed is not None:
        begin, state = json.loads((resumed / "state.json").read_text())
    output.write(f"begins at {begin}\n")
    for step in range(begin, settings["steps"]):
        output.write(step_lines(step, settings["lines"]))
        state = after(state, step)
        report(step=step, state=state)
        progress((step + 1) / settings["steps"])
        if (step + 1) % settings["every"] == 0 and step + 1 < settings["steps"]:
            with new_checkpoint(f"step-{step + 1}") as folder:
                (folder / "state.json").write_text(json.dumps([step + 1, state]))
        time.sleep(settings["pace_s"])
    output.write(final_lines(settings["tail"]))
    for name, content in weights(assigned().seed, state).items():
        (output_folder() / name).write_bytes(content)
    (output_folder() / "result.json").write_text(json.dumps([settings["steps"], state]))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
