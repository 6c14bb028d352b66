"""The sections and defaults of a recipe (model, data, training, evaluation, output, server, preference, sampling,
reinforcement), which kinds have which, and the wording of problems.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, assert_never, get_args, get_type_hints

import msgspec

from strata.base import toml
from strata.base.errors import Code, StrataError
from strata.fleet.core.problems import Problems, kinds_of, read_fields, table_at
from strata.train.combinations import Combination, assess
from strata.train.core.model_options import AdamParams, LoraConfig, ScheduleKind
from strata.train.parallel import ParallelSettings

RecipeKind = Literal["sft", "dpo", "grpo", "distill"]
TinyFamily = Literal["", "llama", "qwen3", "qwen3_moe"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
AboveOne = Annotated[float, msgspec.Meta(gt=1)]
StepsAhead = Annotated[int, msgspec.Meta(ge=1, le=32)]
"""Each is a thread of the client, and a sampler of the server, which has 64."""
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
_TASK: Final = re.compile(r"[\w.-]+")
_LORA: Final = LoraConfig()
_ADAM: Final = AdamParams()


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RecipeModel(_Section, frozen=True, kw_only=True):
    """The base model, and the adapter that is trained over it."""

    path: str = ""
    """The model of a server that the recipe starts: a folder in Hugging Face's format, or the id of a model in the
    cache."""
    tiny: TinyFamily = ""
    """Or a small random model of this family, made in the run folder: for first steps."""
    name: str = ""
    """One of the models of a server that is named; its first one unless set."""
    start: str = ""
    """A PEFT adapter to continue from: a folder, or `tinker://…` on that server."""
    rank: Count = 16
    alpha: Positive = _LORA.alpha
    train_attn: bool = _LORA.train_attn
    train_mlp: bool = _LORA.train_mlp
    train_unembed: bool = _LORA.train_unembed


class RecipeData(_Section, frozen=True, kw_only=True):
    """What is learned from."""

    path: str = ""
    """A file (JSONL, JSON, Parquet), a folder of them, `s3://BUCKET/KEY`, or `hf://OWNER/NAME`."""
    split: str = "train"
    """The split of a folder or a dataset of the Hugging Face Hub."""
    max_tokens: Count = 1024
    """Longer examples are left out."""
    supervise: Literal["assistant", "all"] = "assistant"
    """What of conversations is learned: what the assistant says, or all of it."""


class RecipeTraining(_Section, frozen=True, kw_only=True):
    steps: Count | None = None
    epochs: Positive | None = None
    """Passes over the data, in place of steps; 1 unless one of them is set."""
    batch_size: Count = 8
    """Examples, pairs or prompts of a step."""
    learning_rate: Positive = _ADAM.learning_rate
    schedule: ScheduleKind = "constant"
    """The learning rate after the warm-up: constant, or down to zero at the last step."""
    warmup_steps: Whole = 0
    weight_decay: NotNegative = _ADAM.weight_decay
    grad_clip_norm: NotNegative = _ADAM.grad_clip_norm
    """The bound on the gradient of the mean over tokens; 0 is no clipping."""
    seed: Seed = 0
    save_every: Count | None = None
    """Steps between two saved states; a tenth of all unless set."""


class RecipeEvaluation(_Section, frozen=True, kw_only=True):
    path: str = ""
    split: str = "test"
    share: Share = 0.0
    """The share of the data that is not trained on, in place of a path."""
    every: Count = 10
    """Steps between two evaluations; there is one before the first step and one after the last."""
    patience: Whole = 0
    """Stop after so many evaluations without improvement, and export the best; 0: never stop early."""
    min_delta: NotNegative = 0.0
    """What counts as an improvement."""
    max_examples: Count = 256
    pass_at: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4)] = ()
    """`grpo`: for each of these k, how likely one of k drawn answers to a held-out prompt passes."""
    pass_samples: Whole = 0
    """Answers that are drawn for each prompt for this; the largest k unless set."""
    pass_reward: float = 1.0
    """The reward from which an answer passes."""
    tasks: Annotated[tuple[str, ...], msgspec.Meta(max_length=4)] = ()
    """Tasks of lm-eval, by name."""
    task_folder: str = ""
    """A folder with tasks of your own."""
    task_limit: Count | None = None
    """Only the first examples of each task."""
    task_tokens: Count = 2048
    """Longer prompts of tasks are cut at their beginning."""
    task_timeout_s: Positive = 3600.0
    task_python: str = ""
    """The interpreter that has lm-eval; that of this command unless set."""


class RecipeOutput(_Section, frozen=True, kw_only=True):
    folder: str = ""
    """The run folder; `runs/NAME` of the recipe's file unless set."""
    tracker: str = ""
    """`tensorboard:FOLDER`, `wandb:PROJECT` or `wandb:ENTITY/PROJECT`."""
    offline: bool = False
    """W&B writes files for `wandb sync` and connects to nothing."""
    keep_rollouts: bool = False
    """The server keeps the newest answers that are learned from, with their rewards, for the dashboard."""


