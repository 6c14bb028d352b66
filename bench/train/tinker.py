"""The `tinker` SDK as a client of the bench: `python -m bench.train.tinker --url URL --batches FILE`.

Reads commands as lines of JSON and writes results as lines of JSON. The SDK finds its key in the environment.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import tinker
from tinker import types

from bench.train.protocol import BETAS, EPS, LORA_RANK, MODEL, RATE, BenchCommand, BenchResult, Tokens, load

ADAM = types.AdamParams(learning_rate=RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)


def datum(document: Tokens) -> types.Datum:
    inputs: Any = {"target_tokens": document[1:].tolist(), "weights": [1.0] * (len(document) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(document[:-1].tolist()), loss_fn_inputs=inputs)


def train(model: tinker.TrainingClient, order: BenchCommand, batches: list[list[types.Datum]]) -> BenchResult:
    """Submit every step before waiting for the first, as the SDK's own documents recommend."""
    started = perf_counter()
    passes, steps = [], []
    for number in range(order.first, order.first + order.steps):
        passes.append(model.forward_backward(batches[number % len(batches)], "cross_entropy"))
        steps.append(model.optim_step(ADAM))
    losses = [float(each.result().metrics["loss:sum"]) for each in passes]
    for each in steps:
        each.result()
    return BenchResult(seconds=perf_counter() - started, loss=losses[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="A client that takes orders.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--batches", type=Path, required=True)
    given = parser.parse_args()
    drawn = load(given.batches)
    batches = [[datum(document) for rank in batch for document in rank] for batch in drawn]
    service = tinker.ServiceClient(base_url=given.url)
    model = service.create_lora_training_client(base_model=MODEL, rank=LORA_RANK, seed=1)
    for line in sys.stdin.buffer:
        found = train(model, msgspec.json.decode(line, type=BenchCommand), batches)
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
