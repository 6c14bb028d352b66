from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.hyper import HyperSchema
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import parse_quiet_hours
from strata.fleet.core.manifest import JobManifest, parse_manifest, validate_manifest
from strata.fleet.core.plan import ExistingJob, plan
from strata.fleet.core.problems import MAX_LISTED
from tests.core.fleet.jobs import TRAINER, json_values

ROOT: Final = Path(__file__).parents[3]
EXAMPLE: Final = ROOT / "etc" / "training_manifest.toml.example"

SCHEMA: Final = HyperSchema(
    {
        "type": "object",
        "properties": {
            "learning_rate": {"type": "number", "exclusiveMinimum": 0},
            "epochs": {"type": "integer", "minimum": 1},
            "optimizer": {"type": "object", "properties": {"name": {"enum": ["adamw", "lion"]}}},
        },
        "required": ["epochs"],
    }
)


JOB: Final = '[[jobs]]\nmodel = "m"\n'
SWEEP: Final = '[sweep]\nmodel = "m"\n'
USED: Final = '[trainers.u]\ncommand = ["x"]\n'
HERE: Final = 'directory = "/x"\n'


def read(text: str, **given: Any) -> JobManifest:
    # A key of the document itself has to come before the first table.
    whole = TRAINER + text if text.lstrip().startswith("[") else f"{text}\n{TRAINER}"
    return parse_manifest(whole, "m.toml").resolve(**given)


def problems(text: str, **given: Any) -> list[str]:
    with pytest.raises(StrataError) as refused:
        read(text, **given)
    assert refused.value.code is Code.INVALID
    return list(refused.value.detail["problems"])


def problem(text: str, **given: Any) -> str:
    (only,) = problems(text, **given)
    assert only.startswith("m.toml:")
    return only.removeprefix("m.toml:").partition(": ")[2]


def test_the_example_is_a_manifest() -> None:
    manifest = parse_manifest(EXAMPLE.read_text(encoding="utf-8"), EXAMPLE.name).resolve()
    assert len(manifest.jobs) == 4 + 12 + 20 + 1
    assert set(manifest.hosts) == {"pi", "desk"}
    assert str(manifest.hosts["desk"].quiet_hours[0]) == "mon,tue,wed,thu,fri 09:00-18:00"
    labels = {spec.label: identity for identity, spec in manifest.jobs.items()}
    assert manifest.jobs[labels["transformer-realistic"]].after == (labels["base"],)
    assert plan(manifest, {}, trainers={}, hosts={}).summary() == "+37 new  ~1 trainer  ~2 hosts"


def test_the_manifest_on_the_page_of_the_fleet_can_be_read() -> None:
    page = (ROOT / "docs" / "fleet-manifest.md").read_text(encoding="utf-8")
    manifest = parse_manifest(page.partition("```toml\n")[2].partition("```")[0], "fleet-manifest.md").resolve()
    assert [job.label for job in manifest.jobs.values()] == ["mlp-oracle", *(f"rates/{number}" for number in range(6))]


