"""Kill ranks of a server with `ranks.deterministic`, and let the kernels of the next ones replay with noise.

Without noise the replay has to differ by 0. With noise below the tolerance of float32 the difference is reported, and
the model trains on. With more it is stopped: its operations are refused, its checkpoints and the snapshot from before
stay, and `strata serve resolve` accepts the new numbers or rolls it back to the weights of its last checkpoint.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from soak.train.client import Trainer
from soak.train.noisy_kernels import order_noise
from soak.train.server import START_S, ServeOptions, ServeProcess, Victim, make_model, serving
from soak.trials import CampaignRequest, CampaignResult, OnProgress, spread_s
from strata.train.core.replay_differences import TOLERANCES

Kind = Literal["none", "below", "accept", "roll back"]
KINDS: Final[Sequence[Kind]] = ("none", "below", "accept", "roll back")
NOISE: Final[dict[Kind, float]] = {"none": 0.0, "below": 1e-7, "accept": 1e-2, "roll back": 1e-2}
"""The share of a product by which it is off. That of `below` is one step of float32."""
VICTIMS: Final[Sequence[Victim]] = ("rank 0", "rank 1")
EVERY: Final = 14
"""Dispatches that change something between two snapshots; a trial makes fewer."""
STEPS: Final = 3
LOOK_S: Final = 0.05
PROBE: Final = tuple(range(5, 25))


@dataclass
class NoiseOutcome:
    times: int = 0
    problems: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    below: list[float] = field(default_factory=list)
    """The largest difference of a log probability, in nats, of each trial."""
    above: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)

    def result(self) -> CampaignResult:
        kinds = ", ".join(f"{count} with {name}" for name, count in sorted(self.kinds.items()))
        figures = (
            f"{self.times} kills of ranks: {kinds}; {self.compared} passes and steps compared; log probabilities off "
            f"by at most {max(self.below, default=0):.2g} nats below the tolerance of {TOLERANCES['float32']:g}, by "
            f"{min(self.above, default=0):.2g} to {max(self.above, default=0):.2g} above it; "
            f"loss of the ranks to the end of their replay {spread_s(self.recovered_s)}"
        )
        return CampaignResult(
            times=self.times, problems=self.problems, figures=figures, worst_s=max(self.recovered_s, default=0.0)
        )


class Model(Trainer):
    """Passes have odd numbers and steps even ones, as its parent counts them; a save and a probe are followed by a
    step."""

    def __init__(self, client: httpx.AsyncClient, place: int) -> None:
        super().__init__(client, place)
        self._number = 0

    @property
    def model_id(self) -> str:
        return self._model_id

    async def step(self) -> list[Any]:
        """A pass and a step; their results."""
        return [await self._next(), await self._next()]

    async def keep(self, name: str) -> None:
        self._number += 1
        await self.save(name, self._number)
        await self._idle_step()

    async def probe(self) -> list[float]:
        """The log probabilities of a text, which change no model."""
        self._number += 1
        inputs = {"target_tokens": {"data": [*PROBE[1:], 7], "dtype": "int64", "shape": [len(PROBE)]}}
        datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": PROBE}]}, "loss_fn_inputs": inputs}
        body = {"data": [datum], "loss_fn": "cross_entropy"}
        head = {"model_id": self._model_id, "seq_id": self._number, "forward_input": body}
        result = await self._result((await self._post("forward", head))["request_id"])
        await self._idle_step()
        if "error" in result:
            raise RuntimeError(f"no probe: {result}")
        return [float(each) for each in result["loss_fn_outputs"][0]["logprobs"]["data"]]

    async def leave(self) -> None:
        """Makes room for the next one."""
        await self._result((await self._post("unload_model", {"model_id": self._model_id}))["request_id"])

    async def _next(self) -> Any:
        self._number += 1
        return await self._result(await self._submit(self._number))

    async def _idle_step(self) -> None:
        """A step with a learning rate of 0: the weights stay as they are."""
        self._number += 1
        body = {"model_id": self._model_id, "seq_id": self._number, "adam_params": {"learning_rate": 0.0}}
        await self._result((await self._post("optim_step", body))["request_id"])


async def run(ask: CampaignRequest, tell: OnProgress) -> CampaignResult:
    model = ask.folder / "tiny"
    await asyncio.to_thread(make_model, model)
    return await noisy_replays(ask.folder / "noise", model, range(ask.first, ask.first + ask.times), tell)


async def noisy_replays(folder: Path, model: Path, numbers: range, tell: OnProgress) -> CampaignResult:
    outcome = NoiseOutcome()
    options = ServeOptions(armed=True, ranks="deterministic = true")
    snapshots = f"every_dispatches = {EVERY}\nevery_s = 0\nevery_payload_mb = 0\nevery_replay_s = 0"
    async with serving(folder, model, "real", snapshots=snapshots, options=options) as server:
        key = {"X-API-Key": server.key}
        async with httpx.AsyncClient(base_url=server.url, headers=key, timeout=30.0) as http:
            other = Model(http, 1)
            await other.begin()
            for number in numbers:
                # A new one: the longer a tiny model learns random texts by heart, the more a difference grows.
                trained = Model(http, 2 + number)
                await trained.begin()
                await _trial(server, trained, other, number, outcome)
                await trained.leave()
                outcome.times += 1
                tell(outcome.result())
                if outcome.problems:
                    break
    return outcome.result()


async def _trial(server: ServeProcess, model: Model, other: Model, number: int, outcome: NoiseOutcome) -> None:
    kind, victim = KINDS[number % len(KINDS)], VICTIMS[number // len(KINDS) % len(VICTIMS)]
    await _train_to_snapshot(server, model)
    await model.step()
    await model.keep(f"kept-{number}")
    expected = await model.probe()
    for _ in range(STEPS):
        await model.step()
    before = await _status(server)
    order_noise(server.orders, NOISE[kind])
    await server.there(victim)
    server.kill(victim)
    after = await _recovered(server, before["recoveries"])
    order_noise(server.orders, 0.0)
    recovery = after["recovered"][0]
    found = recovery["differences"]
    outcome.recovered_s.append(recovery["seconds"])
    outcome.kinds[kind] += 1
    outcome.compared += found.get("compared", 0)
    problems = [] if found.get("compared") and not found.get("not_compared") else ["not all was compared"]
    stops = kind in ("accept", "roll back")
    if kind != "none":
        (outcome.above if stops else outcome.below).append(found.get("logprobs", 0.0))
    problems += _judge_difference(kind, found)
    stopped = [each["model_id"] for each in after["stopped"]]
    if stopped != [model.model_id] * stops:
        problems.append(f"stopped are {stopped}")
    elif stops:
        problems += await _resolve(server, (model, other), kind, expected, before["snapshot"]["number"])
    if any("error" in each for each in await model.step()):
        problems.append("the model does not train on")
    outcome.problems += [f"trial {number} ({kind}): {each}; {found}" for each in problems]


def _judge_difference(kind: Kind, found: Any) -> list[str]:
    logprobs = found.get("logprobs", 0.0)
    if kind == "none" and any(found.get(name) for name in ("loss", "gradient_norm", "logprobs")):
        return ["without noise there is a difference"]
    if kind == "below" and not 0 < logprobs <= TOLERANCES["float32"]:
        return ["the difference is not below the tolerance, or there is none"]
    return []


async def _resolve(
    server: ServeProcess, models: tuple[Model, Model], kind: Kind, expected: list[float], snapshot: int
) -> list[str]:
    """The first of the models is stopped. What it refuses, and what is kept for it; then the command."""
    model, other = models
    problems = []
    if not all("is stopped" in each.get("error", "") for each in await model.step()):
        problems.append("a stopped model took an operation")
    if any("error" in each for each in await other.step()):
        problems.append("another model does not train on")
    if not list(server.settings.snapshot_folder.glob(f"{snapshot:012d}-*")):
        problems.append("the snapshot from before the difference is gone")
    await _command(server, model.model_id, "--accept" if kind == "accept" else "--roll-back")
    async with asyncio.timeout(START_S):
        while (await _status(server))["stopped"]:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(LOOK_S)
    if (await model.probe() == expected) != (kind == "roll back"):
        problems.append("the weights are those of the wrong run")
    return problems


async def _command(server: ServeProcess, model_id: str, option: str) -> None:
    """As an operator would, in a shell."""
    code = "from strata.cli.main import main; main()"
    arguments = ("-c", code, "serve", "resolve", model_id, option, "--server", str(server.settings_file))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"strata serve resolve ended with {process.returncode}: {output.decode()}")


async def _train_to_snapshot(server: ServeProcess, model: Model) -> None:
    """A snapshot of everything so far: the next replay repeats nothing that ran with noise, or before a decision."""
    number = (await _status(server))["dispatched"]
    async with asyncio.timeout(START_S):
        while ((await _status(server))["snapshot"] or {"number": 0})["number"] <= number:
            await model.step()


async def _recovered(server: ServeProcess, recoveries: int) -> Any:
    """The status when another group has finished its replay."""
    async with asyncio.timeout(START_S):
        while (found := await _status(server))["recoveries"] <= recoveries:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(LOOK_S)
    return found


async def _status(server: ServeProcess) -> Any:
    async with httpx.AsyncClient(base_url=server.url, timeout=START_S) as http:
        reply = await http.get("/api/v1/status", headers={"X-API-Key": server.key})
        return reply.raise_for_status().json()
