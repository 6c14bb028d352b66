"""The CUDA build of torch in a folder of its own, for machines without a GPU: it imports without a driver."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from strata.base.settings import process_environment
from tests.cuda_lane.table import CaseCounts

VERSION: Final = torch.__version__.partition("+")[0]
FOLDER: Final = "STRATA_TEST_CUDA_TORCH"
"""A folder that has the build already; else it is installed into the user's cache, 3.4 GB once."""
LIBRARY: Final = "strata-hooks.so"
SOURCE: Final = Path(__file__).with_name("hooks.cpp")
ROOT: Final = Path(__file__).parents[2]


def prepare() -> Path:
    """The folder with torch, and in it the library that lets autograd run."""
    environment = process_environment()
    folder = Path(environment.get(FOLDER) or Path("~/.cache/strata-tests").expanduser() / f"cuda-torch-{VERSION}")
    done = folder / "complete"
    if FOLDER not in environment and not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), f"torch=={VERSION}"]
        # An index or a folder of links that is set for the CPU build has no other.
        own = {**environment, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
        subprocess.run(pip, env=own, check=True, timeout=1800)
        done.touch()
    library = folder / LIBRARY
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        compile_hooks(folder, library)
    return folder


def compile_hooks(folder: Path, library: Path) -> None:
    """With the headers of that build."""
    parts = ["-I", str(folder / "torch/include"), "-L", str(folder / "torch/lib"), "-lc10", "-ltorch_cpu"]
    options = ["-std=c++20", "-shared", "-fPIC", "-O1", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["g++", *options, str(SOURCE), "-o", str(library), *parts], check=True, timeout=300)


def run(folder: Path, cases: Sequence[str], *, planted: bool = False) -> dict[str, CaseCounts]:
    """Count these cases of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "counts.json"
        run_module(folder, "tests.cuda_lane.lane", "--out", str(out), *(["--planted"] if planted else []), "--", *cases)
        return msgspec.json.decode(out.read_bytes(), type=dict[str, CaseCounts])


def run_module(folder: Path, module: str, *arguments: str) -> None:
    """In a process with the CUDA build of torch, and all else of this environment."""
    environment = {
        **process_environment(),
        "PYTHONPATH": f"{folder}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", module, "--hooks", str(folder / LIBRARY), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, timeout=1800, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
