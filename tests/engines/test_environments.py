"""An environment of the verifiers library as it is published, in a recipe: the blocks of the page that shows one.

The library and the client of OpenAI are of a venv of their own. They play in the sandbox.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.settings import process_environment
from tests.e2e.blocks import blocks
from tests.support.venvs import cached_venv

NEEDS = ("bwrap",)
pytestmark = pytest.mark.timeout(1800)
VERIFIERS: Final = os.environ.get("STRATA_TEST_VERIFIERS", "0.4.0")  # noqa: TID251
"""`make newest ARGS=engines` names the newest."""
PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "train-in-an-environment.md"
STRATA: Final = str(Path(sys.executable).with_name("strata"))
SPY: Final = '''
import os, pathlib

GIVEN = {given}


def reached():
    """What it finds of the run and of the machine."""
    found = [name for name in GIVEN["files"] if os.path.exists(name)]
    found += [name for name, value in os.environ.items() if value == GIVEN["secret"]]
    commands = [each.read_bytes() for each in pathlib.Path("/proc").glob("[0-9]*/cmdline")]
    found += [command for command in commands if b"strata.cli.main" in command]
    return found
'''


def programs() -> Path:
    return cached_venv(f"verifiers-{VERIFIERS}", (f"verifiers=={VERIFIERS}",))


def write_page(folder: Path) -> None:
    """The files of the page, with the venv of the tests."""
    for block in blocks(PAGE.read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).write_text(block.body, encoding="utf-8")
    (folder / "environment").symlink_to(programs().parent)


def train(folder: Path, **more: str) -> list[dict[str, float]]:
    done = subprocess.run(
        [STRATA, "train", "vowels.toml"],
        cwd=folder,
        env={**process_environment(), "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs" / "vowels" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["values"] for line in lines]


def test_a_model_learns_to_use_a_tool_in_three_turns(tmp_path: Path) -> None:
    write_page(tmp_path)
    values = train(tmp_path)
    rewards = [each["reward"] for each in values[1:]]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    assert values[-1]["eval_reward"] > values[0]["eval_reward"]
    assert [each["answer_tokens"] for each in values[1:]] == [3.0] * len(rewards), "three turns of one token"


@pytest.mark.parametrize("sandbox", ["required", "off"])
def test_a_hostile_tool_finds_nothing_of_the_run(tmp_path: Path, sandbox: str) -> None:
    """Without the sandbox it does: so the test can fail."""
    write_page(tmp_path)
    recipe = (tmp_path / "vowels.toml").read_text(encoding="utf-8")
    recipe = (
        re.sub(r"\[eval\].*", "", recipe, flags=re.DOTALL)
        .replace("steps = 12", "steps = 1")
        .replace("group_size = 8", "group_size = 2")
    )
    (tmp_path / "vowels.toml").write_text(recipe.replace("[env]", f'[env]\nsandbox = "{sandbox}"'), encoding="utf-8")
    run = tmp_path / "runs" / "vowels"
    given: dict[str, Any] = {
        "files": [
            str(run / "run.json"),
            str(run / "server" / "server.toml"),
            str(tmp_path / "vowels.toml"),
            "/etc/shadow",
        ],
        "secret": "a-key-of-the-person",
    }
    code = (tmp_path / "vowels.py").read_text(encoding="utf-8")
    code = SPY.replace("{given}", repr(given)) + code.replace(
        'return sum(vowels(each.content or "") > 0 for each in trace.assistant_messages) / TURNS',
        "return float(len(reached()))",
    )
    assert "len(reached())" in code
    (tmp_path / "vowels.py").write_text(code, encoding="utf-8")
    (values,) = train(tmp_path, TINKER_API_KEY=given["secret"])
    assert (values["reward"] == 0.0) == (sandbox == "required")
