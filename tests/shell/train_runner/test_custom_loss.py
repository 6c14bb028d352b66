"""Losses of clients: traced, encoded and computed by the `tinker` SDK itself, which is the oracle of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it in a loss
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, run_loss_handle, trace_loss

from strata.base.errors import StrataError
from strata.train.core.loss_graph import CustomLoss, LossGraph, LossInput, LossNode, check_loss
from strata.train.runner.passes.custom_loss import GroupMember, check_group, compute_group

Loss = Callable[..., Any]
BETA: Final = 0.3


def reference_kl(logprobs: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor) -> Any:
    """A policy gradient, held near a reference model by its log probabilities."""
    ratio = reference - logprobs
    penalty = torch.exp(ratio) - ratio - 1
    loss = (-logprobs * advantages + BETA * penalty).sum()
    return loss, {"custom/kl:mean": penalty.mean(), "custom/tokens:sum": (advantages != 0).float().sum()}


def dpo(logprobs: torch.Tensor, reference: torch.Tensor, sign: torch.Tensor) -> Any:
    """A pair as one group: `sign` is 1 on the tokens of the chosen answer, -1 on those of the rejected one."""
    margin = BETA * (sign * (logprobs - reference)).sum()
    return -F.logsigmoid(margin), {"custom/accuracy:mean": (margin > 0).float()}


def many_operations(logprobs: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> Any:
    length = logprobs.shape[0]
    d = (1 - logprobs) ** 2 + abs(weights) - weights / 2
    m = torch.where(d > 1, d, -d).clamp(min=0.1, max=3)
    mixed = torch.sigmoid(m).mean(dim=0) + F.relu(m).sum() + F.softplus(m).sum() + torch.logsumexp(m, dim=0)
    both = (d > 0) & (d < 3) | ~(d > 1)
    inner = m[:2].sum() + m[..., None].squeeze(-1).sum() + (m * both.float()).sum() / length / m.size(0)
    probabilities = (F.softmax(m, dim=-1) * m.log_softmax(-1)).sum() + torch.stack([m.sum(), m.mean()]).sum() + m.max()
    rest = (
        torch.nan_to_num(m, posinf=1e4).sum() + m.masked_fill(m > 1, 0.0).sum() + m.std() + m.to(torch.float32).amax()
    )
    return scale * (mixed + inner + probabilities) + rest.sqrt() + m.numel(), {"custom/m:sum": m.detach().sum()}


def matrix(logprobs: torch.Tensor, teacher: torch.Tensor) -> Any:
    """A distillation: K targets for each token."""
    return (teacher * (teacher.clamp(min=1e-6).log() - logprobs)).sum(-1).mean(), {}


def random_datum(length: int, **inputs: torch.Tensor) -> tuple[torch.Tensor, types.Datum]:
    shape = inputs.get("teacher", torch.zeros(length)).shape
    logprobs = -torch.rand(shape) * 4 - 0.01
    tokens = torch.zeros(shape, dtype=torch.int64)
    given: Any = {"target_tokens": tokens, **inputs}
    return logprobs, types.Datum(model_input=types.ModelInput.from_ints([0] * length), loss_fn_inputs=given)


def to_core(handle: LossHandle) -> CustomLoss:
    """As it comes over the wire."""
    inputs = [LossInput(each.name, each.rank) for each in handle.inputs]
    graph = msgspec.json.decode(encode_graph(handle).model_dump_json(), type=LossGraph)
    loss = CustomLoss(handle.name, inputs, graph)
    check_loss(loss)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(loss), type=CustomLoss)


def member(datum: types.Datum, logprobs: torch.Tensor) -> GroupMember:
    inputs = {name: each.to_torch() for name, each in datum.loss_fn_inputs.items() if name != "target_tokens"}
    return GroupMember(logprobs, inputs)


CASES: Final[Mapping[str, tuple[Loss, Mapping[str, Any], Callable[[int], dict[str, torch.Tensor]]]]] = {
    "reference_kl": (
        reference_kl,
        {"logprobs": 1, "advantages": 1, "reference": 1},
        lambda n: {"advantages": torch.randn(n), "reference": -torch.rand(n)},
    ),
    "many_operations": (
        many_operations,
        {"logprobs": 1, "weights": 1, "scale": 0},
        lambda n: {"weights": torch.randn(n), "scale": torch.tensor(0.7)},
    ),
    "matrix": (matrix, {"logprobs": 2, "teacher": 2}, lambda n: {"teacher": torch.rand(n, 5)}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_graph_computes_what_the_sdk_computes_of_it(name: str) -> None:
    torch.manual_seed(3)
    fn, ranks, make = CASES[name]
    handle = trace_loss(fn, ranks, "session")
    loss = to_core(handle)
    for length in (1 if name != "many_operations" else 2, 7, 100):
        logprobs, datum = random_datum(length, **make(length))
        leaf = logprobs.clone().requires_grad_()
        expected, metrics = run_loss_handle(handle, [datum], [leaf])
        expected.backward()  # type: ignore[no-untyped-call]
        check_group(loss, [member(datum, logprobs)])
        computed = compute_group(loss, [member(datum, logprobs)], backward=True)
        assert computed.loss == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-6)
        assert computed.metrics == pytest.approx(metrics, abs=1e-6)
        assert leaf.grad is not None
        torch.testing.assert_close(computed.gradients[0], leaf.grad, rtol=0, atol=1e-6)
        assert compute_group(loss, [member(datum, logprobs)], backward=False).gradients == ()


def test_the_datums_of_a_group_are_one_input_one_after_the_other() -> None:
    torch.manual_seed(4)
    handle = trace_loss(dpo, {"logprobs": 1, "reference": 1, "sign": 1}, "session")
    pairs = [
        random_datum(length, reference=-torch.rand(length), sign=torch.full((length,), sign))
        for length, sign in ((6, 1.0), (9, -1.0))
    ]
    computed = compute_group(to_core(handle), [member(datum, logprobs) for logprobs, datum in pairs], backward=True)
    leaves = [logprobs.clone().requires_grad_() for logprobs, _ in pairs]
    # The published formula (Rafailov et al., 2023), and not our concatenation.
    sums = [
        (leaf - datum.loss_fn_inputs["reference"].to_torch()).sum()
        for leaf, (_, datum) in zip(leaves, pairs, strict=True)
    ]
    expected = -F.logsigmoid(BETA * (sums[0] - sums[1]))
    expected.backward()  # type: ignore[no-untyped-call]
    assert computed.loss == pytest.approx(float(expected.detach()), abs=1e-6)
    for leaf, gradient in zip(leaves, computed.gradients, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(gradient, leaf.grad, rtol=0, atol=1e-6)


def built(*nodes: tuple[str, str, str, Sequence[Any]], inputs: Sequence[LossInput] = ()) -> CustomLoss:
    """A graph over `logprobs`, by op, name, target and arguments; the last node is the loss."""
    inputs = inputs or [LossInput("logprobs", 1)]
    placeholders = [LossNode("placeholder", each.name, each.name) for each in inputs]
    calls = [LossNode(op, name, target, list(args)) for op, name, target, args in nodes]  # type: ignore[arg-type]
    output = LossNode(
        "output", "output", "output", [{"tuple": [{"ref": (calls or placeholders)[-1].name}, {"dict": {}}]}]
    )
    return CustomLoss("loss", inputs, LossGraph([*placeholders, *calls, output]))


REF: Final = {"ref": "logprobs"}
SUM: Final = ("call_method", "total", "sum", [{"ref": "last"}])
GROWING: Final[Mapping[str, Sequence[Any]]] = {
    "a table of all pairs": [
        ("call_function", "column", "operator.getitem", [REF, {"tuple": [{"slice": [None, None, None]}, None]}]),
        ("call_function", "last", "operator.mul", [{"ref": "column"}, REF]),
    ],
    "expanded without end": [("call_method", "last", "expand", [REF, 1 << 40, -1])],
    "expanded beyond 64 bits": [("call_method", "last", "expand", [REF, 1 << 40, 1 << 40, -1])],
    "joined again and again": [
        *(
            ("call_function", f"x{place}", "torch.cat", [[{"ref": f"x{place - 1}" if place else "logprobs"}] * 60])
            for place in range(4)
        ),
        ("call_method", "last", "neg", [{"ref": "x3"}]),
    ],
    "sums of a large view": [
        ("call_method", "large", "expand", [REF, 400, -1]),
        *(("call_method", f"sum{place}", "sum", [{"ref": "large"}]) for place in range(400)),
        ("call_function", "last", "operator.mul", [{"ref": "sum0"}, {"ref": "sum399"}]),
    ],
    "a reshape that does not fit": [("call_method", "last", "reshape", [REF, 7, 11])],
    "a negative size": [("call_method", "last", "view", [REF, -1, -1])],
    "an axis that is not there": [("call_function", "last", "torch.sum", [REF, 99])],
    "a shape repeated as a tuple": [
        ("call_function", "shape", "getattr", [REF, "shape"]),
        ("call_function", "last", "operator.mul", [{"ref": "shape"}, 1 << 40]),
    ],
    "a power of integers": [
        ("call_method", "count", "numel", [REF]),
        ("call_function", "power", "operator.pow", [{"ref": "count"}, 10**15]),
        ("call_function", "last", "operator.mul", [REF, {"ref": "power"}]),
    ],
    "a division of numbers by zero": [
        ("call_method", "count", "numel", [REF]),
        ("call_function", "none", "operator.sub", [{"ref": "count"}, {"ref": "count"}]),
        ("call_function", "over", "operator.truediv", [1, {"ref": "none"}]),
        ("call_function", "last", "operator.mul", [REF, {"ref": "over"}]),
    ],
    "an index that is a tensor": [("call_function", "last", "operator.getitem", [REF, REF])],
    "positions that depend on the content": [
        ("call_function", "mask", "operator.gt", [REF, 0]),
        ("call_function", "last", "operator.getitem", [REF, {"ref": "mask"}]),
    ],
    "a move to a device": [("call_method", "last", "to", [REF, 0])],
    "no number at the end": [
        ("call_method", "count", "numel", [REF]),
        ("call_function", "last", "operator.add", [{"ref": "count"}, 1]),
    ],
}


@pytest.mark.parametrize("name", GROWING)
def test_a_graph_that_does_not_fit_is_refused_before_anything_is_computed(name: str) -> None:
    loss = built(*GROWING[name], SUM)
    check_loss(loss)
    with pytest.raises(StrataError, match="graph: node") as refused:
        check_group(loss, [GroupMember(torch.zeros(5000), {})])
    assert len(refused.value.message) < 500


def test_a_graph_that_needs_too_many_bytes_is_refused_however_long_its_inputs_are() -> None:
    chain = [
        ("call_function", f"x{place}", "operator.mul", [{"ref": f"x{place - 1}"} if place else REF, 1.0])
        for place in range(200)
    ]
    loss = built(*chain, ("call_method", "total", "sum", [{"ref": "x199"}]))
    check_group(loss, [GroupMember(torch.zeros(1 << 19), {})])
    with pytest.raises(StrataError, match="more than 512 MiB"):
        check_group(loss, [GroupMember(torch.zeros(1 << 20), {})])


def test_a_loss_that_runs_out_of_memory_is_no_error_of_the_client() -> None:
    loss = built(
        ("call_method", "large", "expand", [REF, 1 << 46, -1]), ("call_method", "last", "neg", [{"ref": "large"}]), SUM
    )
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        compute_group(loss, [GroupMember(torch.zeros(8), {})], backward=False)


def test_the_groups_of_an_operation_share_the_cost_of_the_smallest_graph() -> None:
    loss = built(("call_method", "last", "expand", [REF, 100_000, -1]), SUM)
    check_group(loss, [GroupMember(torch.zeros(1), {})])
    with pytest.raises(StrataError, match="more than 512 numbers"):
        check_group(loss, [GroupMember(torch.zeros(1), {})], groups=100)


def test_a_loss_must_be_one_number_that_depends_on_the_log_probabilities() -> None:
    with pytest.raises(StrataError, match="must be one number"):
        check_group(built(("call_method", "last", "neg", [REF])), [GroupMember(torch.zeros(3), {})])
    constant = built(("call_method", "cut", "detach", [REF]), ("call_method", "last", "sum", [{"ref": "cut"}]))
    with pytest.raises(StrataError, match="does not depend on logprobs"):
        compute_group(constant, [GroupMember(torch.zeros(3), {})], backward=True)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [("infinite", "reciprocal", "its loss is"), ("gradient", "sqrt", "a gradient of its loss is not finite")],
)
def test_a_division_by_zero_fails_the_operation_and_trains_nothing(name: str, target: str, message: str) -> None:
    del name
    loss = built(("call_method", "last", target, [REF]), SUM)
    check_group(loss, [GroupMember(torch.zeros(3), {})])
    with pytest.raises(StrataError, match=message):
        compute_group(loss, [GroupMember(torch.zeros(3), {})], backward=True)


def test_the_longest_chain_that_is_allowed_is_computed_without_recursion() -> None:
    chain = [
        ("call_function", f"x{place}", "operator.mul", [{"ref": f"x{place - 1}"} if place else REF, 1.0])
        for place in range(508)
    ]
    loss = built(*chain, ("call_method", "total", "sum", [{"ref": "x507"}]))
    check_loss(loss)
    check_group(loss, [GroupMember(torch.ones(100), {})])
    assert compute_group(loss, [GroupMember(torch.ones(100), {})], backward=True).loss == 100.0