def test_all_problems_are_reported_at_once_with_file_line_and_suggestion() -> None:
    text = """
[hosts.desk]
slots = 0
deny_job = ["mlp"]
[[jobs]]
model = "mlp"
min_ram_gb = 4
hyper = { learning_rat = 0.1, epochs = "3", optimizer = { name = "adam" } }
[[jobs]]
model = "../x"
workers = 2
workers_per_host = 3
name = "x"
after = ["mpl-default"]
seed = nan
"""
    assert problems(text, schemas={"t": SCHEMA}) == [
        "m.toml:6: hosts.desk.slots: expected an integer >= 1, found 0",
        'm.toml:7: hosts.desk.deny_job: unknown (did you mean "deny_jobs"?)',
        'm.toml:10: jobs[0].min_ram_gb: unknown (did you mean "min_ram_gib"?)',
        'm.toml:11: jobs[0].hyper.learning_rat: unknown (did you mean "learning_rate"?)',
        'm.toml:11: jobs[0].hyper.epochs: expected integer, found "3"',
        'm.toml:11: jobs[0].hyper.optimizer.name: expected one of "adamw", "lion", found "adam"'
        ' (did you mean "adamw"?)',
        "m.toml:12: jobs[1].hyper: epochs is required",
        "m.toml:13: jobs[1].model: expected a name of ASCII letters, digits, dots, - and _, at most 64 of them,"
        ' found "../x"',
        "m.toml:14: jobs[1].workers: it is not a multiple of workers_per_host = 3",
        'm.toml:17: jobs[1].after[0]: there is no job "mpl-default" (did you mean "mlp-default"?)',
        "m.toml:18: jobs[1].seed: expected an integer, found nan",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[jobs]]", "jobs[0]: model is required"),
        ("jobs = 3", "jobs: expected an array of tables ([[jobs]]), found 3"),
        ("jobs = [3]", "jobs[0]: expected a table, found 3"),
        ("[job]\n", 'job: unknown (did you mean "jobs"?)'),
        (JOB + 'trainer = "tt"', 'jobs[0].trainer: there is no trainer "tt" (did you mean "t"?)'),
        (JOB + "hyper = { x = inf }", "jobs[0].hyper.x: inf is not a JSON number"),
        (JOB + "hyper = { x = 2020-01-01 }", "jobs[0].hyper.x: JSON has no date; write it as a string"),
        (JOB + "min_ram_gib = nan", "jobs[0].min_ram_gib: expected a number >= 0.0, found nan"),
        (JOB + "priority = 1000001", "jobs[0].priority: expected an integer <= 1000000, found 1000001"),
        (JOB + 'require_cuda = "yes"', 'jobs[0].require_cuda: expected true or false, found "yes"'),
        (JOB + 'after = ["m-default"]', "jobs[0].after: the order goes in a circle: m-default after m-default"),
        (
            JOB + 'retrain_on = ["data"]',
            'jobs[0]: m-default: retrain_on has "data", but the digest of the data is not known',
        ),
        ('[[sweeps]]\nmodel = "m"\ngrid = { a = [1] }', "sweeps[0]: name is required"),
        (SWEEP, "sweep: expected exactly one of grid, random, search"),
        (SWEEP + "grid = { a = [] }", "sweep.grid.a: it has no values"),
        (SWEEP + "grid = { seed = [-1] }", "sweep.grid: -1 is no seed: it is at least 0"),
        (SWEEP + 'hyper = { a = 1 }\ngrid = { "a.b" = [1] }', 'sweep.grid."a.b": a is a value and not a table'),
        (
            SWEEP + "random = { samples = 3, space = { a = { log_uniform = [0, 1] } } }",
            "sweep.random.space.a: log_uniform needs a low end above 0",
        ),
        ('[hosts."a b"]', 'hosts."a b": expected a name of ASCII letters, digits, dots, - and _, at most 64 of them'),
        (
            '[hosts.a]\nquiet_hours = ["25:00-3:00"]',
            'hosts.a.quiet_hours[0]: expected hours like "22:00-07:00" or "mon-fri,sun 09:00-17:30", '
            'found "25:00-3:00"',
        ),
        (USED, "trainers.u: expected exactly one of directory, git, bundle, to say where the source comes from"),
        (
            '[trainers.u]\ncommand = "python x"\ndirectory = "/x"',
            'trainers.u.command: expected an array, found "python x"',
        ),
        (USED + 'git = "g"', "trainers.u.git: commit is required with git: a branch would be another code tomorrow"),
        (USED + 'git = "g"\ncommit = "main"', 'trainers.u.commit: expected the full hash of a commit, found "main"'),
        (
            USED + HERE + 'env = { HF_TOKEN = "a" }',
            'trainers.u.env.HF_TOKEN: it looks like a secret: "strata secrets set HF_TOKEN", and secrets = '
            '["HF_TOKEN"] in its place',
        ),
        (
            USED + HERE + 'env = { STRATA_URL = "a" }',
            "trainers.u.env.STRATA_URL: names that begin with STRATA_ belong to the agent",
        ),
        (USED + HERE + "env = { A = 1 }", "trainers.u.env.A: expected a string, found 1"),
    ],
)
def test_a_mistake_is_one_problem_at_its_place(text: str, message: str) -> None:
    assert problem(text) == message


