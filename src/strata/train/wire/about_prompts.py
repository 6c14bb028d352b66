"""What clients ask about a prompt beside its own tokens: others in their places, named by the client or drawn."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from strata.train.core import ops
from strata.train.core.sampling import Draws, Layout, TargetLogprobs, Targets
from strata.train.wire.arrays import check_tensor, refuse
from strata.train.wire.json_era import TensorJson, tensor_of
from strata.train.wire.pb import tinker_pb2 as pb

MOST_TARGETS: Final = 1 << 18
"""They go into the journal with their request."""
_HERE: Final = "target_prompt_logprobs"


def targets_of(given: TensorJson, length: int) -> Targets:
    """A row of tokens for each token of the prompt but the first."""
    tensor = tensor_of(_HERE, given)
    if tensor.dtype is not ops.DType.I64 or len(tensor.shape) != 2 or tensor.shape[0] != length - 1:
        found = f"{tensor.dtype.value} of {list(tensor.shape)}"
        raise refuse(_HERE, f"is to be int64 of [{length - 1}, K], and is {found}")
    check_tensor(_HERE, tensor)
    tokens = np.frombuffer(tensor.data, "<i8")
    if tokens.size > MOST_TARGETS:
        raise refuse(_HERE, f"names {tokens.size} tokens; at most {MOST_TARGETS} are looked up at once")
    if ((tokens < -1) | (tokens >= 2**31)).any():
        raise refuse(_HERE, "names what is no token; -1 stands for none")
    shape = tensor.shape[0], tensor.shape[1]
    layout = Layout(shape, tensor.crow, tensor.col) if isinstance(tensor, ops.Sparse) else Layout(shape)
    return Targets(tokens.astype("<i4").tobytes(), layout)


def targets_to_proto(found: TargetLogprobs) -> pb.Tensor:
    layout = found.layout
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=layout.shape)
    if layout.crow is None or layout.col is None:
        tensor.dense = found.logprobs
    else:
        sparse = pb.SparseCsr(values=found.logprobs, crow_indices=layout.crow, col_indices=layout.col)
        tensor.sparse_csr.CopyFrom(sparse)
    return tensor


def draws_to_proto(draws: Draws) -> pb.PromptAltTokens:
    shape = [draws.length, draws.k]
    tokens = np.frombuffer(draws.tokens, "<i4").astype("<i8").tobytes()
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dense=tokens, dtype=pb.DTYPE_INT64, shape=shape),
        logprobs=pb.Tensor(dense=draws.logprobs, dtype=pb.DTYPE_FLOAT32, shape=shape),
    )


def targets_to_json(found: TargetLogprobs) -> dict[str, Any]:
    layout = found.layout
    told: dict[str, Any] = {
        "data": np.frombuffer(found.logprobs, "<f4").tolist(),
        "dtype": "float32",
        "shape": layout.shape,
    }
    if layout.crow is not None and layout.col is not None:
        told["sparse_crow_indices"] = np.frombuffer(layout.crow, "<i8").tolist()
        told["sparse_col_indices"] = np.frombuffer(layout.col, "<i8").tolist()
    return told


def draws_to_json(draws: Draws) -> dict[str, Any]:
    shape = [draws.length, draws.k]
    return {
        "tokens": {"data": np.frombuffer(draws.tokens, "<i4").tolist(), "dtype": "int64", "shape": shape},
        "logprobs": {"data": np.frombuffer(draws.logprobs, "<f4").tolist(), "dtype": "float32", "shape": shape},
    }
