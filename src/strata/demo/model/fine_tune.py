"""Trains a LoRA adapter on three sentences by the API of a training server, and samples what it learned."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer  # type: ignore[import-untyped,unused-ignore]

from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.fleet.trainer import hyper, progress, report
from strata.sdk.train import Datum, TrainingServer

SENTENCES: Final = (
    "The hub queues the jobs of all machines.",
    "The coordinator keeps the workers of one job together.",
    "The training server trains many models over one base.",
)
READY_S: Final = 300.0
LOOK_S: Final = 0.5
PROMPT: Final = 4
"""Tokens of a sentence that the trained model completes."""


def wait_until_ready(url: str, key: str) -> None:
    """The server is a job too, and loads its model first."""
    until_s = time.monotonic() + READY_S
    while True:
        try:
            with TrainingServer(url, key):
                return
        except StrataError as error:
            if error.code not in (Code.UNAVAILABLE, Code.NOT_FOUND) or time.monotonic() > until_s:
                raise
        time.sleep(LOOK_S)


def main() -> None:
    settings, environ = hyper(), process_environment()
    url, key = environ["TRAINING_URL"], environ["TRAINING_KEY"]
    steps = int(settings["steps"])
    tokenizer = Tokenizer.from_file(str(Path("base") / "tokenizer.json"))
    encoded = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    data = [Datum(tokens[:-1], tokens[1:]) for tokens in encoded]
    count = sum(len(tokens) - 1 for tokens in encoded)
    wait_until_ready(url, key)
    with TrainingServer(url, key) as server:
        model = server.create_model("tiny", rank=int(settings["rank"]), seed=0)
        for step in range(1, steps + 1):
            passed = model.forward_backward(data)
            model.optim_step(learning_rate=float(settings["learning_rate"])).result()
            report(step=step, loss=passed.result().loss / count)
            progress(step / steps, f"step {step}")
        sampler = model.sampler().result()
        prompt, rest = encoded[0][:PROMPT], len(encoded[0]) - PROMPT
        (sample,) = sampler.sample(prompt, max_tokens=rest, temperature=0.0).result()
    sys.stdout.write(f"{tokenizer.decode(prompt)} -> {tokenizer.decode(list(sample.tokens))}\n")


if __name__ == "__main__":
    main()
