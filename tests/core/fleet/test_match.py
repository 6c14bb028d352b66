from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strata.fleet.core.amounts import Amounts, Taken
from strata.fleet.core.capability import (
    GIB,
    Capability,
    Gpu,
    Profile,
    bucket_gib,
    in_quiet_hours,
    minimum_agent,
    parse_agent_version,
    profile,
)
from strata.fleet.core.job import JobStatus
from strata.fleet.core.jobspec import HostSpec, QuietHours
from strata.fleet.core.match import eligible, eligible_classes, holds_back, is_better_fit, score
from strata.fleet.core.requirement import Needs, RequirementClass
from strata.fleet.core.why import HostState, UnmetDependency, WhyQuery, why
from tests.core.fleet.jobs import capabilities, needs, policies, requirements, sizes

PI = Profile(host="pi", os="linux", arch="aarch64", cores=4, ram_gib=8)
GPU = Profile(host="gpu-1", os="linux", arch="x86_64", cores=16, ram_gib=64, cuda=True, vram_gib=(24.0, 12.0), slots=2)


def asking(**fields: Any) -> RequirementClass:
    return RequirementClass("mlp", "oracle", Needs(**fields))


def constraints(requirement: RequirementClass, host: Profile) -> list[str]:
    return [reason.constraint for reason in eligible(requirement, host).reasons]


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({}, []),
        ({"require_cuda": True}, ["require_cuda"]),
        ({"min_vram_gib": 1}, ["min_vram_gib"]),
        ({"min_gpus": 1}, ["min_gpus"]),
        ({"min_ram_gib": 8}, []),
        ({"min_ram_gib": 8.5}, ["min_ram_gib"]),
        ({"min_cores": 5}, ["min_cores"]),
        ({"allowed_hosts": ("p*",)}, []),
        ({"allowed_hosts": ("gpu-*",)}, ["allowed_hosts"]),
        ({"require_os": "Linux", "require_arch": "x86_64"}, ["require_arch"]),
        ({"require_labels": {"room": "*"}}, ["require_labels.room"]),
        ({"require_cuda": True, "min_ram_gib": 9, "min_vram_gib": 4}, ["require_cuda", "min_vram_gib", "min_ram_gib"]),
    ],
)
def test_every_constraint_that_fails_is_named(fields: dict[str, Any], refused: list[str]) -> None:
    assert constraints(asking(**fields), PI) == refused


