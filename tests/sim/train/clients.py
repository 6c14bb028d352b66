"""Clients as the tinker SDK is one: they number, send in any order and again, ask for results, and give up some."""

from __future__ import annotations

import array
import asyncio
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.core import client_commands, model_options, ops
from strata.train.core.sampling import SampleOperation, SampleParams
from strata.train.link import messages
from strata.train.link.messages import OrchestratorRequest
from strata.train.status import queries, views
from tests.sim.train.expected_state import ExpectedResult, ExpectedState
from tests.sim.train.wires import TrainWorld

RETRIED: Final = frozenset({Code.UNAVAILABLE, Code.EXHAUSTED, Code.DEADLINE})
"""What a client repeats by itself. INTERNAL would be, too, and is a finding here."""
ROW_TOKENS: Final = 64

decode_output: Final = msgspec.msgpack.Decoder(messages.Output).decode


class Caller:
    """One tenant's way to the server: asks until there is an answer, at one API server or another."""

    def __init__(self, world: TrainWorld, expected: ExpectedState, apis: Sequence[str], tenant: str) -> None:
        self.world = world
        self.expected = expected
        self.tenant = tenant
        self._apis = apis

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    async def ask(self, request: OrchestratorRequest, wait_s: float = 0.0) -> messages.Output:
        payload = messages.encode(request)
        while True:
            try:
                timeout_s = self.rng.uniform(1.0, 4.0) + wait_s
                output: messages.Output = decode_output(
                    await self.world.call(self.rng.choice(self._apis), payload, timeout_s)
                )
            except StrataError as error:
                if error.code not in RETRIED:
                    self.world.violated(f"an API server said {error!r} to {request}")
                await asyncio.sleep(self.rng.uniform(0.05, 0.3))
                continue
            if isinstance(output, views.ErrorResponse) and output.code in RETRIED:
                full = output.code is Code.EXHAUSTED
                await asyncio.sleep(self.rng.uniform(0.5, 2.0) if full else self.rng.uniform(0.1, 0.6))
                continue
            return output

    async def look(self, body: client_commands.Command | queries.Query, wait_s: float = 0.0) -> messages.Output:
        return await self.ask(OrchestratorRequest("", self.tenant, body), wait_s)

    async def add(self, operation: ops.Operation, session_id: str = "") -> messages.Output:
        return await self.look(client_commands.SubmitOperation(operation, session_id))

    async def send(self, operation: ops.Operation, session_id: str = "") -> str:
        """Send until it is accepted; its future."""
        output = await self.add(operation, session_id)
        if not isinstance(output, client_commands.Accepted):
            self.world.violated(f"{str(operation)[:90]} was answered {output}")
            return ""
        self.expected.accepted(output.future_id, self.tenant, operation)
        return output.future_id

    async def result(self, future_id: str) -> ops.Result | None:
        """Ask until it is there. None if it was kept as long as was promised, and is gone."""
        while True:
            wait_s = self.rng.uniform(0.2, 4.0)
            output = await self.look(queries.WatchFuture(future_id, wait_s), wait_s)
            match output:
                case views.FutureResult():
                    self.expected.told(future_id, output.result)
                    return output.result
                case views.QueuePosition():
                    await asyncio.sleep(self.rng.uniform(0.0, 0.2))
                case views.ErrorResponse(Code.GONE) if self.expected.may_be_gone(future_id):
                    return None
                case _:
                    self.world.violated(f"a question for the result of {future_id} was answered {output}")
                    return None

    async def abort(self, future_id: str) -> None:
        self.expected.entries[future_id].may_cancel = True
        output = await self.look(client_commands.AbortOperation(future_id))
        fine = isinstance(output, client_commands.Done) or (
            isinstance(output, views.ErrorResponse)
            and (
                output.code is Code.PRECONDITION or (output.code is Code.GONE and self.expected.may_be_gone(future_id))
            )
        )
        if not fine:
            self.world.violated(f"giving up {future_id} was answered {output}")

    async def pry(self, future_id: str, model_id: str) -> None:
        """Ask for what is somebody else's: to this tenant, it does not exist."""
        looks: list[queries.Query] = [queries.WatchFuture(future_id, 0.0), queries.DescribeModel(model_id)]
        asked = [await self.look(each) for each in looks]
        asked.append(await self.add(ops.AbortGradients(model_id, 1)))
        for output in asked:
            if not isinstance(output, views.ErrorResponse) or output.code is not Code.NOT_FOUND:
                self.world.violated(f"{self.tenant} asked for {future_id} of another tenant and heard {output}")


