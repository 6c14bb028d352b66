"""What is to be learned: sums of small numbers. Nothing here knows of a training server.

The model is a random one that never saw its own tokenizer, so the bytes of a text do for tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

PROBLEMS = [(a, b) for a in range(4) for b in range(4)]
SAMPLES = 16
"""Answers that are drawn for each problem, at every step."""
RANK, SEED = 16, 1
WARM_UP_STEPS, STEPS, RATE = 8, 14, 5e-3
"""The warm-up ends while most answers are wrong: without any right ones there would be no reward to learn from."""


@dataclass(frozen=True)
class Try:
    """An answer to a problem, and how likely the model that gave it thought it."""

    prompt: list[int]
    token: int
    logprob: float
    reward: float


def prompt_of(a: int, b: int) -> list[int]:
    return list(f"{a}+{b}=".encode())


def reward_of(a: int, b: int, token: int) -> float:
    return float(token == ord(str(a + b)))


def answered() -> list[tuple[list[int], int]]:
    """For the warm-up: every problem with its answer."""
    return [(prompt_of(a, b), ord(str(a + b))) for a, b in PROBLEMS]


def advantages(tries: Sequence[Try]) -> list[tuple[Try, float]]:
    """How much better each answer is than the mean of the answers to its problem, where they are not all alike."""
    mean = fmean(each.reward for each in tries)
    found = [(each, (each.reward - mean) / SAMPLES) for each in tries]
    return [(each, advantage) for each, advantage in found if advantage]


def report(step: int, groups: Sequence[Sequence[Try]]) -> None:
    print(f"step {step} reward {fmean(each.reward for group in groups for each in group):.3f}", flush=True)


def server_in(folder: str) -> tuple[str, str]:
    """Address and key of the server whose data folder this is."""
    return (Path(folder) / "api.address").read_text().strip(), (Path(folder) / "api.key").read_text().strip()
