"""Tokens and certificates: from the environment or a file, and never sent to another machine in the clear."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from strata.coord.pb import coordinator_pb2_grpc as pb_grpc
from tests.conformance.coordinator.fleet import MARKS, Fleet
from tests.shell.coord.running import CoordinatorProcess, connect
from tests.shell.coord.test_access import certificate, tls_files, token
from tests.support.ports import port_of, reserve_port

pytestmark = MARKS

Commands = Mapping[str, Sequence[str]]


@asynccontextmanager
async def guarded(folder: Path, commands: Commands) -> AsyncIterator[tuple[Fleet, dict[str, str]]]:
    """A coordinator that asks for tokens and certificates, and what a worker needs in its environment."""
    authority = certificate("authority")
    tls_files(folder, certificate("server", authority), authority)
    own = certificate("worker", authority)
    # The secret that the tokens of `token` are signed with.
    secret = b"s" * 32
    for name, content in {
        "ca.pem": authority.pem,
        "own.pem": own.pem,
        "own.key": own.key_pem,
        "secret": secret,
    }.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    guard = reserve_port()
    process = CoordinatorProcess(
        f"sqlite:{folder / 'coord.db'}",
        port_of(guard),
        {
            "STRATA_COORDINATOR_TLS_CERTIFICATE": str(folder / "server.pem"),
            "STRATA_COORDINATOR_TLS_KEY": str(folder / "server.key"),
            "STRATA_COORDINATOR_TLS_CLIENT_CA": str(folder / "clients.pem"),
            "STRATA_COORDINATOR_TOKEN_SECRET_FILE": str(folder / "secret"),
        },
    )
    credentials = grpc.ssl_channel_credentials(authority.pem, own.key_pem, own.pem)
    async with connect(process.address, credentials) as channel:
        stub: pb_grpc.CoordinatorAsyncStub = pb_grpc.CoordinatorStub(channel)
        fleet = Fleet(process.address, "j", folder, stub, commands)
        try:
            await process.start()
            yield (
                fleet,
                {
                    "STRATA_WORKER_TLS_CA": str(folder / "ca.pem"),
                    "STRATA_WORKER_TLS_CERTIFICATE": str(folder / "own.pem"),
                    "STRATA_WORKER_TLS_KEY": str(folder / "own.key"),
                    "STRATA_WORKER_TOKEN_FILE": str(folder / "token"),
                },
            )
        finally:
            await fleet.close()
            await process.close()
            guard.close()


def write_token(folder: Path, text: str) -> None:
    (folder / "token").write_text(f"{text}\n", encoding="utf-8")
    (folder / "token").chmod(0o600)


async def test_a_token_says_who_the_worker_is(tmp_path: Path, commands: Commands, sdk: str) -> None:
    async with guarded(tmp_path, commands) as (fleet, environ):
        write_token(tmp_path, token(worker="w7"))
        driver = await fleet.start(sdk, environ)
        found = await driver.ask("join")
        assert (found["job"], found["world_size"]) == ("j", 1)
        await driver.ask("dataset", dataset_id="corpus", samples=10, shard_size=10)
        await driver.ask("barrier", barrier_id="here")
        await driver.ask("leave")


async def test_a_forged_token_is_refused_and_not_repeated(tmp_path: Path, commands: Commands, sdk: str) -> None:
    async with guarded(tmp_path, commands) as (fleet, environ):
        forged = f"{token(worker='w7')[:-4]}AAAA"
        write_token(tmp_path, forged)
        error = await (await fleet.start(sdk, environ)).refused("join")
        assert error.code == "UNAUTHENTICATED"
        assert forged not in error.message


async def test_another_job_than_that_of_the_token_is_refused(tmp_path: Path, commands: Commands, sdk: str) -> None:
    async with guarded(tmp_path, commands) as (fleet, environ):
        write_token(tmp_path, token(worker="w7"))
        error = await (await fleet.start(sdk, environ)).refused("join", job="another")
        assert error.code == "PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"STRATA_WORKER_TOKEN": "t", "STRATA_WORKER_ADDRESS": "192.0.2.1:7070"}, "in the clear"),
        ({"STRATA_WORKER_TOKEN": "t", "STRATA_WORKER_TOKEN_FILE": "token"}, "only one of them can be meant"),
        ({"STRATA_WORKER_ADRESS": "127.0.0.1:7070"}, "unknown variable"),
        ({"STRATA_WORKER_ELASTIC": "perhaps"}, "STRATA_WORKER_ELASTIC"),
    ],
    ids=["a token in the clear", "two tokens", "a misspelt name", "neither yes nor no"],
)
async def test_settings_that_cannot_be_meant_are_refused(
    fleet: Fleet, sdk: str, environ: dict[str, str], words: str
) -> None:
    error = await (await fleet.start(sdk, environ)).refused("join")
    assert error.code == "INVALID_ARGUMENT"
    assert words in error.message
