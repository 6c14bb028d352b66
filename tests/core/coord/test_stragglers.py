"""Slow and hung workers are found soon, equal ones never, and every finding says why in figures."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.coord.core.facts import CommandKind, StragglerFinding
from strata.coord.core.job_config import EscalationLevel
from strata.coord.core.step_samples import StepSample, add_report
from strata.coord.core.straggler_detection import (
    COMMAND,
    NEXT,
    StragglerIncident,
    StragglerLimits,
    StragglerStanding,
    judge,
)


class Gang:
    """Workers that each make a step in their own time and tell of it; judged once a round."""

    def __init__(self, workers: int, seed: int = 0, noise: float = 0.1, limits: StragglerLimits | None = None) -> None:
        self.rng = random.Random(seed)
        self.noise = noise
        self.limits = limits or StragglerLimits(slow_until=EscalationLevel.STOP)
        self.now_s = 0.0
        self.factor = {f"w{number}": 1.0 for number in range(workers)}
        self.hung: set[str] = set()
        self.steps = dict.fromkeys(self.factor, 0)
        self.samples: dict[str, StepSample] = {}
        self.standings: dict[str, StragglerStanding] = {}

    def time_s(self, worker_id: str) -> float:
        hiccup = 5.0 if self.rng.random() < 0.03 else 1.0
        return self.factor[worker_id] * self.rng.lognormvariate(0.0, self.noise) * hiccup

    def round(self, seconds: float = 1.0) -> tuple[StragglerIncident, ...]:
        self.now_s += seconds
        for worker_id in self.factor:
            if worker_id not in self.hung:
                self.steps[worker_id] += 1
            before = self.samples.get(worker_id)
            self.samples[worker_id] = add_report(before, self.steps[worker_id], self.time_s(worker_id), self.now_s)
        return self.judge()

    def judge(self) -> tuple[StragglerIncident, ...]:
        found = judge(self.samples, self.standings, self.now_s, self.limits)
        self.standings = found.standings
        return found.incidents

    def rounds(self, count: int) -> list[StragglerIncident]:
        return [incident for _ in range(count) for incident in self.round()]


# Slow


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 32), seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 0.02, 0.1, 0.2]))
def test_equal_workers_with_noise_raise_no_alarm(workers: int, seed: int, noise: float) -> None:
    assert Gang(workers, seed, noise).rounds(150) == []


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(2, 32),
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.02, 0.1]),
    factor=st.sampled_from([3.0, 5.0, 20.0]),
)
def test_one_three_times_slower_is_found_within_sixteen_steps_and_nobody_else(
    workers: int, seed: int, noise: float, factor: float
) -> None:
    gang = Gang(workers, seed, noise)
    gang.rounds(20)
    gang.factor["w1"] = factor
    incidents = gang.rounds(16)
    assert [(each.worker_id, each.finding, each.level) for each in incidents][:1] == [
        ("w1", StragglerFinding.SLOW, EscalationLevel.REWEIGHT)
    ]
    assert {each.worker_id for each in incidents} == {"w1"}
    assert incidents[0].weight == pytest.approx(1 / factor, rel=0.5)


def test_a_finding_says_why_in_figures() -> None:
    gang = Gang(8, noise=0.0)
    gang.factor["w3"] = 3.0
    (incident,) = gang.rounds(20)
    assert incident.reason.startswith(
        "w3 is slow: 3 s for a step where the median of 8 workers is 1 s, 3.0 times as long (z "
    )


def test_who_stays_slow_climbs_the_ladder_rung_by_rung_and_no_further() -> None:
    gang = Gang(6)
    gang.factor["w0"] = 4.0
    assert [each.level for each in gang.rounds(100)] == [
        EscalationLevel.REWEIGHT,
        EscalationLevel.REBALANCE,
        EscalationLevel.STOP,
    ]
    assert [COMMAND.get(rung) for rung in EscalationLevel] == [None, None, CommandKind.REBALANCE, CommandKind.STOP]


def test_an_elastic_job_goes_no_further_than_giving_it_less() -> None:
    gang = Gang(6, limits=StragglerLimits(slow_until=EscalationLevel.REWEIGHT))
    gang.factor["w0"] = 4.0
    assert [each.level for each in gang.rounds(100)] == [EscalationLevel.REWEIGHT]


def test_who_keeps_up_again_comes_down_and_gets_its_share_back() -> None:
    gang = Gang(6)
    gang.factor["w0"] = 4.0
    gang.rounds(20)
    gang.factor["w0"] = 1.0
    (back,) = gang.rounds(30)
    assert (back.worker_id, back.finding, back.level, back.weight) == (
        "w0",
        StragglerFinding.FINE,
        EscalationLevel.NONE,
        1.0,
    )
    assert "keeps up again" in back.reason


def test_between_slow_and_fine_nothing_changes() -> None:
    gang = Gang(6, noise=0.02)
    gang.factor["w0"] = 4.0
    gang.rounds(20)
    gang.factor["w0"] = 1.35
    assert gang.rounds(60) == []
    assert gang.standings["w0"].level is EscalationLevel.REWEIGHT


def test_one_that_is_slow_now_and_then_is_left_alone() -> None:
    gang = Gang(6, noise=0.02)
    incidents = []
    for _ in range(20):
        gang.factor["w0"] = 3.0
        incidents += gang.rounds(3)
        gang.factor["w0"] = 1.0
        incidents += gang.rounds(9)
    assert incidents == []


def test_of_two_workers_the_slower_one_is_named_by_the_time_of_the_other() -> None:
    gang = Gang(2, noise=0.0)
    gang.factor["w0"] = 3.0
    incident = gang.rounds(20)[0]
    assert incident.worker_id == "w0"
    assert incident.reason.startswith("w0 is slow: 3 s for a step where the other worker takes 1 s, 3.0 times as long")
    assert incident.weight == pytest.approx(1 / 3, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 16),
    seed=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.02, 0.1, 0.2]),
    factors=st.lists(st.sampled_from([0.3, 0.5, 2.0, 4.0, 20.0]), min_size=1, max_size=3),
)
def test_a_job_that_gets_slower_or_faster_as_a_whole_raises_no_alarm(
    workers: int, seed: int, noise: float, factors: list[float]
) -> None:
    gang = Gang(workers, seed, noise)
    assert gang.rounds(60) == []
    for factor in factors:
        gang.factor = {worker_id: each * factor for worker_id, each in gang.factor.items()}
        assert gang.rounds(60) == []


def mixed(seed: int = 0) -> Gang:
    """Hardware of three kinds: the spread between the workers hides one that is a kind slower than it was."""
    gang = Gang(6, seed, noise=0.05, limits=StragglerLimits())
    gang.factor = {"w0": 1.0, "w1": 1.0, "w2": 1.6, "w3": 1.6, "w4": 2.2, "w5": 2.2}
    return gang


@pytest.mark.parametrize("seed", range(10))
def test_among_unequal_workers_one_is_found_by_its_own_past_and_comes_down_again(seed: int) -> None:
    gang = mixed(seed)
    assert gang.rounds(80) == []
    gang.factor["w2"] = 3.0
    (incident,) = gang.rounds(40)
    assert (incident.worker_id, incident.level) == ("w2", EscalationLevel.REWEIGHT)
    assert re.search(
        r"(1\.[789]|2\.\d) times as long as its own best of 1\.\d+ s; the others take 1\.\d times", incident.reason
    )
    gang.factor["w2"] = 1.6
    assert [(each.worker_id, each.finding) for each in gang.rounds(60)] == [("w2", StragglerFinding.FINE)]


def test_one_that_slows_down_to_what_the_others_take_delays_nobody() -> None:
    gang = Gang(4, noise=0.05)
    gang.factor["w0"] = 0.4
    gang.rounds(80)
    gang.factor["w0"] = 1.0
    assert gang.rounds(60) == []


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), factor=st.sampled_from([0.5, 2.0, 4.0]))
def test_unequal_workers_that_get_slower_together_raise_no_alarm(seed: int, factor: float) -> None:
    gang = mixed(seed)
    gang.rounds(80)
    gang.factor = {worker_id: each * factor for worker_id, each in gang.factor.items()}
    assert gang.rounds(80) == []


def test_few_steps_mean_silence() -> None:
    gang = Gang(6)
    gang.factor["w0"] = 10.0
    assert gang.rounds(StragglerLimits().recent) == []


def test_a_new_generation_starts_to_count_again_and_the_rung_stays() -> None:
    gang = Gang(6)
    gang.factor["w0"] = 4.0
    gang.rounds(20)
    gang.samples = {}
    assert gang.rounds(StragglerLimits().recent + StragglerLimits().patience_steps) == []
    assert gang.standings["w0"].level is EscalationLevel.REWEIGHT
    assert [each.level for each in gang.rounds(4)] == [EscalationLevel.REBALANCE]


# Slow among those that step together


class Lockstep:
    """Ranks that wait for the slowest in every step, so all step times are equal, and tell their computing times."""

    def __init__(
        self, workers: int, seed: int = 0, step_s: float = 1.0, noise: float = 0.1, hiccups: float = 0.03
    ) -> None:
        self.hiccups = hiccups
        self.rng = random.Random(seed)
        self.noise = noise
        self.factor = {f"w{number}": step_s for number in range(workers)}
        self.now_s = 0.0
        self.step = 0
        self.computed: dict[str, list[float]] = {worker_id: [] for worker_id in self.factor}
        self.samples = {worker_id: add_report(None, 0, None, 0.0) for worker_id in self.factor}
        self.standings: dict[str, StragglerStanding] = {}
        self.heard_s = 0.0

    def steps(self, count: int, beat_s: float = 5.0) -> list[tuple[int, StragglerIncident]]:
        """Incidents, and after how many of these steps each was found."""
        found: list[tuple[int, StragglerIncident]] = []
        for number in range(1, count + 1):
            for worker_id, step_s in self.factor.items():
                hiccup = 5.0 if self.rng.random() < self.hiccups else 1.0
                self.computed[worker_id].append(step_s * self.rng.lognormvariate(0.0, self.noise) * hiccup)
            took_s = max(times[-1] for times in self.computed.values())
            self.now_s, self.step = self.now_s + took_s, self.step + 1
            # Every heartbeat interval, and once early in a generation, as the SDK does.
            if self.now_s - self.heard_s >= beat_s or self.step == 5:
                self.heard_s = self.now_s
                found += [(number, incident) for incident in self.report(*self.computed)]
        return found

    def report(self, *workers: str) -> tuple[StragglerIncident, ...]:
        """These send heartbeats, then all are judged."""
        took_s = max(times[-1] for times in self.computed.values())
        for worker_id in workers:
            times = tuple(self.computed[worker_id][-32:])
            self.samples[worker_id] = add_report(
                self.samples[worker_id], self.step, took_s, self.now_s, compute_s=times
            )
        verdicts = judge(self.samples, self.standings, self.now_s)
        self.standings = verdicts.standings
        return verdicts.incidents


@pytest.mark.parametrize("step_s", [0.04, 0.2, 1.0, 20.0])
@pytest.mark.parametrize("workers", [2, 3, 8, 64])
def test_a_rank_that_computes_five_times_longer_is_named_within_ten_steps(workers: int, step_s: float) -> None:
    gang = Lockstep(workers, step_s=step_s)
    gang.factor["w1"] = 5 * step_s
    # A heartbeat is the resolution in time: ten steps may be shorter.
    after, incident = gang.steps(max(10, round(6.0 / (5 * step_s))))[0]
    assert (incident.worker_id, incident.finding) == ("w1", StragglerFinding.SLOW)
    assert incident.level is EscalationLevel.REWEIGHT
    assert after <= 10 or step_s < 0.2
    assert incident.reason.startswith("w1 is slow: ")
    others = "the other worker takes" if workers == 2 else f"the median of {workers} workers is"
    assert f"of computing for a step where {others}" in incident.reason
    assert [each.worker_id for _, each in gang.steps(200)] == [], "nobody else, and no further"


def test_a_rank_that_becomes_slow_is_named_within_ten_steps_of_a_second() -> None:
    gang = Lockstep(4)
    assert gang.steps(100) == []
    gang.factor["w2"] = 5.0
    ((after, incident),) = gang.steps(10)
    assert (incident.worker_id, after <= 10) == ("w2", True)


@pytest.mark.parametrize("step_s", [0.05, 1.0])
def test_ranks_that_compute_alike_are_never_named(step_s: float) -> None:
    for seed in range(8):
        assert Lockstep(2 + seed * 4, seed, step_s, noise=0.2).steps(400) == [], f"seed {seed}"


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("step_s", [0.05, 0.2, 1.0])
def test_ranks_that_get_slower_together_are_not_named_before_all_have_reported_it(workers: int, step_s: float) -> None:
    """Heartbeats come one after the other: the first that tells of longer steps is not the slow rank."""
    gang = Lockstep(workers, step_s=step_s, noise=0.05, hiccups=0.0)
    assert gang.steps(100) == []
    gang.factor = dict.fromkeys(gang.factor, 8 * step_s)
    for _ in range(8):
        assert gang.steps(6, beat_s=1e9) == []
        for worker_id in gang.factor:
            assert gang.report(worker_id) == (), worker_id


def test_a_disturbance_of_less_than_a_second_names_nobody() -> None:
    gang = Lockstep(4, step_s=0.02, noise=0.0, hiccups=0.0)
    gang.steps(400)
    gang.factor["w1"] = 0.1
    assert gang.steps(9, beat_s=0.0) == []
    assert [each.worker_id for _, each in gang.steps(3, beat_s=0.0)] == ["w1"], "it lasts longer"


def test_computing_times_that_are_reported_no_more_count_no_more() -> None:
    gang = Lockstep(4, noise=0.0, hiccups=0.0)
    gang.factor["w1"] = 5.0
    assert gang.steps(10) != []
    for _ in range(100):
        gang.now_s, gang.step = gang.now_s + 1.0, gang.step + 1
        gang.samples = {
            worker_id: add_report(each, gang.step, 1.0, gang.now_s) for worker_id, each in gang.samples.items()
        }
        verdicts = judge(gang.samples, gang.standings, gang.now_s)
        gang.standings = verdicts.standings
        assert {each.finding for each in verdicts.incidents} <= {StragglerFinding.FINE}


def test_the_computing_times_of_one_worker_do_not_hide_another_that_is_slow() -> None:
    samples: dict[str, StepSample] = {}
    standings: dict[str, StragglerStanding] = {}
    found = set()
    for step in range(1, 100):
        for worker_id, step_s in {"w0": 1.0, "w1": 1.0, "w2": 1.0, "w3": 1.0, "w4": 4.0}.items():
            computed = (1.0,) * min(step, 32) if worker_id == "w0" else ()
            samples[worker_id] = add_report(samples.get(worker_id), step, step_s, float(step), compute_s=computed)
        verdicts = judge(samples, standings, float(step))
        standings = dict(verdicts.standings)
        found |= {each.worker_id for each in verdicts.incidents}
    assert found == {"w4"}


def test_computing_times_are_not_compared_with_step_times() -> None:
    gang = Lockstep(4, noise=0.0)
    for _ in range(20):
        gang.steps(5)
    gang.samples["old"] = StepSample(100, gang.now_s, gang.now_s, (5.0,) * 32, 32)
    assert judge(gang.samples, gang.standings, gang.now_s).incidents == ()


# Hung


@settings(max_examples=40, deadline=None)
@given(workers=st.integers(2, 32), seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 0.1, 0.2]))
def test_one_that_hangs_while_others_go_on_is_found(workers: int, seed: int, noise: float) -> None:
    gang = Gang(workers, seed, noise)
    gang.rounds(30)
    gang.hung.add("w1")
    incidents = gang.rounds(70)
    assert [(each.worker_id, each.finding, each.level) for each in incidents] == [
        ("w1", StragglerFinding.HUNG, EscalationLevel.REBALANCE)
    ]
    assert "w1 hangs: it is at step 30 for " in incidents[0].reason
    assert [each.level for each in gang.rounds(70)] == [EscalationLevel.STOP]


def test_the_time_that_counts_as_a_hang_follows_from_the_jobs_own_steps() -> None:
    gang = Gang(4, noise=0.0)
    gang.factor = dict.fromkeys(gang.factor, 20.0)
    for _ in range(30):
        assert gang.round(20.0) == ()
    gang.hung.add("w1")
    quiet = [incident for _ in range(9) for incident in gang.round(20.0)]
    assert quiet == [], "ten steps of this job are 200 s or more"
    assert [each.worker_id for _ in range(60) for each in gang.round(20.0)][:1] == ["w1"]


def test_the_one_behind_is_to_blame_when_the_others_wait_for_it() -> None:
    gang = Gang(4)
    gang.rounds(30)
    gang.hung.add("w2")
    gang.round()
    gang.hung |= set(gang.factor)
    assert {(each.worker_id, each.finding) for each in gang.rounds(100)} == {("w2", StragglerFinding.HUNG)}


def test_if_all_stand_at_the_same_step_all_are_named_and_nobody_is_stopped() -> None:
    gang = Gang(4)
    gang.rounds(30)
    gang.hung |= set(gang.factor)
    incidents = gang.rounds(400)
    assert [(each.worker_id, each.level) for each in incidents] == [
        (f"w{n}", EscalationLevel.REBALANCE) for n in range(4)
    ]
    assert "like all others it is at step 30" in incidents[0].reason


def test_one_that_goes_on_after_a_hang_comes_down() -> None:
    gang = Gang(4)
    gang.rounds(30)
    gang.hung.add("w1")
    gang.rounds(70)
    gang.hung.clear()
    assert [(each.worker_id, each.level) for each in gang.rounds(40)] == [("w1", EscalationLevel.NONE)]


def test_who_is_silent_or_says_that_it_is_busy_does_not_hang() -> None:
    gang = Gang(4)
    gang.rounds(30)
    gang.now_s += 1_000.0
    assert gang.judge() == (), "nobody was heard of: that is not a hang"
    for worker_id, sample in gang.samples.items():
        gang.samples[worker_id] = add_report(sample, sample.step, None, gang.now_s, busy=True)
    assert gang.judge() == ()
    for worker_id, sample in gang.samples.items():
        gang.samples[worker_id] = add_report(sample, sample.step, None, gang.now_s + 1.0)
    gang.now_s += 30.0
    assert gang.judge() == (), "what it was busy with does not count"


def test_a_hang_in_the_first_seconds_of_a_generation_is_found() -> None:
    gang = Gang(4)
    gang.rounds(4)
    gang.hung.add("w1")
    assert [(each.worker_id, each.finding) for each in gang.rounds(70)] == [("w1", StragglerFinding.HUNG)]


def test_a_first_step_may_take_five_times_as_long_as_a_hang() -> None:
    gang = Gang(4, noise=0.0)
    gang.round()
    gang.hung |= set(gang.factor)
    assert gang.rounds(5 * 60 - 2) == []
    assert {each.finding for each in gang.rounds(10)} == {StragglerFinding.HUNG}


def test_who_has_made_no_step_does_not_hang() -> None:
    gang = Gang(4)
    gang.samples = {worker_id: add_report(None, 7, None, 0.0) for worker_id in gang.factor}
    for _ in range(500):
        gang.now_s += 1.0
        gang.samples = {name: add_report(each, 7, None, gang.now_s) for name, each in gang.samples.items()}
        assert gang.judge() == ()


# Observing


def test_a_duration_that_is_not_told_follows_from_the_beats() -> None:
    sample = add_report(None, 10, None, 100.0)
    assert (sample.times_s, sample.steps) == ((), 0)
    sample = add_report(sample, 15, None, 110.0)
    sample = add_report(sample, 15, None, 115.0)
    sample = add_report(sample, 16, 0.5, 116.0)
    assert (sample.times_s, sample.steps, sample.moved_s, sample.heard_s) == ((2.0, 0.5), 2, 116.0, 116.0)


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_cannot_be_is_not_believed(nonsense: float) -> None:
    began = add_report(add_report(None, 0, None, -1.0), 1, nonsense, 0.0)
    assert began.times_s == (), "its first report came in the middle of this step"
    assert add_report(began, 2, nonsense, 3.0).times_s == (3.0,)


def test_workers_whose_steps_take_no_time_at_all_are_not_judged() -> None:
    gang = Gang(4)
    gang.samples = {worker: StepSample(40, 0.0, 0.0, (0.0,) * 32, 40) for worker in gang.factor}
    gang.samples["w0"] = StepSample(40, 0.0, 0.0, (1.0,) * 32, 40)
    assert gang.judge() == ()


def test_going_back_to_a_checkpoint_is_no_step() -> None:
    sample = add_report(add_report(None, 10, None, 0.0), 11, 1.0, 1.0)
    back = add_report(sample, 5, 9.0, 10.0)
    assert (back.times_s, back.step, back.moved_s) == ((1.0,), 5, 10.0)


def test_only_a_window_of_steps_is_remembered() -> None:
    sample = add_report(None, 0, None, 0.0)
    for step in range(1, 100):
        sample = add_report(sample, step, float(step), float(step), window=16)
    assert (len(sample.times_s), sample.times_s[-1], sample.steps) == (16, 99.0, 99)


def test_the_ladder_goes_up_one_rung_at_a_time_and_a_stop_is_final() -> None:
    rungs = list(EscalationLevel)
    for (rung, finding), following in NEXT.items():
        if finding is StragglerFinding.SLOW:
            assert rungs.index(following) == rungs.index(rung) + 1
        if finding is StragglerFinding.FINE:
            assert following is EscalationLevel.NONE
    assert not any(rung is EscalationLevel.STOP for rung, _ in NEXT)


def test_ten_thousand_workers_are_judged_in_a_second() -> None:
    gang = Gang(10_000)
    gang.samples = {worker: StepSample(40, 0.0, 0.0, (1.0, 1.1, 0.9, 1.0) * 8, 40) for worker in gang.factor}
    began_s = time.process_time()
    assert gang.judge() == ()
    took_s = time.process_time() - began_s
    print(f"{took_s:.3f} s")
    assert took_s < 4.0
