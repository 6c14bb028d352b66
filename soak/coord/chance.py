"""Chance that can be had again: the number of a trial decides what happens in it."""

from __future__ import annotations

import random


def chance(number: int) -> random.Random:
    return random.Random(number)  # noqa: S311 - nothing here is a secret
