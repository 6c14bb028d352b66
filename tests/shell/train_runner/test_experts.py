"""Experts by grouped matrix multiplication beside transformers' own modules, unmodified, with gradients.

Adapters are compared with the definition: the same unmodified module, whose weights have B A of one adapter added to
them, over the tokens of that adapter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from strata.base.errors import Code, StrataError
from strata.train.core.model_options import LoraConfig
from strata.train.runner.experts import PlanDispatch, group_experts
from strata.train.runner.lora.adapter import Adapter
from strata.train.runner.lora.hooks import Adapters, Span
from strata.train.runner.lora.span_products import GroupedProducts, LoopedProducts, SpanProducts
from strata.train.runner.lora.targets import is_experts, targets_of
from strata.train.runner.model.expert_parallel import DispatchSizes, ExpertParallel, RoutedPairs
from tests.shell.train_runner import tiny_families
from tests.shell.train_runner.dispatched import Dispatched
from tests.shell.train_runner.single_rank import one_rank

FAMILIES: Final = ("aria_text", "deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
TOKENS: Final = 37
SEVERAL: Final = (11, 7, 0, 1, TOKENS - 20, 1)
CHOSEN: Final = 2
CLOSE: Final = 2e-6
"""Of float32, beside the largest number of a tensor."""
WAYS: Final = {
    "looped": LoopedProducts(),
    "grouped": GroupedProducts(),
    # Of four experts: one adapter at a time.
    "in few groups": GroupedProducts(most_groups=12),
}
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Holder(nn.Module):
    """The experts alone, under the name that they have in a model."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def experts_of(family: str) -> Any:
    model = tiny_families.shape_of(family, experts_implementation="eager")
    tiny_families.draw(model)
    return next(module for module in model.modules() if is_experts(module))


def routed(experts: Any, *, unused: int = 0) -> Routed:
    """Tokens, their experts, and the weights of those; the last experts have no token."""
    generator = torch.Generator().manual_seed(3)
    width = experts.gate_up_proj.shape[1 if experts.is_transposed else 2]
    hidden = torch.randn(TOKENS, width, generator=generator)
    scores = torch.rand(TOKENS, len(experts.gate_up_proj), generator=generator)
    scores[:, scores.shape[1] - unused :] = -1
    weights, chosen = scores.topk(CHOSEN)
    return hidden, chosen, weights


def with_gradients(
    forward: Callable[..., torch.Tensor], inputs: Routed, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    hidden, chosen, weights = (part.clone() for part in inputs)
    hidden.requires_grad_()
    weights.requires_grad_()
    output = forward(hidden, chosen, weights)
    loss = (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(4))).sum()
    names = ["hidden", "weights", *parameters]
    leaves = [hidden, weights, *parameters.values()]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    # Grouped products add the gradients of adapters themselves.
    loss.backward()  # type: ignore[no-untyped-call]
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return {"output": output.detach(), **dict(zip(names, found, strict=True))}


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).abs().max()) <= CLOSE * float(value.abs().max()), name


@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_all_gradients_are_those_of_the_unmodified_module(family: str, unused: int) -> None:
    experts = experts_of(family)
    inputs, parameters = routed(experts, unused=unused), dict(experts.named_parameters())
    theirs = with_gradients(experts, inputs, parameters)
    group_experts(experts, Adapters())
    assert_close(with_gradients(experts, inputs, parameters), theirs)


