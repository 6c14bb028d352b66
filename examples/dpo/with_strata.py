"""Direct preference optimisation with Strata's SDK, the gradient by hand: `python with_strata.py DATA_FOLDER`."""

import math
import sys
from collections.abc import Sequence

from pairs import ANSWERED, BETA, HELD_OUT, RANK, RATE, SEED, STEPS, Text, margins, pairs_of, report, server_in

from strata.sdk.train import Datum, Model, TrainingServer


def totals(model: Model, texts: Sequence[Text]) -> list[float]:
    found = model.forward([Datum(each.tokens, each.targets) for each in texts]).result()
    return [each.total(logprobs) for each, logprobs in zip(texts, found.logprobs, strict=True)]


def weighed(texts: Sequence[Text], found: Sequence[float]) -> list[Datum]:
    """The batch whose cross entropy has the gradient of the mean DPO loss.

    With m the margin, d loss / d log p is -BETA * sigmoid(-BETA * m) for each token of the chosen answer, and the same
    without the sign for the rejected one. The loss `cross_entropy` is -sum(weight * log p).
    """
    data = []
    for index, each in enumerate(texts):
        margin = found[index // 2]
        pull = BETA / (1 + math.exp(BETA * margin)) / len(found)
        sign = 1 if index % 2 == 0 else -1
        data.append(Datum(each.tokens, each.targets, weights=[sign * pull * weight for weight in each.weights]))
    return data


def main(folder: str) -> None:
    texts, held_out = pairs_of(ANSWERED), pairs_of(HELD_OUT)
    with TrainingServer(*server_in(folder)) as server:
        model = server.create_model("tiny", rank=RANK, seed=SEED)
        reference, before = totals(model, texts), totals(model, held_out)
        report(0, before, before)
        for step in range(1, STEPS + 1):
            model.forward_backward(weighed(texts, margins(totals(model, texts), reference)))
            model.optim_step(RATE)
            if step % 4 == 0:
                report(step, totals(model, held_out), before)


if __name__ == "__main__":
    main(*sys.argv[1:])
