"""Episodes of a process that does not always reply."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest

from strata.sdk.recipes import environment
from strata.sdk.recipes.recipe import Recipe, RecipeEnvironment, RecipeSampling
from strata.sdk.recipes.rollouts import PromptRow
from strata.sdk.train import Sampler, TrainingServer

PROGRAM: Final = """
import json, sys
print('{"tasks": ["one"]}', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    print(line, end="", file=sys.stderr, flush=True)
    if asked["id"] > 0:
        print(json.dumps({"id": asked["id"], "reward": 0.75}), flush=True)
"""


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"session_id": "s", "id": "rollout_1", "branches": [], "next_branch": None})


def test_an_episode_without_an_end_has_failed_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "GRACE_S", 0.0)
    log = tmp_path / "log"
    recipe = Recipe(
        kind="grpo",
        env=RecipeEnvironment(name="x", timeout_s=0.5, concurrent=1),
        sampling=RecipeSampling(group_size=3),
    )
    command = [sys.executable, "-c", PROGRAM]
    with (
        log.open("wb") as file,
        TrainingServer("http://server", "tml-key", transport=httpx.MockTransport(answer)) as server,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file) as process,
    ):
        played = environment.Environment(process, recipe, tmp_path, log)
        try:
            played.serve(server)
            (group,) = played.draw(Sampler(server, "sampler_1"), [PromptRow([], {"task": 0})], 0)
        finally:
            played.close()
    assert [each.reward for each in group] == [0.75] * 3
    asked = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    late, *others = [each["path"] for each in asked]
    assert late not in others, "what still runs reaches no other session"
    assert len(set(others)) == 1, "the library keeps connections for each path, and the relay has few"
