"""The examples of the training server, lived through by the commands of their READMEs against one server of theirs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from strata.base.settings import process_environment
from tests.e2e.blocks import blocks
from tests.e2e.served import served

pytestmark = pytest.mark.timeout(300)
ROOT: Final = Path(__file__).parents[2]
BIN: Final = Path(sys.executable).parent
EXAMPLES: Final = ("rl_arithmetic", "dpo")
GUESSED: Final = 0.4
LEARNED: Final = 0.7
INDIFFERENT: Final = 0.6931
PREFERRED: Final = 0.2


def commands(example: str) -> tuple[list[list[str]], list[list[str]]]:
    """Those of the first terminal and those of the second."""
    page = (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    first, second = (
        [shlex.split(line) for line in block.body.splitlines()] for block in blocks(page) if block.language == "sh"
    )
    return first, second


def environment() -> dict[str, str]:
    # On any port: somebody may have a server running here.
    return {**process_environment(), "STRATA_SERVER_PORT": "0", "TINKER_TELEMETRY": "0"}


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as the READMEs want it, in which their server runs."""
    folder = tmp_path_factory.mktemp("x")
    (folder / "examples").symlink_to(ROOT / "examples")
    started = [commands(example)[0] for example in EXAMPLES]
    assert started[0] == started[1], "one server does for all examples"
    make, serve = ([str(BIN / command[0]), *command[1:]] for command in started[0])
    subprocess.run(make, cwd=folder, env=environment(), check=True, timeout=120)
    with served(serve, folder, environment()):
        yield folder


def told(folder: Path, example: str, sdk: str) -> str:
    """What the README's command for this SDK prints."""
    (command,) = [each for each in commands(example)[1] if each[1].endswith(f"/with_{sdk}.py")]
    assert command[0] == "python"
    # What an SDK calls deprecated is not shown to anybody; a client that stands still tells where.
    watched = ["timeout", "--signal=ABRT", "180", sys.executable, "-X", "faulthandler"]
    done = subprocess.run(
        [*watched, "-W", "error::FutureWarning:__main__", *command[1:]],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout


@pytest.mark.parametrize("sdk", ["strata", "tinker"])
def test_sums_are_learned_from_their_reward(lived: Path, sdk: str) -> None:
    rewards = [float(each) for each in re.findall(r"(?m)^step \d+ reward (\S+)$", told(lived, "rl_arithmetic", sdk))]
    assert rewards[0] < GUESSED
    assert rewards[-1] > LEARNED


@pytest.mark.parametrize("sdk", ["strata", "tinker"])
def test_a_preference_is_learned_and_holds_for_pairs_that_were_not_shown(lived: Path, sdk: str) -> None:
    lines = re.findall(r"(?m)^step \d+ loss (\S+) margin \S+ accuracy (\S+)$", told(lived, "dpo", sdk))
    (first_loss, first_accuracy), *_, (loss, accuracy) = ((float(one), float(other)) for one, other in lines)
    assert first_loss == INDIFFERENT
    assert first_accuracy < 1.0
    assert loss < PREFERRED
    assert accuracy == 1.0


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_readme_names_the_files_that_are_there(example: str) -> None:
    page = (ROOT / "examples" / example / "README.md").read_text(encoding="utf-8")
    files = {each.name for each in (ROOT / "examples" / example).glob("*.py")}
    assert set(re.findall(r"(?m)^\| `(\w+\.py)` \|", page)) == files
