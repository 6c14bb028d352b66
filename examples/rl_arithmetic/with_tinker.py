"""Learn sums from their reward, with the `tinker` SDK: `python with_tinker.py DATA_FOLDER`."""

import sys
from contextlib import suppress

import tinker
from sums import (
    PROBLEMS,
    RANK,
    RATE,
    SAMPLES,
    SEED,
    STEPS,
    WARM_UP_STEPS,
    Try,
    advantages,
    answered,
    prompt_of,
    report,
    reward_of,
    server_in,
)
from tinker import types


def warm_up(model: tinker.TrainingClient) -> None:
    shown = answered()
    for _ in range(WARM_UP_STEPS):
        # The loss is a sum over tokens: only the answer counts, and the batch counts as one.
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(prompt),
                loss_fn_inputs={
                    "target_tokens": [*prompt[1:], token],
                    "weights": [0.0] * (len(prompt) - 1) + [1 / len(shown)],
                },
            )
            for prompt, token in shown
        ]
        model.forward_backward(data, "cross_entropy")
        done = model.optim_step(types.AdamParams(learning_rate=RATE))
    done.result()


def draw(sampler: tinker.SamplingClient, step: int) -> list[list[Try]]:
    """All problems are asked for at once: the server samples them together."""
    params = types.SamplingParams(max_tokens=1, seed=step, stop=[])
    asked = [sampler.sample(types.ModelInput.from_ints(prompt_of(a, b)), SAMPLES, params) for a, b in PROBLEMS]
    return [
        [
            Try(prompt_of(a, b), each.tokens[0], each.logprobs[0], reward_of(a, b, each.tokens[0]))
            for each in future.result().sequences
        ]
        for (a, b), future in zip(PROBLEMS, asked, strict=True)
    ]


def datum(tried: Try, advantage: float) -> types.Datum:
    """What is read is the prompt, so nothing before the answer has an advantage."""
    before = [0.0] * (len(tried.prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tried.prompt),
        loss_fn_inputs={
            "target_tokens": [*tried.prompt[1:], tried.token],
            "advantages": [*before, advantage],
            "logprobs": [*before, tried.logprob],
        },
    )


def main(folder: str) -> None:
    url, key = server_in(folder)
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = service.create_lora_training_client(base_model="tiny", rank=RANK, seed=SEED).result()
    warm_up(model)
    for step in range(STEPS):
        groups = draw(model.save_weights_and_get_sampling_client().result(), step)
        report(step, groups)
        data = [datum(*each) for group in groups for each in advantages(group)]
        model.forward_backward(data, "importance_sampling")
        model.optim_step(types.AdamParams(learning_rate=RATE))
    report(STEPS, draw(model.save_weights_and_get_sampling_client().result(), STEPS))
    # With tinker 0.38 this wait may never end (docs/limits.md); the session ends all the same.
    with suppress(TimeoutError):
        service.close("success").result(timeout=10)


if __name__ == "__main__":
    main(*sys.argv[1:])
