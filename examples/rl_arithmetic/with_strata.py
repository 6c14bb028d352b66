"""Learn sums from their reward, with Strata's SDK: `python with_strata.py DATA_FOLDER`."""

import sys

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

from strata.sdk.train import Datum, Model, Sampler, TrainingServer


def warm_up(model: Model) -> None:
    shown = answered()
    for _ in range(WARM_UP_STEPS):
        # The loss is a sum over tokens: only the answer counts, and the batch counts as one.
        data = [
            Datum(prompt, [*prompt[1:], token], weights=[0.0] * (len(prompt) - 1) + [1 / len(shown)])
            for prompt, token in shown
        ]
        model.forward_backward(data)
        done = model.optim_step(RATE)
    done.result()


def draw(sampler: Sampler, step: int) -> list[list[Try]]:
    """All problems are asked for at once: the server samples them together."""
    asked = [sampler.sample(prompt_of(a, b), SAMPLES, max_tokens=1, seed=step, stop=[]) for a, b in PROBLEMS]
    return [
        [
            Try(prompt_of(a, b), each.tokens[0], each.logprobs[0], reward_of(a, b, each.tokens[0]))
            for each in future.result()
        ]
        for (a, b), future in zip(PROBLEMS, asked, strict=True)
    ]


def datum(tried: Try, advantage: float) -> Datum:
    """What is read is the prompt, so nothing before the answer has an advantage."""
    before = [0.0] * (len(tried.prompt) - 1)
    return Datum(
        tried.prompt,
        [*tried.prompt[1:], tried.token],
        advantages=[*before, advantage],
        logprobs=[*before, tried.logprob],
    )


def main(folder: str) -> None:
    with TrainingServer(*server_in(folder)) as server:
        model = server.create_model("tiny", rank=RANK, seed=SEED)
        warm_up(model)
        for step in range(STEPS):
            groups = draw(model.sampler().result(), step)
            report(step, groups)
            data = [datum(*each) for group in groups for each in advantages(group)]
            model.forward_backward(data, "importance_sampling")
            model.optim_step(RATE)
        report(STEPS, draw(model.sampler().result(), STEPS))


if __name__ == "__main__":
    main(*sys.argv[1:])
