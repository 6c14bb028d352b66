"""Checks arrays of clients before a rank takes them: types, shapes, finite numbers, sparse columns, at most 1 GiB
dense; with the wording of each refusal.

All checks are vectorized: a batch has millions of tokens, and none of them is looked at in Python alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strata.train.core.ops import (
    MAX_DATUMS,
    MAX_DIMENSIONS,
    MAX_INPUTS,
    MAX_NAME,
    Datum,
    Dense,
    DType,
    Sparse,
    Tensor,
)
from strata.train.wire.fields import invalid_field

MAX_DENSE_BYTES: Final = 1 << 30
"""Bytes of a sparse matrix when it is written out: a few bytes must not become all the memory of a rank."""

NUMPY: Final = {DType.F32: "<f4", DType.I64: "<i8", DType.I32: "<i4", DType.BF16: "<u2"}
PER_TOKEN: Final = frozenset({"target_tokens", "weights", "advantages", "logprobs"})
"""Inputs that every loss reads beside the tokens, one row for each."""


def check_datums(datums: Sequence[Datum]) -> None:
    if not datums:
        raise invalid_field("data", "there is nothing to train on")
    if len(datums) > MAX_DATUMS:
        raise invalid_field("data", f"has {len(datums)} datums; one operation takes at most {MAX_DATUMS}")
    for index, datum in enumerate(datums):
        _check_datum(f"data[{index}]", datum)


def _check_datum(path: str, datum: Datum) -> None:
    tokens = as_array(f"{path}.model_input", datum.tokens, DType.I32)
    if not tokens.size:
        raise invalid_field(f"{path}.model_input", "has no tokens")
    if tokens.min() < 0:
        where = int((tokens < 0).argmax())
        raise invalid_field(f"{path}.model_input", f"token {where} is {tokens[where]}, which no vocabulary has")
    if len(datum.inputs) > MAX_INPUTS:
        raise invalid_field(f"{path}.loss_fn_inputs", f"has {len(datum.inputs)} arrays; at most {MAX_INPUTS} are read")
    for name, tensor in datum.inputs.items():
        here = f"{path}.loss_fn_inputs.{name[:MAX_NAME]}"
        check_tensor(here, tensor)
        if name in PER_TOKEN and tensor.shape[:1] != (tokens.size,):
            raise invalid_field(here, f"has the shape {list(tensor.shape)} beside {tokens.size} tokens")


def check_tensor(path: str, tensor: Tensor) -> None:
    if len(tensor.shape) > MAX_DIMENSIONS or any(size < 0 for size in tensor.shape):
        raise invalid_field(path, f"{list(tensor.shape[: MAX_DIMENSIONS + 1])} is not a shape")
    values = as_array(path, tensor.data, tensor.dtype)
    if isinstance(tensor, Dense):
        wanted = math.prod(tensor.shape)
        if values.size != wanted:
            raise invalid_field(path, f"has {values.size} numbers where the shape {list(tensor.shape)} has {wanted}")
    else:
        _check_sparse(path, tensor, values.size)
    _check_finite(path, values, tensor.dtype)


def _check_sparse(path: str, tensor: Sparse, count: int) -> None:
    rows, columns = tensor.shape
    if rows * columns * tensor.dtype.itemsize > MAX_DENSE_BYTES:
        raise invalid_field(path, f"a matrix of {rows} times {columns} is more than any loss reads")
    crow = as_array(f"{path}.crow_indices", tensor.crow, DType.I64)
    col = as_array(f"{path}.col_indices", tensor.col, DType.I64)
    if crow.size != rows + 1:
        raise invalid_field(f"{path}.crow_indices", f"has {crow.size} entries for {rows} rows, not {rows + 1}")
    if crow[0] != 0 or crow[-1] != count or (np.diff(crow) < 0).any():
        raise invalid_field(f"{path}.crow_indices", f"does not go up from 0 to the {count} values")
    _check_columns(path, crow, col, columns)


def _check_columns(path: str, crow: npt.NDArray[Any], col: npt.NDArray[Any], columns: int) -> None:
    count = int(crow[-1])
    if col.size != count:
        raise invalid_field(f"{path}.col_indices", f"has {col.size} entries for {count} values")
    if count and not (col.min() >= 0 and col.max() < columns):
        raise invalid_field(f"{path}.col_indices", f"names a column beyond the {columns} there are")
    inside = np.diff(col) <= 0
    inside[crow[(crow > 0) & (crow < count)] - 1] = False
    if inside.any():
        raise invalid_field(f"{path}.col_indices", "a row names its columns twice or out of order")


def _check_finite(path: str, values: npt.NDArray[Any], dtype: DType) -> None:
    if dtype is DType.F32:
        good = np.isfinite(values)
    elif dtype is DType.BF16:
        good = (values & 0x7F80) != 0x7F80
    else:
        return
    if not good.all():
        where = int((~good).argmax())
        raise invalid_field(
            path, f"number {where} is {to_client_dtype(values, dtype)[where]}; only finite numbers can be trained on"
        )


def as_array(path: str, data: bytes, dtype: DType) -> npt.NDArray[Any]:
    """The bytes as an array, without a copy; bfloat16 as the integers of its bits."""
    if len(data) % dtype.itemsize:
        raise invalid_field(path, f"{len(data)} bytes are no whole number of {dtype.value}")
    return np.frombuffer(data, NUMPY[dtype])


def to_client_dtype(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Converts to a type that clients know: float32 or int64."""
    if dtype is DType.BF16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.int64) if dtype is DType.I32 else values
