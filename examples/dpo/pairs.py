"""What is to be preferred: answers that do not shout. Nothing here knows of a training server.

The model is a random one that never saw its own tokenizer, so the bytes of a text do for tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ANSWERED = [
    ("Where is the station? ", "Left at the bridge."),
    ("Who wrote this? ", "Nobody knows."),
    ("Is there any tea? ", "There is some in the kitchen."),
    ("When do we leave? ", "As soon as the rain stops."),
    ("What was that noise? ", "Only the wind."),
    ("Can it be mended? ", "With a little glue."),
    ("How far is it? ", "An hour on foot."),
    ("Shall I wait? ", "Please do."),
]
HELD_OUT = [
    ("Did they win? ", "Yes, in the end."),
    ("Which one is mine? ", "That on the left."),
    ("Why is it dark? ", "Somebody forgot to pay."),
    ("May I come in? ", "Of course."),
]
BETA = 0.1
"""How dear it is to move away from the model that training began with."""
RANK, SEED, STEPS, RATE = 8, 1, 8, 2e-3


@dataclass(frozen=True)
class Text:
    """A prompt with an answer. Only the answer's tokens, of which `weights` are 1, are judged."""

    tokens: list[int]
    targets: list[int]
    weights: list[float]

    def total(self, logprobs: Sequence[float]) -> float:
        """The log probability of the answer, from those of all targets."""
        return sum(each * weight for each, weight in zip(logprobs, self.weights, strict=True))


def pairs_of(answered: Sequence[tuple[str, str]]) -> list[Text]:
    """Chosen, rejected, chosen, rejected, …"""
    return [text(prompt, answer) for prompt, calm in answered for answer in (calm, calm.upper())]


def text(prompt: str, answer: str) -> Text:
    tokens = list((prompt + answer).encode())
    known = len(prompt.encode()) - 1
    return Text(tokens[:-1], tokens[1:], [0.0] * known + [1.0] * (len(tokens) - 1 - known))


def margins(totals: Sequence[float], reference: Sequence[float]) -> list[float]:
    """By how much more than the reference, in nats, each chosen answer is likelier than the rejected one."""
    moved = [now - before for now, before in zip(totals, reference, strict=True)]
    return [chosen - rejected for chosen, rejected in zip(moved[::2], moved[1::2], strict=True)]


def loss_of(margin: float) -> float:
    """-log sigmoid(BETA * margin)"""
    return math.log1p(math.exp(-BETA * margin))


def report(step: int, totals: Sequence[float], reference: Sequence[float]) -> None:
    """Accuracy: how often the chosen answer is the likelier one of its pair."""
    found = margins(totals, reference)
    right = [float(chosen > rejected) for chosen, rejected in zip(totals[::2], totals[1::2], strict=True)]
    loss = fmean(map(loss_of, found))
    print(f"step {step} loss {loss:.4f} margin {fmean(found):.2f} accuracy {fmean(right):.2f}", flush=True)


def server_in(folder: str) -> tuple[str, str]:
    """Address and key of the server whose data folder this is."""
    return (Path(folder) / "api.address").read_text().strip(), (Path(folder) / "api.key").read_text().strip()
