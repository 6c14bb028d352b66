"""Which hosts have ranks together, and as which generation."""

from __future__ import annotations

import pytest

from strata.base.errors import StrataError
from strata.train.parallel import ParallelSettings
from strata.train.plan.host_plan import HostPlan, HostReport, HostRules, mesh_on

OWN, SECOND, THIRD = "first", "second", "third"


class Hosts:
    """Hosts that report each second, and do what they are ordered."""

    def __init__(self, *names: str, count: int = 3, parallel: ParallelSettings | None = None) -> None:
        rules = HostRules(
            own=OWN,
            run="run",
            address="10.0.0.1",
            data="/data",
            nproc=2,
            parallel=parallel or ParallelSettings(),
            count=count,
            wait_s=60.0,
            prepare_s=300.0,
            lost_after_s=10.0,
            grow_after_s=60.0,
        )
        self.plan = HostPlan(rules)
        self.now_s = 100.0
        self.running = dict.fromkeys(names, 0)
        self.ended = dict.fromkeys(names, 0)
        self.incarnations = {name: f"{name} 1" for name in names}
        self.starts = 1
        self.silent: set[str] = set()
        self.preparing: set[str] = set()
        self.deaf: set[str] = set()
        """They report and do nothing."""
        self.log: list[str] = []

    def join(self, name: str) -> None:
        self.running[name] = self.ended[name] = 0
        self.starts += 1
        self.incarnations[name] = f"{name} {self.starts}"
        self.silent.discard(name)

    def report(self, name: str, *, run: str = "run") -> str:
        running, ended = self.running[name], self.ended[name]
        report = HostReport(
            name=name,
            incarnation=self.incarnations[name],
            version="1",
            run=run,
            prepared=name not in self.preparing,
            running=running,
            ended=ended,
            status=1 if ended else 0,
            port=4000,
        )
        return self.plan.report(report, self.now_s)

    def step(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        for _ in range(3):
            for name in self.running:
                if name in self.silent:
                    continue
                self.report(name)
                order = self.plan.order(name)
                number = order.number if order is not None else 0
                if name not in self.deaf:
                    self.running[name] = 0 if number == self.ended[name] else number
            self.log += [f"{event.kind} {event.reason or event.host}".strip() for event in self.plan.decide(self.now_s)]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def attached(*names: str, parallel: ParallelSettings | None = None) -> Hosts:
    hosts = Hosts(*names, count=len(names), parallel=parallel)
    hosts.step()
    hosts.plan.ranks_attached()
    return hosts


def test_ranks_of_all_hosts_start_together_those_of_the_first_host_first() -> None:
    hosts = Hosts(THIRD, SECOND, OWN)
    hosts.step()
    assert hosts.plan.hosts == (OWN, SECOND, THIRD)
    orders = [hosts.plan.order(name) for name in (OWN, SECOND, THIRD)]
    assert [order and (order.number, order.first_rank, order.ranks, order.port) for order in orders] == [
        (1, 0, 6, 4000),
        (1, 2, 6, 4000),
        (1, 4, 6, 4000),
    ]


def test_the_first_generation_waits_for_hosts_and_then_goes_on_without() -> None:
    hosts = Hosts(OWN, SECOND)
    hosts.steps(50)
    assert hosts.plan.generation == 0
    hosts.steps(15)
    assert hosts.plan.hosts == (OWN, SECOND)


def test_a_host_that_still_prepares_is_waited_for_longer_and_not_for_ever() -> None:
    hosts = Hosts(OWN, SECOND, THIRD)
    hosts.preparing.add(THIRD)
    hosts.steps(290)
    assert hosts.plan.generation == 0
    hosts.steps(15)
    assert hosts.plan.hosts == (OWN, SECOND)
    hosts.plan.ranks_attached()
    hosts.preparing.clear()
    hosts.steps(65)
    assert (hosts.plan.generation, len(hosts.plan.hosts)) == (2, 3)


def test_a_silent_host_is_lost_and_the_others_go_on_as_the_next_generation() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.silent.add(THIRD)
    hosts.steps(10)
    assert hosts.plan.generation == 1
    hosts.steps(2)
    assert (hosts.plan.generation, hosts.plan.hosts) == (2, (OWN, SECOND))
    assert hosts.log[-3:] == ["lost silent for 10 s", "over third is lost", "started"]


def test_a_dead_host_is_left_out_of_what_follows_before_it_is_lost() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.silent.add(THIRD)
    hosts.ended[SECOND], hosts.running[SECOND] = 1, 0
    hosts.steps(2)
    assert hosts.plan.generation == 0
    hosts.steps(3)
    assert (hosts.plan.generation, hosts.plan.hosts) == (2, (OWN, SECOND))


def test_a_host_whose_connection_ended_is_not_waited_for() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.silent.add(THIRD)
    hosts.ended[SECOND], hosts.running[SECOND] = 1, 0
    hosts.plan.gone(THIRD)
    hosts.steps(2)
    assert (hosts.plan.generation, hosts.plan.hosts) == (2, (OWN, SECOND))


def test_the_next_generation_waits_until_ranks_of_the_last_have_ended_or_leaves_their_host_out() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.deaf.add(THIRD)
    hosts.ended[SECOND], hosts.running[SECOND] = 1, 0
    hosts.steps(5)
    assert hosts.plan.generation == 0
    hosts.deaf.clear()
    hosts.steps(1)
    assert (hosts.plan.generation, len(hosts.plan.hosts)) == (2, 3)
    hosts.plan.ranks_attached()
    hosts.deaf.add(THIRD)
    hosts.ended[SECOND], hosts.running[SECOND] = 2, 0
    hosts.steps(12)
    assert (hosts.plan.generation, hosts.plan.hosts) == (3, (OWN, SECOND))


def test_a_rank_that_dies_costs_no_host() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.ended[SECOND], hosts.running[SECOND] = 1, 0
    hosts.steps(2)
    assert (hosts.plan.generation, len(hosts.plan.hosts)) == (2, 3)


def test_a_host_that_comes_back_gets_ranks_after_the_next_snapshot() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.silent.add(THIRD)
    hosts.steps(12)
    hosts.plan.ranks_attached()
    hosts.plan.snapshot_committed(hosts.now_s)
    assert hosts.plan.generation == 2
    hosts.join(THIRD)
    hosts.steps(5)
    assert hosts.plan.generation == 2
    hosts.plan.snapshot_committed(hosts.now_s)
    hosts.step()
    assert (hosts.plan.generation, len(hosts.plan.hosts)) == (3, 3)


def test_without_a_snapshot_it_gets_them_after_a_while_and_not_before_the_others_serve() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.silent.add(THIRD)
    hosts.steps(12)
    hosts.join(THIRD)
    hosts.steps(70)
    assert hosts.plan.generation == 2
    hosts.plan.ranks_attached()
    hosts.steps(59)
    assert hosts.plan.generation == 2
    hosts.steps(3)
    assert (hosts.plan.generation, len(hosts.plan.hosts)) == (3, 3)


def test_a_host_that_started_again_has_no_ranks_of_the_generation_it_was_in() -> None:
    hosts = attached(OWN, SECOND, THIRD)
    hosts.join(SECOND)
    hosts.report(SECOND)
    assert hosts.plan.order(SECOND) is None
    hosts.step()
    assert (hosts.plan.generation, len(hosts.plan.hosts)) == (2, 3)


def test_of_two_hosts_with_one_name_the_older_is_refused() -> None:
    hosts = attached(OWN, SECOND)
    older = hosts.incarnations[SECOND]
    hosts.join(SECOND)
    hosts.steps(2)
    newer, hosts.incarnations[SECOND] = hosts.incarnations[SECOND], older
    assert "another host has its address and data folder" in hosts.report(SECOND)
    hosts.incarnations[SECOND] = newer
    assert hosts.report(SECOND) == ""
    hosts.steps(5)
    assert (hosts.plan.generation, hosts.plan.hosts) == (2, (OWN, SECOND))


def test_a_host_with_ranks_of_an_earlier_server_is_told_to_end_them() -> None:
    hosts = Hosts(OWN, SECOND, count=2)
    hosts.report(OWN)
    hosts.running[SECOND] = 1
    hosts.report(SECOND, run="earlier")
    hosts.plan.decide(hosts.now_s)
    assert hosts.plan.generation == 0
    assert hosts.plan.order(SECOND) is None


def test_ranks_that_die_before_they_were_ever_ready_stop_the_server() -> None:
    hosts = Hosts(OWN, SECOND, count=2)
    hosts.step()
    hosts.ended[SECOND] = 1
    hosts.steps(2)
    assert hosts.plan.generation == 2
    hosts.ended[SECOND] = 2
    with pytest.raises(StrataError, match="died 2 times before they were ready, the last on second with status 1"):
        hosts.steps(2)


def test_a_host_with_which_ranks_do_not_start_is_left_out_until_it_starts_again() -> None:
    hosts = attached(OWN, SECOND)
    hosts.join(THIRD)
    hosts.step()
    hosts.plan.snapshot_committed(hosts.now_s)
    for generation in (2, 3):
        hosts.steps(2)
        assert (hosts.plan.generation, len(hosts.plan.hosts)) == (generation, 3)
        # The host that reports first need not be the one with the fault.
        hosts.ended[SECOND], hosts.running[SECOND] = generation, 0
    hosts.steps(2)
    assert (hosts.plan.generation, hosts.plan.hosts) == (4, (OWN, SECOND))
    assert "barred ranks do not start with it, status 1" in hosts.log
    hosts.plan.ranks_attached()
    hosts.steps(100)
    assert hosts.plan.generation == 4
    hosts.join(THIRD)
    hosts.steps(2)
    hosts.plan.snapshot_committed(hosts.now_s)
    hosts.step()
    assert len(hosts.plan.hosts) == 3


def test_a_mesh_shrinks_by_copies_and_shards_and_by_nothing_else() -> None:
    assert mesh_on(ParallelSettings(), 4) == ParallelSettings()
    assert mesh_on(ParallelSettings(shard=6), 4) == ParallelSettings()
    assert mesh_on(ParallelSettings(replicate=3, shard=2), 4) == ParallelSettings(replicate=2, shard=2)
    assert mesh_on(ParallelSettings(replicate=3, tensor=2), 4) == ParallelSettings(replicate=2, tensor=2)
    assert mesh_on(ParallelSettings(tensor=4), 6) is None


def test_hosts_that_form_no_mesh_wait_and_the_reason_is_said_once() -> None:
    hosts = attached(OWN, SECOND, parallel=ParallelSettings(tensor=4))
    hosts.silent.add(SECOND)
    hosts.steps(20)
    assert hosts.plan.generation == 0
    assert hosts.log.count("unplaced parallel.tensor 4 does not divide the number of ranks, 2") == 1
    hosts.join(SECOND)
    hosts.steps(2)
    assert len(hosts.plan.hosts) == 2


def test_of_hosts_that_form_no_mesh_together_some_do() -> None:
    hosts = attached(OWN, SECOND, THIRD, "fourth", parallel=ParallelSettings(tensor=4))
    hosts.silent.add("fourth")
    hosts.steps(15)
    assert hosts.plan.hosts == (OWN, SECOND)
