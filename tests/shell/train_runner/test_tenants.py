"""Tenants that share a pass: whatever company a tenant has, it gets the numbers that it would get alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.train.runner.model.tiny import TinyModel, make
from tests.shell.train_runner.shared_passes import TENANTS, Composition, Quick, independent, settle
from tests.shell.train_runner.single_rank import driver_of, one_rank

EXAMPLES = 25

compositions = st.builds(
    Composition,
    lengths=st.dictionaries(
        st.sampled_from(list(TENANTS)), st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=6
    ),
    row_tokens=st.sampled_from([16, 64, 1024]),
    seed=st.integers(0, 1000),
)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    folder = tmp_path_factory.mktemp("tenants")
    make(folder / "llama", TinyModel())
    with one_rank(folder) as ranks:
        made = driver_of(ranks, folder / "llama", folder)
        driver = Quick(made.dispatcher, made.link, made.ranks, made.folder)
        settle(driver)
        yield driver


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(composition=compositions)
def test_a_tenants_numbers_do_not_depend_on_its_company(tenants: Quick, composition: Composition) -> None:
    independent(tenants, composition)


def layers_of(driver: Quick, name: str) -> set[str]:
    """The kinds of layers that a model has learned something for: what it would save that is not zero."""
    weights = {part: value for part, value in driver.state(name).items() if part.endswith("lora_B")}
    return {part.split(".")[-2] for part, value in weights.items() if float(value.abs().max()) > 0}


@pytest.mark.proves("Never: target layers are ignored")
def test_the_layers_that_were_asked_for_are_trained_and_no_others(tenants: Quick) -> None:
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert layers_of(tenants, "attention") == attention
    assert layers_of(tenants, "mlp") == mlp
    assert layers_of(tenants, "head") == {"lm_head"}
    assert layers_of(tenants, "usual") == attention | mlp | {"lm_head"}
