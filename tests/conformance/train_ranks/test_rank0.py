"""What every rank 0 keeps to: the rules that the orchestrator's recovery rests on."""

from __future__ import annotations

import array
from pathlib import Path

import msgspec
import pytest

from strata.train.core import commands, model_options, ops
from strata.train.core.sampling import (
    AddedSample,
    SampledPart,
    SampleFailed,
    SampleOperation,
    SampleParams,
    SampleResult,
    SamplingSlice,
    SliceResult,
)
from tests.conformance.train_ranks.groups import RANKS, RUN, Group, Speaker, outputs

BATCH = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12, 13, 14], [15], [16, 17, 18]]


async def test_who_attaches_is_told_the_group_and_what_it_applied(speaker: Speaker) -> None:
    first = await speaker.attach()
    assert isinstance(first, commands.AttachReply)
    assert (first.world_size, first.applied) == (RANKS, speaker.group.number)
    await speaker.create("told")
    second = await speaker.attach()
    assert isinstance(second, commands.AttachReply)
    assert (second.group, second.applied) == (first.group, speaker.group.number)
    assert second.model.max_context >= 64


async def test_a_command_of_a_generation_that_has_not_attached_is_refused_and_not_done(speaker: Speaker) -> None:
    ahead = speaker.command(commands.ManageModel(ops.CreateModel("ahead", "x", model_options.LoraConfig(rank=4))))
    early = commands.DispatchCommand(ahead.generation + 1, ahead.number, ahead.work, ahead.durable)
    await speaker.say(early, commands.Fenced)
    speaker.group.number -= 1
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    assert attached.applied == speaker.group.number


async def test_whoever_speaks_with_a_generation_that_is_over_is_refused(speaker: Speaker) -> None:
    old = speaker.command(commands.ManageModel(ops.Wake()), speaker.group.number + 1)
    await speaker.attach()
    assert (await speaker.say(old, commands.Fenced)).generation == speaker.group.generation
    assert isinstance(await speaker.attach(generation=1), commands.Fenced)


async def test_ranks_that_worked_for_one_run_take_no_orders_of_another(speaker: Speaker) -> None:
    await speaker.create("owned")
    assert isinstance(await speaker.attach(generation=speaker.group.generation, run="train/other"), commands.Fenced)
    assert isinstance(await speaker.attach(generation=speaker.group.generation, run=RUN), commands.AttachReply)


@pytest.mark.proves("Never: what is told again is done twice")
async def test_a_dispatch_that_comes_again_is_answered_from_memory_and_not_done_again(speaker: Speaker) -> None:
    model = await speaker.create("once")
    before = await speaker.train(model, BATCH)
    step = speaker.command(
        commands.StepsCommand([ops.OptimStep(model, 2, model_options.AdamParams(learning_rate=0.01))])
    )
    first = await speaker.say(step, commands.DispatchReply)
    again = await speaker.say(step, commands.DispatchReply)
    assert again.results == first.results
    after = await speaker.train(model, BATCH, forward_only=True)
    assert after.metrics["loss:sum"] != before.metrics["loss:sum"]
    twin = await speaker.create("once-twin")
    await speaker.train(twin, BATCH)
    await speaker.step(twin)
    assert await speaker.train(twin, BATCH, forward_only=True) == after


async def test_a_reply_is_kept_for_the_next_generation_and_carries_its_number(speaker: Speaker) -> None:
    model = await speaker.create("kept")
    await speaker.train(model, BATCH)
    work = commands.StepsCommand([ops.OptimStep(model, 2, model_options.AdamParams())])
    first = await speaker.do(work)
    await speaker.attach()
    again = await speaker.say(speaker.command(work, speaker.group.number), commands.DispatchReply)
    assert again.generation == speaker.group.generation > first.generation
    assert again.results == first.results


async def test_numbers_may_have_gaps(speaker: Speaker) -> None:
    speaker.group.number += 3
    model = await speaker.create("gap")
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    assert attached.applied == speaker.group.number
    assert isinstance(await speaker.one(commands.ManageModel(ops.UnloadModel(model))), ops.ModelUnloaded)


