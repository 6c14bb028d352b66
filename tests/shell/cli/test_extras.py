"""The table of optional packages agrees with the project, and a missing one is explained."""

from __future__ import annotations

import tomllib
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from strata.base.errors import Code, StrataError
from strata.cli.extras import (
    COMPOSED,
    IRREGULAR,
    distribution_of,
    explain_missing_module,
    extras_by_distribution,
    require,
)

ROOT: Final = Path(__file__).parents[3]


def optional() -> dict[str, list[str]]:
    """Distribution to the extras that bring it, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = {}
    for extra, requirements in project["optional-dependencies"].items():
        for line in requirements if extra not in COMPOSED else []:
            found.setdefault(canonicalize_name(Requirement(line).name), []).append(extra)
    return found


def test_every_optional_distribution_of_the_project_has_its_import_name() -> None:
    found = {distribution_of(module) for module in packages_distributions()} | set(IRREGULAR.values())
    installed = {canonicalize_name(each.name) for each in distributions()}
    assert optional().keys() & installed <= found
    assert set(IRREGULAR.values()) <= optional().keys()


def test_the_extra_of_each_distribution_comes_from_the_metadata() -> None:
    assert extras_by_distribution() == {name: min(extras) for name, extras in optional().items()}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("psycopg.rows", "this command needs psycopg, which is not installed: pip install 'strata-train[postgres]'"),
        ("grpc", "this command needs grpcio, which is not installed: pip install 'strata-train[coordinator]'"),
        ("zmq", "this command needs pyzmq, which is not installed: pip install 'strata-train[train]'"),
    ],
)
def test_a_failed_import_of_an_optional_package_is_explained(module: str, line: str) -> None:
    error = explain_missing_module(ModuleNotFoundError(f"No module named {module!r}", name=module))
    assert error is not None
    assert (error.code, error.message, error.hint) == (Code.UNSUPPORTED, line, None)


@pytest.mark.parametrize("module", ["strata.nowhere", "scipy", None])
def test_another_failed_import_is_not(module: str | None) -> None:
    assert explain_missing_module(ModuleNotFoundError("No module", name=module)) is None


def test_require_names_the_extra_it_was_given() -> None:
    require("click", extra="hub")
    with pytest.raises(StrataError, match=r"needs no-such, .*'strata-train\[hub\]'"):
        require("no-such", extra="hub")
