"""The format of clients' losses as traced graphs, the allow-list of torch operations, and the limits of nodes (512),
inputs, metrics and nesting.

A graph is a list of nodes in the order of execution; a node refers to earlier ones by name. Nothing in it is code: the
ranks look every operation up in a table of their own. It is checked here before it is journaled. What depends on the
shapes of a batch the ranks check, with tensors that have no content, before they compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn

import msgspec

from strata.base.errors import Code, StrataError

MAX_NODES: Final = 512
MAX_INPUTS: Final = 16
MAX_METRICS: Final = 32
MAX_ARGUMENTS: Final = 64
"""Values in the arguments of one node, nested ones too."""
MAX_NESTING: Final = 4
LOGPROBS: Final = "logprobs"
DTYPES: Final = frozenset({"float32", "float64", "int64", "bool"})
ATTRIBUTES: Final = frozenset({"shape", "T", "ndim"})
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_DIM: Final = frozenset({"dim", "keepdim", "dtype"})
_SOFTMAX: Final = frozenset({"dim", "dtype", "_stacklevel"})
_NONE: Final = frozenset[str]()
TORCH: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(
        (
            *("abs", "neg", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "square", "reciprocal", "sign"),
            *("sigmoid", "tanh", "erf", "sin", "cos", "floor", "ceil", "round", "relu", "isfinite", "isnan", "isinf"),
            *("logical_not", "logical_and", "logical_or", "logical_xor", "eq", "ne", "lt", "le", "gt", "ge"),
            *("mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "detach", "clone"),
            *("ones_like", "zeros_like", "reshape", "flatten", "t"),
        ),
        _NONE,
    ),
    **dict.fromkeys(("add", "sub"), frozenset({"alpha"})),
    **dict.fromkeys(("clamp", "clip"), frozenset({"min", "max"})),
    **dict.fromkeys(("sum", "mean"), _DIM),
    **dict.fromkeys(("amax", "amin", "logsumexp", "any", "all"), frozenset({"dim", "keepdim"})),
    **dict.fromkeys(("std", "var"), frozenset({"dim", "keepdim", "unbiased", "correction"})),
    **dict.fromkeys(("max", "min"), _NONE),
    **dict.fromkeys(("softmax", "log_softmax"), _SOFTMAX),
    **dict.fromkeys(("cat", "stack", "unsqueeze", "squeeze"), frozenset({"dim"})),
    "transpose": frozenset({"dim0", "dim1"}),
    "flip": frozenset({"dims"}),
    "nan_to_num": frozenset({"nan", "posinf", "neginf"}),
    "masked_fill": _NONE,
}
"""Functions of `torch`, with the names of the arguments that they may have."""
FUNCTIONAL: Final[Mapping[str, frozenset[str]]] = {
    "logsigmoid": _NONE,
    "softplus": frozenset({"beta", "threshold"}),
    "relu": frozenset({"inplace"}),
    "softmax": _SOFTMAX,
    "log_softmax": _SOFTMAX,
}
"""Functions of `torch.nn.functional`."""
METHODS: Final[Mapping[str, frozenset[str]]] = {
    **{
        name: named for name, named in TORCH.items() if name not in ("where", "cat", "stack", "ones_like", "zeros_like")
    },
    **dict.fromkeys(("float", "double", "long", "bool", "view", "expand", "expand_as", "numel", "size", "dim"), _NONE),
    "to": frozenset({"dtype"}),
}
"""Methods of a tensor."""
OPERATORS: Final = frozenset(
    {
        *("add", "sub", "mul", "truediv", "pow", "neg", "pos", "abs", "getitem"),
        *("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "xor", "invert"),
    }
)
_ALIASES: Final = {
    "torch._C._nn.log_sigmoid": "torch.nn.functional.logsigmoid",
    "torch._C._nn.softplus": "torch.nn.functional.softplus",
}
"""How the tracer spells functions that are written in C."""


class LossInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """`logprobs`, or an input of the datum."""
    rank: Literal[0, 1, 2]
    """0 is a number, 1 has one for each token, 2 has K for each token."""


class LossNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: str
    target: str
    args: Sequence[Any] = ()
    """Numbers, texts and lists stand for themselves; everything else is an object with one key, such as
    `{"ref": NAME}`."""
    kwargs: Mapping[str, Any] = {}


class LossGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: Sequence[LossNode]
    format: Literal[1] = 1


class CustomLoss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A loss of a client: it computes one number from the log probabilities and other inputs of a group of datums."""

    name: str
    inputs: Sequence[LossInput]
    graph: LossGraph


def check_loss(loss: CustomLoss) -> None:
    """INVALID, with the node, if the ranks would not compute this loss."""
    nodes = loss.graph.nodes
    if not 2 <= len(nodes) <= MAX_NODES:
        _refuse(f"has {len(nodes)} nodes; a loss has 2 to {MAX_NODES}")
    _check_inputs(loss.inputs)
    names: set[str] = set()
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != [each.name for each in loss.inputs] or any(
        node.op != "placeholder" for node in nodes[: len(placeholders)]
    ):
        _refuse("its placeholders are not its inputs in their order, before all other nodes")
    for place, node in enumerate(nodes):
        if not _NAME.fullmatch(node.name) or node.name in names:
            _refuse(f"node {place} has no name of its own: {node.name[:80]!r}")
        if (node.op == "output") != (place == len(nodes) - 1):
            _refuse("its last node, and no other, must be its output", node)
        _check_references(node, names)
        if node.op == "output":
            read_output(loss.graph)
        elif node.op == "placeholder":
            if node.args or node.kwargs:
                _refuse("has arguments: an input has no default", node)
        else:
            _check_call(node)
        names.add(node.name)


