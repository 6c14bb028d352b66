"""`strata train` on two ranks, a mesh, two hosts and a gang of two hosts: killed, continued by a server, and back.

One rank is in test_recipes.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from strata.cli.local_server import run_own_command
from tests.e2e.nodes import network
from tests.e2e.served import served
from tests.e2e.test_gang_nodes import ADDRESS, JOB, WITH_NETWORKS, guarded_coordinator
from tests.e2e.test_recipes import STEPS, STRATA, environment, kill_after, metrics, peft_loss, place, train
from tests.e2e.test_train_connect import FIRST, HEAD, SECOND, Page, page, start_nodes
from tests.shell.fleet_agent.waiting import eventually

__all__ = ["page", "place"]
pytestmark = pytest.mark.timeout(1200)
FILES: Final = ("metrics.jsonl", "adapter/adapter_model.safetensors", "adapter/adapter_config.json")


def differing(run: Path, other: Path) -> list[str]:
    return [name for name in FILES if (run / name).read_bytes() != (other / name).read_bytes()]


def finish(place: Path, *options: str) -> str:
    done = train(place, *options)
    assert done.returncode == 0, done.stderr
    assert f"finished after step {STEPS}" in done.stdout
    return done.stderr


@pytest.mark.parametrize("mesh", ["", "[parallel]\ntensor = 2\n"], ids=["two ranks", "tensor 2"])
def test_a_run_on_two_ranks_that_is_killed_and_continued_by_a_server_is_bit_equal_to_an_undisturbed_one(
    place: Path, mesh: str
) -> None:
    name = "tensor" if mesh else "ranks"
    text = (place / "sft.toml").read_text(encoding="utf-8")
    if mesh:
        # With two heads of keys and values, one for each rank.
        run_own_command("models", "tiny", str(place / "wide"), "--hidden", "128")
        text = text.replace(str(place / "model"), str(place / "wide"))
    (place / f"{name}.toml").write_text(f"{text}\n[server]\nranks = 2\n{mesh}", encoding="utf-8")
    finish(place, f"{name}.toml", "--folder", name)
    run = place / f"{name}-killed"
    kill_after(place, run, 5, group=True, recipe=f"{name}.toml")
    with served([STRATA, "serve", str(run / "server" / "server.toml")], place, environment()):
        kill_after(place, run, 8, group=False, recipe=f"{name}.toml")
    said = finish(place, f"{name}.toml", "--folder", run.name)
    assert "continuing after step" in said
    assert not differing(run, place / name)


def test_the_command_continues_what_a_server_began_and_the_server_what_the_command_continued(place: Path) -> None:
    """The server is a person's own; while it does not run, the command runs it by its settings."""
    finish(place, "sft.toml", "--folder", "alone")
    model = place / "model"
    text = f'[server]\ndata = "served"\nport = 0\n[model]\npath = "{model}"\n[limits]\npack_tenants = false\n'
    (place / "train.toml").write_text(text, encoding="utf-8")
    run, options = place / "begun", ("--server", "train.toml")
    with served([STRATA, "serve", "train.toml"], place, environment()):
        kill_after(place, run, 4, group=True, options=options)
    kill_after(place, run, 7, group=True, options=options)
    assert metrics(run)[-1]["step"] >= 7
    with served([STRATA, "serve", "train.toml"], place, environment()):
        said = finish(place, "sft.toml", "--folder", run.name, *options)
    assert "continuing after step" in said
    assert not (run / "server").exists(), "it made a server of its own"
    assert not differing(run, place / "alone")


def test_a_recipe_on_a_base_in_nf4_learns_what_bitsandbytes_and_peft_compute(place: Path) -> None:
    """Killed once, too. PEFT loads the adapter around the model that bitsandbytes quantised itself."""
    run_own_command("models", "tiny", str(place / "nf4"), "--hidden", "128")
    text = (place / "sft.toml").read_text(encoding="utf-8").replace(str(place / "model"), str(place / "nf4"))
    (place / "nf4.toml").write_text(f'{text}\n[server]\nquantise = "nf4"\n', encoding="utf-8")
    kill_after(place, place / "quantised", 5, group=True, recipe="nf4.toml")
    said = finish(place, "nf4.toml", "--folder", "quantised")
    assert "continuing after step" in said
    lines = metrics(place / "quantised")
    assert lines[-1]["values"]["eval_loss"] < 0.8 * lines[0]["values"]["eval_loss"]
    own, adapter = lines[-1]["values"]["eval_loss"], place / "quantised" / "adapter"
    assert peft_loss(place / "nf4", adapter, "nf4") == pytest.approx(own, abs=1e-4)
    assert peft_loss(place / "nf4", adapter) != pytest.approx(own, abs=1e-4), "the base was not quantised"


