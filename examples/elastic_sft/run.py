"""Trains a small language model on two ranks, and with --chaos kills things meanwhile.

    python examples/elastic_sft/run.py --out sft --chaos

Starts the coordinator and torchrun, watches the log of the ranks for the moments at which something is to die, starts
again what it killed (torchrun starts the ranks itself), and at the end has `check.py` judge the log.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from check import Run, judge, lines
from corpus import write_corpus

from strata.coord.private import reserve_port

HERE: Final = Path(__file__).parent
LOOK_EVERY_S: Final = 0.05
VICTIM: Final = 1
"""The rank that is killed."""


class Site:
    """The coordinator and torchrun, and what was done to them."""

    def __init__(self, given: argparse.Namespace, port: int) -> None:
        self.given = given
        self.address = f"127.0.0.1:{port}"
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.ranks: subprocess.Popen[bytes] | None = None
        self.moments = {"rank": given.kill_rank_at, "coordinator": given.kill_coordinator_at}

    def say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "at_s": round(time.monotonic(), 3), **fields})
        with (self.given.out / "events.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def start_coordinator(self) -> None:
        database = f"sqlite:{self.given.out / 'coordinator.db'}"
        with (self.given.out / "coordinator.log").open("ab") as log:
            self.coordinator = subprocess.Popen(
                [_program("strata"), "coordinator", "--listen", self.address, "--database", database],
                env={"PATH": os.defpath, "STRATA_COORDINATOR_LEASE_S": "0.5"},
                stderr=log,
            )
        self.say("coordinator", pid=self.coordinator.pid)

    def start_ranks(self, count: int) -> None:
        given = self.given
        with (given.out / "ranks.log").open("ab") as log:
            self.ranks = subprocess.Popen(
                [
                    *(_program("torchrun"), "--nproc-per-node", str(count), "--max-restarts", str(given.max_restarts)),
                    *("--rdzv-backend", "strata", "--rdzv-endpoint", self.address, "--rdzv-id", "elastic-sft"),
                    *("--monitor-interval", "0.2", str(HERE / "train.py")),
                    *("--corpus", str(given.out / "corpus.jsonl"), "--out", str(given.out)),
                    *("--epochs", str(given.epochs), "--checkpoint-every", str(given.checkpoint_every)),
                ],
                env={
                    "PATH": os.defpath,
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                stdout=log,
                stderr=log,
            )
        self.say("ranks", count=count, pid=self.ranks.pid)

    def watch(self) -> int:
        """Until torchrun ends: its exit status."""
        assert self.ranks is not None
        while (status := self.ranks.poll()) is None:
            time.sleep(LOOK_EVERY_S)
            said = lines(self.given.out, "rank-*.jsonl")
            step = max((line["step"] for line in said), default=0)
            for what, moment in list(self.moments.items()):
                if moment is not None and step >= moment:
                    del self.moments[what]
                    self.kill_rank(said, step) if what == "rank" else self.kill_coordinator(step)
        return status

    def kill_rank(self, said: list[dict[str, Any]], step: int) -> None:
        pid = max(
            (line["generation"], line["pid"]) for line in said if line["event"] == "started" and line["rank"] == VICTIM
        )[1]
        os.kill(pid, signal.SIGKILL)
        self.say("killed", what=f"rank {VICTIM}", pid=pid, step=step)
        if self.given.spoil_checkpoint:
            self.spoil()

    def spoil(self) -> None:
        """Damage the newest checkpoint: the job has to notice and go back further."""
        folders = [each for each in (self.given.out / "checkpoints").iterdir() if (each / ".metadata").exists()]
        newest = max(folders, key=lambda folder: int(folder.name.split("-")[1]))
        with next(newest.glob("*.distcp")).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        self.say("spoilt", checkpoint=newest.name)

    def kill_coordinator(self, step: int) -> None:
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()
        self.say("killed", what="coordinator", pid=self.coordinator.pid, step=step)
        self.start_coordinator()

    def close(self) -> None:
        # torchrun ends its ranks when it is told to end, not when it is killed.
        for process in (self.ranks, self.coordinator):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextmanager
def site(given: argparse.Namespace) -> Iterator[Site]:
    # Held open, so that nobody else gets the port while the coordinator is down.
    with reserve_port() as guard:
        found = Site(given, guard.getsockname()[1])
        try:
            yield found
        finally:
            found.close()


def train(found: Site, ranks: int) -> None:
    """With fewer ranks each time that torchrun has used up its restarts."""
    found.start_coordinator()
    while True:
        found.start_ranks(ranks)
        status = found.watch()
        if status == 0:
            return
        found.say("failed", status=status, log=str(found.given.out / "ranks.log"))
        ranks -= 1
        if ranks == 0:
            sys.exit("no rank is left")


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder; one that exists is carried on with")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--max-restarts", type=int, default=3, help="by torchrun; after that, with one rank less")
    parser.add_argument("--loss-below", type=float, default=3.0, help="what the mean of the last ten losses must be")
    parser.add_argument("--kill-rank-at", type=int, metavar="STEP")
    parser.add_argument("--kill-coordinator-at", type=int, metavar="STEP")
    parser.add_argument("--spoil-checkpoint", action="store_true", help="damage the newest one when the rank is killed")
    parser.add_argument("--chaos", action="store_true", help="--kill-rank-at 25 --kill-coordinator-at 55")
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.chaos:
        given.kill_rank_at = given.kill_rank_at or 25
        given.kill_coordinator_at = given.kill_coordinator_at or 55
    write_corpus(given.out / "corpus.jsonl", given.samples)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    with site(given) as found:
        train(found, given.ranks)
    verdict = judge(Run.read(given.out), epochs=given.epochs, loss_below=given.loss_below)
    sys.stdout.write(verdict.text)
    sys.exit(not verdict.holds)


if __name__ == "__main__":
    main()
