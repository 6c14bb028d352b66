"""`strata train`, from a clean folder: it learns, it continues after kills, and other programs read what it exports."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from soak.train.server import make_model
from strata.base.settings import process_environment
from tests.e2e.blocks import blocks
from tests.e2e.served import served
from tests.support.s3 import S3Server
from tests.support.tracked import scalars, wandb_history

pytestmark = pytest.mark.timeout(600)
ROOT: Final = Path(__file__).parents[2]
RECIPES: Final = ROOT / "examples" / "recipes"
STRATA: Final = str(Path(sys.executable).with_name("strata"))
STEPS: Final = 12
LOOK_S: Final = 0.02
START_S: Final = 240.0


def environment() -> dict[str, str]:
    return {**process_environment(), "OMP_NUM_THREADS": "1"}


def train(folder: Path, *options: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STRATA, "train", *options],
        cwd=folder,
        env={**environment(), **(more or {})},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the recipe of the example with fewer steps, for it."""
    folder = tmp_path_factory.mktemp("recipes")
    make_model(folder / "model")
    text = (RECIPES / "sft.toml").read_text(encoding="utf-8")
    text = text.replace('tiny = "llama"', f'path = "{folder / "model"}"').replace("data/", f"{RECIPES}/data/")
    text = text.replace("steps = 60", f"steps = {STEPS}\nsave_every = 3").replace("every = 10", "every = 4")
    # With patience the best evaluation is saved; with this alpha the scale is not the one that a model has by default.
    text = text.replace("every = 4", "every = 4\npatience = 9").replace("rank = 8", "rank = 8\nalpha = 8")
    (folder / "sft.toml").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    done = train(place, "sft.toml", "--folder", "undisturbed")
    assert done.returncode == 0, done.stderr
    assert f"finished after step {STEPS}" in done.stdout
    assert "┤" in done.stdout, "no curve"
    log = (place / "undisturbed" / "server" / "server.log").read_text(encoding="utf-8")
    assert "strata serve: unix:" in log, "it has a port"
    return place / "undisturbed"


def test_the_loss_falls(undisturbed: Path) -> None:
    lines = metrics(undisturbed)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    # A quarter of the example's scale learns slower than the example, whose own test asks for more.
    assert lines[-1]["values"]["loss"] < 0.8 * lines[1]["values"]["loss"]
    assert lines[-1]["values"]["eval_loss"] < 0.8 * lines[0]["values"]["eval_loss"]


def test_peft_computes_the_loss_of_the_evaluation_with_the_exported_adapter(undisturbed: Path, place: Path) -> None:
    own = metrics(undisturbed)[-1]["values"]["eval_loss"]
    assert peft_loss(place / "model", undisturbed / "adapter") == pytest.approx(own, abs=1e-4)


def peft_loss(model: Path, adapter: Path, *quantise: str) -> float:
    program, held_out = Path(__file__).with_name("peft_loss.py"), RECIPES / "data" / "answers_held_out.jsonl"
    command = [sys.executable, str(program), str(model), str(adapter), str(held_out), *quantise]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_run_that_is_killed_again_and_again_ends_bit_equal_to_one_that_is_not(place: Path, undisturbed: Path) -> None:
    run = place / "killed"
    attempt_in_vain(place, run)
    for kills, group in ((0, True), (5, False)):
        kill_after(place, run, kills, group=group)
    # A server continues what the command began, and the command what the server continued.
    with served([STRATA, "serve", str(run / "server" / "server.toml")], place, environment()):
        kill_after(place, run, 8, group=True)
    done = train(place, "sft.toml", "--folder", "killed")
    assert done.returncode == 0, done.stderr
    assert "continuing after step 6 of 12" in done.stderr or "continuing after step 9 of 12" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (run / "adapter" / name).read_bytes() == (undisturbed / "adapter" / name).read_bytes(), name


def attempt_in_vain(place: Path, run: Path) -> None:
    """Attempts in the same folder that end before a state is saved: with another model, then with a row that is bad."""
    text = (place / "sft.toml").read_text(encoding="utf-8")
    (place / "other.toml").write_text(text.replace(str(place / "model"), str(place / "none")), encoding="utf-8")
    done = train(place, "other.toml", "--folder", run.name)
    assert done.returncode != 0
    assert "the training server did not start" in done.stderr
    (place / "bad.jsonl").write_text('{"text": "x"}\n{"question": "y"}\n', encoding="utf-8")
    (place / "bad.toml").write_text(text.replace(f"{RECIPES}/data/answers.jsonl", "bad.jsonl"), encoding="utf-8")
    done = train(place, "bad.toml", "--folder", run.name)
    assert done.returncode != 0
    assert "row 2 of the training data (bad.jsonl): a row needs messages" in done.stderr


