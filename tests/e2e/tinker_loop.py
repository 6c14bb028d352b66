"""A short fine-tuning loop with whatever `tinker` is installed, for other versions than ours: prints losses as JSON.

Run by the interpreter of that version. Address and key come from the SDK's own variables, the text from the argument.
"""

import json
import sys
from typing import Any

import tinker
from tinker import types

STEPS, RATE = 60, 5e-3


def main(text: str) -> None:
    service = tinker.ServiceClient()
    assert [each.model_name for each in service.get_server_capabilities().supported_models] == ["tiny"]
    model = service.create_lora_training_client(base_model="tiny", rank=8, seed=1)
    tokens = model.get_tokenizer().encode(text)
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * len(tokens[1:])}
    batch = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    before = model.forward(batch, "cross_entropy").result()
    pending: list[Any] = []
    for _ in range(STEPS):
        pending.append(model.forward_backward(batch, "cross_entropy"))
        pending.append(model.optim_step(types.AdamParams(learning_rate=RATE)))
    for each in pending:
        each.result()
    after = model.forward(batch, "cross_entropy").result()
    saved = model.save_state("old").result().path
    lengths = [len(each["logprobs"].data) for each in after.loss_fn_outputs]
    losses = [found.metrics["loss:sum"] / len(tokens[1:]) for found in (before, after)]
    told = {"version": tinker.__version__, "losses": losses, "lengths": lengths, "tokens": len(tokens) - 1}
    print(json.dumps(told | {"saved": saved}))


if __name__ == "__main__":
    main(sys.argv[1])
