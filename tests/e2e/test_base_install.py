"""The base install is small, starts fast and is useful: the wheel, without extras, in an empty environment.

Versions come from constraints.txt with their hashes, so this needs the package index as `make setup` does.
"""

from __future__ import annotations

import math
import re
import resource
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import requires
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from strata.web.documents import DocumentPages, find_documents
from tests.e2e.blocks import play, problems
from tests.e2e.machines import ROOT, build_wheel

pytestmark = pytest.mark.timeout(300)

MOST_DISTRIBUTIONS: Final = 12
SLOWEST_START_S: Final = 0.3
ABSENT: Final = {"torch", "grpcio", "fastapi", "starlette", "psycopg"}
INSTALLERS: Final = {"pip", "setuptools"}


@dataclass(frozen=True)
class Install:
    programs: Path
    distributions: frozenset[str]

    def strata(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.programs / "strata"), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def checked(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def needed(requirements: list[str]) -> set[str]:
    """The distributions that these requirements bring here, as the installed packages know them."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += [Requirement(text) for text in requires(name) or []]
    return found


def pins_of(names: set[str], constraints: str) -> str:
    """The entries of these distributions, each with its hashes."""
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", constraints)
    return "".join(entry for entry in entries if canonicalize_name(re.split(r"[=\s]", entry)[0]) in names)


def base_requirements(wheel: Path) -> list[str]:
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Install:
    folder = tmp_path_factory.mktemp("base")
    wheel = build_wheel(folder)

    pins = folder / "base.txt"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins.write_text(pins_of(needed(base_requirements(wheel)), constraints), encoding="utf-8")

    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv" / "bin"
    install = (programs / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    checked(*install, "--require-hashes", "-r", pins)
    checked(*install, "--no-deps", "--no-index", wheel)
    checked(programs / "python", "-m", "pip", "check")
    names = "from importlib.metadata import distributions as d; print(*(each.name for each in d()))"
    listed = checked(programs / "python", "-c", names).split()
    return Install(programs, frozenset(map(canonicalize_name, listed)) - INSTALLERS)


def test_the_base_install_is_small_and_has_no_engine(base: Install) -> None:
    print(f"{len(base.distributions)} distributions: {' '.join(sorted(base.distributions))}")
    assert "strata-train" in base.distributions
    assert len(base.distributions) <= MOST_DISTRIBUTIONS
    assert not {name for name in base.distributions if name.split("-")[0] in ABSENT}


def test_the_wheel_has_the_documents_that_the_dashboard_shows(base: Install) -> None:
    package = checked(base.programs / "python", "-c", "import strata; print(strata.__path__[0])").strip()
    installed, here = DocumentPages(Path(package) / "documents"), find_documents()
    assert installed.paths == here.paths
    # All but the first include other files.
    for path in ("index.md", "architecture.md", "changelog.md", "starts.md"):
        assert installed.page(path) == here.page(path)


def subcommands(help_text: str) -> list[str]:
    """The names that a group's help lists, below one heading or several."""
    lists = re.findall(r"(?m)^(\S[^\n]*):\n((?:  .+\n?)+)", help_text)
    return [name for heading, listed in lists if heading != "Options" for name in re.findall(r"(?m)^  (\S+)", listed)]


def started_s(base: Install, *args: str) -> tuple[float, str]:
    """What is printed, and the seconds of the processor: the first that are few enough, of ten at most, since what else
    runs here is not ours."""
    best_s, printed = math.inf, ""
    for _ in range(10):
        before_s = children_s()
        done = base.strata(*args)
        assert done.returncode == 0, done.stderr
        best_s, printed = min(best_s, children_s() - before_s), done.stdout
        if best_s < SLOWEST_START_S:
            break
    return best_s, printed


def helps_s(base: Install, *path: str) -> Iterator[tuple[str, float]]:
    """Each help below a group and the time that it took."""
    took_s, help_text = started_s(base, *path, "--help")
    yield " ".join([*path, "--help"]), took_s
    for name in subcommands(help_text):
        yield from helps_s(base, *path, name)


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_version_and_every_help_answer_at_once(base: Install) -> None:
    times = {"--version": started_s(base, "--version")[0], **dict(helps_s(base))}
    assert "journal list --help" in times
    for command, took_s in times.items():
        print(f"{took_s:.3f} s  strata {command}")
    assert {command: took_s for command, took_s in times.items() if took_s >= SLOWEST_START_S} == {}


def test_what_needs_an_extra_says_which_in_one_line(base: Install) -> None:
    refused = base.strata("journal", "list", "postgresql://x/y")
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert "pip install 'strata-train[postgres]'" in line


def test_a_state_machine_on_a_journal_works_there(base: Install, tmp_path: Path) -> None:
    ran = play((ROOT / "docs" / "state-machine.md").read_text(encoding="utf-8"), base.programs, tmp_path)
    assert ran
    assert "\n\n".join(problems(ran)) == ""


def test_names_of_subcommands_are_read_from_a_help_text() -> None:
    text = "Usage: x\n\nOptions:\n  -h  Help.\n\nCommands:\n  list    List.\n  verify  Check, and\n          more.\n"
    assert subcommands(text) == ["list", "verify"]
    assert subcommands("Usage: x\n\nOptions:\n  -h  Help.\n") == []


def test_only_the_named_pins_are_kept() -> None:
    text = "# made by\na==1 \\\n    --hash=sha256:00\n    # via b\nb_c==2 ; x \\\n    --hash=sha256:11\nd==3\n"
    assert pins_of({"b-c", "d"}, text) == "b_c==2 ; x \\\n    --hash=sha256:11\nd==3\n"
