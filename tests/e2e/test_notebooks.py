"""The notebooks of the examples, cell after cell in one process, against real servers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.settings import process_environment
from tests.e2e.served import served

pytestmark = pytest.mark.timeout(300)
ROOT: Final = Path(__file__).parents[2]
NOTEBOOKS: Final = ROOT / "examples" / "notebooks"
NAMES: Final = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
STRATA: Final = str(Path(sys.executable).with_name("strata"))
CELL_KEYS: Final = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}


def cells(name: str) -> list[dict[str, Any]]:
    notebook = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def execute(name: str, folder: Path) -> str:
    """What its code cells print, one after the other."""
    program = folder / f"{name}.py"
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]
    program.write_text("\n\n".join(code), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout


def environment() -> dict[str, str]:
    return {**process_environment(), "STRATA_SERVER_PORT": "0", "TINKER_TELEMETRY": "0", "PYTHONWARNINGS": "ignore"}


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_stored_without_outputs(name: str) -> None:
    found = cells(name)
    assert found[0]["cell_type"] == "markdown"
    assert len({cell["id"] for cell in found}) == len(found)
    for cell in found:
        assert set(cell) == CELL_KEYS[cell["cell_type"]]
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
        if cell["cell_type"] == "code":
            # No magics: the cells are a program.
            compile("".join(cell["source"]), name, "exec")


def test_the_page_names_all_notebooks() -> None:
    page = (NOTEBOOKS / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"(?m)^\| `(\S+\.ipynb)` \|", page)) == NAMES


def test_a_recipe_is_written_trained_and_drawn(tmp_path: Path) -> None:
    printed = execute("sft_by_recipe.ipynb", tmp_path)
    assert "finished after step 40" in printed
    assert "adapter_model.safetensors" in printed


def test_a_loss_of_its_own_is_learned_and_sampled(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("n")
    (folder / "examples").symlink_to(ROOT / "examples")
    subprocess.run([STRATA, "models", "tiny", "model"], cwd=folder, env=environment(), check=True, timeout=120)
    with served([STRATA, "serve", "examples/rl_arithmetic/train.toml"], folder, environment()):
        printed = execute("custom_loss.ipynb", folder)
    assert "A lease ends, whoever holds it." in printed.replace(" → ", "")