class RecipeServer(_Section, frozen=True, kw_only=True):
    """The training server: one that runs, by its URL, or how to start one for this run."""

    url: str = ""
    key_file: str = ""
    ranks: Count | None = None
    """Ranks; by device unless set, as `ranks.nproc` of a server. The same holds for `threads` and `dtype`."""
    threads: Count | None = None
    """Threads of each rank."""
    dtype: Literal["float32", "bfloat16"] | None = None
    quantise: Literal["", "nf4", "int8"] = ""
    """How the frozen base is quantised; empty: not at all."""


class RecipePreference(_Section, frozen=True, kw_only=True):
    beta: Positive = 0.1
    """How dear it is to move away from the model that training began with."""
    label_smoothing: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0


class RecipeSampling(_Section, frozen=True, kw_only=True):
    group_size: Count = 8
    """Answers that are drawn for each prompt."""
    max_tokens: Count = 128
    temperature: Positive = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end an answer, beside the model's end of text."""


class RecipeReinforcement(_Section, frozen=True, kw_only=True):
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    substeps: Count = 1
    """Optimizer steps on the answers of one step, each on a part of them."""
    normalise: bool = False
    """Divide advantages by the standard deviation of their group."""
    kl: NotNegative = 0.0
    """Weight of a penalty for moving away from the model that training began with."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """How `importance_sampling` corrects the gap between sampler and trainer: importance weights above the limit are
    truncated to it, or what is outside it is masked, or the gap is ignored."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether a token or a whole answer is held to the limit."""
    correction_limit: AboveOne = 2.0
    """The largest importance weight; the smallest that is not masked is one by it."""
    router_replay: bool = False
    """The passes of a mixture compute the tokens of an answer with the experts that it was drawn with."""
    patience: Whole = 20
    """Stop after so many steps in a row in which no group had different rewards; 0: never stop early."""
    pipeline: Literal["synchronous", "one-step-off", "bounded", "in-flight"] = "synchronous"
    """Whether the answers of coming steps are drawn while the ranks train: not at all, those of the next step, or those
    of `max_staleness` steps; `in-flight`: these too, and each step replaces the weights under the running ones."""
    max_staleness: StepsAhead = 2
    """How many steps the weights that draw an answer may lack of those that learn from it, for `bounded` and
    `in-flight`."""

    @property
    def staleness(self) -> int:
        """The largest staleness of an answer in steps."""
        match self.pipeline:
            case "synchronous":
                return 0
            case "one-step-off":
                return 1
            case "bounded" | "in-flight":
                return self.max_staleness
            case _:
                assert_never(self.pipeline)


class RecipeReward(_Section, frozen=True, kw_only=True):
    check: str = "exact"
    """`exact`, `number`, `regex`, or `FILE.py:FUNCTION` of your own."""
    column: str = "answer"
    """The column of the data with the right answer."""
    pattern: str = ""
    """The pattern of `regex`: it must match, and its first group, if it has one, must be the right answer."""