def test_a_host_that_gives_less_to_one_job_is_not_eligible_for_more() -> None:
    detected = Capability(hostname="pi", ram_bytes=64 * GIB, cores=4, limits="watched", job_ram_bytes=9 * GIB // 4)
    pi = profile(detected)
    assert constraints(asking(min_ram_gib=2.25), pi) == []
    reasons = eligible(asking(min_ram_gib=8), pi).reasons
    assert [str(each) for each in reasons] == [
        "min_ram_gib: needs 8 GiB, has 2.25 GiB for one job (sandbox.memory_gib)"
    ]
    assert constraints(asking(above_ram_gib=2), pi) == []
    assert constraints(asking(above_ram_gib=2.25), pi) == ["above_ram_gib"]


def test_a_job_may_require_that_hosts_enforce_what_jobs_declare() -> None:
    watched, enforced = msgspec.structs.replace(PI, limits="watched"), msgspec.structs.replace(PI, limits="enforced")
    assert constraints(asking(require_limits="enforced"), PI) == ["require_limits"]
    assert constraints(asking(require_limits="enforced"), watched) == ["require_limits"]
    assert constraints(asking(require_limits="enforced"), enforced) == []
    assert constraints(asking(require_limits="watched"), enforced) == []
    answer = why(
        WhyQuery(status=JobStatus.PENDING, requirement=asking(require_limits="enforced")),
        [HostState(profile=watched)],
        now_s=0,
    )
    assert [each.detail for each in answer.obstacles] == ["needs enforced, pi has watched"]


@given(requirements(), st.lists(st.sampled_from([8.0, 24.0, 80.0])), st.lists(st.sampled_from([8.0, 24.0, 80.0])))
def test_of_two_hosts_at_most_one_is_the_better_fit(
    requirement: RequirementClass, cards: list[float], others: list[float]
) -> None:
    one = msgspec.structs.replace(GPU, vram_gib=tuple(sorted(cards, reverse=True)))
    other = msgspec.structs.replace(PI, vram_gib=tuple(sorted(others, reverse=True)))
    assert not (is_better_fit(requirement, one, other) and is_better_fit(requirement, other, one))


def test_the_better_fit_has_the_smaller_card_that_is_enough() -> None:
    mixed, large = (msgspec.structs.replace(GPU, vram_gib=cards) for cards in ((80.0, 24.0), (80.0,)))
    assert is_better_fit(asking(min_vram_gib=20), mixed, large), "it takes the smaller one of two cards"
    assert not is_better_fit(asking(min_vram_gib=60), mixed, large)
    assert is_better_fit(asking(min_cores=1), PI, GPU), "a job without a card leaves cards alone"
    assert not is_better_fit(asking(min_cores=1), msgspec.structs.replace(PI, ram_gib=5), PI), "nearly as large"


def test_a_host_in_a_pool_runs_the_jobs_that_name_it_and_no_others() -> None:
    lab = profile(Capability(hostname="lab-1"), pool="lab")
    free = profile(Capability(hostname="desk"))
    assert constraints(asking(), lab) == constraints(asking(pool="lab"), free) == ["pool"]
    assert constraints(asking(pool="lab"), lab) == constraints(asking(), free) == []
    assert constraints(asking(pool="other"), lab) == ["pool"]
    answer = why(WhyQuery(status=JobStatus.PENDING, requirement=asking(pool="lab")), [HostState(profile=free)], now_s=0)
    assert [(each.what, each.detail, each.fix) for each in answer.obstacles] == [
        ("pool", "needs a host of the pool lab, desk has no pool", "remove pool, or strata invite --pool lab")
    ]


def test_slots_are_asked_of_a_host_that_has_some() -> None:
    assert constraints(asking(slots=2), PI) == []
    assert constraints(asking(slots=3), GPU) == ["slots"]


def test_memory_is_asked_of_one_card_and_not_of_all_together() -> None:
    assert constraints(asking(min_vram_gib=24), GPU) == []
    assert constraints(asking(min_vram_gib=36), GPU) == ["min_vram_gib"]
    assert constraints(asking(min_vram_gib=16, min_gpus=2), GPU) == ["min_gpus"]


@pytest.mark.parametrize(
    ("allow", "deny", "allowed"),
    [
        (None, (), True),
        ((), (), False),
        (("mlp",), (), True),
        (("mlp-oracle",), (), True),
        (("mlp-realistic",), (), False),
        (("m*",), ("*-oracle",), False),
        (None, ("mlp-realistic",), True),
    ],
)
def test_a_policy_names_models_or_models_with_modes_or_globs(
    allow: tuple[str, ...] | None, deny: tuple[str, ...], allowed: bool
) -> None:
    host = msgspec.structs.replace(PI, allow_jobs=allow, deny_jobs=deny)
    assert eligible(asking(), host).eligible == allowed


@given(requirements(), capabilities(), sizes, st.data())
def test_more_of_anything_never_adds_a_reason_against_a_host(
    requirement: RequirementClass, capability: Capability, more: int, data: st.DataObject
) -> None:
    policy = data.draw(policies(capability.hostname))
    richer = msgspec.structs.replace(
        capability,
        ram_bytes=capability.ram_bytes + more,
        cores=capability.cores + 1,
        gpus=(*(Gpu(name=card.name, vram_bytes=card.vram_bytes + more) for card in capability.gpus),
              Gpu(name="another", vram_bytes=more)),
    )  # fmt: skip
    before = constraints(requirement, profile(capability, policy))
    assert set(constraints(requirement, profile(richer, policy))) <= set(before)


@given(requirements(), capabilities(), st.data())
def test_following_every_fix_that_is_a_number_makes_the_constraint_go_away(
    requirement: RequirementClass, capability: Capability, data: st.DataObject
) -> None:
    host = profile(capability, data.draw(policies(capability.hostname)))
    for reason in eligible(requirement, host).reasons:
        field, _, value = reason.fix.removeprefix("set ").removesuffix(" or less").partition(" = ")
        if reason.fix.startswith("set min_"):
            eased = msgspec.structs.replace(requirement.needs, **{field: float(value)})
            assert reason.constraint not in constraints(msgspec.structs.replace(requirement, needs=eased), host)


@given(st.lists(requirements(), max_size=5), capabilities())
def test_the_quick_way_over_many_classes_agrees_with_the_verdicts(
    classes: list[RequirementClass], capability: Capability
) -> None:
    host, numbered = profile(capability), dict(enumerate(classes))
    assert eligible_classes(host, numbered) == {
        number for number, each in numbered.items() if eligible(each, host).eligible
    }


@given(requirements(), capabilities(), st.floats(0, 1e6))
def test_a_preference_only_delays_and_never_beyond_its_wait(
    requirement: RequirementClass, capability: Capability, waited_s: float
) -> None:
    host = profile(capability)
    patient = msgspec.structs.replace(requirement, needs=msgspec.structs.replace(requirement.needs, prefer_wait_s=60.0))
    own = score(patient, host)
    assert 0 <= own <= 1
    assert not holds_back(patient, host, waited_s=waited_s, best_online=own)
    assert holds_back(patient, host, waited_s=waited_s, best_online=2.0) == (waited_s < 60)


def test_a_card_sold_as_24_gib_that_reports_a_little_less_has_24() -> None:
    assert bucket_gib(24564 * 1024**2) == 24.0
    assert bucket_gib(int(7.7 * GIB)) == 7.5


@given(sizes, sizes)
def test_rounding_keeps_the_order_of_sizes(one: int, other: int) -> None:
    assert (bucket_gib(one) <= bucket_gib(other)) or one > other


def test_what_a_manifest_declares_lowers_what_was_detected_and_never_raises_it() -> None:
    detected = Capability(
        hostname="pi", cores=4, ram_bytes=8 * GIB, gpus=(Gpu(name="x", vram_bytes=4 * GIB),), cuda="12"
    )
    capped = profile(detected, HostSpec(name="pi", cores=64, ram_gib=6.0, vram_gib=2.0, cuda=False))
    assert (capped.cores, capped.ram_gib, capped.vram_gib, capped.cuda) == (4, 6.0, (2.0,), False)
    assert not profile(Capability(hostname="pi"), HostSpec(name="pi", cuda=True)).cuda


def test_cuda_without_a_card_is_no_cuda() -> None:
    assert not profile(Capability(hostname="pi", cuda="12.4")).cuda


@given(requirements())
def test_a_class_has_the_same_key_after_a_journey_through_json(requirement: RequirementClass) -> None:
    back = msgspec.json.decode(msgspec.json.encode(requirement), type=RequirementClass)
    assert back == requirement
    assert back.key == requirement.key


def test_the_order_of_hosts_and_spelt_out_defaults_make_no_new_class() -> None:
    one = asking(allowed_hosts=("b", "a"))
    spelt = msgspec.json.decode(
        b'{"model":"mlp","mode":"oracle","needs":{"allowed_hosts":["a","b","a"],"min_ram_gib":0,"prefer_wait_s":0.0}}',
        type=RequirementClass,
    )
    assert one.key == spelt.key


THURSDAY_S = 0.0
NIGHT = QuietHours((3,), 22 * 60, 7 * 60)


@pytest.mark.parametrize(
    ("now_s", "offset_min", "quiet"),
    [
        (THURSDAY_S + 12 * 3600, 0, False),
        (THURSDAY_S + 23 * 3600, 0, True),
        (THURSDAY_S + 30 * 3600, 0, True),
        (THURSDAY_S + 31 * 3600, 0, False),
        (THURSDAY_S + 6 * 3600, 0, False),
        (THURSDAY_S + 12 * 3600, 10 * 60, True),
        (THURSDAY_S + 23 * 3600, -120, False),
    ],
)
def test_quiet_hours_are_by_the_hosts_own_clock_and_may_pass_midnight(
    now_s: float, offset_min: int, quiet: bool
) -> None:
    host = Capability(hostname="desk", utc_offset_min=offset_min)
    assert (in_quiet_hours((NIGHT,), host, now_s) is not None) == quiet


def question(requirement: RequirementClass, **fields: Any) -> WhyQuery:
    return WhyQuery(status=JobStatus.PENDING, requirement=requirement, **fields)


def test_why_counts_hosts_per_constraint_and_names_the_nearest_fix() -> None:
    small = msgspec.structs.replace(GPU, host="gpu-2", vram_gib=(8.0,))
    answer = why(
        question(asking(require_cuda=True, min_vram_gib=12)),
        [HostState(profile=PI), HostState(profile=small)],
        now_s=0,
    )
    assert not answer.schedulable
    assert [(each.what, each.hosts, each.of) for each in answer.obstacles] == [
        ("min_vram_gib", 2, 2),
        ("require_cuda", 1, 2),
    ]
    assert (answer.nearest_host, answer.nearest_fix) == ("gpu-2", ("set min_vram_gib = 8 or less",))


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"online": False}, "offline"),
        ({"paused": True}, "paused"),
        ({"quarantined": "infra"}, "quarantined"),
        ({"quiet": "22:00-07:00"}, "in quiet hours"),
        ({"held": (Taken(slots=2),)}, "busy"),
    ],
)
def test_why_tells_eligible_hosts_that_cannot_take_it_now(state: dict[str, Any], what: str) -> None:
    answer = why(question(asking()), [HostState(profile=GPU, **state)], now_s=0)
    assert [each.what for each in answer.obstacles] == [what]
    assert answer.schedulable
    assert answer.eligible_hosts == ("gpu-1",)