def test_a_job_written_twice_is_refused_and_says_where_the_other_is() -> None:
    text = JOB + "hyper = { a = 1, b = 2 }\n" + JOB + "priority = 3\nhyper = { b = 2.0, a = 1 }\n"
    assert problem(text).startswith("jobs[1]: it is the same job as jobs[0] (line 4)")


def test_a_name_given_twice_is_refused() -> None:
    text = '[[jobs]]\nname = "x"\nmodel = "m"\n[[jobs]]\nname = "x"\nmodel = "n"\n'
    assert problem(text) == 'jobs[1].name: "x" is the name of jobs[0] (line 4) already'


def test_a_circle_over_several_jobs_is_refused() -> None:
    text = "".join(f'[[jobs]]\nmodel = "{model}"\nafter = ["{other}-default"]\n' for model, other in ("ab", "bc", "cb"))
    assert "the order goes in a circle: b-default after c-default after b-default" in problem(text)


def test_a_chain_of_thousands_of_jobs_is_no_circle() -> None:
    text = '[[jobs]]\nmodel = "m0"\n' + "".join(
        f'[[jobs]]\nmodel = "m{number}"\nafter = ["m{number - 1}-default"]\n' for number in range(1, 3000)
    )
    assert len(read(text).jobs) == 3000


def test_a_name_in_after_stands_for_all_jobs_that_answer_to_it() -> None:
    manifest = read(
        '[[sweeps]]\nname = "s"\nmodel = "m"\ngrid = { a = [1, 2] }\n'
        '[[jobs]]\nmodel = "n"\nafter = ["s"]\n[[jobs]]\nmodel = "o"\nafter = ["m-default"]\n'
    )
    by_model: dict[str, list[str]] = {}
    for identity, spec in manifest.jobs.items():
        by_model.setdefault(spec.model, []).append(identity)
    for model in "no":
        assert set(manifest.jobs[by_model[model][0]].after) == set(by_model["m"])


def test_one_mistake_in_a_job_is_not_reported_again_by_those_that_come_after_it() -> None:
    assert problem('[[jobs]]\nname = "x"\nmodel = "m"\nseed = -1\n[[jobs]]\nmodel = "n"\nafter = ["x"]\n').startswith(
        "jobs[0].seed"
    )


def test_jobs_of_an_unreadable_trainer_are_checked_all_the_same() -> None:
    found = problems('[[jobs]]\nmodel = "m"\nhyper = { epoch = 3 }\ntrainer = "t"\n', schemas={"t": SCHEMA})
    assert [each.partition(": ")[2] for each in found] == [
        "jobs[0].hyper: epochs is required",
        'jobs[0].hyper.epoch: unknown (did you mean "epochs"?)',
    ]


def test_every_point_of_a_sweep_is_checked_against_the_schema() -> None:
    text = (
        '[sweep]\nmodel = "m"\nhyper = { epochs = 1 }\ngrid = { learning_rate = [0.1, 0], "optimizer.name" = ["x"] }\n'
    )
    assert sorted(each.partition(": ")[2] for each in problems(text, schemas={"t": SCHEMA})) == [
        'sweep.grid."optimizer.name": expected one of "adamw", "lion", found "x"',
        "sweep.grid.learning_rate: expected more than 0, found 0",
    ]


def test_too_many_points_are_refused_before_they_are_made() -> None:
    axes = ", ".join(f"a{axis} = [{', '.join(map(str, range(100)))}]" for axis in range(6))
    assert "1000000000000 points" in problem(f'[sweep]\nmodel = "m"\ngrid = {{ {axes} }}\n')


