"""No change of the coordinator's contract breaks a worker that is already out there, and the check can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]
CONTRACT: Final = "strata/v1/coordinator.proto"
ACCEPTED: Final = ROOT / "proto" / "strata" / "v1" / "coordinator.binpb"


class Edit(NamedTuple):
    name: str
    old: str
    new: str
    named: str
    """What the complaint has to name."""


BREAKING: Final = (
    Edit("a field has another number", "string worker_id = 1;\n  // Where", "string worker_id = 5;\n  // Where", '"1"'),
    Edit("a field has another type", "uint64 start_index = 3;", "int64 start_index = 3;", '"start_index"'),
    Edit("a field has another name", "bool released = 1;", "bool open = 1;", '"open"'),
    Edit("a field is repeated", "uint64 size_bytes = 3;", "repeated uint64 size_bytes = 3;", '"size_bytes"'),
    Edit("a field loses its presence", "optional bool wait = 15;", "bool wait = 15;", '"wait"'),
    Edit("a field is gone", "  // Current global training step.\n  uint64 step = 2;\n", "", '"step"'),
    Edit(
        "a reserved number is free",
        "  reserved 100 to 199;\n}\n\n// Telemetry of one worker",
        "}\n\n//",
        '"GpuMetrics"',
    ),
    Edit("an RPC is gone", "  rpc AckDataset(DatasetInfo) returns (DatasetAck);\n", "", '"AckDataset"'),
    Edit("an RPC takes another message", "rpc Barrier(BarrierRequest)", "rpc Barrier(ShardRequest)", '"Barrier"'),
    Edit("an RPC streams", "returns (HeartbeatResponse);", "returns (stream HeartbeatResponse);", '"Heartbeat"'),
    Edit("an enum value is gone", "  WORKER_STATUS_RECOVERING = 6;\n", "", '"6"'),
    Edit("an enum value has another number", "COMMAND_KIND_DRAIN = 5;", "COMMAND_KIND_DRAIN = 60;", '"5"'),
    Edit(
        "telemetry is renumbered", "uint64 network_tx_bytes = 6;", "uint64 network_tx_bytes = 8;", '"network_tx_bytes"'
    ),
    Edit(
        "telemetry is swapped",
        "uint64 disk_read_bytes = 3;\n  // Bytes written to disks.\n  uint64 disk_write_bytes = 4;",
        "uint64 disk_read_bytes = 4;\n  // Bytes written to disks.\n  uint64 disk_write_bytes = 3;",
        '"disk_read_bytes"',
    ),
    Edit("the package has another name", "package strata.v1;", "package strata.v2;", "strata.v2"),
)

COMPATIBLE: Final = (
    Edit("an optional field", "bool explicit_acks = 18;", "bool explicit_acks = 18;\n  optional uint64 seen = 60;", ""),
    Edit("a repeated field", "bool released = 1;", "bool released = 1;\n  repeated string notes = 15;", ""),
    Edit("an enum value", "COMMAND_KIND_DRAIN = 5;", "COMMAND_KIND_DRAIN = 5;\n  COMMAND_KIND_PROFILE = 60;", ""),
    Edit(
        "an RPC", "service Coordinator {", "service Coordinator {\n  rpc Ping(WorkerInfo) returns (WorkerConfig);", ""
    ),
    Edit(
        "a message", "// Telemetry of one GPU.", "message Extra {\n  string text = 1;\n}\n// Telemetry of one GPU.", ""
    ),
    Edit("a comment", "// Resident memory.", "// Memory.", ""),
)


def buf(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("buf")), *arguments],
        cwd=ROOT,
        env={"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def breaking(tree: Path) -> subprocess.CompletedProcess[str]:
    return buf(tree, "breaking", str(tree / "proto"), "--against", str(ACCEPTED))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    return tmp_path


def edit(tree: Path, old: str, new: str) -> None:
    file = tree / "proto" / CONTRACT
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_contract_as_it_is_breaks_nothing_and_every_part_of_it_has_a_comment(tmp_path: Path) -> None:
    done = [buf(tmp_path, "lint", "proto"), buf(tmp_path, "breaking", "proto", "--against", str(ACCEPTED))]
    assert [(each.returncode, each.stdout + each.stderr) for each in done] == [(0, ""), (0, "")]


@pytest.mark.parametrize("change", BREAKING, ids=lambda change: change.name)
def test_a_change_that_breaks_workers_is_refused(tree: Path, change: Edit) -> None:
    edit(tree, change.old, change.new)
    done = breaking(tree)
    assert done.returncode == 100, done.stdout + done.stderr
    assert change.named in done.stdout


@pytest.mark.parametrize("change", COMPATIBLE, ids=lambda change: change.name)
def test_an_addition_is_accepted(tree: Path, change: Edit) -> None:
    edit(tree, change.old, change.new)
    done = breaking(tree)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_missing_accepted_contract_is_an_error_and_not_a_pass(tmp_path: Path) -> None:
    assert buf(tmp_path, "breaking", "proto", "--against", str(tmp_path / "gone.binpb")).returncode != 0


def test_a_field_without_a_comment_is_refused(tree: Path) -> None:
    edit(tree, "  // Resident memory.\n", "")
    done = buf(tree, "lint", str(tree / "proto"))
    assert done.returncode == 100
    assert '"memory_used_bytes"' in done.stdout


def test_the_static_checks_include_the_contract() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "check", f"BIN={Path(sys.executable).parent}"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "buf lint proto" in planned.stdout
    assert "buf breaking proto --against proto/strata/v1/coordinator.binpb" in planned.stdout
