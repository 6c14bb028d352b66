"""Each test reads the files of every released version, and those that this version writes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from scripts.golden import write_part
from tests.shell.golden.folder import GOLDEN, versions

PRESENT = "present"


@pytest.fixture(scope="module", params=[*versions(), PRESENT])
def part(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the part that the module is about. Nothing may be changed in it."""
    name = Path(request.path).stem.removeprefix("test_")
    if request.param != PRESENT:
        return GOLDEN / str(request.param) / name
    folder = tmp_path_factory.mktemp("golden") / name
    with warnings.catch_warnings():
        # Packages that propose trials and send messages warn of Python's next version.
        warnings.simplefilter("ignore", DeprecationWarning)
        write_part(name, folder, request.getfixturevalue("postgres_server"))
    return folder
