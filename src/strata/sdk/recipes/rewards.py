"""Rewards of answers: built-in checks (exact match, last number, pattern), and a user's function."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError
from strata.sdk.recipes.recipe import RecipeReward
from strata.sdk.recipes.rows import Row

Reward = Callable[[str, Row], float]
"""Rewards an answer's text, given the row whose prompt it answers."""
_NUMBER: Final = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def load_reward(reward: RecipeReward, folder: Path) -> Reward:
    """The check of a recipe. A file's path counts from `folder`."""
    match reward.check:
        case "exact":
            return lambda text, row: float(text.strip() == _answer(row, reward).strip())
        case "number":
            return lambda text, row: float(last_number(text) == last_number(_answer(row, reward)))
        case "regex":
            pattern = _compile(reward.pattern)
            return lambda text, row: _match(pattern, text, row, reward)
        case _:
            return _load_function(reward.check, folder)


def last_number(text: str) -> float:
    """The last number in a text, without the commas between its digits; NaN, which equals nothing, if it has none."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else float("nan")


def _match(pattern: re.Pattern[str], text: str, row: Row, reward: RecipeReward) -> float:
    match = pattern.search(text)
    if match is None:
        return 0.0
    return float(not pattern.groups or (match[1] or "").strip() == _answer(row, reward).strip())


def _answer(row: Row, reward: RecipeReward) -> str:
    if reward.column not in row:
        raise StrataError(
            Code.INVALID,
            f"a row has no column {reward.column!r} with the right answer; it has {', '.join(row)}",
            hint="set reward.column",
        )
    return str(row[reward.column])


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise StrataError(Code.INVALID, f"reward.pattern is no regular expression: {error}") from error


def _load_function(check: str, folder: Path) -> Reward:
    name, _, attribute = check.rpartition(":")
    path = folder / Path(name).expanduser()
    spec = spec_from_file_location("strata_recipe_reward", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise StrataError(Code.NOT_FOUND, f"there is no Python file {path}", hint='reward.check = "FILE.py:FUNCTION"')
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise StrataError(Code.NOT_FOUND, f"{path} has no function {attribute!r}")

    def reward(text: str, row: Row) -> float:
        return float(function(text, row))

    return reward
