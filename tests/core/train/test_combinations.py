"""Which features of the training server work together, by the rows of one table."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.train.combinations import (
    CONTEXT_FAMILIES,
    FAMILIES,
    ONE_DOCUMENT,
    PAIRS,
    TENSOR_FAMILIES,
    Combination,
    PairRow,
    assess,
    assess_groups,
    check_combination,
)
from strata.train.parallel import ParallelSettings

USES: Final[dict[str, dict[str, Any]]] = {
    "model.quantise": {"quantise": "nf4"},
    "model.training": {"training": "full"},
    "model.compile": {"compile": True},
    "model.fused_layers": {"fused_layers": "liger"},
    "model.attention": {"attention": "FA3"},
    "soft-capped attention": {"config": {"model_type": "gemma2", "attn_logit_softcapping": 50.0}},
    "model.offload": {"offload": True},
    "inference.engine": {"engine": "vllm"},
    "sampling": {"samples": True},
    "images": {"images": True},
    "a memory plan": {"is_planned": True},
    "the optimizer muon": {"optimizer": "muon"},
    "quantised files": {"config": {"model_type": "qwen3", "quantization_config": {"bits": 4}}},
    "attn_temperature_tuning": {"config": {"model_type": "qwen3", "attn_temperature_tuning": True}},
    ONE_DOCUMENT: {"config": {"model_type": "bamba"}},
    **{
        f"rotary embeddings of type {kind}": {"config": {"model_type": "qwen3", "rope_scaling": {"type": kind}}}
        for kind in ("dynamic", "longrope")
    },
}
"""How a combination uses each feature that is no size of the mesh."""


def combine(*features: str) -> Combination:
    sizes: dict[str, Any] = {name.removeprefix("parallel."): 2 for name in features if name.startswith("parallel.")}
    uses: dict[str, Any] = {}
    for name in features:
        uses |= USES.get(name, {})
    return Combination(parallel=ParallelSettings(**sizes), **uses)


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: f"{row.first} with {row.second}")
def test_each_pair_is_refused_with_its_reason_and_each_half_alone_is_not(row: PairRow) -> None:
    with pytest.raises(StrataError) as refused:
        check_combination(combine(row.first, row.second))
    assert refused.value.code is Code.INVALID
    assert refused.value.message.endswith(f": {row.why}")
    assert refused.value.hint == row.hint
    assert assess(combine(row.first)).level == "supported"
    assert assess(combine(row.second)).level == "supported"


def test_no_pair_has_two_rows() -> None:
    pairs = [frozenset((row.first, row.second)) for row in PAIRS]
    assert len(pairs) == len(set(pairs))


def test_a_family_is_refused_or_experimental_as_its_row_says() -> None:
    for row in FAMILIES:
        verdict = assess(msgspec.structs.replace(combine(row.feature), config={"model_type": "phi3"}))
        assert (verdict.level, verdict.features) == (row.level, (row.feature,))
        assert "phi3" in verdict.message


def test_a_model_that_is_not_known_is_judged_by_the_other_rows_alone() -> None:
    assert assess(Combination(parallel=ParallelSettings(tensor=2))).level == "supported"
    assert assess(Combination(parallel=ParallelSettings(tensor=2), config={})).level == "refused"


def test_a_refusal_outweighs_what_is_experimental() -> None:
    parallel = ParallelSettings(context=2)
    verdict = assess(Combination(parallel=parallel, offload=True, config={"model_type": "phi3"}))
    assert verdict.level == "refused"
    assert verdict.features == ("model.offload", "parallel.context")


def test_the_groups_of_a_model_follow_from_its_family() -> None:
    levels = {setting: verdict.level for setting, verdict in assess_groups({"model_type": "gemma2"}).items()}
    assert levels == {
        "parallel.tensor": "refused",
        "parallel.context": "supported",
        "parallel.expert": "refused",
        "parallel.pipeline": "refused",
    }
    # Its experts are spread over tensor groups, which needs expert groups too.
    assert assess_groups({"model_type": "qwen3_moe"})["parallel.tensor"].level == "supported"
    assert TENSOR_FAMILIES <= CONTEXT_FAMILIES
