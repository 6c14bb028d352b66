"""A wheel of this tree, and a machine of its own, for the tests of the installers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shell.deploy.machine import ROOT, Machine, machine


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", folder, ROOT], check=True, timeout=240)
    (made,) = folder.glob("strata_train-*.whl")
    return made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made
