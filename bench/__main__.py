"""`python -m bench NAME [--quick] [--json-only]`: one JSON line per case on stdout, a table on stderr.

With `--against REV` an older commit and this one take turns, and a line compares their ratios to the bare engine.

A missed goal is a result, not an error: the exit status is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Final

import msgspec

from bench.against import PROGRAM, checkout, compare
from bench.report import Report

BENCHES: Final = {
    "artifacts": "uploads of artifacts to the hub's disk beside bare hashing and writing",
    "coordinator": "heartbeats, shards, barriers and placement beside a bare gRPC server and other hashes",
    "experts": "a layer of 64 experts, forward and backward, beside transformers' loop and a loop over unbound weights",
    "dlrover": "heartbeats and shards of the coordinator beside DLRover's local master",
    "fleet": "claims and heartbeats at the store port and over HTTP beside the bare databases and an empty route",
    "gap": "rewards learned from a noisy sampler, corrected and not, beside an exact one; one forward pass less",
    "hosts": "memory of a hub on SQLite with 2,000 hosts that wait for jobs and send heartbeats",
    "journal": "appends, replay and restore beside the bare PostgreSQL and SQLite drivers",
    "loading": "memory of a rank that loads its shards of a model beside one that loads all of it",
    "metrics": "what metrics and traces cost a call of coordinator and hub, beside the same servers without",
    "pipelines": "steps and rewards of the recipe grpo with answers drawn ahead, beside the synchronous one",
    "plan": "memory of a rank as `strata plan` has it beside the measured peak of training",
    "neighbours": "a step of a job beside one that takes more than it declared, beside a step beside one that does not",
    "pages": "pages of the dashboard with 100,000 jobs and 10,000 hosts, first paint in Chromium, and 50 viewers",
    "peers": "operations and fine-tuning of the training server beside TuFT, by the same SDK",
    "publish": "from an optimizer step to the first token of the new weights, beside the same in one process",
    "quantised": "memory of a rank with a quantised base beside one in float32, and how far its numbers are off",
    "recovery": "the first result after kill -9 of a rank beside a new process that loads the model",
    "sampling": "tokens of the built-in sampler beside Hugging Face's `generate`, one request at a time",
    "tenants": "many tenants in shared passes beside one with the same tokens, beside time slices, and with snapshots",
    "train": "operations and fine-tuning through the training server beside a plain torchrun loop",
    "weights": "checkpoints of the training server beside bare safetensors and torch.distributed.checkpoint",
}
"""Each is a module `bench.NAME`, or `bench.NAME.cases` of a package, with
`async def run(report: Report, *, quick: bool) -> None`, and perhaps with the `loop_factory` of what it measures. One
with `run_against(report: Report, program: str, *, quick: bool)` puts the `strata` of an older commit in place of the
bare engine."""
PACKAGES: Final = ("coordinator", "dlrover", "fleet", "journal", "pages", "peers", "train")

Run = Callable[..., Coroutine[Any, Any, None]]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure a layer beside the bare engine under it, interleaved in one process.",
        epilog="benches:\n" + "\n".join(f"  {name:12} {what}" for name, what in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHES, metavar="NAME", help="which bench, from the list below")
    parser.add_argument("--quick", action="store_true", help="about a minute; documents quote the long version")
    parser.add_argument("--json-only", action="store_true", help="no table and no progress on stderr")
    parser.add_argument("--against", metavar="REV", help="compare this commit with an older one")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each commit with --against (default 3)")
    given = parser.parse_args()
    bench = importlib.import_module(f"bench.{given.name}.cases" if given.name in PACKAGES else f"bench.{given.name}")
    report = Report(given.name, quiet=given.json_only)
    run: Run = bench.run
    run_against: Run | None = getattr(bench, "run_against", None)
    if given.against and run_against is None:
        for line in compare(given.name, given.against, rounds=given.rounds, quick=given.quick):
            print(msgspec.json.encode(line).decode(), flush=True)
        return
    # The runner cancels what runs at an interrupt, and so the servers of a bench end. What a shell starts in the
    # background ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with ExitStack() as stack, asyncio.Runner(loop_factory=getattr(bench, "loop_factory", None)) as runner:
        if given.against and run_against is not None:
            older = stack.enter_context(checkout(given.against))
            runner.run(run_against(report, str(older / PROGRAM), quick=given.quick))
        else:
            runner.run(run(report, quick=given.quick))
    report.table()


if __name__ == "__main__":
    main()