async def test_work_that_fails_is_a_reply_and_the_next_one_is_done(speaker: Speaker) -> None:
    assert isinstance(await speaker.step("nobody"), ops.Failed)
    assert isinstance(await speaker.one(speaker.passes([("nobody", BATCH)])), ops.Failed)
    await speaker.create("somebody")


async def test_outputs_are_in_the_order_of_the_datums_however_they_were_packed(speaker: Speaker) -> None:
    model = await speaker.create("order")
    together = await speaker.train(model, BATCH, forward_only=True)
    for datum, output in zip(BATCH, together.outputs, strict=True):
        alone = await speaker.train(model, [datum], forward_only=True)
        found, wanted = output.fields["logprobs"], alone.outputs[0].fields["logprobs"]
        assert found.shape == wanted.shape == (len(datum),)
        assert floats(found) == pytest.approx(floats(wanted), abs=1e-5)


async def test_every_item_of_a_pass_has_its_own_result_in_the_order_of_the_items(speaker: Speaker) -> None:
    one, other = await speaker.create("item-one"), await speaker.create("item-other")
    reply = await speaker.do(speaker.passes([(one, BATCH[:2]), (other, BATCH[2:]), ("nobody", BATCH[:1])]))
    assert [len(outputs(each).outputs) for each in reply.results[:2]] == [2, 3]
    assert isinstance(reply.results[2], ops.Failed)
    assert reply.timing.total_s > 0


async def test_steps_of_several_models_each_have_their_own_result_and_are_those_made_alone(speaker: Speaker) -> None:
    batches = {"one": BATCH, "other": BATCH[:2]}
    for name, batch in batches.items():
        for model in (f"{name}-together", f"{name}-alone"):
            await speaker.create(model)
            await speaker.train(model, batch)
    together = [f"{name}-together" for name in batches]
    orders = [together[0], "nobody", together[1]]
    steps = [ops.OptimStep(model, 2, model_options.AdamParams(learning_rate=0.01)) for model in orders]
    first, nobody, last = (await speaker.do(commands.StepsCommand(steps))).results
    assert isinstance(nobody, ops.Failed)
    assert [first, last] == [await speaker.step(f"{name}-alone", 2) for name in batches]
    after = {}
    for name in batches:
        after[name], alone = [
            await speaker.train(f"{name}-{how}", BATCH, forward_only=True) for how in ("together", "alone")
        ]
        assert after[name] == alone
    assert after["one"] != after["other"]


async def test_a_forward_pass_leaves_the_gradients_alone_and_aborting_forgets_them(speaker: Speaker) -> None:
    plain, looked, forgot = [await speaker.create(name) for name in ("plain", "looked", "forgot")]
    for model in (plain, looked):
        await speaker.train(model, BATCH[:2])
    await speaker.train(looked, BATCH[2:], forward_only=True)
    await speaker.train(forgot, BATCH[2:])
    aborted = await speaker.one(commands.ManageModel(ops.AbortGradients(forgot, 2)))
    assert aborted == ops.GradientsAborted()
    await speaker.train(forgot, BATCH[:2])
    for model in (plain, looked, forgot):
        await speaker.step(model, 9)
    losses = [(await speaker.train(model, BATCH, forward_only=True)).metrics["loss:sum"] for model in (plain, looked)]
    assert losses[0] == losses[1]
    assert (await speaker.train(forgot, BATCH, forward_only=True)).metrics["loss:sum"] == losses[0]


async def test_ranks_that_sleep_let_go_of_models_and_do_nothing_else(speaker: Speaker) -> None:
    gone, kept = await speaker.create("asleep-gone"), await speaker.create("asleep-kept")
    before = await speaker.train(kept, BATCH)
    assert isinstance(await speaker.one(commands.ManageModel(ops.Sleep())), ops.Asleep)
    assert isinstance(await speaker.step(kept), ops.Failed)
    assert await speaker.one(commands.ManageModel(ops.AbortGradients(kept, 3))) == ops.GradientsAborted()
    assert await speaker.one(commands.ManageModel(ops.UnloadModel(gone))) == ops.ModelUnloaded(gone)
    assert await speaker.one(commands.ManageModel(ops.Wake())) == ops.Awake()
    assert isinstance(await speaker.step(gone), ops.Failed)
    assert await speaker.create("asleep-gone")
    assert await speaker.train(kept, BATCH) == before


