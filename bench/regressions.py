"""Compares this commit with the last release, as `make weekly` does: `python -m bench.regressions`.

Each bench that calls both commits by turns runs once in its quick version, and again if a case lost more than 5 %. A
case that lost in both runs is red, until the table of docs/benchmarks.md says why and down to which ratio. Cases
without a goal are only printed: the tails of few turns, and latencies at more than a server can do.

`bench/released.toml` names the release: its version, its commit and the SHA-256 of its wheel. The exit status is 0 if
nothing is red, 1 if a case is or a bench failed, and 77 if no release is recorded: then nothing was compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from bench.against import ROOT
from bench.report import Line

BENCHES: Final = ("coordinator", "fleet", "train")
"""Those with `run_against`. Whole runs of each commit, as of the others, differ by more than 5 % without a cause."""
RELEASED: Final = ROOT / "bench" / "released.toml"
EXPLAINED: Final = ROOT / "docs" / "benchmarks.md"
HEADING: Final = "\n## Slower than the last release\n"
LIMIT: Final = 0.95
"""The ratio, new to old, below which a case has lost."""
NOT_COMPARED: Final = 77
"""The exit status of a test that was skipped, by the convention of Automake."""
_ROW: Final = re.compile(
    r"\| (?P<bench>\w+) \| `(?P<case>[\w.]+)` \| (?P<release>[\w.]+) \| (?P<limit>0\.\d+) \| \S.* \|"
)


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of the last release, written when its successor's development starts."""

    version: str
    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}$")]
    wheel_sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def read_release(recorded: Path) -> Release:
    return msgspec.toml.decode(recorded.read_bytes(), type=Release)


class Case(NamedTuple):
    bench: str
    name: str


Ratios = Mapping[Case, float]


def find_losses(ratios: Ratios, explained: Ratios) -> set[Case]:
    """Returns the cases below the limit, which is a lower one for a case that is explained."""
    return {case for case, ratio in ratios.items() if ratio < min(LIMIT, explained.get(case, LIMIT))}


def find_red(runs: Sequence[Ratios], explained: Ratios) -> set[Case]:
    """Returns the cases that lost in each of two runs or more: one run alone shows nothing."""
    return set.intersection(*(find_losses(run, explained) for run in runs)) if len(runs) > 1 else set()


def read_explained(page: str, version: str) -> dict[Case, float]:
    """Returns the limits that the table of the page has for losses beside this version."""
    _, heading, section = page.partition(HEADING)
    if not heading:
        raise ValueError(f"docs/benchmarks.md has no section '{HEADING.strip()}'")
    # The first two lines are the head of the table.
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    explained = {}
    for row in rows:
        match = _ROW.fullmatch(row)
        if match is None or match["bench"] not in BENCHES:
            raise ValueError(f"docs/benchmarks.md should have '| bench | `case` | release | 0.9 | why |': {row}")
        if match["release"] == version:
            explained[Case(match["bench"], match["case"])] = float(match["limit"])
    return explained


def compare_release(recorded: Path) -> int:
    """Returns the exit status; `recorded` is the file of the last release."""
    if not recorded.exists():
        print("nothing was compared: bench/released.toml records no release yet")
        return NOT_COMPARED
    release = read_release(recorded)
    explained = read_explained(EXPLAINED.read_text(encoding="utf-8"), release.version)
    failed = [bench for bench in BENCHES if not _passes(bench, release, explained)]
    print(
        f"red beside {release.version}: {', '.join(failed)}" if failed else f"nothing is red beside {release.version}"
    )
    return 1 if failed else 0


def _passes(bench: str, release: Release, explained: Ratios) -> bool:
    runs: list[Ratios] = []
    try:
        runs.append(_run(bench, release.commit))
        if losses := find_losses(runs[0], explained):
            print(f"{bench} runs again: {_list(losses)} lost", flush=True)
            runs.append(_run(bench, release.commit))
    except subprocess.CalledProcessError as error:
        print(f"{bench} failed with status {error.returncode}; see above", flush=True)
        return False
    red = find_red(runs, explained)
    for case in sorted(red):
        ratios = " and ".join(f"{run[case]:.3f}" for run in runs)
        print(
            f"{bench} {case.name} is red: {ratios} of {release.version}; explain it in docs/benchmarks.md or repair it"
        )
    return not red


def _run(bench: str, commit: str) -> Ratios:
    """Returns the cases with a goal, and prints all."""
    command = (sys.executable, "-m", "bench", bench, "--quick", "--json-only", "--against", commit)
    ratios: dict[Case, float] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            line = msgspec.json.decode(text, type=Line)
            if line.goal is not None:
                ratios[Case(bench, line.case)] = line.ratio
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return ratios


def _list(cases: set[Case]) -> str:
    return ", ".join(sorted(case.name for case in cases))


if __name__ == "__main__":
    sys.exit(compare_release(RELEASED))