class RecipeEnvironment(_Section, frozen=True, kw_only=True):
    """An environment of the `verifiers` library: tasks, tools and rewards, in place of data and reward."""

    name: str
    """An installed package, or a Python file or a folder beside the recipe."""
    arguments: dict[str, Any] = {}
    """The settings of its taskset."""
    python: str = ""
    """The interpreter that has `verifiers`; that of this command unless set."""
    tasks: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1000
    """The first tasks are used."""
    max_turns: Count = 16
    concurrent: Annotated[int, msgspec.Meta(ge=1, le=128)] = 32
    """Episodes that are played at a time. The relay to the server takes 256 connections."""
    timeout_s: Positive = 600.0
    """The time of an episode. What ends it may take as long again."""
    sandbox: Literal["required", "off"] = "required"
    memory_gib: Positive = 8.0
    """The address space of each of its processes."""
    processes: Count = 512


class RecipeTeacher(_Section, frozen=True, kw_only=True):
    """The model to learn from. Without path, tiny and url it is on the student's server: an adapter, or the base."""

    path: str = ""
    tiny: TinyFamily = ""
    tiny_seed: Seed = 1
    url: str = ""
    key_file: str = ""
    adapter: str = ""
    """A PEFT adapter over that model: a folder, or `tinker://…` on its server."""


class RecipeDistillation(_Section, frozen=True, kw_only=True):
    mode: Literal["on_policy", "off_policy"] = "on_policy"
    """The student learns from its own answers, whose tokens the teacher judges, or from the teacher's answers."""


class Recipe(_Section, frozen=True, kw_only=True):
    kind: RecipeKind
    model: RecipeModel = RecipeModel()
    data: RecipeData = RecipeData()
    train: RecipeTraining = RecipeTraining()
    eval: RecipeEvaluation | None = None
    output: RecipeOutput = RecipeOutput()
    server: RecipeServer = RecipeServer()
    parallel: ParallelSettings = ParallelSettings()
    """The mesh of the ranks of a server that the recipe starts."""
    dpo: RecipePreference = RecipePreference()
    sampling: RecipeSampling = RecipeSampling()
    grpo: RecipeReinforcement = RecipeReinforcement()
    reward: RecipeReward = RecipeReward()
    env: RecipeEnvironment | None = None
    teacher: RecipeTeacher = RecipeTeacher()
    distill: RecipeDistillation = RecipeDistillation()


KINDS: Final[Mapping[RecipeKind, str]] = {
    "sft": "Supervised fine-tuning: learn texts, or the answers of conversations.",
    "dpo": "Direct preference optimisation: learn from pairs of a better and a worse answer.",
    "grpo": "Reinforcement learning: draw groups of answers, reward each, learn from the better ones.",
    "distill": "Distillation: learn from another model, on its answers or on your own.",
}
_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    name: next(each for each in (*get_args(kind), kind) if isinstance(each, type) and each is not type(None))
    for name, kind in get_type_hints(Recipe).items()
    if name != "kind"
}
"""Every section with its struct, without the None of one that may be left out."""
_OF_KINDS: Final[Mapping[str, Collection[str]]] = {
    "dpo": ("dpo",),
    "sampling": ("grpo", "distill"),
    "grpo": ("grpo",),
    "reward": ("grpo",),
    "env": ("grpo",),
    "teacher": ("distill",),
    "distill": ("distill",),
}
"""Sections that only some kinds have."""
_CORRECTION: Final = ("correction", "correction_level", "correction_limit")
_ADDED: Final = (*_CORRECTION, "router_replay", "patience", "pipeline", "max_staleness")
"""Settings of `grpo` after 0.2.0, which wrote this section into the records of all kinds: runs of the others have none
of these, so that they go on."""
_NEW: Final = {
    "eval": (
        *("pass_at", "pass_samples", "pass_reward"),
        *("tasks", "task_folder", "task_limit", "task_tokens", "task_timeout_s", "task_python"),
    ),
}
"""Settings after 0.2.0 that decide nothing unless they are set: a run that began without them goes on."""
_ELSEWHERE: Final = {
    "server": ("url", "key_file"),
    "teacher": ("key_file",),
    "eval": ("task_python", "task_timeout_s"),
    "env": ("python", "concurrent", "timeout_s", "sandbox", "memory_gib", "processes"),
}
"""Settings that say where and how long something runs, and decide no number."""


def is_recipe(path: Path) -> bool:
    """Says whether this file says which kind of recipe it is, as no other file does."""
    return "kind" in _parse(path).data