def test_thousands_of_problems_are_listed_in_part() -> None:
    found = problems("".join(f'[[jobs]]\nmodel = "m{number}"\nmin_ram_gb = 1\n' for number in range(1000)))
    assert len(found) == MAX_LISTED + 1
    assert found[-1] == f"m.toml: and at least {1000 - MAX_LISTED} more problems"


def test_a_value_too_large_to_be_kept_with_every_job_is_refused() -> None:
    assert "bytes as JSON" in problem(f'[[jobs]]\nmodel = "m"\nhyper = {{ a = "{"x" * 70_000}" }}\n')


def test_retraining_takes_the_source_that_the_caller_resolved() -> None:
    plain = read('[[jobs]]\nmodel = "m"\n')
    draft = parse_manifest(f'retrain_on = ["code"]\n{TRAINER}[[jobs]]\nmodel = "m"\n', "m")
    with pytest.raises(StrataError, match="the digest of the code is not known"):
        draft.resolve()
    one, other = (
        draft.resolve(trainers={"t": msgspec.structs.replace(draft.trainers["t"], directory="", bundle=digit * 64)})
        for digit in "12"
    )
    assert len({*plain.jobs, *one.jobs, *other.jobs}) == 3


def test_the_trainers_can_be_seen_although_the_rest_is_wrong() -> None:
    draft = parse_manifest(TRAINER + 'params = "p.json"\n[trainers.bad]\n[[jobs]]\nmodle = 3\n', "m.toml")
    assert {name: spec.params for name, spec in draft.trainers.items()} == {"t": "p.json"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("22:00-07:00", "22:00-07:00"),
        ("mon-fri 9:00-17:30", "mon,tue,wed,thu,fri 09:00-17:30"),
        ("sat-mon 00:00-24:00", "mon,sat,sun 00:00-24:00"),
        ("Sat,Sun 10:00-12:00", "sat,sun 10:00-12:00"),
        ("24:00-03:00", None),
        ("10:00-10:00", None),
        ("10-12", None),
        ("foo 10:00-12:00", None),
        ("", None),
        ("1:2:3-4:00", None),
        ("10:00", None),
        ("10:60-11:00", None),
        ("23:00-24:01", None),
    ],
)
def test_quiet_hours_are_written_as_people_write_them(text: str, shown: str | None) -> None:
    hours = parse_quiet_hours(text)
    assert (None if hours is None else str(hours)) == shown


VALUE: Final = """
retrain_on = ["code"]
[trainers.t]
command = ["python", "run.py"]
git = "https://example.org/t"
commit = "1111111111111111111111111111111111111111"
[hosts.desk]
slots = 2
[[jobs]]
model = "m"
hyper = { epochs = 1 }
[[sweeps]]
name = "s"
model = "m"
grid = { epochs = [2, 3] }
"""


def received(text: str, change: Callable[[Any], object] = lambda value: None) -> JobManifest:
    """The manifest as the hub decodes it, after a client changed the value."""
    value = msgspec.to_builtins(parse_manifest(text, "m.toml").resolve())
    change(value)
    return msgspec.convert(value, JobManifest)


ALWAYS: Final = {"days": [0, 1, 2, 3, 4, 5, 6], "start_min": 540, "end_min": 540}
"""Covers every minute of every day: the parser refuses it."""


def first(value: Any) -> Any:
    return next(iter(value["jobs"].values()))


