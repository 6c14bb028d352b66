"""A trainer that does what its hyper-parameters say: the jobs of these tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from strata.fleet.trainer import hyper, new_checkpoint, output_folder, progress, report, resume_from


def say(*words: object) -> None:
    print(*words, flush=True)


def until(path: str) -> None:
    """Go on when the test says so."""
    while not Path(path).exists():
        time.sleep(0.02)


def complete(told: dict[str, Any]) -> None:
    for step in range(5):
        report(step=step, loss=1.0 / (step + 1))
        progress(step / 4)
    (output_folder() / "model.txt").write_text(f"weights of {told['act']}")
    say("done")


def once(told: dict[str, Any]) -> None:
    """Leaves a mark each time it runs, outside of its own folder."""
    with Path(told["ran"]).open("a") as marks:
        marks.write("ran\n")
    for line in range(100):
        say("line", line)
    with new_checkpoint("step-1") as folder:
        (folder / "step").write_text("1")
        # Content that is nowhere yet, or there would be nothing to upload.
        (folder / "whose").write_text(told["ran"])
    until(told["release"])
    (output_folder() / "model.txt").write_text("once")


def chatter(told: dict[str, Any]) -> None:
    """More than fits into one request, just before the end."""
    sys.stdout.write("".join(f"line {line}\n" for line in range(told["lines"])))


def crash(told: dict[str, Any]) -> None:
    say("crashing at", time.time())
    raise ValueError("the learning rate is a fish")


def held(told: dict[str, Any]) -> None:
    """Writes lines, waits to be released, writes more and ends well."""
    for line in range(1000):
        say("before", line)
    say("held")
    until(told["release"])
    for line in range(1000):
        say("after", line)
    (output_folder() / "model.txt").write_text("held")


def family(told: dict[str, Any]) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    pids = [subprocess.Popen(sleeper, start_new_session=apart).pid for apart in (False, True)]
    say("pids", os.getpid(), *pids)
    time.sleep(600)


def stepwise(told: dict[str, Any]) -> None:
    """Counts from where the last attempt left off; saves when it is told to end."""
    resumed = resume_from()
    start = int((resumed / "step").read_text()) if resumed is not None else 0
    say("starts at", start)

    def save(number: int = 0, frame: FrameType | None = None) -> None:
        del frame
        with new_checkpoint(f"step-{start + 10}") as folder:
            (folder / "step").write_text(str(start + 10))
        if number:
            sys.exit(0)

    if start == 0:
        if told.get("early"):
            with new_checkpoint("step-1") as folder:
                (folder / "step").write_text("1")
        signal.signal(signal.SIGTERM, save)
        say("counting")
        time.sleep(600)
    (output_folder() / "model.txt").write_text(f"resumed at {start}")


def stubborn(told: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("counting")
    time.sleep(600)


if __name__ == "__main__":
    settings = hyper()
    {each.__name__: each for each in (complete, once, chatter, crash, held, family, stepwise, stubborn)}[
        settings["act"]
    ](settings)
