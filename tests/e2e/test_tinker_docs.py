"""docs/training.md does what it says: its five minutes are lived through, its formulas are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.base.settings import process_environment
from strata.train.runner.passes.losses import RULES
from tests.e2e.blocks import blocks
from tests.e2e.served import served

pytestmark = pytest.mark.timeout(300)
PAGE: Final = Path(__file__).parents[2] / "docs" / "training.md"
ADDRESS: Final = "http://127.0.0.1:5555"
BIN: Final = Path(sys.executable).parent


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lived(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the server of the page runs. On another port: somebody may have one running here."""
    folder = tmp_path_factory.mktemp("t")
    commands = [block.body.split() for block in blocks(page) if block.language == "sh"]
    assert [command[1] for command in commands] == ["models", "serve"]
    make, serve = ([str(BIN / command[0]), *command[1:]] for command in commands)
    environment = {**process_environment(), "STRATA_SERVER_PORT": "0", "TINKER_TELEMETRY": "0"}
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.body, encoding="utf-8")
    subprocess.run(make, cwd=folder, env=environment, check=True, timeout=120)
    with served(serve, folder, environment):
        yield folder


@pytest.mark.parametrize("name", ["sft.py", "sft_tinker.py"])
def test_the_five_minutes_end_with_a_model_that_has_learned(lived: Path, name: str) -> None:
    address = (lived / "strata-train" / "api.address").read_text().strip()
    program = lived / f"moved_{name}"
    program.write_text((lived / name).read_text().replace(ADDRESS, address))
    environment = {**process_environment(), "TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=lived,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first = float(re.findall(r"(?m)^0 (\S+)$", done.stdout)[0])
    last = float(re.findall(r"(?m)^after (\S+)$", done.stdout)[0])
    assert first > 3.0
    assert last < 0.5
    assert re.search(r"(?m)^tinker://\S+/weights/memorised$", done.stdout)


def test_the_formulas_are_those_of_the_losses(page: str) -> None:
    for name in RULES:
        row = re.search(rf"(?m)^\| `{name.value}` \| (.*) \|$", page)
        assert row, name
        formula = (RULES[name].loss.__doc__ or "").partition(".")[0].partition(", with")[0].partition(" with one")[0]
        assert row[1].startswith(formula), (formula, row[1])