async def test_a_save_told_again_changes_nothing_and_a_load_brings_it_back(speaker: Speaker) -> None:
    model = await speaker.create("saved")
    folder = str(speaker.group.settings.checkpoint_folder / "saved" / "weights" / "a@1")
    save = commands.SaveState(ops.SaveWeights(model, 1, "weights", "a"), folder)
    wanted = ops.WeightsSaved(f"tinker://{model}/weights/a")
    assert await speaker.one(save) == wanted
    before = await speaker.train(model, BATCH, forward_only=True)
    files = sorted(path.name for path in Path(folder).iterdir())
    assert await speaker.one(save) == wanted
    assert sorted(path.name for path in Path(folder).iterdir()) == files
    await speaker.train(model, BATCH)
    await speaker.step(model, 2)
    load = commands.LoadState(ops.LoadWeights(model, 3, model, "weights", "a", optimizer=True), folder)
    assert isinstance(await speaker.one(load), ops.WeightsLoaded)
    assert await speaker.train(model, BATCH, forward_only=True) == before


async def test_all_ranks_answer_to_a_health_check_and_it_is_no_dispatch(speaker: Speaker) -> None:
    healthy = await speaker.say(
        commands.RankRequest(speaker.group.generation, 41, commands.HealthCheck()), commands.HealthReply
    )
    assert (healthy.ask_id, sorted(healthy.ranks)) == (41, list(range(RANKS)))
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    assert attached.applied == speaker.group.number


async def test_ranks_leave_shared_devices_and_take_them_again_between_two_dispatches(speaker: Speaker) -> None:
    """Twice: a confirmation may be lost."""
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    generation = speaker.group.generation
    leave, take = commands.YieldDevices(), commands.TakeDevices()
    moves: list[commands.Requested] = [leave, leave, take, take]
    for number, work in enumerate(moves):
        moved = await speaker.say(commands.RankRequest(generation, number, work), commands.HealthReply)
        assert (moved.ask_id, moved.failure, sorted(moved.ranks)) == (number, "", list(range(RANKS)))
    again = await speaker.attach()
    assert isinstance(again, commands.AttachReply)
    assert again.applied == attached.applied
    assert isinstance(await speaker.one(commands.ManageModel(ops.Wake())), ops.Awake)


async def test_bytes_that_are_no_message_are_dropped(speaker: Speaker) -> None:
    for data in (b"", b"\xff" * 100, b"\x80"):
        await speaker.garbage(data)
    assert isinstance(await speaker.one(commands.ManageModel(ops.Wake())), ops.Awake | ops.Failed)


def floats(tensor: ops.Dense) -> list[float]:
    import array

    return array.array("f", tensor.data).tolist()


def added(name: str, sampler: str, tokens: int = 6) -> AddedSample:
    prompt = array.array("i", [5, 6, 7]).tobytes()
    return AddedSample(
        name, SampleOperation(sampler, 0, prompt, SampleParams(max_tokens=tokens, seed=3, end_tokens=False))
    )


async def sampling(speaker: Speaker, *time_slices: SamplingSlice) -> list[SliceResult]:
    found = []
    for time_slice in time_slices:
        reply = await speaker.do(time_slice)
        assert reply.results == []
        assert reply.sampled is not None
        found.append(reply.sampled)
    return found


async def test_a_request_goes_on_from_slice_to_slice_and_ends_once(speaker: Speaker) -> None:
    await speaker.one(commands.MakeSampler(ops.OpenSampler("goes-on", "x"), ""))
    first, second, third = await sampling(
        speaker, SamplingSlice(4, [added("goes-on:0", "goes-on")]), SamplingSlice(4), SamplingSlice(4)
    )
    assert (first.ended, first.requests) == ([], 1)
    assert [each.request_id for each in second.ended] == ["goes-on:0"]
    (ended,) = second.ended
    assert isinstance(ended.outcome, SampleResult)
    assert len(ended.outcome.sequences[0].tokens) == 4 * 6
    assert (second.requests, third.ended, third.requests) == (0, [], 0)