def test_the_command_of_the_document_trains_from_a_clean_folder(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    first = next(block for block in blocks(page) if block.language == "bash")
    install, command = first.body.splitlines()
    assert install.startswith("pip install")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program, verb, recipe = shlex.split(command)
    assert (program, verb) == ("strata", "train")
    done = train(tmp_path, recipe)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "runs" / "sft")
    assert lines[-1]["values"]["loss"] < 0.2 * lines[1]["values"]["loss"]
    assert (tmp_path / "runs" / "sft" / "adapter" / "adapter_model.safetensors").is_file()


def kill_after(
    place: Path,
    run: Path,
    step: int,
    *,
    group: bool,
    recipe: str = "sft.toml",
    options: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
) -> None:
    """Start the run, and kill it when the metrics of this step are there; 0: while its server starts."""
    command = [STRATA, "train", recipe, "--folder", run.name, *options]
    process = subprocess.Popen(
        command,
        cwd=place,
        env={**environment(), **(more or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        if step == 0 and [*run.glob("server/data-*/journal.db")]:
            break
        if step and any(line["step"] >= step for line in metrics(run)):
            break
        time.sleep(LOOK_S)
    if group:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The name of a bucket with the rows of the example, and what a client of it needs in its environment."""
    with S3Server() as server:
        name = server.create_bucket()
        server.store(name).put("data/answers.jsonl", (RECIPES / "data" / "answers.jsonl").read_bytes())
        yield name, server.environment


@pytest.mark.parametrize("tracker", ["tensorboard:tracked", "wandb:tracked"])
def test_a_run_with_data_from_a_bucket_is_tracked_once_through_a_kill(
    place: Path, undisturbed: Path, bucket: tuple[str, Mapping[str, str]], tracker: str
) -> None:
    name, keys = bucket
    kind = tracker.partition(":")[0]
    text = (place / "sft.toml").read_text(encoding="utf-8")
    text = text.replace(f"{RECIPES}/data/answers.jsonl", f"s3://{name}/data/answers.jsonl")
    text += f'\n[output]\ntracker = "{tracker}"\noffline = true\n'
    (place / f"{kind}.toml").write_text(text, encoding="utf-8")
    run = place / kind
    kill_after(place, run, 7, group=True, recipe=f"{kind}.toml", more=keys)
    done = train(place, f"{kind}.toml", "--folder", kind, more=keys)
    assert done.returncode == 0, done.stderr
    assert "continuing after step 6 of 12" in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == (undisturbed / "metrics.jsonl").read_bytes()
    losses = [(line["step"], line["values"]["loss"]) for line in metrics(run) if "loss" in line["values"]]
    found: list[tuple[int, Any]]
    if kind == "tensorboard":
        found = [*scalars(place / "tracked")]
    else:
        rows = wandb_history(run / "tracker")
        assert [row["_step"] for row in rows] == list(range(STEPS + 1))
        found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert found == [(step, pytest.approx(loss)) for step, loss in losses]


def test_a_finished_run_is_shown_again_and_trains_nothing(place: Path, undisturbed: Path) -> None:
    before = (undisturbed / "run.json").stat().st_mtime_ns
    done = train(place, "sft.toml", "--folder", "undisturbed")
    assert done.returncode == 0, done.stderr
    assert f"finished after step {STEPS}" in done.stdout
    assert (undisturbed / "run.json").stat().st_mtime_ns == before


def test_a_changed_recipe_is_refused_with_what_differs(place: Path, undisturbed: Path) -> None:
    text = (place / "sft.toml").read_text(encoding="utf-8").replace("learning_rate = 5e-3", "learning_rate = 1e-3")
    (place / "changed.toml").write_text(text, encoding="utf-8")
    done = train(place, "changed.toml", "--folder", "undisturbed")
    assert done.returncode != 0
    assert "train.learning_rate was 0.005 and is 0.001" in done.stderr


def test_a_second_process_in_the_folder_is_refused(place: Path, undisturbed: Path) -> None:
    import fcntl

    with (undisturbed / "run.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = train(place, "sft.toml", "--folder", "undisturbed")
    assert done.returncode != 0
    assert "another process runs a recipe" in done.stderr
