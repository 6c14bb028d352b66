"""`python moving_client.py URL FOLDER`: the `tinker` SDK as it is published, while its server moves to another machine.

Trains and saves, waits for the file `moved` in the folder, and goes on from what it saved. Prints one line of JSON
before and one after that.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import tinker
from tinker import types

TOKENS = list(range(3, 40))


def batch() -> list[types.Datum]:
    inputs: Any = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    return [types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)]


def step(model: tinker.TrainingClient) -> float:
    done = model.forward_backward(batch(), "cross_entropy")
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return float(done.result().metrics["loss:sum"])


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(url: str, folder: Path) -> None:
    service = tinker.ServiceClient(base_url=url)
    models = [each.model_name for each in service.get_server_capabilities().supported_models]
    model = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    losses = [step(model) for _ in range(4)]
    path = model.save_state("kept").result().path
    following = model.forward(batch(), "cross_entropy").result().metrics["loss:sum"]
    say(models=models, losses=losses, following=following)
    while not (folder / "moved").exists():
        time.sleep(0.05)
    again = service.create_training_client_from_state_with_optimizer(path)
    say(losses=[step(again) for _ in range(2)])
    # With tinker 0.38 this wait may never end (docs/limits.md); the session ends all the same.
    with suppress(TimeoutError):
        service.close("success").result(timeout=10)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
