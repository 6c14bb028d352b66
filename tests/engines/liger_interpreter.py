"""Liger's own kernels in our layers, under Triton's interpreter, beside the unmodified models of transformers.

A program of its own: `TRITON_INTERPRET=1 python -m tests.engines.liger_interpreter OUT FAMILY`, with Liger and
Triton in the path. It writes to OUT by how much log probabilities and gradients are apart, and how many kernels ran.

Two things stop Liger 0.8.5 under the interpreters of Triton 3.7.1 and 3.9.0; both are mended here and nowhere else.
A number that is passed to a kernel stays a number of Python, which has no `to` ("'float' object has no attribute
'to'"), and `rsqrt` of CUDA's libdevice returns None ("cannot convert None of type <class 'NoneType'> to tensor"). In
bfloat16 the interpreter gives NaN, so nothing is compared in it.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from strata.base.errors import StrataError
from tests.shell.train_runner import family_table, tiny_families
from tests.shell.train_runner.replicated import compute
from tests.shell.train_runner.single_rank import one_rank


class Apart(msgspec.Struct):
    logprobs: float
    """In nats."""
    gradients: float
    """The largest difference of a weight's gradient, as a share of its largest number."""
    adapters: float
    """The same of an adapter on fused layers and on plain ones, by their norm."""
    kernels: dict[str, int]
    refused: str
    """What the start-up check says of Liger's rotary embedding the wrong way round."""


def mend_interpreter() -> None:
    """Before Liger is imported."""
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.language.extra import libdevice  # type: ignore[import-not-found, import-untyped, unused-ignore]
    from triton.runtime import interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

    convert: Any = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = with_floats

    def rsqrt(value: Any) -> Any:
        # Looked up at each call: the interpreter puts its own functions there while a kernel runs.
        return tl.math.rsqrt(value)

    libdevice.rsqrt = rsqrt


def count_kernels() -> Counter[str]:
    from triton.runtime import interpreter  # type: ignore[import-not-found, import-untyped, unused-ignore]

    calls: Counter[str] = Counter()
    run = interpreter.GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls[executor.fn.__name__] += 1
        return run(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    return calls


def main(out: Path, family: str) -> None:
    mend_interpreter()
    calls = count_kernels()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, one_rank(Path(temporary)) as ranks:
        folder = Path(temporary) / family
        tiny_families.make(family, folder)
        base = family_table.base_of(folder, ranks, "full", fused_layers="liger")
        with torch.no_grad():
            logprobs = float((family_table.all_logprobs(base) - family_table.reference_logprobs(folder)).abs().max())
        ours, theirs = family_table.gradients(base), family_table.reference_gradients(folder)
        assert ours.keys() == theirs.keys()
        largest = max(float(gradient.abs().max()) for gradient in theirs.values())
        gradients = max(
            float((ours[name] - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * largest)
            for name, gradient in theirs.items()
        )
        options: dict[str, Any] = {"replicated_bytes": 1 << 30, "activation_checkpointing": True}
        plain, fused = (
            compute(family_table.base_of(folder, ranks, **options, fused_layers=layers), ranks)
            for layers in ("", "liger")
        )
        adapters = float((fused - plain).norm() / plain.norm())
        apart = Apart(logprobs, gradients, adapters, dict(calls), _refused(folder, ranks))
    out.write_bytes(msgspec.json.encode(apart))


def _refused(folder: Path, ranks: Any) -> str:
    from liger_kernel.transformers import rope  # type: ignore[import-not-found, import-untyped, unused-ignore]

    rotate = rope.liger_rotary_pos_emb
    rope.liger_rotary_pos_emb = lambda query, key, cos, sin: rotate(query, key, cos, -sin)
    try:
        family_table.base_of(folder, ranks, fused_layers="liger")
    except StrataError as error:
        return error.message
    finally:
        rope.liger_rotary_pos_emb = rotate
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
