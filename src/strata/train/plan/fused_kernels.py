"""Names of the fused kernels of others that passes may use, the packages that have them, and what they need of a
device.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment

FusedLayers = Literal["", "liger"]
"""The setting `model.fused_layers`; empty: the layers of transformers."""
AttentionKernel = Literal["", "FA3", "FA4"]
"""The setting `model.attention`, by torch's names; empty: torch's own kernel."""


class KernelPackage(NamedTuple):
    module: str
    install: str


PACKAGES: Final[Mapping[str, KernelPackage]] = {
    "liger": KernelPackage("liger_kernel", "pip install liger-kernel"),
    "FA3": KernelPackage("flash_attn_interface", "install it from the folder hopper of flash-attention"),
    "FA4": KernelPackage("flash_attn", "pip install flash-attn-4; with torch 2.13, 4.0.0b19"),
}


def check_fused_kernels(layers: FusedLayers, attention: AttentionKernel, dtype: str, *, on_cuda: bool) -> None:
    """UNSUPPORTED if ranks on such devices could not use the kernels, or their package is not installed."""
    # Triton's interpreter runs its kernels on CPUs, very slowly, for tests.
    if layers and not on_cuda and process_environment().get("TRITON_INTERPRET") != "1":
        raise StrataError(
            Code.UNSUPPORTED, f"model.fused_layers is {layers}, which needs CUDA devices", hint="leave it out"
        )
    if attention and not (on_cuda and dtype == "bfloat16"):
        raise StrataError(
            Code.UNSUPPORTED,
            f"model.attention is {attention}, which needs CUDA devices and bfloat16",
            hint='set model.dtype = "bfloat16", or leave model.attention out',
        )
    for setting, kernel in (("model.fused_layers", layers), ("model.attention", attention)):
        if kernel and find_spec(PACKAGES[kernel].module) is None:
            raise StrataError(
                Code.UNSUPPORTED,
                f"{setting} is {kernel}, which needs {PACKAGES[kernel].module}, and that is not installed",
                hint=PACKAGES[kernel].install,
            )
