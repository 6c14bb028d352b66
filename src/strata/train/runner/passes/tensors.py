"""Decode the tensors of a request and encode those of a result. A malformed tensor is rejected by its name."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import torch

from strata.base.errors import Code, StrataError
from strata.train.core import ops

DENSE_LIMIT: Final = 1 << 26
"""The most numbers of one input. A sparse matrix can claim any shape in a few bytes, so the shape is limited."""
_NUMPY: Final = {ops.DType.F32: "<f4", ops.DType.I64: "<i8", ops.DType.I32: "<i4", ops.DType.BF16: "<i2"}


def invalid(message: str) -> StrataError:
    return StrataError(Code.INVALID, message)


def read_tokens(datum: ops.Datum) -> torch.Tensor:
    return _numbers(datum.tokens, ops.DType.I32).to(torch.int64)


def to_tensor(name: str, tensor: ops.Tensor) -> torch.Tensor:
    """A dense tensor of float32 or int64."""
    size = math.prod(tensor.shape)
    if any(length < 0 for length in tensor.shape) or size > DENSE_LIMIT:
        raise invalid(f"{name} has the shape {tuple(tensor.shape)}, which is not one of at most {DENSE_LIMIT} numbers")
    try:
        values = _numbers(tensor.data, tensor.dtype)
        dense = values.reshape(tensor.shape) if isinstance(tensor, ops.Dense) else _densify(name, tensor, values)
    except (ValueError, RuntimeError) as error:
        raise invalid(f"{name} does not hold what its shape {tuple(tensor.shape)} says") from error
    if dense.is_floating_point() and not bool(torch.isfinite(dense).all()):
        raise invalid(f"{name} holds a number that is not finite")
    return dense


def to_dense(tensor: torch.Tensor) -> ops.Dense:
    """Encode a tensor as float32."""
    plain = tensor.detach().to("cpu", torch.float32).contiguous()
    return ops.Dense(ops.DType.F32, tuple(plain.shape), plain.numpy().tobytes())


def _numbers(data: bytes, dtype: ops.DType) -> torch.Tensor:
    # frombuffer alone would share read-only memory, which torch warns of.
    plain = torch.from_numpy(np.frombuffer(data, dtype=_NUMPY[dtype]).copy())
    match dtype:
        case ops.DType.BF16:
            return plain.view(torch.bfloat16).to(torch.float32)
        case ops.DType.I32:
            return plain.to(torch.int64)
        case _:
            return plain


def _densify(name: str, tensor: ops.Sparse, values: torch.Tensor) -> torch.Tensor:
    rows, columns = tensor.shape
    crow = _numbers(tensor.crow, ops.DType.I64)
    col = _numbers(tensor.col, ops.DType.I64)
    counts = crow.diff()
    well_formed = (
        crow.shape == (rows + 1,)
        and col.shape == values.shape
        and int(crow[0]) == 0
        and int(crow[-1]) == len(values)
        and bool((counts >= 0).all())
        and bool(((col >= 0) & (col < columns)).all())
    )
    if not well_formed:
        raise invalid(f"{name} is not a matrix in compressed row format (CSR)")
    dense = torch.zeros((rows, columns), dtype=values.dtype)
    dense[torch.arange(rows).repeat_interleave(counts), col] = values
    return dense


def decode_pass_data(data: bytes) -> ops.PassData:
    try:
        return ops.decode_pass_data(data)
    except msgspec.MsgspecError as error:
        raise invalid(f"the payload cannot be decoded as the data of a pass: {error}") from error
