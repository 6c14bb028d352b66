"""Router replay through the orchestrator: routing is found by tokens, is part of what was accepted, survives kills."""

from __future__ import annotations

import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from strata.train.core import client_commands, model_options, ops
from strata.train.core.sampling import SampleOperation, SampleParams, decode_result
from strata.train.orchestrator.maintenance.compaction import _referenced_payloads
from strata.train.payload import Payloads
from tests.core.train.servers import Server, forward_backward
from tests.shell.train_orchestrator.stacks import TENANT, Stack, running
from tests.shell.train_orchestrator.test_sampler_gap import ints, rollout

PROMPT: Final = [1, 2, 3]
REPLAYED: Final = "router_replay_tokens:sum"


async def created(stack: Stack, wanted: str = "true", number: int = 0) -> str:
    session_id = f"session-{TENANT}"
    await stack.look(client_commands.Done, client_commands.OpenSession(session_id))
    create = ops.CreateModel(
        f"{session_id}:train:{number}",
        "pretended",
        model_options.LoraConfig(),
        user_metadata={"router_replay": wanted},
    )
    await stack.result(await stack.submit(create, session_id=session_id))
    return create.model_id


async def drawn(stack: Stack, model: str, prompt: Sequence[int] = PROMPT, tokens: int = 4) -> list[int]:
    """An answer of the model as it is before its second operation."""
    sampler = f"{model.partition(':')[0]}:sample:{model.rpartition(':')[2]}"
    await stack.result(await stack.submit(ops.SaveSampler(model, 1, sampler)))
    sample = SampleOperation(sampler, len(prompt), ints(*prompt), SampleParams(max_tokens=tokens))
    result = await stack.result(await stack.submit(sample))
    assert isinstance(result, ops.SampleDone), result
    (sequence,) = decode_result(Payloads(stack.settings.payloads).read(result.payload)).sequences
    return array.array("i", sequence.tokens).tolist()


def learn(stack: Stack, model: str, seq: int, *datums: ops.Datum) -> ops.ForwardBackward:
    payload = Payloads(stack.settings.payloads).keep(ops.encode_pass_data(ops.PassData(datums)))
    lengths = [each.length for each in datums]
    return ops.ForwardBackward(model, seq, model_options.LossName.PPO, {}, False, lengths, payload)


async def metrics(stack: Stack, operation: ops.ForwardBackward) -> dict[str, float]:
    return dict(stack.outputs(await stack.result(await stack.submit(operation))).metrics)


async def test_a_datum_replays_the_sample_that_it_begins_with_and_nothing_else(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model, other = await created(stack), await created(stack, number=1)
        plain = await created(stack, "false", 2)
        answer = await drawn(stack, model)
        turn = [*PROMPT, *answer, 9, 8]
        more = rollout(turn, [7])
        assert (await metrics(stack, learn(stack, model, 2, rollout(PROMPT, answer))))[REPLAYED] == 6
        found = await metrics(stack, learn(stack, model, 3, rollout(PROMPT, answer), rollout([1, 2, 4], answer)))
        assert found[REPLAYED] == 6, "of the first alone"
        assert REPLAYED not in await metrics(stack, learn(stack, model, 4, more)), "only the last turn is learned from"
        both = dict(more.inputs)
        weights = [0.0] * 2 + [1.0] * 4 + [0.0] * 2 + [1.0]
        both["advantages"] = ops.Dense(ops.DType.F32, (9,), array.array("f", weights).tobytes())
        found = await metrics(stack, learn(stack, model, 5, ops.Datum(more.tokens, both)))
        assert found[REPLAYED] == 6, "the first turn was sampled here"
        assert REPLAYED not in await metrics(stack, learn(stack, other, 1, rollout(PROMPT, answer)))
        own = await drawn(stack, plain)
        assert REPLAYED not in await metrics(stack, learn(stack, plain, 2, rollout(PROMPT, own)))


@pytest.mark.parametrize("datums", [1, 400], ids=["in the journal", "in files"])
async def test_kills_of_orchestrator_and_ranks_change_nothing_of_what_is_replayed(tmp_path: Path, datums: int) -> None:
    """The orchestrator dies between the sample and its pass, the ranks after it; a client that sends the pass again
    gets the same future."""

    async def run(folder: Path, *, kills: bool) -> list[ops.Result]:
        folder.mkdir()
        async with running(folder) as stack:
            model = await created(stack)
            answer = await drawn(stack, model, tokens=200)
            if kills:
                await stack.orchestrator.kill()
                await stack.start_orchestrator()
            operation = learn(stack, model, 2, *[rollout(PROMPT, answer)] * datums)
            first = await stack.submit(operation)
            passed = await stack.result(first)
            assert stack.outputs(passed).metrics[REPLAYED] == 202 * datums
            if kills:
                assert await stack.submit(operation) == first
                await stack.ranks.kill()
                await stack.start_ranks()
            return [passed, await stack.result(await stack.submit(stack.step(model, 3)))]

    calm = await run(tmp_path / "calm", kills=False)
    assert await run(tmp_path / "killed", kills=True) == calm


def test_the_routing_of_a_pass_stays_as_long_as_the_pass() -> None:
    server = Server()
    routing = ops.StoredPayload("5" * 64, 1 << 20)
    fields = msgspec.structs.asdict(forward_backward(server.model(), 1))
    server.accept(ops.RoutedForwardBackward(**fields, routing=routing))
    assert routing.sha256 in set(_referenced_payloads(server.state))
