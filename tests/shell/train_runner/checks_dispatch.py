"""Rank 0 and its orchestrators: every dispatch once, whoever asks for it again, and nobody heard whose time is over."""

from __future__ import annotations

from strata.train.core import commands, model_options, ops
from tests.shell.train_runner.check_results import Check, Found
from tests.shell.train_runner.checks_lora import trained
from tests.shell.train_runner.driver import Driver, apart_by, batch, outcome, packed


def _pass(driver: Driver, model: str) -> commands.PassCommand:
    data = ops.encode_pass_data(ops.PassData(batch()))
    item = commands.PassItem("request", model, model_options.LossName.CROSS_ENTROPY, {}, data)
    return commands.PassCommand(False, [item], packed([batch()], driver.ranks))


def a_dispatch_that_comes_again_is_answered_and_not_done_again(driver: Driver, found: Found) -> None:
    model = trained(driver, "once")
    driver.train(model, batch())
    expected = driver.gradient(model)
    driver.number += 1
    command = commands.DispatchCommand(driver.generation, driver.number, _pass(driver, model), driver.number - 1)
    first = driver.say(command)
    assert isinstance(first, commands.DispatchReply), first
    assert first.timing.tokens == sum(one.length for one in batch())
    assert first.timing.total_s >= first.timing.forward_s + first.timing.backward_s > 0
    assert driver.say(command) == first
    attached = driver.attach()
    assert (attached.applied, attached.world_size) == (driver.number, driver.ranks)
    again = commands.DispatchCommand(driver.generation, driver.number, command.work, driver.number - 1)
    answer = driver.say(again)
    assert isinstance(answer, commands.DispatchReply), answer
    assert (answer.generation, answer.results) == (driver.generation, first.results)
    outcome(answer.results[0])
    assert apart_by(expected, driver.gradient(model)) == 0
    driver.unload(model)


def nobody_is_heard_whose_generation_is_over_or_who_is_of_another_run(driver: Driver, found: Found) -> None:
    driver.attach()
    step = commands.ManageModel(ops.Wake())
    for message in (
        commands.Attach(driver.generation - 1, "train/kit"),
        commands.DispatchCommand(driver.generation - 1, driver.number + 1, step, 0),
        commands.RankRequest(driver.generation - 1, 1, commands.Shutdown()),
        commands.Attach(driver.generation, "train/another"),
        commands.DispatchCommand(driver.generation + 1, driver.number + 1, step, 0),
    ):
        refused = driver.say(message)
        assert isinstance(refused, commands.Fenced), refused
        assert refused.generation == driver.generation


def numbers_may_have_gaps_and_replies_are_kept_until_they_are_durable(driver: Driver, found: Found) -> None:
    """A dispatch that was given up leaves a gap; one that was left out cannot be done later."""
    wake = commands.ManageModel(ops.Wake())
    driver.do(wake)
    driver.number += 3
    later = driver.say(commands.DispatchCommand(driver.generation, driver.number, wake, driver.number - 3))
    assert isinstance(later, commands.DispatchReply)
    for number in (driver.number - 1, driver.number - 3):
        gone = driver.say(commands.DispatchCommand(driver.generation, number, wake, 0))
        assert isinstance(gone, commands.Fenced), gone
    assert driver.say(commands.DispatchCommand(driver.generation, driver.number, wake, 0)) == later


def a_health_check_names_every_rank(driver: Driver, found: Found) -> None:
    healthy = driver.say(commands.RankRequest(driver.generation, 7, commands.HealthCheck()))
    assert healthy == commands.HealthReply(driver.generation, 7, list(range(driver.ranks)))


CHECKS: tuple[Check, ...] = (
    a_dispatch_that_comes_again_is_answered_and_not_done_again,
    nobody_is_heard_whose_generation_is_over_or_who_is_of_another_run,
    numbers_may_have_gaps_and_replies_are_kept_until_they_are_durable,
    a_health_check_names_every_rank,
)
