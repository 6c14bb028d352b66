"""`strata coordinator certificate`: what it writes, and a coordinator and its workers with it."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import strata.coord.worker as strata
from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.failpoint import arm
from strata.cli.exit_codes import ExitCode
from strata.cli.main import run
from strata.identity.ca import Authority
from tests.shell.cli_fleet.driving import Person, Said
from tests.shell.coord.running import STRATA
from tests.support.ports import port_of, reserve_port

FILES = ("ca.pem", "cert.pem", "key.pem")


def issue(person: Person, out: Path, *names: str) -> Said:
    options = (word for name in names for word in ("--name", name))
    return person.says("coordinator", "certificate", *options, "--out", str(out))


def contents(out: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(out.iterdir())}


def test_three_files_are_written_and_only_their_owner_reads_the_key(person: Person, tmp_path: Path) -> None:
    out = tmp_path / "tls"
    done = issue(person, out, "coordinator.example", "10.1.2.3")
    assert done.status == ExitCode.OK, done.err
    assert tuple(contents(out)) == FILES
    assert [stat.S_IMODE((out / name).stat().st_mode) for name in FILES] == [0o644, 0o644, 0o600]
    assert "coordinator.example, 10.1.2.3" in done.err
    assert f"--tls-certificate {out}/cert.pem --tls-key {out}/key.pem" in done.err
    assert "PRIVATE KEY" not in done.out + done.err


def test_running_it_again_renews_certificate_and_key(person: Person, tmp_path: Path) -> None:
    out = tmp_path / "tls"
    issue(person, out, "coordinator.example")
    before = contents(out)
    assert issue(person, out, "coordinator.example").status == ExitCode.OK
    after = contents(out)
    assert [name for name in FILES if before[name] == after[name]] == ["ca.pem"]
    assert stat.S_IMODE((out / "key.pem").stat().st_mode) == 0o600


def test_a_folder_that_a_crash_left_without_certificate_is_completed(person: Person, tmp_path: Path) -> None:
    out = tmp_path / "tls"
    issue(person, out, "coordinator.example")
    (out / "cert.pem").unlink()
    assert issue(person, out, "coordinator.example").status == ExitCode.OK
    assert tuple(contents(out)) == FILES


def test_a_refused_request_and_files_of_another_origin_leave_a_folder_as_it_was(person: Person, tmp_path: Path) -> None:
    out = tmp_path / "tls"
    assert issue(person, out, "*.example").status == ExitCode.USAGE
    assert not out.exists()
    out.mkdir()
    (out / "key.pem").write_text("the key of something else")
    done = issue(person, out, "coordinator.example")
    assert (done.status, "is not of this hub's authority" in done.err) == (ExitCode.FAILED, True)
    assert contents(out) == {"key.pem": b"the key of something else"}


@pytest.mark.parametrize("replaced", range(3))
def test_of_two_renewals_at_once_the_one_that_left_a_mixture_fails(
    person: Person, tmp_path: Path, replaced: int
) -> None:
    out = tmp_path / "tls"
    words = ("coordinator", "certificate", "--name", "coordinator.example", "--out", str(out))
    others: list[dict[str, bytes]] = []

    def renew_meanwhile(_: str) -> None:
        assert run(words) == ExitCode.OK
        others.append(contents(out))

    # When the first renewal has replaced so many of its three files.
    arm("cli.coordinator.before_certificate_file", renew_meanwhile, skip=replaced)
    done = issue(person, out, "coordinator.example")
    mixed = contents(out)["key.pem"] == others[0]["key.pem"]
    assert mixed == (replaced == 2), "the certificate is the last file"
    assert done.status == (ExitCode.FAILED if mixed else ExitCode.OK), done.err
    assert ("another renewal wrote into" in done.err) == mixed
    assert issue(person, out, "coordinator.example").status == ExitCode.OK


@asynccontextmanager
async def coordinator(address: str, out: Path, database: Path) -> AsyncIterator[None]:
    """`strata coordinator` with the files of this folder."""
    tls = ("--tls-certificate", str(out / "cert.pem"), "--tls-key", str(out / "key.pem"))
    process = await asyncio.create_subprocess_exec(
        *(STRATA, "coordinator", "--listen", address, "--database", f"sqlite:{database}", *tls),
        env={"PATH": os.defpath},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def test_workers_join_a_coordinator_with_this_certificate_and_trust_no_other_authority(
    person: Person, tmp_path: Path
) -> None:
    out, other = tmp_path / "tls", tmp_path / "other.pem"
    assert issue(person, out, "127.0.0.1").status == ExitCode.OK
    other.write_bytes(Authority.create("another", SystemClock().wall_s()).certificate_pem)
    with reserve_port() as reserved:
        address, ca = f"127.0.0.1:{port_of(reserved)}", str(out / "ca.pem")
        async with coordinator(address, out, tmp_path / "coord.db"):
            async with strata.join_async(address=address, id="w", patience_s=30, tls_ca=ca) as worker:
                assert worker.generation == 1
            with pytest.raises(StrataError) as refused:
                async with strata.join_async(address=address, id="x", patience_s=1, tls_ca=str(other)):
                    pass
            assert refused.value.code is Code.UNAVAILABLE


async def test_a_worker_goes_on_when_its_coordinator_restarts_with_a_renewed_certificate(
    person: Person, tmp_path: Path
) -> None:
    out = tmp_path / "tls"
    issue(person, out, "127.0.0.1")
    async with AsyncExitStack() as stack:
        reserved = stack.enter_context(reserve_port())
        address, ca = f"127.0.0.1:{port_of(reserved)}", str(out / "ca.pem")
        async with coordinator(address, out, tmp_path / "coord.db"):
            worker = await stack.enter_async_context(
                strata.join_async(address=address, id="w", patience_s=30, tls_ca=ca)
            )
            await worker.barrier("before")
        assert issue(person, out, "127.0.0.1").status == ExitCode.OK
        async with coordinator(address, out, tmp_path / "coord.db"):
            await worker.barrier("after")
            await stack.aclose()