def canonical_target(node: LossNode) -> str:
    """The function by the name under which it is public."""
    return _ALIASES.get(node.target, node.target)


def read_output(graph: LossGraph) -> tuple[str, Mapping[str, str]]:
    """The nodes that are the loss and its metrics."""
    node = graph.nodes[-1]
    match node.args:
        case [{"tuple": [{"ref": loss}, {"dict": dict(metrics)}]}] if isinstance(loss, str) and not node.kwargs:
            if node.target != "output":
                _refuse("its last node must have the target output", node)
        case _:
            _refuse("must return its loss and a dictionary of metrics", node)
    if len(metrics) > MAX_METRICS:
        _refuse(f"has {len(metrics)} metrics; a loss has at most {MAX_METRICS}", node)
    read: dict[str, str] = {}
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name):
            _refuse(f"metric {name[:80]!r} is not named custom/NAME:sum or custom/NAME:mean, in lowercase", node)
        match value:
            case {"ref": str(referred)} if len(value) == 1:
                read[name] = referred
            case _:
                _refuse(f"metric {name!r} is not a node", node)
    return loss, read


def _check_inputs(inputs: Sequence[LossInput]) -> None:
    names = [each.name for each in inputs]
    if not 1 <= len(inputs) <= MAX_INPUTS or len(set(names)) != len(names):
        _refuse(f"takes 1 to {MAX_INPUTS} inputs, each once, not {len(inputs)}")
    if names[0] != LOGPROBS or inputs[0].rank == 0:
        _refuse(f"its first input is {LOGPROBS}, with the rank 1 or 2")
    for name in names:
        if not _INPUT.fullmatch(name):
            _refuse(f"input {name[:80]!r} is not a lowercase name of letters, digits and underscores")


def _check_references(node: LossNode, earlier: set[str]) -> None:  # noqa: C901 - one arm per form
    """Every value in the arguments is of a known form, and refers to nodes before it: there are no cycles."""
    values = list(_values([*node.args, *node.kwargs.values()], node))
    if len(values) > MAX_ARGUMENTS:
        _refuse(f"has more than {MAX_ARGUMENTS} arguments", node)
    for value in values:
        match value:
            case {"ref": referred} if len(value) == 1:
                if not isinstance(referred, str) or referred not in earlier:
                    _refuse(f"refers to {str(referred)[:80]!r}, which is no node before it", node)
            case {"float": "inf" | "-inf" | "nan"} | {"ellipsis": True} if len(value) == 1:
                pass
            case {"dtype": dtype} if len(value) == 1:
                if not isinstance(dtype, str) or dtype not in DTYPES:
                    _refuse(f"names the type {str(dtype)[:80]!r}; known are {', '.join(sorted(DTYPES))}", node)
            case bool() | None:
                pass
            case int() if -(2**63) <= value < 2**63:
                pass
            case float() if math.isfinite(value):
                pass
            case str() if canonical_target(node) == "getattr" and value in ATTRIBUTES:
                pass
            case _:
                _refuse("has an argument that a loss cannot have here", node)


def _values(arguments: Sequence[Any], node: LossNode, nesting: int = 0) -> Iterator[Any]:
    """All values in lists, tuples and slices, and in the dictionary of metrics."""
    if nesting > MAX_NESTING:
        _refuse(f"has arguments in more than {MAX_NESTING} layers", node)
    for value in arguments:
        match value:
            case list() | {"tuple": list()} | {"slice": list()} if isinstance(value, list) or len(value) == 1:
                inside = value if isinstance(value, list) else next(iter(value.values()))
                if isinstance(value, dict) and "slice" in value and len(inside) != 3:
                    _refuse("has a slice that is no slice", node)
                yield from _values(inside, node, nesting + 1)
            case {"dict": dict(inside)} if len(value) == 1 and node.op == "output":
                yield from _values(list(inside.values()), node, nesting + 1)
            case _:
                yield value


def _check_call(node: LossNode) -> None:
    target = canonical_target(node)
    module, _, name = target.rpartition(".")
    allowed: frozenset[str] | None = None
    match node.op, module:
        case "call_function", "torch":
            allowed = TORCH.get(name)
        case "call_function", "torch.nn.functional":
            allowed = FUNCTIONAL.get(name)
        case "call_function", "operator" if name in OPERATORS:
            allowed = _NONE
        case "call_function", "" if name == "getattr":
            if len(node.args) != 2 or not isinstance(node.args[1], str) or node.args[1] not in ATTRIBUTES:
                _refuse(f"reads an attribute that is none of {', '.join(sorted(ATTRIBUTES))}", node)
            allowed = _NONE
        case "call_method", "":
            allowed = METHODS.get(name)
        case _:
            pass
    if allowed is None:
        _refuse("is not among the operations that this server computes for a client", node)
    if strange := sorted(set(node.kwargs) - allowed):
        _refuse(f"has no argument {strange[0][:80]!r} here", node)


def _refuse(why: str, node: LossNode | None = None) -> NoReturn:
    where = "graph" if node is None else f"graph: node {node.name[:80]!r} ({node.op} {node.target[:80]})"
    raise StrataError(Code.INVALID, f"{where}: {why}", hint="docs/training-losses.md lists what a loss may be made of")
