"""What is generated from the contracts is fresh, and runs with every version of its libraries that we allow."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

ROOT: Final = Path(__file__).parents[2]
GENERATED: Final = ROOT / "src" / "strata" / "coord" / "pb"
TINKER: Final = ROOT / "src" / "strata" / "train" / "wire" / "pb"
ACCEPTED: Final = ROOT / "proto" / "strata" / "v1" / "coordinator.binpb"


def generate(out: Path, accepted: Path) -> None:
    out.mkdir()
    done = subprocess.run(
        ["make", "proto", f"BIN={Path(sys.executable).parent}", f"OUT={out}", f"ACCEPTED={accepted}"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(out), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*_pb2*.py*"))}


def bounds(extra: str) -> dict[str, Version]:
    """The lowest version of each requirement of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(line) for line in project["optional-dependencies"][extra]]
    return {each.name: min(Version(one.version) for one in each.specifier) for each in requirements}


def found(pattern: str, file: str) -> str:
    match = re.search(pattern, (GENERATED / file).read_text(encoding="utf-8"))
    assert match, f"{file} does not say which generator wrote it"
    return ".".join(match.groups())


def test_the_generated_files_and_the_accepted_contract_are_fresh(tmp_path: Path) -> None:
    generate(tmp_path / "out", tmp_path / "accepted.binpb")
    fresh = contents(tmp_path / "out" / "strata" / "coord" / "pb")
    fresh |= contents(tmp_path / "out" / "strata" / "train" / "wire" / "pb")
    committed = contents(GENERATED) | contents(TINKER)
    assert len(fresh) == 6
    assert [name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name)] == [], (
        "make proto"
    )
    assert (tmp_path / "accepted.binpb").read_bytes() == ACCEPTED.read_bytes(), "make proto"


def test_the_lowest_allowed_runtime_runs_the_generated_code() -> None:
    protobuf = Version(found(r"Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", "coordinator_pb2.py"))
    grpc = Version(found(r"GRPC_GENERATED_VERSION = '([\d.]+)'", "coordinator_pb2_grpc.py"))
    assert {bounds(extra)["protobuf"] for extra in ("worker", "worker-data", "coordinator", "train")} == {protobuf}
    assert {bounds(extra)["grpcio"] for extra in ("worker", "worker-data", "coordinator")} == {grpc}
    assert not {"grpcio", "protobuf", "numpy"} & bounds("hub").keys()
    assert bounds("dev")["grpcio-tools"] == grpc
