"""An older commit beside this one: `python -m bench NAME --against REV`.

Each turn is one whole run of the bench in a process of its own, old and new in the order A B B A. A run measures its
commit beside the bare engine, so a case is compared by its ratio to the bare engine. Both commits use the packages of
this environment.

A bench that can serve both commits to the same clients has `run_against` instead, and compares them by turns: on two
cores the noise between two whole runs is larger than what commits differ by. `bench.regressions` compares with the
last release by those.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from bench.interleave import turns
from bench.report import Line

ROOT: Final = Path(__file__).parents[1]
PROGRAM: Final = ".venv/bin/strata"
"""Below the tree of a commit."""
OLDER_GOAL: Final = 0.97
"""What a case has to reach beside an older commit."""


class ComparedCase(msgspec.Struct, frozen=True):
    """The fields and their order are those of the JSON line."""

    bench: str
    case: str
    old: float
    """The median of the case's ratios to the bare engine."""
    new: float
    ratio: float
    """New to old: above 1 is better."""


def compare(bench: str, revision: str, *, rounds: int, quick: bool) -> list[ComparedCase]:
    """Cases that only one of the commits has are left out."""
    with checkout(revision) as old:
        roots = {"ours": ROOT, "bare": old}
        found: dict[str, list[Mapping[str, float]]] = {"ours": [], "bare": []}
        for side in turns(rounds):
            found[side].append(_ratios(roots[side], bench, quick=quick))
    cases = [case for case in found["ours"][0] if all(case in run for runs in found.values() for run in runs)]
    compared = []
    for case in cases:
        old_ratio, new_ratio = (median(run[case] for run in found[side]) for side in ("bare", "ours"))
        ratio = median(new[case] / old[case] for new, old in zip(found["ours"], found["bare"], strict=True))
        compared.append(ComparedCase(bench, case, round(old_ratio, 3), round(new_ratio, 3), round(ratio, 3)))
    return compared


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The tree of a commit, with an environment that has the packages of this one but the commit's own `strata`."""
    look = ["git", "cat-file", "-e", f"{revision}^{{commit}}"]
    if subprocess.run(look, cwd=ROOT, capture_output=True, check=False).returncode:
        raise RuntimeError(f"the history of {ROOT} has no commit {revision}: fetch it, as `git fetch --unshallow` does")
    with tempfile.TemporaryDirectory(prefix="strata-bench-against-") as name:
        root = Path(name)
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", root], input=archive, check=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
        packages = Path(sysconfig.get_path("purelib"))
        (own,) = (root / ".venv" / "lib").glob("python*/site-packages")
        (own / "commit.pth").write_text(f"{root / 'src'}\n{packages}\n", "utf-8")
        for program in ("strata", "torchrun"):
            _, _, body = Path(sys.executable).with_name(program).read_text("utf-8").partition("\n")
            copy = root / ".venv" / "bin" / program
            copy.write_text(f"#!{_python(root)}\n{body}", "utf-8")
            copy.chmod(0o755)
        _check_source(root)
        yield root


def _check_source(root: Path) -> None:
    """A commit that imports the `strata` of this tree would be compared with itself, from any working directory."""
    code = "import strata; print(strata.__file__)"
    done = subprocess.run([_python(root), "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    if not Path(done.stdout.strip()).is_relative_to(root / "src"):
        raise RuntimeError(f"the older commit would run {done.stdout.strip()}")


def _python(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


def _ratios(root: Path, bench: str, *, quick: bool) -> Mapping[str, float]:
    command = [str(_python(root)), "-m", "bench", bench, "--json-only", *(["--quick"] if quick else [])]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True)
    lines = (msgspec.json.decode(line, type=Line) for line in done.stdout.splitlines())
    return {line.case: line.ratio for line in lines}
