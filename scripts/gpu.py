"""Everything that has to be shown on CUDA devices, as one command: `make gpu`, or `.venv/bin/python scripts/gpu.py`.

It runs on one device, on two and on eight, as far as the machine has them: the tests that are marked `gpu` (numbers,
meshes, memory, snapshots), the kill campaign with NCCL between the ranks, and the benches beside a bare torch loop. It
goes on after a failure and ends with status 1 if there was any, and with status 77 if there is no CUDA device.
`--collect` shows what would run: it needs no device.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[1]
SIZES: Final = (1, 2, 8)
NO_DEVICE: Final = 77
"""The exit status of a test that was skipped, by the convention of Automake."""
FOLDER: Final = "tests/shell/train_runner"
FILES: Final = ("numerics", "attention", "mesh", "memory", "snapshots", "replicated")
TESTS: Final = ("pytest", "-m", "gpu", *(f"{FOLDER}/test_{name}.py" for name in FILES))


class Step(NamedTuple):
    module: str
    arguments: tuple[str, ...]
    devices: int

    @property
    def environment(self) -> Mapping[str, str]:
        """Tests take the first two variables; every server that a bench or a campaign starts takes the third."""
        return {
            "STRATA_TEST_DEVICE": "cuda",
            "STRATA_TEST_RANKS": str(max(self.devices, 2)),
            "STRATA_RANKS_BACKEND": "nccl",
        }

    def __str__(self) -> str:
        return f"{self.module} {' '.join(self.arguments)} on {self.devices} of CUDA"


def steps(devices: int) -> Iterator[Step]:
    for size in SIZES:
        if size <= devices:
            yield Step(TESTS[0], TESTS[1:], size)
            if size == 2:
                # Its servers have two ranks.
                yield Step("soak", ("train-kill", "--kills", "20"), size)
            yield Step("bench", ("train",), size)
            yield Step("bench", ("recovery",), size)


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests, campaign and benches on CUDA devices.")
    parser.add_argument("--collect", action="store_true", help="show what would run on eight devices")
    if parser.parse_args().collect:
        print(*steps(max(SIZES)), sep="\n", flush=True)
        return subprocess.run([sys.executable, "-m", *TESTS, "--collect-only", "-q"], cwd=ROOT, check=False).returncode
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device on this machine: nothing ran. `scripts/gpu.py --collect` shows what would run.")
        return NO_DEVICE
    visible = _visible(torch.cuda.device_count())
    failed = []
    for step in steps(len(visible)):
        print(f"== {step}", flush=True)
        environment = {
            **process_environment(),
            **step.environment,
            "CUDA_VISIBLE_DEVICES": ",".join(visible[: step.devices]),
        }
        command = [sys.executable, "-m", step.module, *step.arguments]
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(step)
    names = [torch.cuda.get_device_name(number) for number in range(len(visible))]
    print(f"devices: {', '.join(names)}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    for size in SIZES:
        if size > len(visible):
            print(f"NOT RUN: {size} devices, there are {len(visible)}")
    print("failed:" if failed else "nothing failed", *failed, sep="\n  ")
    return 1 if failed else 0


def _visible(count: int) -> list[str]:
    """As a variable of this process names them, or by their numbers."""
    named = process_environment().get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


if __name__ == "__main__":
    sys.exit(main())