def read_recipe(path: Path) -> Recipe:
    """The recipe in this file; INVALID with all that is wrong with it."""
    document = _parse(path)
    problems = Problems(document)
    kind = document.data.get("kind")
    if kind not in get_args(RecipeKind):
        problems.add(("kind",), f"expected one of {', '.join(KINDS)}")
    values: dict[str, Any] = {"kind": kind}
    known = {"kind": str, **dict.fromkeys(_SECTIONS, dict[str, Any])}
    for name, table in read_fields(problems, (), document.data, known).items():
        if name in _SECTIONS:
            values[name] = _read_section(problems, name, table)
            if kind in KINDS and kind not in _OF_KINDS.get(name, KINDS):
                problems.add((name,), f'a recipe of kind "{kind}" has no such section')
    problems.raise_any()
    recipe = Recipe(**values)
    for place, message in _conflicts(recipe):
        problems.add(place, message)
    problems.raise_any()
    return recipe


def _read_section(problems: Problems, name: str, value: Any) -> msgspec.Struct | None:
    kind, table = _SECTIONS[name], table_at(problems, (name,), value)
    if table is None:
        return None
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    values = read_fields(problems, (name,), table, kinds_of(kind), required=required)
    return None if any(field not in values for field in required) else kind(**values)


def _conflicts(recipe: Recipe) -> list[tuple[tuple[str, ...], str]]:
    """Settings that contradict each other."""
    model, train, evaluation, reward = recipe.model, recipe.train, recipe.eval, recipe.reward
    found: list[tuple[tuple[str, ...], str]] = list(_source_conflicts(recipe))
    if train.steps is not None and train.epochs is not None:
        found.append((("train", "epochs"), "steps is set too; only one of them can be meant"))
    if model.path and model.tiny:
        found.append((("model", "tiny"), "path is set too; only one of them can be meant"))
    if evaluation is not None:
        found += _evaluation_conflicts(recipe, evaluation)
    if recipe.kind == "grpo" and reward.check == "regex" and not reward.pattern:
        found.append((("reward", "pattern"), 'required for check = "regex"'))
    if recipe.kind == "grpo" and reward.check not in ("exact", "number", "regex") and ":" not in reward.check:
        found.append((("reward", "check"), 'expected "exact", "number", "regex" or "FILE.py:FUNCTION"'))
    found += _reinforcement_conflicts(recipe.grpo)
    if recipe.server.ranks is not None and (problem := recipe.parallel.problem(recipe.server.ranks)):
        found.append((("parallel",), problem))
    samples = recipe.kind == "grpo" or (recipe.kind == "distill" and recipe.distill.mode == "on_policy")
    verdict = assess(Combination(parallel=recipe.parallel, quantise=recipe.server.quantise, samples=samples))
    if verdict.level == "refused":
        about = f"{recipe.kind} samples, and " if "sampling" in verdict.features else ""
        found.append((tuple(verdict.features[0].split(".")), f"{about}{verdict.why}"))
    if sum(map(bool, (recipe.teacher.path, recipe.teacher.tiny, recipe.teacher.url))) > 1:
        found.append((("teacher",), "path, tiny and url name different models; set one of them"))
    return found


def _reinforcement_conflicts(grpo: RecipeReinforcement) -> list[tuple[tuple[str, ...], str]]:
    found: list[tuple[tuple[str, ...], str]] = []
    defaults = RecipeReinforcement()
    corrected = [name for name in _CORRECTION if getattr(grpo, name) != getattr(defaults, name)]
    if corrected and grpo.loss != "importance_sampling":
        bounds = f"{grpo.loss} limits the ratio to the sampler itself"
        found.append((("grpo", corrected[0]), f"only importance_sampling takes it: {bounds}"))
    if grpo.staleness and grpo.correction == "none" and grpo.loss == "importance_sampling":
        found.append((("grpo", "pipeline"), 'answers of older weights need a correction, and correction is "none"'))
    if grpo.max_staleness != defaults.max_staleness and grpo.pipeline not in ("bounded", "in-flight"):
        found.append((("grpo", "max_staleness"), 'only pipeline = "bounded" and "in-flight" take it'))
    if grpo.router_replay and grpo.pipeline == "in-flight":
        found.append((("grpo", "router_replay"), "answers that several versions draw have no routing to replay"))
    return found


