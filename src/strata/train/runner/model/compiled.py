"""Compiles layers by `torch.compile`: which modules stay uncompiled, and the limit of recompilations (64).

Attention, adapters and experts stay as they are written: they follow the documents, adapters and tokens of a row, and
would be compiled again for each. A layer is compiled once for rows of every length, for passes with gradients and for
those without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import AttentionInterface

from strata.base.errors import Code, StrataError
from strata.base.settings import put_variables
from strata.train.runner.lora.targets import is_experts
from strata.train.runner.model.attention import ATTENTION, document_attention

RECOMPILE_LIMIT: Final = 64
"""How often one function of a layer may be compiled."""

F = TypeVar("F", bound=Callable[..., Any])


def prepare_compiling(folder: Path) -> None:
    """UNSUPPORTED if this machine has no compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        message = "model.compile needs a C++ compiler on the machine of every rank, such as g++"
        raise StrataError(Code.UNSUPPORTED, message) from error
    # Not in a folder that another user could have made before.
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    put_variables({"TORCHINDUCTOR_CACHE_DIR": str(folder.absolute())})


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compiles the layers at their next call, which takes a minute or so."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as autograd_config
    from torch._inductor import config as inductor_config

    # Without the caches that are read by pickle.
    inductor_config.fx_graph_cache = False
    autograd_config.enable_autograd_cache = False
    # Past its limit, torch goes on uncompiled. Every shape of a linear layer counts, with gradients and without.
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    AttentionInterface.register(ATTENTION, keep_uncompiled(document_attention))
    for layer in layers:
        for module in layer.modules():
            if is_experts(module):
                module.forward = keep_uncompiled(module.forward)
        layer.compile(dynamic=True)


def keep_uncompiled(function: F) -> F:
    """The same function, which compiled code calls as it is."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
