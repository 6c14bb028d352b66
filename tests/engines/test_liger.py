"""Liger's own kernels under Triton's interpreter: our fused layers beside the unmodified models of transformers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from strata.base.settings import process_environment
from strata.train.combinations import FUSED_FAMILIES
from tests.engines.liger_interpreter import Apart

LIGER: Final = "0.8.5"
TRITON: Final = "3.7.1"
"""What torch 2.13 asks for."""
ROOT: Final = Path(__file__).parents[2]
CLOSE: Final = 1e-4
"""How far rounding in float32 may be apart."""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with both, without the build of torch that they would bring."""
    folder = Path("~/.cache/strata-tests").expanduser() / f"liger-{LIGER}-triton-{TRITON}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        # An index or a folder of links that is set for the CPU build of torch has neither.
        own = {**process_environment(), "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
        subprocess.run([*pip, f"liger-kernel=={LIGER}", f"triton=={TRITON}"], env=own, check=True, timeout=1800)
        (folder / "complete").touch()
    return folder


@pytest.mark.parametrize("family", sorted(FUSED_FAMILIES))
def test_layers_on_ligers_kernels_compute_what_transformers_does(family: str, packages: Path, tmp_path: Path) -> None:
    environment = {**process_environment(), "PYTHONPATH": f"{packages}:{ROOT}", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.engines.liger_interpreter", str(tmp_path / "out.json"), family]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, timeout=1800, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    apart = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Apart)
    ran = {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_triton_rope"}
    if family != "qwen3_moe":
        ran |= {"_swiglu_forward_kernel", "_swiglu_backward_kernel"}
    assert apart.kernels.keys() == ran
    assert apart.logprobs < CLOSE
    assert apart.gradients < CLOSE
    assert apart.adapters < CLOSE
    assert apart.refused.startswith("model.fused_layers cannot be liger here: its log probabilities are not those")