def test_why_tells_what_is_reserved_and_which_hosts_drain() -> None:
    reserved = HostState(profile=GPU, reserved={"big": Amounts(whole=True)})
    (obstacle,) = why(question(asking()), [reserved], now_s=0).obstacles
    assert (obstacle.what, obstacle.detail) == ("reserved", "1 eligible host is reserved: gpu-1 (for big)")
    draining = HostState(profile=GPU, held=(Taken(slots=2),), drains=True)
    assert why(question(asking()), [draining], now_s=0).headline == "gpu-1 is reserved for it; the jobs there end first"
    gang = why(question(asking(), gang_hosts=2), [HostState(profile=GPU)], now_s=0)
    assert gang.obstacles[0].fix == "add hosts, or raise workers_per_host"
    assert gang.headline == "its gang starts on 2 hosts at once, and 1 of 1 could take it now"


@given(
    st.lists(
        st.builds(
            HostState,
            profile=st.sampled_from(
                [PI, GPU, msgspec.structs.replace(GPU, slots=3), msgspec.structs.replace(PI, cores=2)]
            ),
            held=st.lists(st.sampled_from([Taken(slots=1), Taken(cores=3, slots=0)]), max_size=3).map(tuple),
            paused=st.booleans(),
            reserved=st.sampled_from([{}, {"big": Amounts(cores=4)}]),
        ),
        max_size=8,
    ),
    st.sampled_from([asking(min_cores=2), asking(min_cores=4, slots=2), asking()]),
)
def test_hosts_that_are_alike_are_judged_as_each_would_be_alone(
    hosts: list[HostState], requirement: RequirementClass
) -> None:
    def stopped(states: list[HostState]) -> Counter[str]:
        return Counter({each.what: each.hosts for each in why(question(requirement), states, now_s=0).obstacles})

    fitting = [host for host in hosts if eligible(requirement, host.profile).eligible]
    assume(fitting)
    assert stopped(hosts) == sum((stopped([host]) for host in fitting), Counter[str]())


