"""Turns a recipe into tokens and a method: reads rows, leaves out too long ones, picks the method of its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, assert_never

from strata.base.digest import digest, file_digest
from strata.base.errors import Code, StrataError
from strata.sdk.checkpoints import ADAPTER_FILES, SCHEME
from strata.sdk.recipes.batches import held_out
from strata.sdk.recipes.distillation import OffPolicyDistillation, OnPolicyDistillation
from strata.sdk.recipes.environment import Environment, own_code
from strata.sdk.recipes.method import TrainingMethod
from strata.sdk.recipes.preference import PreferenceTraining
from strata.sdk.recipes.recipe import Recipe, recipe_settings
from strata.sdk.recipes.reinforcement import ReinforcementTraining, draw_answers
from strata.sdk.recipes.rendering import Renderer
from strata.sdk.recipes.rewards import load_reward
from strata.sdk.recipes.rollouts import PromptRow
from strata.sdk.recipes.rows import FetchObject, Row, read_rows
from strata.sdk.recipes.supervised import SupervisedTraining
from strata.sdk.recipes.trainer import RunPlace, create_model, local_adapter
from strata.sdk.train import Model

T = TypeVar("T")


@dataclass(frozen=True)
class ChosenRows:
    """Rows of one source, each with its number in it."""

    purpose: str
    """What they are for, in a word."""
    source: str
    rows: Sequence[tuple[int, Row]]

    def __str__(self) -> str:
        return f"the {self.purpose} data ({self.source})"


@dataclass(frozen=True)
class PreparedMethod:
    method: TrainingMethod[Any]
    left_out: tuple[str, ...]
    """The rows that are not used, in sentences."""


@dataclass(frozen=True)
class RecipeRows:
    """The data of a recipe, before the model's tokenizer has seen it."""

    train: ChosenRows
    evaluation: ChosenRows
    settings: dict[str, Any]
    """What decides the numbers of the run: the recipe, and digests of all it reads."""
    folder: Path
    """The folder of the recipe: relative paths count from here."""


def read_recipe_rows(
    recipe: Recipe, folder: Path, fetch_object: FetchObject, environment: Environment | None = None
) -> RecipeRows:
    if environment is not None:
        data = environment.rows()
    else:
        data = read_rows(recipe.data.path, recipe.data.split, folder, fetch_object)
    settings = recipe_settings(recipe) | {"data.sha256": data.digest} | _adapter_digests(recipe, folder)
    train, evaluation, source = list(enumerate(data.rows, 1)), list[tuple[int, Row]](), recipe.data.path
    if recipe.eval is not None and recipe.eval.share:
        kept, chosen = held_out(len(data.rows), recipe.eval.share, recipe.train.seed)
        train, evaluation = [train[each] for each in kept], [train[each] for each in chosen]
    elif recipe.eval is not None:
        source = recipe.eval.path
        held = read_rows(source, recipe.eval.split, folder, fetch_object)
        evaluation = list(enumerate(held.rows, 1))
        settings["eval.sha256"] = held.digest
    if recipe.eval is not None:
        evaluation = evaluation[: recipe.eval.max_examples]
    if recipe.env is not None and (own := own_code(recipe.env, folder)) is not None:
        settings["env.sha256"] = digest_environment(own)
    if recipe.kind == "grpo" and ":" in recipe.reward.check:
        file = folder / Path(recipe.reward.check.rpartition(":")[0]).expanduser()
        settings["reward.sha256"] = _digest_if_there(file)
    return RecipeRows(
        ChosenRows("training", recipe.data.path, train), ChosenRows("evaluation", source, evaluation), settings, folder
    )


def digest_environment(own: Path) -> str:
    """Digests the file or the folder of an environment: code and what it reads, without what its interpreter writes."""
    found = [own] if own.is_file() else sorted(own.rglob("*"))
    names = {file.relative_to(own.parent): file for file in found if file.is_file()}
    return digest({str(name): file_digest(file) for name, file in names.items() if "__pycache__" not in name.parts})


