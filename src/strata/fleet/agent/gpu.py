"""What `nvidia-smi` says: the cards, and who uses them. Without the program there are no cards."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.fleet.core.capability import Gpu
from strata.fleet.core.requirement import Needs

MIB: Final = 1024 * 1024
ASKING_S: Final = 20.0
_CUDA: Final = re.compile(r"CUDA Version:\s*([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Cards:
    gpus: tuple[Gpu, ...] = ()
    driver_cuda: str = ""
    """The newest CUDA the driver can serve."""
    problem: str = ""


def cards(environ: Mapping[str, str]) -> Cards:
    listed, problem = _ask(["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"], environ)
    gpus = parse_cards(listed)
    if not gpus:
        return Cards(problem=problem)
    told, _ = _ask([], environ)
    found = _CUDA.search(told)
    return Cards(gpus, found[1] if found else "")


def users(environ: Mapping[str, str]) -> frozenset[int]:
    """Processes that compute on a card."""
    listed, _ = _ask(["--query-compute-apps=pid", "--format=csv,noheader,nounits"], environ)
    return frozenset(int(line) for line in listed.split() if line.isdecimal())


def parse_cards(listed: str) -> tuple[Gpu, ...]:
    rows = csv.reader(listed.splitlines(), skipinitialspace=True)
    return tuple(
        Gpu(name=row[0].strip()[:256], vram_bytes=int(row[1]) * MIB)
        for row in rows
        if len(row) == 2 and row[1].strip().isdecimal()
    )


def choose(gpus: Sequence[Gpu], held: Collection[Sequence[int]], needs: Needs, *, slots: int) -> tuple[int, ...] | None:
    """Which cards a job gets: those that fewest others have. None: all there are, for a host with one job at a time.

    A job that asks for no card on a host with several slots gets none, unless it would like one.
    """
    if slots <= 1 or not gpus:
        return None
    wanted = needs.min_gpus or (1 if needs.require_cuda or needs.min_vram_gib > 0 or needs.prefer_cuda else 0)
    # A card that is sold as 24 GiB reports a little less; matching has rounded already, so the largest come first.
    use = [sum(number in each for each in held) for number in range(len(gpus))]
    fits = [number for number, gpu in enumerate(gpus) if gpu.vram_bytes >= (needs.min_vram_gib - 0.5) * 1024**3]
    fits.sort(key=lambda number: (use[number], number))
    return tuple(sorted(fits[:wanted]))


def _ask(args: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """What it printed, and what is wrong with it. A driver that hangs is no reason to hang too."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *args],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASKING_S,
            check=False,
        )
    except FileNotFoundError:
        return "", ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi: {error}"
    if done.returncode:
        said = (done.stdout or done.stderr).decode(errors="replace").strip()
        return "", f"nvidia-smi: {said[:200] or done.returncode}"
    return done.stdout.decode(errors="replace"), ""