def test_why_tells_what_is_not_about_hosts() -> None:
    waiting = UnmetDependency(job_id="job1_x", label="base", status=JobStatus.FAILED)
    answer = why(question(asking(), after=(waiting,), not_before_s=70), [HostState(profile=GPU)], now_s=10)
    assert [each.what for each in answer.obstacles] == ["after", "back-off"]
    assert "60 s" in answer.obstacles[1].detail
    assert not answer.schedulable
    assert why(question(asking()), [], now_s=0).obstacles[0].what == "no host"


@given(st.lists(st.tuples(capabilities(), st.booleans(), st.integers(0, 3)), max_size=5), needs())
def test_a_job_that_waits_always_has_an_obstacle_or_a_free_host(
    fleet: list[tuple[Capability, bool, int]], asked: Needs
) -> None:
    hosts = [
        HostState(profile=profile(each), online=online, held=tuple(Taken(cores=1) for _ in range(busy)))
        for each, online, busy in fleet
    ]
    answer = why(question(RequirementClass("mlp", "a", asked)), hosts, now_s=0)
    assert answer.obstacles or "could take it now" in answer.headline


def test_a_required_label_is_one_that_an_operator_gave_the_host() -> None:
    said = Capability(hostname="pi", labels={"room": "vault"})
    needed = asking(require_labels={"room": "vault"}, prefer_labels={"room": "vault"})
    alone = profile(said)
    (reason,) = eligible(needed, alone).reasons
    assert (reason.constraint, reason.has) == ("require_labels.room", "only its agent's word for it")
    assert score(needed, alone) == 1.0, "a wish may follow the host's own word"
    assert eligible(needed, profile(said, granted={"room": "vault"})).eligible
    assert eligible(needed, profile(said, HostSpec(name="pi", labels={"room": "vault"}))).eligible
    assert not eligible(needed, profile(said, granted={"room": "cellar"})).eligible


@pytest.mark.parametrize(
    ("version", "outdated"),
    [("0.1.0", True), ("0.1.12", True), ("0.2.0.dev0", False), ("0.10.0", False), ("1.0", False)],
)
def test_agents_that_are_too_old_are_known_by_their_version(version: str, outdated: bool) -> None:
    parsed = parse_agent_version(version)
    assert parsed is not None
    assert (parsed < minimum_agent(RequirementClass("m", "default"))) is outdated


def test_an_agent_without_a_version_of_ours_has_none() -> None:
    assert parse_agent_version("") is parse_agent_version("main") is None
