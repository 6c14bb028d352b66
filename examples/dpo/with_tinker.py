"""Direct preference optimisation with the `tinker` SDK, the loss in the client: `python with_tinker.py DATA_FOLDER`."""

import sys
from collections.abc import Sequence
from contextlib import suppress

import tinker
import torch
from pairs import ANSWERED, BETA, HELD_OUT, RANK, RATE, SEED, STEPS, Text, pairs_of, report, server_in
from tinker import types
from torch.nn import functional


def datum(text: Text) -> types.Datum:
    inputs = {"target_tokens": text.targets, "weights": text.weights}
    return types.Datum(model_input=types.ModelInput.from_ints(text.tokens), loss_fn_inputs=inputs)


def totals(model: tinker.TrainingClient, texts: Sequence[Text]) -> list[float]:
    found = model.forward([datum(each) for each in texts], "cross_entropy").result()
    logprobs = [each["logprobs"].data for each in found.loss_fn_outputs]
    return [each.total(row) for each, row in zip(texts, logprobs, strict=True)]


def main(folder: str) -> None:
    texts, held_out = pairs_of(ANSWERED), pairs_of(HELD_OUT)
    url, key = server_in(folder)
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = service.create_lora_training_client(base_model="tiny", rank=RANK, seed=SEED).result()
    reference, before = torch.tensor(totals(model, texts)), totals(model, held_out)

    def loss(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        answers = [row @ torch.tensor(each.weights) for row, each in zip(logprobs, texts, strict=True)]
        moved = torch.stack(answers) - reference
        margin = moved[::2] - moved[1::2]
        return -functional.logsigmoid(BETA * margin).mean(), {"margin": margin.mean().item()}

    report(0, before, before)
    for step in range(1, STEPS + 1):
        model.forward_backward_custom([datum(each) for each in texts], loss).result()
        model.optim_step(types.AdamParams(learning_rate=RATE)).result()
        if step % 4 == 0:
            report(step, totals(model, held_out), before)
    # With tinker 0.38 this wait may never end (docs/limits.md); the session ends all the same.
    with suppress(TimeoutError):
        service.close("success").result(timeout=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
