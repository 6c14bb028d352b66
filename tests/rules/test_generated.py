"""constraints.txt, which pip installs from, pins and hashes what pyproject.toml asks for and names no registry."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[2]
EXTRAS: Final = ("sdk", "worker", "coordinator", "hub", "postgres", "notify", "sweep", "dev")
"""Not `train`: torch comes as another wheel on every kind of machine, so it is not pinned here."""


class Pin(NamedTuple):
    name: str
    version: str
    hashes: tuple[str, ...]


def pins(text: str) -> dict[str, Pin]:
    """Every `name==version` of a constraints file with the hashes that follow it."""
    found: dict[str, Pin] = {}
    name = ""
    for line in text.splitlines():
        if entry := re.match(r"([A-Za-z0-9._-]+)==([^\s;\\]+)", line):
            name = canonicalize_name(entry[1])
            found[name] = Pin(name, entry[2], ())
        elif entry := re.match(r"\s+--hash=(sha256:[0-9a-f]{64})\b", line):
            found[name] = found[name]._replace(hashes=(*found[name].hashes, entry[1]))
    return found


def unpinned(requirements: list[str], pinned: dict[str, Pin]) -> list[str]:
    problems = []
    for text in requirements:
        requirement = Requirement(text)
        pin = pinned.get(canonicalize_name(requirement.name))
        if pin is None:
            problems.append(f"{text}: not pinned")
        elif not requirement.specifier.contains(pin.version, prereleases=True):
            problems.append(f"{text}: pinned at {pin.version}")
    return problems


def places(text: str) -> list[str]:
    """Lines that say where a package came from, or that are neither a pin, a hash nor a comment about who needs it."""
    known = re.compile(r"[A-Za-z0-9._-]+==\S+( ; [^\\]+)? ?\\?|\s+--hash=sha256:[0-9a-f]{64}( \\)?|\s*#.*|")
    located = re.compile(
        r"://|\b[\w-]+\.(?:org|com|net|io|dev|local|internal)\b|^\s*-|--(?:extra-)?index-url|--find-links"
    )
    return [
        line
        for line in text.splitlines()
        if not known.fullmatch(line) or (located.search(line) and "--hash=" not in line)
    ]


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text(encoding="utf-8")


def installer_constraints(name: str) -> str:
    """The pins of an installer of services: `agent` or `hub`."""
    return (ROOT / f"constraints-{name}.txt").read_text(encoding="utf-8")


def test_every_direct_dependency_is_pinned_within_its_specifier() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for extra in EXTRAS for line in optional[extra])]
    assert unpinned(requirements, pins(constraints())) == []


def test_every_pin_has_a_hash() -> None:
    found = pins(constraints())
    assert found
    assert [pin.name for pin in found.values() if not pin.hashes] == []


def test_no_registry_is_named() -> None:
    assert places(constraints()) == []
    assert places(installer_constraints("agent")) == []
    assert places(installer_constraints("hub")) == []


@pytest.mark.parametrize(("name", "extras"), [("agent", ("agent",)), ("hub", ("hub", "postgres", "notify"))])
def test_an_installer_has_the_same_pins_for_all_that_its_service_needs(name: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]
    found = pins(installer_constraints(name))
    assert unpinned([*needed, *project["build-system"]["requires"]], found) == []
    assert {name: pin for name, pin in pins(constraints()).items() if name in found} == found
    assert all(pin.hashes for pin in found.values())


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("click>=8.2", "click>=8.2: not pinned"),
        ("rich>=99", "rich>=99: pinned at 15.0.0"),
    ],
)
def test_a_dependency_without_a_fitting_pin_is_found(requirement: str, problem: str) -> None:
    assert unpinned([requirement], pins("rich==15.0.0 \\\n    --hash=sha256:" + "0" * 64)) == [problem]


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://packages.example/simple",
        "# from https://packages.example/simple",
        "    # via files.example.org",
        "rich @ file:///tmp/rich.whl",
        "-r other.txt",
    ],
)
def test_a_line_that_names_a_place_is_found(line: str) -> None:
    assert places(line) == [line]
