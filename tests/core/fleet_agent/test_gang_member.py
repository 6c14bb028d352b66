"""What a host gives a member of a gang: a command, a token that it renews, and nothing that the job can replace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import read_secret
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.gang_member import member_command, prepare_member, write_token
from strata.fleet.agent.settings import SandboxSettings
from strata.fleet.core.jobspec import GangPlace
from strata.fleet.wire import GangLease, LeaseGiven
from tests.core.fleet_agent.leases import lease

PLACE = GangPlace(name="sft", size=4, index=1, min_size=2, workers_per_host=8)
ACCESS = GangLease(
    coordinator="10.0.0.9:7070",
    job="mlp-0123",
    ca_pem="the authority",
    token="strata1.first.x",
    token_s=900.0,
    checkpoint_root="s3://models/gangs/",
)


def member(gang: GangLease | None = ACCESS, **spec: Any) -> LeaseGiven:
    return msgspec.structs.replace(lease(gang=PLACE, **spec), gang=gang)


@pytest.fixture
def paths(tmp_path: Path) -> AttemptPaths:
    return AttemptPaths(tmp_path)


def test_a_member_is_started_as_gang_run_of_its_own_python(paths: AttemptPaths) -> None:
    command = member_command(member(), paths, ["/venv/bin/python", "train.py", "--epochs", "3"])
    assert (command[0], command[4:6]) == ("/venv/bin/python", ["gang", "run"])
    assert command[-4:] == ["--", "train.py", "--epochs", "3"]
    options = dict(zip(command[6:-4:2], command[7:-4:2], strict=False))
    assert (options["--coordinator"], options["--job"]) == ("10.0.0.9:7070", "mlp-0123")
    assert (options["--nnodes"], options["--nproc"]) == ("2:4", "8")
    assert not any("strata1" in word for word in command), "every user of the machine sees arguments"


def test_token_and_authority_are_private_files_and_their_paths_are_variables(paths: AttemptPaths) -> None:
    variables = prepare_member(member(), paths, None, SandboxSettings())
    token = Path(variables["STRATA_WORKER_TOKEN_FILE"])
    assert read_secret(token).reveal() == "strata1.first.x"
    assert token.stat().st_mode & 0o777 == 0o600
    assert Path(variables["STRATA_WORKER_TLS_CA"]).read_text() == "the authority"
    assert variables["STRATA_WORKER_CHECKPOINT_ROOT"] == "s3://models/gangs/mlp-0123"
    assert "strata1.first.x" not in variables.values(), "other users may see the environment"

    write_token(paths, "strata1.second.x", None)
    assert read_secret(token).reveal() == "strata1.second.x"
    assert {each.name for each in paths.gang.iterdir()} == {token.name, "ca.pem"}


def test_a_coordinator_on_this_machine_needs_neither_token_nor_authority(paths: AttemptPaths) -> None:
    local = GangLease(coordinator="127.0.0.1:7070", job="mlp-0123")
    assert prepare_member(member(local), paths, None, SandboxSettings()) == {}


def test_a_member_without_a_coordinator_or_a_network_is_refused(paths: AttemptPaths) -> None:
    for given, sandbox in ((None, SandboxSettings()), (ACCESS, SandboxSettings(network="none"))):
        with pytest.raises(StrataError) as refused:
            prepare_member(member(given), paths, None, sandbox)
        assert refused.value.code is Code.PRECONDITION
