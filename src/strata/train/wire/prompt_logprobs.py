"""Log probabilities of other tokens in a prompt: tokens that the client names, or alternatives that are drawn."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from strata.train.core import ops
from strata.train.core.sampling import Draws, Layout, TargetLogprobs, Targets
from strata.train.wire.arrays import check_tensor, invalid_field
from strata.train.wire.pb import tinker_pb2 as pb
from strata.train.wire.tinker_json import TensorJson, tensor_of

MAX_TARGETS: Final = 1 << 18
"""They go into the journal with their request."""
_FIELD: Final = "target_prompt_logprobs"


def targets_of(sent: TensorJson, length: int) -> Targets:
    """A row of tokens for each token of the prompt but the first."""
    tensor = tensor_of(_FIELD, sent)
    if tensor.dtype is not ops.DType.I64 or len(tensor.shape) != 2 or tensor.shape[0] != length - 1:
        actual = f"{tensor.dtype.value} of {list(tensor.shape)}"
        raise invalid_field(_FIELD, f"is to be int64 of [{length - 1}, K], and is {actual}")
    check_tensor(_FIELD, tensor)
    tokens = np.frombuffer(tensor.data, "<i8")
    if tokens.size > MAX_TARGETS:
        raise invalid_field(_FIELD, f"names {tokens.size} tokens; at most {MAX_TARGETS} are looked up at once")
    if ((tokens < -1) | (tokens >= 2**31)).any():
        raise invalid_field(_FIELD, "names what is no token; -1 stands for none")
    shape = tensor.shape[0], tensor.shape[1]
    layout = Layout(shape, tensor.crow, tensor.col) if isinstance(tensor, ops.Sparse) else Layout(shape)
    return Targets(tokens.astype("<i4").tobytes(), layout)


def targets_to_proto(targets: TargetLogprobs) -> pb.Tensor:
    layout = targets.layout
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=layout.shape)
    if layout.crow is None or layout.col is None:
        tensor.dense = targets.logprobs
    else:
        sparse = pb.SparseCsr(values=targets.logprobs, crow_indices=layout.crow, col_indices=layout.col)
        tensor.sparse_csr.CopyFrom(sparse)
    return tensor


def draws_to_proto(draws: Draws) -> pb.PromptAltTokens:
    shape = [draws.length, draws.k]
    tokens = np.frombuffer(draws.tokens, "<i4").astype("<i8").tobytes()
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dense=tokens, dtype=pb.DTYPE_INT64, shape=shape),
        logprobs=pb.Tensor(dense=draws.logprobs, dtype=pb.DTYPE_FLOAT32, shape=shape),
    )


def targets_to_json(targets: TargetLogprobs) -> dict[str, Any]:
    layout = targets.layout
    tensor: dict[str, Any] = {
        "data": np.frombuffer(targets.logprobs, "<f4").tolist(),
        "dtype": "float32",
        "shape": layout.shape,
    }
    if layout.crow is not None and layout.col is not None:
        tensor["sparse_crow_indices"] = np.frombuffer(layout.crow, "<i8").tolist()
        tensor["sparse_col_indices"] = np.frombuffer(layout.col, "<i8").tolist()
    return tensor


def draws_to_json(draws: Draws) -> dict[str, Any]:
    shape = [draws.length, draws.k]
    return {
        "tokens": {"data": np.frombuffer(draws.tokens, "<i4").tolist(), "dtype": "int64", "shape": shape},
        "logprobs": {"data": np.frombuffer(draws.logprobs, "<f4").tolist(), "dtype": "float32", "shape": shape},
    }
