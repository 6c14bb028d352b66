"""What a host gives a member of a gang: a command, a token that it renews, and nothing that the job can replace."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strata.base.errors import Code, StrataError
from strata.base.secret import read_secret
from strata.fleet.agent.attempt_folder import AttemptPaths
from strata.fleet.agent.gang_member import member_command, prepare_member, put_fetched, wanted_parts, write_token
from strata.fleet.agent.path_names import PathName
from strata.fleet.agent.settings import SandboxSettings
from strata.fleet.core.jobspec import GangPlace
from strata.fleet.wire.leases import GangLease, LeaseGiven
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
    local = GangLease(coordinator="127.0.0.1:7070", job="mlp-0123", checkpoint_root="/shared")
    variables = prepare_member(member(local), paths, None, SandboxSettings())
    assert variables == {"STRATA_WORKER_CHECKPOINT_ROOT": "/shared/mlp-0123"}


def test_a_member_without_a_coordinator_or_a_network_is_refused(paths: AttemptPaths) -> None:
    for given, sandbox in ((None, SandboxSettings()), (ACCESS, SandboxSettings(network="none"))):
        with pytest.raises(StrataError) as refused:
            prepare_member(member(given), paths, None, sandbox)
        assert refused.value.code is Code.PRECONDITION


ALONE = GangLease(coordinator="127.0.0.1:7070", job="mlp-0123")


def test_without_shared_storage_workers_write_to_the_agent_and_read_from_it(paths: AttemptPaths) -> None:
    variables = prepare_member(member(ALONE), paths, None, SandboxSettings())
    parts, fetched = paths.checkpoints / ".parts", paths.gang / "fetched"
    assert variables == {
        "STRATA_WORKER_CHECKPOINT_ROOT": str(parts),
        "STRATA_WORKER_FETCHED_CHECKPOINTS": str(fetched),
    }
    assert list(wanted_parts(paths, None)) == []
    (parts / ".wanted").mkdir()
    (parts / ".wanted" / "0123456789abcdef.json").write_text('{"parts": {"part-0": "sha256:aa"}}')
    (parts / ".wanted" / "0123456789abcdef.json.tmp").write_text("half")
    assert list(wanted_parts(paths, None)) == [("0123456789abcdef", {"part-0": "sha256:aa"})]

    put_fetched(paths, PathName("0123456789abcdef"), ["one", "two"], lambda name: tar(f"part-{name}", name), None)
    found = {each.name: each.read_text() for each in (fetched / "0123456789abcdef").iterdir()}
    assert found == {"part-one": "one", "part-two": "two"}
    assert list(wanted_parts(paths, None)) == [], "it is there"
    put_fetched(paths, PathName("f" * 16), ["one"], lambda name: tar("p", name), None)
    assert [each.name for each in fetched.iterdir()] == ["f" * 16]


def test_a_download_that_breaks_off_leaves_nothing_for_which_workers_would_wait(paths: AttemptPaths) -> None:
    def broken(_: str) -> Iterator[bytes]:
        yield from tar("part-0", "x")
        raise StrataError(Code.UNAVAILABLE, "the hub is away")

    prepare_member(member(ALONE), paths, None, SandboxSettings())
    with pytest.raises(StrataError, match="the hub is away"):
        put_fetched(paths, PathName("f" * 16), ["one"], broken, None)
    assert list(paths.fetched.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"parts": {"a": 1}}', b'{"parts": {}, "more": 1}'])
def test_a_request_that_cannot_be_read_is_told(paths: AttemptPaths, content: bytes) -> None:
    prepare_member(member(ALONE), paths, None, SandboxSettings())
    (paths.parts / ".wanted").mkdir()
    (paths.parts / ".wanted" / "0123456789abcdef.json").write_bytes(content)
    with pytest.raises(StrataError, match="of the gang cannot be read"):
        list(wanted_parts(paths, None))


def test_a_request_is_no_link_to_a_file_of_somebody_else(paths: AttemptPaths, tmp_path: Path) -> None:
    prepare_member(member(ALONE), paths, None, SandboxSettings())
    (paths.parts / ".wanted").mkdir()
    (tmp_path / "secret").write_text('{"parts": {}}')
    (paths.parts / ".wanted" / "0123456789abcdef.json").symlink_to(tmp_path / "secret")
    with pytest.raises(StrataError, match="of the gang cannot be read"):
        list(wanted_parts(paths, None))


def tar(name: str, content: str) -> Iterator[bytes]:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content.encode()))
    yield packed.getvalue()
