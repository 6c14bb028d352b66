"""Values for the tests of the fleet's core."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

from strata.fleet.core.capability import GIB, Capability, Gpu
from strata.fleet.core.jobspec import HostSpec
from strata.fleet.core.requirement import Needs, RequirementClass

TRAINER: Final = '[trainers.t]\ncommand = ["python", "run.py"]\ndirectory = "/opt/t"\n'

names = st.sampled_from(["pi", "desk", "gpu-1", "gpu-2"])
gib = st.integers(0, 64).map(lambda halves: halves / 2)
sizes = st.integers(0, 64 * GIB)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcd", max_size=3), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@st.composite
def needs(draw: st.DrawFn) -> Needs:
    return Needs(
        require_cuda=draw(st.booleans()),
        min_vram_gib=draw(st.just(0.0) | gib),
        min_ram_gib=draw(st.just(0.0) | gib),
        min_cores=draw(st.integers(0, 16)),
        min_gpus=draw(st.integers(0, 2)),
        gpu_share=draw(st.sampled_from([0.0, 0.0, 0.25, 0.5])),
        allowed_hosts=tuple(draw(st.lists(names | st.just("gpu-*"), max_size=2))),
        require_labels=draw(st.dictionaries(st.just("room"), st.sampled_from(["a", "*"]), max_size=1)),
        slots=draw(st.integers(1, 3)),
        prefer_cuda=draw(st.booleans()),
        prefer_hosts=tuple(draw(st.lists(names, max_size=2))),
    )


@st.composite
def requirements(draw: st.DrawFn) -> RequirementClass:
    return RequirementClass(draw(st.sampled_from(["gbt", "mlp"])), draw(st.sampled_from(["a", "b"])), draw(needs()))


@st.composite
def capabilities(draw: st.DrawFn) -> Capability:
    cards = draw(st.lists(sizes, max_size=3))
    return Capability(
        hostname=draw(names),
        cores=draw(st.integers(1, 16)),
        ram_bytes=draw(sizes),
        cuda=draw(st.sampled_from(["", "12.4"])),
        gpus=tuple(Gpu(name="card", vram_bytes=size) for size in cards),
        labels=draw(st.dictionaries(st.just("room"), st.sampled_from(["a", "b"]), max_size=1)),
    )


@st.composite
def policies(draw: st.DrawFn, name: str) -> HostSpec:
    patterns = st.lists(st.sampled_from(["gbt", "mlp-a", "m*", "*-b"]), max_size=2).map(tuple)
    return HostSpec(
        name=name,
        allow_jobs=draw(st.none() | patterns),
        deny_jobs=draw(patterns),
        slots=draw(st.integers(1, 3)),
        ram_gib=draw(st.none() | gib),
        cuda=draw(st.none() | st.booleans()),
    )
