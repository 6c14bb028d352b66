"""What the orchestrator tells of itself over the deaths of ranks and its own, and while something runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from strata.base.errors import Code
from strata.train.core import client_commands
from strata.train.status import queries, reports, views
from strata.train.status.learning_curves import LearningCurves
from tests.shell.train_orchestrator.stacks import TENANT, Stack, running


async def told(stack: Stack) -> reports.ServerStatus:
    return (await stack.look(reports.StatusView, queries.DescribeStatus(everything=True))).status


async def metric(stack: Stack, name: str) -> float:
    text = (await stack.look(reports.MetricsView, queries.ReadMetrics(everything=True))).text.decode()
    return {each.name: each.value for family in text_string_to_metric_families(text) for each in family.samples}[name]


async def test_the_loss_of_ranks_is_told_and_counted_when_others_have_caught_up(tmp_path: Path) -> None:
    async with running(tmp_path, snapshots="every_dispatches = 3") as stack:
        model = await stack.model()
        for seq in (1, 2, 3, 4):
            await stack.result(await stack.submit(stack.batch(model, seq, [[1, 2, 3]])))
        before = await told(stack)
        assert (before.ranks.state, before.recoveries, before.models) == ("ready", 0, 1)
        assert before.snapshot is not None
        assert before.snapshot.size
        await stack.ranks.kill()
        await stack.orchestrator.told("lost")
        away = await told(stack)
        assert (away.ranks.state, away.ranks.size, await metric(stack, "strata_train_ranks")) == ("starting", 0, 0)
        await stack.start_ranks()
        await stack.orchestrator.told("attached")
        await stack.result(await stack.submit(stack.step(model, 5)))
        after = await told(stack)
        assert after.recoveries == await metric(stack, "strata_train_recovery_seconds_count") == 1
        assert after.recovery_s is not None
        assert await metric(stack, "strata_train_rank_groups_total") == 2
        done_again = before.dispatched - before.snapshot.number
        assert await metric(stack, "strata_train_replays_total") == done_again
        (recovery,) = after.recovered
        assert (recovery.restored, recovery.replayed) == (before.snapshot.number, done_again)
        assert "disconnected" in recovery.reason
        assert before.now_s < recovery.lost_at_s < recovery.lost_at_s + recovery.seconds < after.now_s
        assert after.ranks.group != before.ranks.group


async def test_what_runs_is_told_with_what_waits_behind_it(tmp_path: Path) -> None:
    async with running(tmp_path, limits="max_running_requests = 1") as stack:
        model = await stack.model()
        first = await stack.submit(stack.batch(model, 1, [[1, 2, 3]], pretend_s=1.0))
        for seq in (2, 3, 9):
            await stack.submit(stack.step(model, seq))
        now = await told(stack)
        assert (now.ranks.state, [each.kind for each in now.running]) == ("busy", ["forward_backward"])
        (row,) = now.tenants
        assert (row.tenant, row.waiting, row.held, row.running) == (TENANT, 3, 1, 1)
        line = (await stack.look(reports.TimelineView, queries.DescribeTimeline(first))).timeline
        assert (line.outcome, line.sent_at_s is not None, line.answered_at_s) == ("", True, None)


async def test_of_an_operation_before_a_restart_there_is_a_result_and_no_times(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()
        future_id = await stack.submit(stack.step(model, 1))
        await stack.result(future_id)
        # What comes later in the journal is durable only after it.
        await stack.submit(stack.step(model, 2))
        await stack.orchestrator.kill()
        await stack.start_orchestrator()
        await stack.result(future_id)
        refused = await stack.look(views.ErrorResponse, queries.DescribeTimeline(future_id))
        assert refused.code is Code.GONE


async def test_learning_curves_survive_a_restart_and_a_kill_of_the_orchestrator(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        model = await stack.model()

        async def curves() -> reports.ModelCurves:
            return (await stack.look(reports.CurvesView, queries.ReadCurves(model, False, 100))).curves

        for seq in (1, 3):
            await stack.look(client_commands.Done, queries.ReportMetrics(model, seq, {"reward": seq / 4}))
            await stack.result(await stack.submit(stack.batch(model, seq, [[1, 2, 3]])))
            await stack.result(await stack.submit(stack.step(model, seq + 1)))
        before = await curves()
        assert {"loss", "reward", "tokens"} <= {each.name for each in before.series}
        await stack.orchestrator.stop()
        await stack.start_orchestrator()
        assert await curves() == before
        await stack.result(await stack.submit(stack.batch(model, 5, [[1, 2, 3]])))
        await stack.result(await stack.submit(stack.step(model, 6)))
        longer = await curves()
        assert [each.steps for each in longer.series if each.name == "loss"] == [[2, 4, 6]]
        written = LearningCurves()
        async with asyncio.timeout(60):
            while (curve := written.get(model)) is None or curve.points()[-1].seq_id != 6:
                await asyncio.sleep(0.05)
                written.restore(stack.settings.curves_file.read_bytes())
        await stack.orchestrator.kill()
        await stack.start_orchestrator()
        assert await curves() == longer


async def test_a_damaged_file_of_curves_costs_the_curves_and_not_the_start(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d" / "curves").write_bytes(b"\xc1 no curves")
    async with running(tmp_path) as stack:
        model = await stack.model()
        await stack.result(await stack.submit(stack.step(model, 1)))
        found = (await stack.look(reports.CurvesView, queries.ReadCurves(model, False, 100))).curves
        assert {tuple(each.steps) for each in found.series} == {(1,)}
