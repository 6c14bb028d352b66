"""Rewards for grpo.toml. A function gets the text of an answer and the row of its prompt."""

from collections.abc import Mapping
from typing import Any


def near_sum(text: str, row: Mapping[str, Any]) -> float:
    """1 for the right digit, up to 0.25 for one that is near: a model that knows nothing has to find digits first."""
    if not (text.isascii() and text.isdigit()):
        return 0.0
    distance = abs(int(text) - int(row["answer"]))
    return 1.0 if distance == 0 else max(0.0, 0.3 - 0.05 * distance)
