"""A `tinker` client that hands in slow passes and steps at once and says when each is done: `python -m … URL STEPS`.

What it says is a line of JSON for each operation, in their order: the loss of a pass, null of a step.
"""

from __future__ import annotations

import json
import os
import sys

import tinker
from tinker import types

PRETEND_S = 0.4
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={
        "target_tokens": types.TensorData(data=[2, 3, 4], dtype="int64"),
        "weights": types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32"),
    },
)


def main(url: str, steps: int) -> None:
    client = tinker.ServiceClient(base_url=url).create_lora_training_client(base_model="tiny", rank=4)
    futures = []
    for _ in range(steps):
        slowly = {"pretend_s": PRETEND_S}
        futures.append(
            (
                client.forward_backward([DATUM], "cross_entropy", loss_fn_config=slowly),
                client.optim_step(types.AdamParams(learning_rate=0.1)),
            )
        )
    for passed, stepped in futures:
        _say(passed.result().metrics["loss:sum"])
        stepped.result()
        _say(None)


def _say(loss: float | None) -> None:
    sys.stdout.write(json.dumps(loss) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    # Threads of the SDK outlive the program; one that logs while the interpreter ends aborts the process.
    os._exit(0)