def _source_conflicts(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """Conflicts of what is learned from and what judges it: data, or an environment."""
    if recipe.env is None:
        if not recipe.data.path:
            missing = (
                "required but not there: [data] with a path" if recipe.data == RecipeData() else "path is required"
            )
            yield ("data",), missing
        return
    if recipe.data.path:
        yield ("data", "path"), "an environment has tasks of its own; only one of them can be meant"
    if recipe.reward != RecipeReward():
        yield ("reward",), "an environment has rewards of its own"
    if recipe.sampling.stop:
        yield ("sampling", "stop"), "the template of the model ends its turns"
    if recipe.eval is not None and recipe.eval.path:
        yield ("eval", "path"), "an environment has tasks of its own: set a share of them"
    if recipe.grpo.pipeline == "in-flight":
        yield ("grpo", "pipeline"), "a session does not record which versions drew a turn"


def _evaluation_conflicts(recipe: Recipe, evaluation: RecipeEvaluation) -> Iterator[tuple[tuple[str, ...], str]]:
    held_out = bool(evaluation.path) + bool(evaluation.share)
    if held_out == 2 or not (held_out or evaluation.tasks):
        yield ("eval",), "needs a path, or a share of the data"
    if evaluation.patience and not held_out:
        yield ("eval", "patience"), "is about held-out data: set a path, or a share of the data"
    if evaluation.pass_at and not (recipe.kind == "grpo" and held_out):
        yield ("eval", "pass_at"), 'needs kind = "grpo", whose rewards say what passes, and held-out prompts'
    if evaluation.pass_at and 0 < evaluation.pass_samples < max(evaluation.pass_at):
        yield ("eval", "pass_samples"), f"fewer than the largest k of pass_at, {max(evaluation.pass_at)}"
    for task in evaluation.tasks:
        if not _TASK.fullmatch(task):
            yield ("eval", "tasks"), f"{task!r} is no name of a task of lm-eval"


def _parse(path: Path) -> toml.TomlDocument:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise StrataError(Code.NOT_FOUND, f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StrataError(Code.INVALID, f"{path}: the recipe is not UTF-8 text (byte {error.start})") from error
    if path.suffix.lower() in (".yaml", ".yml"):
        return _parse_yaml(text, str(path))
    return toml.parse(text, str(path))


def _parse_yaml(text: str, source: str) -> toml.TomlDocument:
    import yaml  # type: ignore[import-untyped]

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark is not None else source
        raise StrataError(
            Code.INVALID, f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    if not isinstance(data, dict):
        raise StrataError(Code.INVALID, f"{source}: expected sections such as data and train")
    # YAML 1.1 reads 1e-3 as text.
    return toml.TomlDocument(_read_numbers(data), "", source)


def _read_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _read_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_read_numbers(inner) for inner in value]
    if isinstance(value, str) and "e" in value.lower() and value[:1].isdigit():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def recipe_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns what decides the numbers of a run, by dotted name: all but where the student's server is and where
    results go."""
    # As JSON has it: what is read back from the record compares equal.
    values = msgspec.json.decode(msgspec.json.encode(recipe))
    values.pop("output")
    for section, names in _ELSEWHERE.items():
        for name in names if values[section] is not None else ():
            values[section].pop(name)
    for section, names in _NEW.items():
        defaults = msgspec.json.decode(msgspec.json.encode(_SECTIONS[section]()))
        for name in names if values[section] is not None else ():
            if values[section].get(name) == defaults[name]:
                values[section].pop(name)
    if recipe.kind != "grpo":
        for name in _ADDED:
            values["grpo"].pop(name)
    return {
        f"{section}.{key}": value
        for section, table in values.items()
        if isinstance(table, dict)
        for key, value in table.items()
    } | {"kind": recipe.kind}


def recipe_text(kind: str) -> str:
    """A recipe of this kind to begin with, as TOML with comments."""
    return files("strata.sdk.recipes").joinpath("files", f"{kind}.toml").read_text(encoding="utf-8")