def test_a_resolved_manifest_is_valid_as_a_value() -> None:
    manifest = received(VALUE)
    validate_manifest(manifest, {"t": SCHEMA})
    assert [spec.label for spec in manifest.jobs.values()] == ["m-default", "s/0", "s/1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: first(value).update(seed=7), "jobs.m-default: the hub computes the id job1_"),
        (lambda value: first(value).update(project="other"), "jobs.m-default.project: it is of project 'other'"),
        (lambda value: first(value).update(trainer="u"), 'jobs.m-default.trainer: there is no trainer "u"'),
        (lambda value: first(value).update(code="2" * 40), "jobs.m-default.retrain_on: code and data are not the"),
        (lambda value: first(value).update(name="a\x1b[2J"), 'jobs."a\\u001b[2J".name: expected a name'),
        (lambda value: first(value).update(sweep="../x"), "jobs.m-default.name: expected a name"),
        (lambda value: first(value).update(hyper={"epochs": 2**60}), "jobs.m-default.hyper.epochs: the integer is"),
        (lambda value: first(value).update(hyper={"epochs": "x" * 70_000}), "jobs.m-default.hyper: it takes"),
        (lambda value: [job.update(name="n") for job in value["jobs"].values()], 'jobs.n.name: "n" is the name of'),
        (lambda value: first(value).update(split_recipe=[1]), "jobs.m-default.split_recipe: expected a string or"),
        (lambda value: value["hosts"]["desk"].update(name="pi"), "hosts.desk: its name is 'pi'"),
        (lambda value: value["hosts"]["desk"].update(quiet_hours=[ALWAYS]), "hosts.desk.quiet_hours: a window needs"),
        (lambda value: value["trainers"]["t"].update(name="u"), "trainers.t: its name is 'u'"),
        (lambda value: value["trainers"]["t"].update(command=[]), "trainers.t: a trainer has a command and"),
        (lambda value: value["trainers"]["t"].update(directory="/x"), "trainers.t: a trainer has a command and"),
        (lambda value: value["trainers"]["t"].update(commit="main"), "trainers.t: the trainer 't' cannot be run"),
        (lambda value: value["trainers"]["t"].update(env={"HF_TOKEN": "a"}), "trainers.t.env.HF_TOKEN: it looks like"),
        (lambda value: value["trainers"]["t"].update(env={"STRATA_URL": "a"}), "trainers.t.env.STRATA_URL: names that"),
        (lambda value: value["trainers"]["t"].update(venv="/v", interpreter="/p"), "trainers.t.venv: interpreter is"),
    ],
)
def test_a_value_that_no_client_may_send_is_refused_with_its_path(
    change: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(StrataError) as refused:
        validate_manifest(received(VALUE, change), {})
    assert refused.value.code is Code.INVALID
    assert any(problem.startswith(f"m.toml: {message}") for problem in refused.value.detail["problems"])


def test_the_hub_checks_hyper_parameters_against_the_schema_it_has() -> None:
    schema = HyperSchema({"type": "object", "properties": {"epochs": {"maximum": 2}}})
    with pytest.raises(StrataError, match=r'm.toml: jobs."s/1".hyper.epochs: expected at most 2, found 3'):
        validate_manifest(received(VALUE), {"t": schema})


def test_a_value_that_is_no_exact_json_is_not_compared_with_the_schema() -> None:
    schema = HyperSchema({"type": "object", "properties": {"epochs": {"multipleOf": 0.5}}})
    with pytest.raises(StrataError, match="the integer is"):
        validate_manifest(received(VALUE, lambda value: first(value).update(hyper={"epochs": 10**400})), {"t": schema})


KEYS: Final = (
    "trainers", "hosts", "jobs", "sweep", "sweeps", "retrain_on", "model", "mode", "hyper", "after", "grid", "random",
    "space", "samples", "name", "command", "env", "data", "t", "allow_jobs", "quiet_hours", "seed", "split_recipe",
)  # fmt: skip
toml_values: st.SearchStrategy[Any] = st.recursive(
    json_values.filter(lambda value: value is not None)
    | st.sampled_from([float("nan"), float("inf"), 2**60])
    | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=30,
)
documents = st.dictionaries(st.sampled_from(KEYS), toml_values, max_size=6)


def drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_nulls(each) for key, each in value.items() if each is not None}
    return [drop_nulls(each) for each in value if each is not None] if isinstance(value, list) else value


