from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.fleet.core.jobspec import GangPlace, JobSpec, TrainerSpec
from strata.fleet.core.requirement import Needs
from tests.core.fleet.jobs import json_values

MLP = JobSpec(
    model="mlp",
    mode="realistic",
    hyper={"hidden": [256, 128], "learning_rate": 0.001, "optimizer": {"name": "adamw", "nesterov": False}},
    split_recipe="by_host",
    train_hosts=("pi", "desk"),
    seed=1,
)

# These ids are in databases. A change of them is a new version of the prefix, never an edit here.
GOLDEN: tuple[tuple[JobSpec, str], ...] = (
    (JobSpec(model="gbt"), "job1_51ae4e39902e619ba17263679afea2cbe55adbbc6363cab954f20c554bafc077"),
    (MLP, "job1_02e00d823fd9f7b405f97eca80a7015e1336d5a661d7d3e479eb0c5c35388c67"),
    (
        JobSpec(model="mlp", hyper={"name": "Grüße"}, split_recipe={"by": "host", "share": 0.2}),
        "job1_ad6124d085a20810c782de4321342b9bfed36e38b71b15d1498647e0484c67a8",
    ),
    (
        JobSpec(model="mlp", retrain_on=("code",), code="4b825dc642cb6eb9a060e54bf8d69288fbee4904"),
        "job1_fadf4fde1a41606fc19f8caa5a16d2d1de698e63e2598ea96937389112d2a729",
    ),
    (
        JobSpec(model="gbt", gang=GangPlace(name="g", size=2, index=1, min_size=1, workers_per_host=4)),
        "job1_bca32f4ef7126b091c334e6db9058bc60e6ac5952132181a0ac6e4289adfe0a3",
    ),
    (JobSpec(model="gbt", project="a"), "job1_514ab97ae79783626eef1b3940233d653544ad55bbbc0da42e080a766552316c"),
)


@pytest.mark.parametrize(("spec", "identity"), GOLDEN)
def test_the_id_of_a_job_never_changes(spec: JobSpec, identity: str) -> None:
    assert spec.id == identity


def with_hyper(hyper: dict[str, Any]) -> str:
    return JobSpec(model="mlp", hyper=hyper).id


def test_json_has_one_kind_of_number_and_its_own_booleans() -> None:
    assert with_hyper({"a": 1}) == with_hyper({"a": 1.0})
    assert with_hyper({"a": 0.0}) == with_hyper({"a": -0.0})
    assert with_hyper({"a": 1}) != with_hyper({"a": True})
    assert with_hyper({"a": 1}) != with_hyper({"a": "1"})
    assert with_hyper({"a": [1, 2]}) != with_hyper({"a": [2, 1]})


@given(st.dictionaries(st.text("abcd", max_size=3), json_values, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_keys_makes_no_difference(hyper: dict[str, Any], chance: Any) -> None:
    keys = list(hyper)
    chance.shuffle(keys)
    assert with_hyper({key: hyper[key] for key in keys}) == with_hyper(hyper)


@given(st.dictionaries(st.text("abcd", max_size=3), json_values, max_size=4))
def test_the_id_survives_a_journey_through_json(hyper: dict[str, Any]) -> None:
    spec = JobSpec(model="mlp", hyper=hyper)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec).id == spec.id


def test_the_hosts_whose_data_is_used_are_a_set() -> None:
    assert msgspec.structs.replace(MLP, train_hosts=("desk", "pi", "desk")).id == MLP.id


@pytest.mark.parametrize(
    "change",
    [
        {"trainer": "other"},
        {"priority": 5},
        {"needs": Needs(require_cuda=True)},
        {"max_attempts": 1},
        {"timeout_s": 60.0},
        {"name": "x"},
        {"code": "abc"},
    ],
)
def test_how_a_job_is_done_is_no_part_of_its_id(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(MLP, **change).id == MLP.id


@pytest.mark.parametrize(
    "change",
    [
        {"model": "gbt"},
        {"mode": "oracle"},
        {"hyper": {}},
        {"split_recipe": None},
        {"train_hosts": ()},
        {"seed": 2},
        {"project": "a"},
    ],
)
def test_what_a_job_is_makes_its_id(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(MLP, **change).id != MLP.id


def test_the_default_project_is_no_part_of_the_id() -> None:
    assert msgspec.structs.replace(MLP, project="default").id == MLP.id
    assert b"project" not in msgspec.json.encode(MLP), "an agent from before projects reads it as well"


def test_the_digest_of_a_trainer_never_changes() -> None:
    """It is in databases, like the ids of jobs."""
    spec = TrainerSpec(name="default", command=("python", "train.py"), directory="/t", env={"B": "2", "A": "1"})
    assert spec.digest == "trainer1_da745564dfaee69d328931ebb26144c6e459c1e09f5f8aaf0d59404b4d7ce249"
    assert msgspec.structs.replace(spec, env={"A": "1", "B": "2"}).digest == spec.digest
    assert msgspec.json.decode(spec.encode(), type=TrainerSpec).digest == spec.digest
    assert msgspec.structs.replace(spec, command=("python", "other.py")).digest != spec.digest


def test_retraining_on_code_needs_to_know_the_code() -> None:
    with pytest.raises(StrataError) as refused:
        _ = JobSpec(model="mlp", retrain_on=("code",)).id
    assert refused.value.code is Code.PRECONDITION


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65, "name\n"])
def test_a_name_that_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"model": name}, JobSpec)