class Session:
    """One session with one model, from its beginning to its end."""

    def __init__(self, caller: Caller, name: str, stranger: Caller) -> None:
        self._caller = caller
        self._world = caller.world
        self._expected = caller.expected
        self._stranger = stranger
        self.session_id = name
        self.model_id = f"{name}:train:0"
        self._samplers = 0

    @property
    def rng(self) -> random.Random:
        return self._world.rng

    async def begin(self) -> None:
        await self._caller.look(client_commands.OpenSession(self.session_id))
        create = ops.CreateModel(self.model_id, "tiny", model_options.LoraConfig(rank=4))
        await self._caller.result(await self._caller.send(create, self.session_id))

    async def work(self, operations: Sequence[ops.Sequenced], burst: int) -> None:
        """All of them, so many at a time, out of order within a burst; to their results."""
        waiting: list[asyncio.Task[None]] = []
        left = list(operations)
        while left:
            now, left = left[:burst], left[burst:]
            self.rng.shuffle(now)
            sending = [asyncio.create_task(self._one(each)) for each in now]
            waiting += sending
            await asyncio.sleep(self.rng.expovariate(1 / 0.4))
        for task in waiting:
            await task

    async def _one(self, operation: ops.Sequenced) -> None:
        caller = self._caller
        await asyncio.sleep(self.rng.expovariate(1 / 0.05))
        future_id = await caller.send(operation)
        if not future_id:
            return
        entry = self._expected.entries[future_id]
        entry.may_fail = isinstance(operation, ops.MalformedOperation)
        chance = self.rng.random()
        if chance < 0.15:
            await self._again(operation, future_id)
        elif chance < 0.25:
            await self._otherwise(operation, entry)
        elif chance < 0.35:
            await caller.abort(future_id)
        elif chance < 0.42:
            await self._stranger.pry(future_id, self.model_id)
        if isinstance(operation, ops.SaveSampler):
            await asyncio.gather(*(self._sample(operation, number, future_id) for number in range(3)))
        await caller.result(future_id)
        if self.rng.random() < 0.2:
            await asyncio.sleep(self.rng.expovariate(1 / 2.0))
            await caller.result(future_id)

    async def _again(self, operation: ops.Sequenced, future_id: str) -> None:
        if await self._caller.send(operation) != future_id:
            self._world.violated(f"{future_id} sent again has another future")

    async def _otherwise(self, operation: ops.Sequenced, entry: ExpectedResult) -> None:
        """The same number with other content."""
        other = ops.OptimStep(operation.model_id, operation.seq_id, model_options.AdamParams(learning_rate=0.123))
        output = await self._caller.add(other)
        if not isinstance(output, views.ErrorResponse) or output.code is not Code.CONFLICT:
            self._world.violated(f"{str(entry.operation)[:90]} sent again with other content was answered {output}")

    async def _sample(self, save: ops.SaveSampler, number: int, made_by: str) -> None:
        sampler_id = save.sampler_id
        await asyncio.sleep(self.rng.expovariate(1 / 0.3))
        prompt = array.array("i", [self.rng.randrange(90) for _ in range(self.rng.randint(1, 5))]).tobytes()
        params = SampleParams(max_tokens=self.rng.choice([1, 40, 200]), seed=number)
        sample = SampleOperation(sampler_id, number, prompt, params)
        if save.inflight and number:
            sample = msgspec.structs.replace(sample, max_staleness=number - 1)
        output = await self._caller.add(sample)
        if not isinstance(output, client_commands.Accepted):
            # A sampler that could not be made makes room for others.
            missing = isinstance(output, views.ErrorResponse) and output.code is Code.NOT_FOUND
            if not missing or not isinstance(self._expected.audit.results.get(made_by), ops.Failed):
                self._world.violated(f"sample {number} of {sampler_id} was answered {output}")
            return
        self._expected.accepted(output.future_id, self._caller.tenant, sample)
        if self.rng.random() < 0.2:
            await self._caller.abort(output.future_id)
        await self._caller.result(output.future_id)

    async def unload(self) -> None:
        """After which nothing of the model is accepted any more; what a gap holds is given up."""
        for future_id, entry in self._expected.entries.items():
            if future_id.startswith(f"{self.model_id}:"):
                entry.may_cancel = True
        await self._caller.result(await self._caller.send(ops.UnloadModel(self.model_id)))

    # What is asked for

    def plan(self, count: int, *, deadly: bool) -> list[ops.Sequenced]:
        saved = ["000000"]
        dies = self.rng.randint(1, count) if deadly else 0
        return [
            self._choose(seq, saved) if seq != dies else self.batch(seq, [8], deadly=True)
            for seq in range(1, count + 1)
        ]

    def _choose(self, seq: int, saved: list[str]) -> ops.Sequenced:  # noqa: PLR0911 - one arm per kind
        kind = self.rng.random()
        if kind < 0.5:
            lengths = [self.rng.randint(1, ROW_TOKENS // 2) for _ in range(self.rng.randint(1, 3))]
            return self.batch(seq, lengths, forward_only=kind < 0.08)
        if kind < 0.75:
            return ops.OptimStep(self.model_id, seq, model_options.AdamParams(learning_rate=self.rng.random()))
        if kind < 0.8:
            return ops.AbortGradients(self.model_id, seq)
        if kind < 0.86:
            saved.append(f"at-{seq}")
            return ops.SaveWeights(self.model_id, seq, "weights", saved[-1])
        if kind < 0.91:
            return ops.LoadWeights(
                self.model_id, seq, self.model_id, "weights", self.rng.choice(saved), optimizer=self.rng.random() < 0.5
            )
        if kind < 0.98:
            self._samplers += 1
            # All but every third is in flight.
            in_flight = self._samplers % 3 > 0
            return ops.SaveSampler(self.model_id, seq, f"{self.session_id}:sample:{self._samplers}", in_flight)
        return ops.MalformedOperation(self.model_id, seq, "this could not be read")

    def batch(
        self, seq: int, lengths: Sequence[int], *, forward_only: bool = False, deadly: bool = False
    ) -> ops.ForwardBackward:
        datums = [
            ops.Datum(array.array("i", [self.rng.randrange(97) for _ in range(length)]).tobytes(), {})
            for length in lengths
        ]
        data = ops.encode_pass_data(ops.PassData(datums))
        config = {"deadly": 1.0} if deadly else {}
        loss = model_options.LossName.CROSS_ENTROPY
        return ops.ForwardBackward(
            self.model_id, seq, loss, config, forward_only, list(lengths), ops.InlinePayload(data)
        )