def toml_text(value: Any) -> str:
    """As inline TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_text(key)} = {toml_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
    return str(value)


@given(documents)
def test_any_toml_is_a_manifest_or_a_strata_error(data: dict[str, Any]) -> None:
    text = "".join(f"{toml_text(key)} = {toml_text(each)}\n" for key, each in drop_nulls(data).items())
    try:
        manifest = parse_manifest(text, "m.toml").resolve(schemas={"t": SCHEMA})
    except StrataError as error:
        assert error.code is Code.INVALID  # noqa: PT017 - either outcome is right, and only this code is
    else:
        assert list(manifest.jobs) == [spec.id for spec in manifest.jobs.values()]
        received = msgspec.json.decode(msgspec.json.encode(manifest), type=JobManifest)
        assert received == manifest
        validate_manifest(received, {"t": SCHEMA})


@given(st.text(max_size=60))
@example("[[jobs]]\nmodel = 'a'\n[jobs.hyper]\n'' = 1")
@example("a." * 3000 + "b = 1")
def test_any_text_is_a_manifest_or_a_strata_error(text: str) -> None:
    for before in ("", TRAINER):
        try:
            parse_manifest(before + text, "m.toml").resolve()
        except StrataError as error:
            assert error.code is Code.INVALID  # noqa: PT017 - as above


job_tables = st.fixed_dictionaries(
    {"model": st.sampled_from(["a", "b"])},
    optional={
        "mode": st.sampled_from(["x", "y"]),
        "hyper": st.dictionaries(st.text("abc", min_size=1, max_size=2), json_values, max_size=3).map(drop_nulls),
        "priority": st.integers(-10, 10),
        "min_ram_gib": st.integers(0, 8),
        "train_hosts": st.lists(st.sampled_from(["h", "i"]), max_size=3),
    },
)


@given(st.lists(job_tables, max_size=5))
def test_the_order_of_keys_in_the_file_makes_no_difference(tables: list[dict[str, Any]]) -> None:
    def written(*, turned: bool) -> str:
        return "".join(
            "[[jobs]]\n" + "".join(f"{key} = {toml_text(table[key])}\n" for key in sorted(table, reverse=turned))
            for table in tables
        )

    def outcome(text: str) -> Any:
        try:
            return msgspec.json.encode({key: spec.id for key, spec in read(text).jobs.items()})
        except StrataError as error:
            return len(error.detail["problems"])

    assert outcome(written(turned=False)) == outcome(written(turned=True))


def test_a_job_has_a_start_time_or_a_delay() -> None:
    for written, field in (
        ("2026-11-17T03:00:00Z", {"not_before_s": 1794884400.0}),
        ('"2026-11-17T04:00+01:00"', {"not_before_s": 1794884400.0}),
        ('"+2h"', {"delay_s": 7200.0}),
    ):
        (spec,) = read(f"{JOB}not_before = {written}\n").jobs.values()
        assert {name: getattr(spec, name) for name in field} == field
    assert "has no offset" in problem(f"{JOB}not_before = 2026-11-17T03:00:00\n")
    assert "is no time" in problem(f'{JOB}not_before = "soon"\n')
    assert "expected a time" in problem(f"{JOB}not_before = 5\n")
    assert "expected a time" in problem(f"{JOB}not_before = 2026-11-17\n")
    search = '[sweep.search]\nobjective = { loss = "minimize" }\ntrials = 2\n'
    search += "space = { rate = { uniform = [0.0, 1.0] } }\n"
    assert "not a delay" in problem(f'{SWEEP}not_before = "+2h"\n{search}')
    assert read(f'{SWEEP}not_before = "2026-11-17T03:00Z"\n{search}').searches["sweep"].base.not_before_s


def test_a_changed_start_is_a_change_of_the_job() -> None:
    before, after = (read(f'{JOB}not_before = "+{hours}h"\n') for hours in (1, 2))
    digest = before.trainers["t"].digest
    there = {id_: ExistingJob(spec=each, status=JobStatus.PENDING, trainer=digest) for id_, each in before.jobs.items()}
    assert "~1 start" in plan(after, there, trainers={}, hosts={}).summary()
    assert plan(before, there, trainers={}, hosts={}).changed == ()
