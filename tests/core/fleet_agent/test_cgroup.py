"""Limits of control groups, of both versions, wherever they are set."""

from __future__ import annotations

from pathlib import Path

from strata.fleet.agent import cgroup
from strata.fleet.agent.probe import cores, ram_bytes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "own"
    own.write_text("0::/system.slice/strata-agent.service\n")
    write(root / "memory.max", "max\n")
    write(root / "system.slice" / "memory.max", "8589934592\n")
    write(root / "system.slice" / "strata-agent.service" / "memory.max", "max\n")
    write(root / "system.slice" / "strata-agent.service" / "cpu.max", "250000 100000\n")
    assert cgroup.memory_limit(root, own) == 8 << 30
    assert cgroup.cpu_quota(root, own) == 2.5


def test_version_1_is_read_too(tmp_path: Path) -> None:
    root, own = tmp_path / "fs", tmp_path / "own"
    own.write_text("4:memory:/docker/abc\n1:cpu,cpuacct:/\n")
    write(root / "memory" / "memory.limit_in_bytes", "1073741824\n")
    write(root / "cpu" / "cpu.cfs_quota_us", "-1\n")
    write(root / "cpu" / "cpu.cfs_period_us", "100000\n")
    assert cgroup.memory_limit(root, own) == 1 << 30
    assert cgroup.cpu_quota(root, own) is None


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    assert cgroup.memory_limit(tmp_path, tmp_path / "nothing") is None
    assert ram_bytes(None) > 1 << 20
    assert ram_bytes(1 << 20) == 1 << 20
    assert cores(0.5) == 1
    assert cores(None) >= 1


def fake_v2(root: Path, own: Path, *, delegated: str) -> Path:
    """A group of version 2 as systemd delegates it. The kernel would create the files of each group below it."""
    unit = root / "system.slice" / "strata-agent.service"
    own.write_text("0::/system.slice/strata-agent.service\n")
    write(root / "cgroup.controllers", "cpuset cpu io memory pids\n")
    write(unit / "cgroup.controllers", f"{delegated}\n")
    write(unit / "cgroup.subtree_control", "")
    write(unit / "cgroup.type", "domain\n")
    write(unit / "cgroup.procs", "")
    return unit


def test_of_version_2_just_the_controllers_that_were_delegated_are_turned_on(tmp_path: Path) -> None:
    """Over a folder that looks like version 2: one controller too many would make the kernel refuse all of them."""
    root, own = tmp_path / "fs", tmp_path / "own"
    unit = fake_v2(root, own, delegated="memory pids")
    cgroup.job_parents(root, own)
    assert (unit / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (unit / cgroup.AGENT_GROUP / "cgroup.procs").read_text() == "0"
    unit = fake_v2(root, own, delegated="cpu memory pids")
    cgroup.job_parents(root, own)
    assert (unit / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_a_group_gets_the_quota_the_weight_and_the_limits_of_its_version(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.shares", "memory.limit_in_bytes", "pids.max"):
        write(first / name, "")
    for name in ("cpu.max", "cpu.weight", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max"):
        write(second / name, "")
    cgroup.create_groups([first, second], memory_bytes=1 << 30, processes=60, cores=1.5, cpu_weight=2)
    assert {path.name: path.read_text() for path in first.iterdir()} == {
        "cpu.cfs_quota_us": "150000",
        "cpu.cfs_period_us": "100000",
        "cpu.shares": "2048",
        "memory.limit_in_bytes": str(1 << 30),
        "pids.max": "60",
    }
    assert {path.name: path.read_text() for path in second.iterdir()} == {
        "cpu.max": "150000 100000",
        "cpu.weight": "200",
        "memory.max": str(1 << 30),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": "60",
    }
