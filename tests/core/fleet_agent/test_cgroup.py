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
