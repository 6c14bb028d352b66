"""A client of either server, by the `tinker` SDK that both take: one order at a time, a JSON line each.

Imports nothing of Strata: it runs in an environment that has TuFT and its SDK alone. `--serve COMMAND…` starts the
server beside the client, so that both can be in one namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from statistics import median
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import tinker
from tinker import types

RATE = 1e-4
SMALL = 64
"""Tokens of the batch whose latency counts."""
PENDING = 6
"""Steps that wait when the process that computes is killed."""
KILL_AFTER_S = 0.5
GIVE_UP_S = 120.0
START_S = 600.0


class Client:
    def __init__(self, url: str, batches: Any) -> None:
        service = tinker.ServiceClient(base_url=url)
        self._model = service.create_lora_training_client(base_model="bench", rank=8, seed=1, train_unembed=False)
        self._batches = [[_datum(document) for document in batch] for batch in batches]
        self._small = [_datum(batches[0][0][: SMALL + 1])]
        self._adam = types.AdamParams(learning_rate=RATE)

    def loss(self) -> list[float]:
        return [float(self._model.forward(self._batches[0], "cross_entropy").result().metrics["loss:sum"])]

    def passes(self, count: int) -> list[float]:
        return [_milliseconds(count, lambda: self._model.forward_backward(self._small, "cross_entropy").result())]

    def steps(self, count: int) -> list[float]:
        return [_milliseconds(count, lambda: self._model.optim_step(self._adam).result())]

    def tokens(self, steps: int) -> list[float]:
        """Tokens a second, with every step submitted before the first is awaited."""
        began_s = time.perf_counter()
        for waiting in self._submit(steps):
            waiting.result()
        trained = sum(datum.model_input.length for datum in self._batches[0])
        return [steps * trained / (time.perf_counter() - began_s)]

    def survive(self, pid: int) -> list[float]:
        """Kill the process that computes: operations that ended, that failed, and seconds to the first and last end.

        0 is the actor of Ray in this namespace.
        """
        pid = pid or _actor()
        waiting = self._submit(PENDING)
        time.sleep(KILL_AFTER_S)
        killed_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        ended_s: list[float] = []
        failed = 0
        for each in waiting:
            try:
                each.result(timeout=max(killed_s + GIVE_UP_S - time.perf_counter(), 0.1))
            except (tinker.TinkerError, TimeoutError, ValueError) as error:
                failed += 1
                print(
                    f"failed {time.perf_counter() - killed_s:.1f} s after the kill: {str(error)[:200]}", file=sys.stderr
                )
            else:
                ended_s.append(time.perf_counter() - killed_s)
        return [float(len(ended_s)), float(failed), min(ended_s, default=0.0), max(ended_s, default=0.0)]

    def _submit(self, steps: int) -> list[Any]:
        waiting: list[Any] = []
        for number in range(steps):
            batch = self._batches[number % len(self._batches)]
            waiting += [self._model.forward_backward(batch, "cross_entropy"), self._model.optim_step(self._adam)]
        return waiting


def _datum(document: Any) -> types.Datum:
    inputs: Any = {"target_tokens": document[1:].tolist(), "weights": [1.0] * (len(document) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(document[:-1].tolist()), loss_fn_inputs=inputs)


def _milliseconds(count: int, act: Any) -> float:
    took_ms = []
    for _ in range(count):
        began_s = time.perf_counter()
        act()
        took_ms.append(1e3 * (time.perf_counter() - began_s))
    return median(took_ms)


def _start(url: str, command: list[str]) -> None:
    """Start a server and wait until it answers. On a busy machine Ray gives up after 30 s: then it is started again."""
    server: subprocess.Popen[bytes] | None = None
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if server is None or server.poll() is not None:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        try:
            urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise SystemExit("the server is not there; see above")


def _actor() -> int:
    """The process that holds TuFT's model."""
    found = [
        each.pid for each in psutil.process_iter(["cmdline"]) if "ray::HFTraining" in " ".join(each.info["cmdline"])
    ]
    (pid,) = found
    return int(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description="A client that takes orders.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], metavar="COMMAND")
    given = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr
    if given.serve:
        _start(given.url, given.serve)
    client = Client(given.url, np.load(given.batches, allow_pickle=False))
    for line in sys.stdin:
        order = json.loads(line)
        values = getattr(client, order.pop("type"))(**order)
        print(json.dumps({"values": values}), file=answers, flush=True)


if __name__ == "__main__":
    main()