def _adapter_digests(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Digests the local adapters that a run starts from. What a server keeps under a path does not change."""
    return {
        f"{name}.sha256": digest(
            {file: _digest_if_there(local_adapter(adapter, folder) / file) for file in ADAPTER_FILES}
        )
        for name, adapter in (("model.start", recipe.model.start), ("teacher.adapter", recipe.teacher.adapter))
        if adapter and not adapter.startswith(SCHEME)
    }


def _digest_if_there(file: Path) -> str:
    """Empty where there is no file: what needs it says so."""
    return file_digest(file) if file.is_file() else ""


@dataclass(frozen=True)
class OpenedParts:
    """What a recipe may have beside its model."""

    teacher: Model | None = None
    environment: Environment | None = None


def make_method(
    recipe: Recipe, rows: RecipeRows, renderer: Renderer, place: RunPlace, opened: OpenedParts
) -> PreparedMethod:
    left_out: list[str] = []

    def render(make: Callable[[Row], T], length: Callable[[T], int]) -> tuple[list[T], list[T]]:
        """The examples to train on, and those to evaluate with."""
        rendered = [render_rows(each, make, length, recipe.data.max_tokens) for each in (rows.train, rows.evaluation)]
        left_out.extend(sentence for _, sentence in rendered if sentence)
        return rendered[0][0], rendered[1][0]

    method: TrainingMethod[Any]
    match recipe.kind:
        case "sft":
            supervise = recipe.data.supervise
            examples, held = render(lambda row: renderer.example(row, supervise), lambda made: len(made.tokens))
            method = SupervisedTraining(examples=examples, evaluation=held, recipe=recipe)
        case "dpo":
            pairs, held_pairs = render(renderer.pair, lambda pair: max(len(answer.tokens) for answer in pair))
            reference = create_model(place, recipe)
            method = PreferenceTraining(examples=pairs, evaluation=held_pairs, recipe=recipe, reference=reference)
        case "grpo":
            played = opened.environment is not None
            # The prompts of an environment are those that its client sends.
            prompts, held_prompts = render(
                lambda row: PromptRow([] if played else renderer.prompt(row), row), _prompt_length
            )
            method = ReinforcementTraining(
                examples=prompts,
                evaluation=held_prompts,
                recipe=recipe,
                renderer=renderer,
                reward=load_reward(recipe.reward, rows.folder),
                draw=draw_answers(recipe) if opened.environment is None else opened.environment.draw,
                reference=create_model(place, recipe) if recipe.grpo.kl else None,
                environment=opened.environment,
            )
        case "distill":
            assert opened.teacher is not None, "a distillation has a teacher"
            prompts, held_prompts = render(lambda row: PromptRow(renderer.prompt(row), row), _prompt_length)
            distil = OnPolicyDistillation if recipe.distill.mode == "on_policy" else OffPolicyDistillation
            method = distil(examples=prompts, evaluation=held_prompts, recipe=recipe, teacher=opened.teacher)
        case _:
            assert_never(recipe.kind)
    return PreparedMethod(method, tuple(left_out))


def _prompt_length(prompt: PromptRow) -> int:
    return len(prompt.tokens)


def render_rows(
    chosen: ChosenRows, make: Callable[[Row], T], length: Callable[[T], int], limit: int
) -> tuple[list[T], str]:
    """Returns what is made of each row that is not longer than the limit, and a sentence on those that are longer, if
    any.

    A row that cannot be used is named.
    """
    made = []
    for number, row in chosen.rows:
        try:
            example = make(row)
        except StrataError as error:
            raise StrataError(error.code, f"row {number} of {chosen}: {error.message}", hint=error.hint) from error
        if length(example) <= limit:
            made.append(example)
    longer = f"rows of {chosen} are longer than data.max_tokens = {limit}"
    if chosen.rows and not made:
        raise StrataError(Code.INVALID, f"all {longer}")
    left_out = len(chosen.rows) - len(made)
    return made, f"{left_out} of {len(chosen.rows)} {longer} and are left out" if left_out else ""