async def test_the_tokens_of_a_streamed_request_are_reported_while_it_runs_but_for_the_last(speaker: Speaker) -> None:
    """Also of samples that run on another rank than rank 0."""
    await speaker.one(commands.MakeSampler(ops.OpenSampler("read", "x"), ""))
    request = added("read:0", "read")
    sample = msgspec.structs.replace(request.sample, num_samples=RANKS, stream=True)
    request = msgspec.structs.replace(request, sample=sample)
    parts: dict[int, list[SampledPart]] = {}
    time_slice = SamplingSlice(2, [request, added("unread:0", "read")])
    while True:
        heard, slice_ended = await speaker.until_reply(time_slice)
        time_slice = SamplingSlice(2)
        for progress in heard:
            for request_id, part in progress.parts:
                assert request_id == "read:0", "the other one is not streamed"
                parts.setdefault(part.index, []).append(part)
        if slice_ended.sampled is not None and not slice_ended.sampled.requests:
            break
    assert slice_ended.sampled is not None
    results = {each.request_id: each.outcome for each in slice_ended.sampled.ended}
    outcome = results["read:0"]
    assert isinstance(outcome, SampleResult)
    assert sorted(parts) == list(range(RANKS))
    for index, sequence in enumerate(outcome.sequences):
        assert [each.start for each in parts[index]] == [0, *(each.end for each in parts[index][:-1])]
        tokens = b"".join(each.tokens for each in parts[index])
        assert sequence.tokens.startswith(tokens)
        assert sequence.logprobs.startswith(b"".join(each.logprobs for each in parts[index]))
        assert 0 < len(tokens) < len(sequence.tokens)


async def test_a_slice_that_comes_again_is_answered_from_memory_and_not_done_again(speaker: Speaker) -> None:
    await speaker.one(commands.MakeSampler(ops.OpenSampler("again", "x"), ""))
    time_slice = speaker.command(SamplingSlice(4, [added("again:0", "again")]))
    first = await speaker.say(time_slice, commands.DispatchReply)
    again = await speaker.say(time_slice, commands.DispatchReply)
    assert again.sampled == first.sampled
    (done,) = await sampling(speaker, SamplingSlice(4))
    assert [each.request_id for each in done.ended] == ["again:0"]


async def test_a_request_that_is_cancelled_ends_so_and_one_without_a_sampler_fails(speaker: Speaker) -> None:
    await speaker.one(commands.MakeSampler(ops.OpenSampler("cancelled", "x"), ""))
    await sampling(speaker, SamplingSlice(1, [added("cancelled:0", "cancelled")]))
    (done,) = await sampling(speaker, SamplingSlice(1, [added("lost:0", "nowhere")], cancel=["cancelled:0", "unknown"]))
    failed = {each.request_id: each.outcome.category for each in done.ended if isinstance(each.outcome, SampleFailed)}
    assert failed == {"cancelled:0": "cancelled", "lost:0": "user"}
    assert done.requests == 0


async def test_a_sampler_stays_as_the_model_was_and_makes_room_when_told(speaker: Speaker) -> None:
    model = await speaker.create("sampled")
    assert await speaker.one(commands.MakeSampler(ops.SaveSampler(model, 1, "kept"), "")) == ops.SamplerOpened("kept")
    before = await sampling(speaker, SamplingSlice(8, [added("kept:0", "kept")]))
    await speaker.train(model, BATCH)
    await speaker.step(model, 2)
    after = await sampling(speaker, SamplingSlice(8, [added("kept:1", "kept")]))
    assert before[0].ended[0].outcome == after[0].ended[0].outcome
    folder = speaker.group.settings.checkpoint_folder / "sampled" / "sampler_weights" / "unnamed@3"
    save = commands.MakeSampler(ops.SaveSampler(model, 3, "newer"), str(folder), ["kept", "never-was"])
    assert await speaker.one(save) == ops.SamplerOpened("newer")
    assert (folder / "adapter_config.json").is_file()
    newer, gone = await sampling(
        speaker, SamplingSlice(8, [added("newer:0", "newer")]), SamplingSlice(8, [added("kept:2", "kept")])
    )
    assert newer.ended[0].outcome != before[0].ended[0].outcome
    assert isinstance(gone.ended[0].outcome, SampleFailed)