@pytest.fixture(scope="module")
def shared(place: Path, page: Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that two hosts share, and in it a run of two ranks on one machine that nothing disturbed."""
    recipe = f"{(place / 'sft.toml').read_text(encoding='utf-8')}\n[server]\nranks = 2\n"
    # A path of a socket must be short, and the names of these tests are not.
    folder = tmp_path_factory.mktemp("n")
    shutil.copytree(place / "model", folder / "model")
    (folder / "sft.toml").write_text(recipe, encoding="utf-8")
    for name in ("nodes", "gang"):
        nodes = page.files["nodes.toml"].replace("strata-train", name)
        (folder / f"{name}.toml").write_text(f"{nodes}[limits]\npack_tenants = false\n", encoding="utf-8")
    finish(folder, "sft.toml", "--folder", "one")
    return folder


def assert_equal(run: Path, other: Path) -> None:
    # The configuration names the base as the server does.
    assert [name for name in differing(run, other) if name != "adapter/adapter_config.json"] == []


@WITH_NETWORKS
def test_a_run_with_ranks_on_two_hosts_that_is_killed_with_them_is_bit_equal_to_one_on_one_machine(
    shared: Path, page: Page
) -> None:
    folder = shared
    run, command = folder / "several", "strata train sft.toml --folder several --server nodes.toml"
    with network(HEAD, FIRST, SECOND) as machines:
        machines[0].run(page.make_keys, folder)
        nodes = start_nodes(page, machines, folder)
        training = machines[0].start(command, folder, folder / "killed.log")
        eventually(lambda: any(line["step"] >= 5 for line in metrics(run)), 600)
        for task in (training, *nodes):
            task.reap()
        nodes = start_nodes(page, machines, folder)
        training = machines[0].start(command, folder, folder / "continued.log")
        eventually(lambda: not training.running, 600)
        assert training.end() == 0, training.said()
        assert "continuing after step" in training.said()
        assert all(node.running for node in nodes)
    assert_equal(run, folder / "one")


@WITH_NETWORKS
def test_a_run_on_a_gang_of_two_hosts_one_of_which_dies_and_returns_is_bit_equal_to_one_on_one_machine(
    shared: Path, page: Page
) -> None:
    """The command that trains is given once: it waits until the gang is whole again."""
    run = shared / "gang-run"
    gang = f"strata gang run --nproc 1 --nnodes 2 --coordinator {ADDRESS} --job {JOB} --data"
    program = "-- -m strata.train.runner --settings gang.toml"
    settings = {"STRATA_COORDINATOR_JOB_HEARTBEAT_INTERVAL_S": "2", "STRATA_COORDINATOR_PING_TIMEOUT_S": "2"}
    with guarded_coordinator(shared, **settings) as (head, hosts):
        head.run(page.make_keys.replace("nodes.toml", "gang.toml"), shared)
        for number, host in enumerate(hosts):
            host.start(f"{gang} gang-{number} {program}", shared, shared / f"gang-{number}.log")
        training = head.start(
            "OMP_NUM_THREADS=1 strata train sft.toml --folder gang-run --server gang.toml", shared, shared / "gang.log"
        )
        eventually(lambda: any(line["step"] >= 5 for line in metrics(run)), 600)
        hosts[1].close()
        assert training.running, training.said()
        again = hosts[1].start(f"{gang} gang-1 {program}", shared, shared / "gang-again.log")
        eventually(lambda: not training.running, 600)
        assert training.end() == 0, training.said() + (shared / "gang-0.log").read_text("utf-8")[-3000:]
        assert again.running
        logs = [file.read_text("utf-8") for file in shared.glob("gang-*.log")]
        assert sum(log.count('"ranks_ready"') for log in logs) >= 2, "the ranks did not start again"
    assert_equal(run, shared / "one")
