"""All ranks are killed after a snapshot: the next ones begin there, and end with the same bits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from soak.train.client import Trainer
from soak.train.server import ServeProcess, make_model, serving

pytestmark = pytest.mark.timeout(600)
STEPS = 5


@pytest.mark.proves(
    "Ranks that were killed go on from the last snapshot with the same bits; a damaged snapshot is never restored"
)
async def test_killed_ranks_restore_a_snapshot_and_are_told_only_what_came_after_it(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny")
    # Creation and three operations: at the first boundary there is a gradient that no step has used.
    often = "every_dispatches = 4\nevery_s = 0\nevery_payload_mb = 0\nevery_replay_s = 0"
    async with serving(tmp_path / "s", tmp_path / "tiny", "real", snapshots=often) as server:
        headers = {"X-API-Key": server.key}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60.0) as http:
            hurt = Trainer(http, 1)
            await hurt.begin()
            await hurt.train(asyncio.Event(), 3)
            async with asyncio.timeout(60):
                while not server.logged("model_snapshot_committed"):
                    await http.get("/api/v1/healthz")
            server.kill_ranks()
            await hurt.train(asyncio.Event(), STEPS - 3)
            first = await hurt.save("end", 2 * STEPS + 1)
            # The same from the same seed, on the same server and in peace.
            calm = Trainer(http, 1)
            await calm.begin()
            await calm.train(asyncio.Event(), STEPS)
            second = await calm.save("end", 2 * STEPS + 1)
        assert hurt.results == calm.results
        assert files(server, first) == files(server, second)
        (restored,) = server.logged("model_snapshot_restored")
        (replayed,) = server.logged("replay_finished")
    # Creation, the first checkpoint and three operations; then the snapshot; then three more.
    assert (restored["number"], replayed["through"], replayed["dispatches"]) == (6, 9, 3)


def files(server: ServeProcess, path: str) -> dict[str, bytes]:
    """Weights and moments, as they lie on the disk."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    (folder,) = (server.settings.checkpoint_folder / run.replace(":", "-") / kind).glob(f"{name}@*")
    found = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert len(found) == 2
    return found
