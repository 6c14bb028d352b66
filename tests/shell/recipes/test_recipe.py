"""What a recipe file may say, and what the errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from strata.base.errors import StrataError
from strata.sdk.recipes.prepare import digest_environment
from strata.sdk.recipes.recipe import KINDS, read_recipe, recipe_settings, recipe_text

EXAMPLES: Final = Path(__file__).parents[3] / "examples" / "recipes"


def written(folder: Path, text: str, name: str = "r.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_that_is_shown_for_a_kind_is_a_recipe_of_it(tmp_path: Path, kind: str) -> None:
    assert read_recipe(written(tmp_path, recipe_text(kind))).kind == kind


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_an_example_is_a_recipe_whose_data_is_there(file: Path) -> None:
    recipe = read_recipe(file)
    assert recipe.kind == file.stem
    assert (file.parent / recipe.data.path).is_file()


def test_yaml_says_the_same_as_toml(tmp_path: Path) -> None:
    toml = written(tmp_path, 'kind = "sft"\n[data]\npath = "x.jsonl"\n[train]\nsteps = 3\nlearning_rate = 1e-3\n')
    text = "kind: sft\ndata:\n  path: x.jsonl\ntrain:\n  steps: 3\n  learning_rate: 1e-3\n"
    yaml = written(tmp_path, text, "r.yaml")
    assert read_recipe(toml) == read_recipe(yaml)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('kind = "sft"\n[data]\npath = "x"\n[train]\nlearning_rat = 1', "r.toml:5: train.learning_rat: unknown"),
        ('kind = "sft"\n[data]\npath = "x"\n[trian]\nsteps = 1', 'did you mean "train"?'),
        ('kind = "stf"\n[data]\npath = "x"', "kind: expected one of sft, dpo, grpo, distill"),
        ('kind = "sft"', "data: required but not there"),
        ('kind = "sft"\n[data]\nsplit = "x"', "path is required"),
        ('kind = "sft"\n[data]\npath = "x"\n[train]\nsteps = 0', "r.toml:5: train.steps: expected"),
        ('kind = "sft"\n[data]\npath = "x"\n[reward]\ncheck = "exact"', 'a recipe of kind "sft" has no such section'),
        ('kind = "sft"\n[data]\npath = "x"\n[train]\nsteps = 1\nepochs = 1.0', "steps is set too"),
        ('kind = "sft"\n[data]\npath = "x"\n[eval]\nevery = 1', "needs a path, or a share"),
        ('kind = "grpo"\n[data]\npath = "x"\n[reward]\ncheck = "regex"', "reward.pattern: required"),
        (
            'kind = "grpo"\n[data]\npath = "x"\n[grpo]\nloss = "ppo"\ncorrection = "mask"',
            "grpo.correction: only importance_sampling takes it: ppo limits the ratio to the sampler itself",
        ),
        ('kind = "grpo"\n[data]\npath = "x"\n[grpo]\ncorrection_limit = 1.0', "grpo.correction_limit"),
        (
            'kind = "grpo"\n[data]\npath = "x"\n[grpo]\npipeline = "one-step-off"\nmax_staleness = 3',
            'grpo.max_staleness: only pipeline = "bounded" and "in-flight" take it',
        ),
        (
            'kind = "grpo"\n[data]\npath = "x"\n[grpo]\npipeline = "bounded"\ncorrection = "none"',
            "grpo.pipeline: answers of older weights need a correction",
        ),
        (
            'kind = "grpo"\n[data]\npath = "x"\n[grpo]\npipeline = "in-flight"\nrouter_replay = true',
            "grpo.router_replay: answers that several versions draw have no routing",
        ),
        (
            'kind = "sft"\n[data]\npath = "x"\n[server]\nranks = 3\n[parallel]\ntensor = 2',
            "r.toml:6: parallel: parallel.tensor 2 does not",
        ),
        (
            'kind = "grpo"\n[data]\npath = "x"\n[server]\nranks = 2\n[parallel]\npipeline = 2',
            "r.toml:7: parallel.pipeline: grpo samples, and ranks that are stages cannot",
        ),
        (
            'kind = "sft"\n[data]\npath = "x"\n[eval]\ntasks = ["a"]\npatience = 1',
            "eval.patience: is about held-out data",
        ),
        ('kind = "sft"\n[data]\npath = "x"\n[eval]\ntasks = ["a b"]', "'a b' is no name of a task of lm-eval"),
        ('kind = "sft"\n[data]\npath = "x"\n[eval]\nshare = 0.1\npass_at = [1]', 'eval.pass_at: needs kind = "grpo"'),
        (
            'kind = "grpo"\n[data]\npath = "x"\n[eval]\nshare = 0.1\npass_at = [4]\npass_samples = 2',
            "eval.pass_samples: fewer than the largest k of pass_at, 4",
        ),
        ('kind = "sft"\n[data]\npath = "x"\n[env]\nname = "y"', 'a recipe of kind "sft" has no such section'),
        ('kind = "grpo"\n[data]\npath = "x"\n[env]\nname = "y"', "data.path: an environment has tasks of its own"),
        (
            'kind = "grpo"\n[reward]\ncheck = "number"\n[env]\nname = "y"',
            "reward: an environment has rewards of its own",
        ),
        ('kind = "grpo"\n[env]\nname = "y"\n[eval]\npath = "x"', "eval.path: an environment has tasks of its own"),
        (
            'kind = "grpo"\n[env]\nname = "y"\n[grpo]\npipeline = "in-flight"',
            "grpo.pipeline: a session does not record which versions drew a turn",
        ),
        ('kind = "grpo"\n[env]\nname = "y"\nconcurrent = 129', "r.toml:4: env.concurrent: expected"),
        ('kind = "sft"\n[data\npath = "x"', "not valid TOML"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(StrataError) as raised:
        read_recipe(written(tmp_path, text))
    assert problem in raised.value.message


def test_yaml_that_is_none_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(StrataError, match=r"r\.yaml:2:\d+: not valid YAML"):
        read_recipe(written(tmp_path, "kind: sft\ndata: [", "r.yaml"))


def test_where_the_server_is_and_where_results_go_does_not_decide_the_numbers(tmp_path: Path) -> None:
    text = 'kind = "sft"\n[data]\npath = "x"\n'
    one = read_recipe(written(tmp_path, text))
    other = read_recipe(written(tmp_path, f'{text}[server]\nurl = "https://x"\n[output]\nfolder = "y"\n'))
    assert recipe_settings(one) == recipe_settings(other)
    taught = text.replace("sft", "distill")
    urls = [read_recipe(written(tmp_path, f'{taught}[teacher]\nurl = "https://{name}"\n')) for name in ("a", "b")]
    assert recipe_settings(urls[0]) != recipe_settings(urls[1]), "another teacher"
    mesh = f"{text}[server]\nranks = 2\n[parallel]\n"
    meshes = [read_recipe(written(tmp_path, f"{mesh}{size} = 2\n")) for size in ("replicate", "tensor")]
    assert recipe_settings(meshes[0]) != recipe_settings(meshes[1]), "another mesh"
    changed = read_recipe(written(tmp_path, f"{text}[train]\nseed = 1\n"))
    assert recipe_settings(one) != recipe_settings(changed)


def test_the_record_of_another_kind_has_no_setting_that_0_2_0_did_not_write(tmp_path: Path) -> None:
    """Else a run that version 0.2.0 began would be refused as one with another recipe."""
    written_by_0_2_0 = {"grpo.loss", "grpo.substeps", "grpo.normalise", "grpo.kl"}
    for kind in KINDS:
        settings = recipe_settings(read_recipe(written(tmp_path, f'kind = "{kind}"\n[data]\npath = "x"\n')))
        added = {name for name in settings if name.startswith("grpo.")} - written_by_0_2_0
        assert bool(added) == (kind == "grpo")
    evaluated = read_recipe(written(tmp_path, 'kind = "sft"\n[data]\npath = "x"\n[eval]\nshare = 0.1\n'))
    names = {name for name in recipe_settings(evaluated) if name.startswith(("eval.", "env."))}
    known = ("path", "split", "share", "every", "patience", "min_delta", "max_examples")
    assert names == {f"eval.{name}" for name in known}


def test_which_interpreter_runs_others_code_does_not_decide_the_numbers(tmp_path: Path) -> None:
    text = 'kind = "grpo"\n[env]\nname = "y"\n'
    one = recipe_settings(read_recipe(written(tmp_path, text)))
    other = recipe_settings(read_recipe(written(tmp_path, f'{text}python = "z"\nsandbox = "off"\nconcurrent = 2\n')))
    assert one == other
    assert one != recipe_settings(read_recipe(written(tmp_path, f"{text}max_turns = 3\n")))


def test_all_files_of_an_environment_decide_the_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "game"
    for name in ("__init__.py", "tasks/rows.jsonl", "__pycache__/__init__.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("a")
    before = digest_environment(folder)
    (folder / "__pycache__" / "__init__.pyc").write_text("b")
    assert digest_environment(folder) == before
    (folder / "tasks" / "rows.jsonl").write_text("b")
    assert digest_environment(folder) != before