@pytest.mark.parametrize("products", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("spans", [(TOKENS,), SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_add_what_their_definition_says(
    family: str, spans: Sequence[int], rank: int, products: SpanProducts
) -> None:
    """The second of several spans has no adapter, the last one that of the first. Another one has a larger rank and
    another scale. There are experts without a token of an adapter."""
    compare_adapters(family, spans, rank, products)


@pytest.fixture(scope="module")
def expert_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertParallel]:
    """Of one rank, to which all pairs travel."""
    with one_rank(tmp_path_factory.mktemp("group")):
        yield ExpertParallel(init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize("products", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("spans", [(TOKENS,), SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_add_the_same_to_pairs_that_travelled(
    family: str, spans: Sequence[int], products: SpanProducts, expert_group: ExpertParallel
) -> None:
    compare_adapters(family, spans, 3, products, expert_group.dispatch)


def compare_adapters(
    family: str, spans: Sequence[int], rank: int, products: SpanProducts, plan: PlanDispatch | None = None
) -> None:
    holder = Holder(experts_of(family))
    configs = [
        LoraConfig(rank=rank + 2 * (number == 3), alpha=2.0 * rank, train_attn=False, train_unembed=False)
        for number in range(len(spans))
    ]
    adapted = [Adapter(config, targets_of(holder, config), torch.device("cpu")) for config in configs]
    for number, adapter in enumerate(adapted):
        adapter.flat.copy_(torch.randn(adapter.size, generator=torch.Generator().manual_seed(number)) * 0.1)
    chosen = [adapter if number != 1 else None for number, adapter in enumerate(adapted)]
    chosen[-1] = chosen[0]
    trained = [adapter for adapter in dict.fromkeys(chosen) if adapter is not None]
    leaves = {
        f"{number}.{name}.{part}": matrix
        for number, adapter in enumerate(trained)
        for name, pair in adapter.pairs.items()
        for part, matrix in zip("AB", pair, strict=True)
    }
    experts: Any = holder.experts

    def by_definition(hidden: torch.Tensor, routed: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = []
        parts = zip(chosen, *(torch.split(part, list(spans)) for part in (hidden, routed, weights)), strict=True)
        for adapter, *own in parts:
            merged = dict(experts.named_parameters())
            for name, (a, b) in adapter.pairs.items() if adapter is not None else ():
                last = name.rpartition(".")[2]
                added = (b @ a) * adapter.scale
                merged[last] = merged[last] + (added.mT if experts.is_transposed else added)
            outputs.append(functional_call(experts, merged, tuple(own)))
        return torch.cat(outputs)

    inputs = routed(experts)
    theirs = with_gradients(by_definition, inputs, leaves)
    adapters = Adapters()
    adapters.products = products
    adapters.add_hooks(holder)
    adapters.row = [Span(adapter, length) for adapter, length in zip(chosen, spans, strict=True)]
    # An adapter of the pass that has no token here comes first.
    adapters.in_pass = [Adapter(configs[0], adapted[0].targets, torch.device("cpu")), *trained]
    group_experts(holder, adapters, plan)
    assert_close(with_gradients(experts, inputs, leaves), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_number_is_read_by_the_host(family: str) -> None:
    """On a device, each would wait for everything that was started before."""
    experts = experts_of(family)
    inputs, parameters = routed(experts), dict(experts.named_parameters())
    group_experts(experts, Adapters())
    with Dispatched() as dispatched:
        with_gradients(experts, inputs, parameters)
    assert dispatched.count("grouped_mm") > 0
    assert dispatched.reads == 0


@pytest.mark.parametrize(("kept", "wanted"), [(1, (TOKENS + 1, CHOSEN)), (0, (TOKENS, CHOSEN))])
def test_a_recomputation_that_does_not_fit_what_was_kept_is_an_internal_error(
    kept: int, wanted: tuple[int, int]
) -> None:
    experts = ExpertParallel()
    forward, again = experts.checkpoint_contexts()
    pairs = RoutedPairs(torch.zeros(TOKENS, CHOSEN), torch.zeros(1), DispatchSizes((), (), ()))
    with forward as context:
        assert context.recall(pairs.groups) is None
        for _ in range(kept):
            context.keep(pairs)
    for _ in range(2):
        with again as context, pytest.raises(StrataError, match="recomputed") as refused:
            context.recall(torch.zeros(wanted))
        assert refused.value.code is Code.INTERNAL
