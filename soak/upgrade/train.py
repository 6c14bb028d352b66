"""A training server that another version starts again on its data folder, with operations that are under way.

The weights that clients have at the end are, byte by byte, those of a server of this version that nobody stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from soak.train import sdk
from soak.train.client import Trainer
from soak.train.compare import compare_counts, compare_files, compare_results, final_folder
from soak.train.kill import ENDLESS, FEW_KEPT, OFTEN
from soak.train.outcome import Outcome
from soak.train.result_times import ResultTimes
from soak.train.server import NO_SNAPSHOTS, START_S, ServeOptions, ServeProcess, gone, serving, until
from soak.trees import CURRENT, Tree

CLIENTS: Final = 2
STEPS: Final = 12
REFUSED: Final = "rank_group_rejected"
_CLIENT: Final = """
import json, sys
from strata.sdk.train import Datum, TrainingServer

url, key = sys.argv[1], sys.stdin.read()
with TrainingServer(url, key) as server:
    model = server.create_model("tiny", rank=4, seed=7)
    passes = []
    for step in range(6):
        passes.append(model.forward_backward([Datum([1, 2, 3 + step], [2, 3 + step, 7])], "cross_entropy"))
        model.optim_step(learning_rate=1e-2)
    print(json.dumps([each.result().loss for each in passes]))
"""


@dataclass(frozen=True)
class Trained:
    """What clients and disk have when all is done."""

    results: list[dict[int, Any]]
    """Of each client, by operation."""
    folders: list[Path | None]
    """Of each client, its last checkpoint."""


async def train(folder: Path, model: Path, versions: Sequence[Tree], outcome: Outcome) -> Trained:
    """Kill the server of each version but the last under its clients, and let the next version go on."""
    options = ServeOptions(more=FEW_KEPT, tree=versions[0])
    snapshots = OFTEN if len(versions) > 1 else NO_SNAPSHOTS
    async with serving(folder, model, "real", snapshots=snapshots, options=options) as server:
        result_times = ResultTimes()
        async with sdk.trainers(server.url, server.key, range(CLIENTS), result_times) as trainers:
            stages = len(versions) - 1
            for stage, tree in enumerate(versions[1:], 1):
                training = asyncio.gather(*(each.train(asyncio.Event(), STEPS * stage // stages) for each in trainers))
                await result_times.wait_sent_after(asyncio.get_running_loop().time())
                if training.done():
                    outcome.problems.append(f"nothing was under way before restart {stage}")
                server.tree = tree
                left = await server.restart()
                outcome.times += 1
                await training
                if still := await gone(left):
                    outcome.problems.append(f"processes {still} outlived their launcher")
            await asyncio.gather(*(each.train(asyncio.Event(), STEPS) for each in trainers))
            await asyncio.gather(*(each.finish() for each in trainers))
        outcome.operations += sum(each.operations for each in trainers)
        await server.idle()
        applied = await server.applied()
        if await server.stop() != 0:
            outcome.problems.append("the launcher did not end in order")
    wanted = sum(each.operations for each in trainers)
    compare_counts(server, applied, await server.journaled(), wanted, outcome)
    checkpoints = server.settings.checkpoint_folder
    folders = [final_folder(checkpoints, each.model_id, sdk.FINAL) for each in trainers]
    return Trained([each.results for each in trainers], folders)


def compare(disturbed: Trained, calm: Trained, outcome: Outcome) -> None:
    for place in range(CLIENTS):
        # Versions may sum losses in another precision; log probabilities and weights have the same bits.
        compare_results(place, disturbed.results[place], calm.results[place], outcome, metrics_within=1e-6)
        problem = compare_files(disturbed.folders[place], calm.folders[place], STEPS)
        outcome.equal += problem is None
        outcome.problems += [f"model {place}: {problem}"] if problem else []


async def replace_ranks_last(folder: Path, older: Tree, outcome: Outcome) -> list[str]:
    """Ranks of the older version under an orchestrator of this one, and then of this version as well. Returns why the
    orchestrator did not use the older ones."""
    async with serving(folder, folder / "none", "pretending", options=ServeOptions(tree=older)) as server:
        headers = {"X-API-Key": server.key}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30.0) as http:
            result_times = ResultTimes()
            trainer = Trainer(http, 0, result_times)
            await trainer.begin()
            enough = asyncio.Event()
            training = asyncio.create_task(trainer.train(enough, ENDLESS))
            await result_times.wait_sent_after(asyncio.get_running_loop().time())
            server.tree = CURRENT
            restart = asyncio.create_task(server.restart())
            async with asyncio.timeout(START_S):
                await until(lambda: server.logged(REFUSED))
                await server.ranks_end()
            await server.start_ranks()
            await restart
            await result_times.wait_sent_after(asyncio.get_running_loop().time())
            enough.set()
            await training
        outcome.operations += trainer.operations
        await server.idle()
        applied = await server.applied()
        await server.stop()
        compare_counts(server, applied, await server.journaled(), trainer.operations, outcome)
        return [str(each["reason"]) for each in server.logged(REFUSED)]


async def run_clients(folder: Path, server_tree: Tree, clients: Sequence[Tree]) -> list[list[float]]:
    """The losses that Strata's SDK of each version gets for the same training."""
    options = ServeOptions(tree=server_tree)
    async with serving(folder, folder / "none", "pretending", options=options) as server:
        return [await _run_client(tree, server) for tree in clients]


async def _run_client(tree: Tree, server: ServeProcess) -> list[float]:
    process = await asyncio.create_subprocess_exec(
        *(tree.python, "-c", _CLIENT, server.url),
        cwd=tree.root,
        env={"PATH": os.defpath, "PYTHONPATH": tree.python_path},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate(server.key.encode())
    if process.returncode:
        raise RuntimeError(f"the client of {tree.root} ended with {process.returncode}: {errors.decode()[-400:]}")
    losses: list[float] = json.loads(out)
    return losses