async def snapshot(speaker: Speaker, name: str) -> commands.Restore:
    """Taken and on the disk; what has to be said to get it back."""
    path = str(speaker.group.settings.snapshot_folder / name)
    reply = await speaker.do(commands.TakeSnapshot(path))
    assert reply.results == []
    written = await speaker.hear(commands.SnapshotWritten)
    assert (written.number, written.trouble) == (speaker.group.number, None)
    return commands.Restore(speaker.group.generation, written.number, path, written.digest)


def again(speaker: Speaker, restore: commands.Restore) -> commands.Restore:
    return msgspec.structs.replace(restore, generation=speaker.group.generation)


async def test_a_snapshot_that_is_written_is_told_to_whoever_attaches_next_too(speaker: Speaker) -> None:
    restore = await snapshot(speaker, "told")
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    assert attached.written is not None
    assert (attached.written.number, attached.written.digest) == (restore.number, restore.digest)


async def test_ranks_that_have_applied_something_do_not_restore(speaker: Speaker) -> None:
    await speaker.create("applied")
    await speaker.say(again(speaker, await snapshot(speaker, "applied")), commands.Fenced)


async def test_ranks_that_start_anew_go_on_from_a_snapshot_with_gradients_and_samplers_as_if_nothing_had_been(
    speaker: Speaker,
) -> None:
    group = speaker.group
    model, other = await speaker.create("goes-on"), await speaker.create("goes-on-other")
    await speaker.train(model, BATCH)
    await speaker.step(model)
    await speaker.one(commands.MakeSampler(ops.SaveSampler(model, 3, "lives-on"), ""))
    await speaker.train(model, BATCH[:3])
    restore = await snapshot(speaker, "goes-on")

    async def go_on() -> list[object]:
        await speaker.train(other, BATCH[1:])
        found = [await speaker.train(model, BATCH[2:]), await speaker.step(model, 9), await speaker.step(other, 9)]
        sampled = await sampling(speaker, SamplingSlice(8, [added("lives-on:0", "lives-on")]))
        losses = [await speaker.train(each, BATCH, forward_only=True) for each in (model, other)]
        return [*found, sampled[0].ended[0].outcome, *losses]

    expected = await go_on()
    group.kill()
    group.start()
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    assert attached.applied == 0
    restore = again(speaker, restore)
    for wrong in ({"digest": "0" * 64}, {"path": f"{restore.path}-not"}):
        refused = await speaker.say(msgspec.structs.replace(restore, **wrong), commands.Restored)
        assert refused.refused
        assert refused.damaged
    assert await speaker.say(restore, commands.Restored) == commands.Restored(group.generation, restore.number)
    attached = await speaker.attach()
    assert isinstance(attached, commands.AttachReply)
    assert attached.applied == restore.number
    assert await go_on() == expected


async def test_a_reply_says_what_the_time_was_spent_on(speaker: Speaker, tmp_path: Path) -> None:
    model = await speaker.create("timed")
    save = ops.SaveWeights(model, 3, "weights", "timed")
    wanted: list[tuple[commands.Work, set[str]]] = [
        (speaker.passes([(model, BATCH)]), {"forward_s", "backward_s"}),
        (speaker.passes([(model, BATCH)], forward_only=True), {"forward_s"}),
        (commands.StepsCommand([ops.OptimStep(model, 2, model_options.AdamParams())]), {"optimizer_s"}),
        (commands.SaveState(save, str(tmp_path / "timed")), {"publish_s"}),
        (commands.MakeSampler(ops.SaveSampler(model, 4, "timed:sample:0"), ""), {"publish_s"}),
        (commands.ManageModel(ops.AbortGradients(model, 5)), set()),
    ]
    for work, phases in wanted:
        timing = (await speaker.do(work)).timing
        spent = {name: getattr(timing, name) for name in ("forward_s", "backward_s", "optimizer_s", "publish_s")}
        assert {name for name, seconds in spent.items() if seconds > 0} == phases, work
        assert sum(spent.values()) <= timing.total_s * 1.001


async def test_ranks_end_in_order_when_told_to(group: Group, speaker: Speaker) -> None:
    await speaker.say(commands.RankRequest(group.generation, 1, commands.Shutdown()), commands.HealthReply)
    assert await group.ended() == 0
