"""Workers on hosts that share no storage: committed parts go to the agents, and come back from them."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

import strata.coord.worker as strata
from strata.base.digest import file_digest
from strata.base.errors import Code, StrataError
from strata.coord.core.job_config import JobConfig
from strata.coord.worker.checkpoint_store import WAIT_S, MemberCheckpoints
from strata.coord.worker.checkpoints import Manifest, Part
from tests.shell.coord.running import in_process
from tests.shell.coord_worker.test_calls import worker
from tests.support.manual_clock import ManualClock


class HostFolders:
    """What the agent of a host makes for a member."""

    def __init__(self, folder: Path) -> None:
        self.uploaded, self.fetched = folder / "checkpoints", folder / "fetched"
        self.root = self.uploaded / ".parts"
        self.root.mkdir(parents=True)
        self.fetched.mkdir()

    @property
    def settings(self) -> dict[str, str]:
        return {"checkpoint_root": str(self.root), "fetched_checkpoints": str(self.fetched)}

    def write(self, folder: str, name: str, content: str) -> Path:
        part = self.root / folder / name
        part.parent.mkdir(exist_ok=True)
        part.write_text(content)
        return part

    def published(self) -> list[Path]:
        return [each for each in self.uploaded.iterdir() if not each.name.startswith(".")]

    def wanted(self) -> list[Path]:
        return list(self.root.glob(".wanted/*.json"))


async def carry(hosts: list[HostFolders]) -> None:
    """As the agents do: give each host that asks the parts with these digests, when all hosts have theirs."""
    while True:
        for host in hosts:
            for request in host.wanted():
                wanted = set(json.loads(request.read_text())["parts"].items())
                published = [part for each in hosts for folder in each.published() for part in folder.iterdir()]
                parts = {(part.name, file_digest(part)): part for part in published}
                reply = host.fetched / request.stem
                if wanted <= parts.keys() and not reply.exists():
                    making = host.fetched / "making"
                    making.mkdir()
                    for name, digest in wanted:
                        shutil.copyfile(parts[name, digest], making / name)
                    making.rename(reply)
        await asyncio.sleep(0.01)


async def test_each_host_uploads_its_own_part_when_it_is_committed_and_recovers_with_all_of_them(
    tmp_path: Path,
) -> None:
    hosts = [HostFolders(tmp_path / name) for name in ("a", "b")]
    job = JobConfig(settle_s=0.05)
    async with (
        in_process(job) as running,
        worker(running, "a", elastic=True, **hosts[0].settings) as a,
        worker(running, "b", elastic=True, **hosts[1].settings) as b,
    ):
        await a.follow()
        parts = [
            host.write("1-10", f"part-{each.rank}", each.worker_id) for host, each in zip(hosts, (a, b), strict=True)
        ]
        first = await a.checkpoint(10, parts[0], commit_within_s=0)
        assert (first.committed, hosts[0].published(), hosts[1].published()) == (False, [], []), "b has not reported"
        await asyncio.gather(b.checkpoint(10, parts[1]), a.checkpoint(10, parts[0]))
        assert [[part.name for part in host.published()[0].iterdir()] for host in hosts] == [
            [part.name] for part in parts
        ]

        agents = asyncio.create_task(carry(hosts))
        manifests = await asyncio.gather(a.recover(), b.recover())
        agents.cancel()
        for host, manifest in zip(hosts, manifests, strict=True):
            assert manifest is not None
            assert {Path(part.uri).parent.parent for part in manifest.parts} == {host.fetched}
            for part in manifest.parts:
                strata.verify_part(part.uri, part.digest)


async def test_a_gang_of_one_host_recovers_from_its_own_files_and_deletes_old_ones(tmp_path: Path) -> None:
    host = HostFolders(tmp_path)
    async with (
        in_process(JobConfig(settle_s=0.05, keep_checkpoints=2)) as running,
        worker(running, **host.settings) as found,
    ):
        for step in range(6):
            await found.checkpoint(step, host.write(f"1-{step}", "part-0", str(step)))
        manifest = await found.recover()
    assert manifest is not None
    assert Path(manifest.parts[0].uri).read_text() == "5"
    assert (host.wanted(), {each.name.rpartition("-")[0] for each in host.published()}) == ([], {"1-3", "1-4", "1-5"})


async def test_a_part_with_a_digest_of_its_program_comes_back_from_its_own_step_and_not_from_another(
    tmp_path: Path,
) -> None:
    hosts = [HostFolders(tmp_path / name) for name in ("a", "b")]
    async with (
        in_process(JobConfig(settle_s=0.05)) as running,
        worker(running, "a", elastic=True, **hosts[0].settings) as a,
        worker(running, "b", elastic=True, **hosts[1].settings) as b,
    ):
        await a.follow()
        for step in (10, 20):
            await asyncio.gather(
                *(
                    each.checkpoint(
                        step, host.write(f"1-{step}", f"part-{each.rank}", f"{each.rank} at {step}"), digest="crc32:1"
                    )
                    for host, each in zip(hosts, (a, b), strict=True)
                )
            )
        agents = asyncio.create_task(carry(hosts))
        manifests = await asyncio.gather(a.recover(), b.recover())
        agents.cancel()
    for manifest in manifests:
        assert manifest is not None
        contents = {Path(part.uri).read_text() for part in manifest.parts}
        assert (manifest.step, contents) == (20, {"0 at 20", "1 at 20"})
        for part in manifest.parts:
            strata.verify_part(part.uri, part.digest)


async def test_of_a_folder_that_was_written_twice_a_worker_takes_the_one_with_the_committed_parts(
    tmp_path: Path,
) -> None:
    host = HostFolders(tmp_path)
    store = MemberCheckpoints(host.root, host.fetched, ManualClock())
    committed = Part(0, "store://1-10/part-0", 1, file_digest(host.write("1-10", "part-0", "committed")))
    store.publish(committed.uri)
    host.write("1-10", "part-0", "written again")
    store.publish(committed.uri)
    assert len(host.published()) == 2
    host.write("1-10", "part-0", "and again")
    resolved = await store.resolve(Manifest("c", 10, 1, (committed,)))
    assert Path(resolved.parts[0].uri).read_text() == "committed"


def test_a_rank_publishes_no_folder_that_another_one_writes_anew(tmp_path: Path) -> None:
    host = HostFolders(tmp_path)
    store = MemberCheckpoints(host.root, host.fetched, ManualClock())
    for rank in range(2):
        host.write("1-10", f"part-{rank}", "first")
    store.publish("store://1-10/part-0")
    host.write("1-10", "part-0", "second, which is not committed")
    store.publish("store://1-10/part-1")
    (published,) = host.published()
    assert {part.name: part.read_text() for part in published.iterdir()} == {"part-0": "first", "part-1": "first"}


async def test_a_part_outside_the_root_stays_where_it_is(tmp_path: Path) -> None:
    host, shared = HostFolders(tmp_path), tmp_path / "shared.bin"
    shared.write_text("weights")
    async with in_process(JobConfig(settle_s=0.05)) as running, worker(running, **host.settings) as found:
        await found.checkpoint(1, shared)
        manifest = await found.recover()
        assert manifest is not None
        assert (manifest.parts[0].uri, host.published()) == (str(shared), [])
        loose = host.root / "part-0"
        loose.write_text("x")
        with pytest.raises(StrataError, match="is in no folder of its checkpoint"):
            await found.checkpoint(2, loose)


async def test_a_worker_waits_as_long_as_the_agent_downloads_and_then_reports_the_checkpoint_as_unreadable(
    tmp_path: Path,
) -> None:
    host, clock = HostFolders(tmp_path), ManualClock()
    store = MemberCheckpoints(host.root, host.fetched, clock)
    digest = file_digest(host.write("other", "x", "x"))
    lost = Manifest("c", 10, 1, (Part(0, "store://1-10/part-0", 1, digest),))
    waiting = asyncio.create_task(store.resolve(lost))
    async with asyncio.timeout(10.0):
        while not host.wanted():
            # A thread looks for the parts on this host first.
            await asyncio.sleep(0.01)
    await clock.advance(WAIT_S / 2)
    (request,) = host.wanted()
    assert json.loads(request.read_text()) == {"parts": {"part-0": digest}}
    downloading = host.fetched / f".{request.stem}"
    downloading.mkdir()
    await clock.advance(WAIT_S)
    assert not waiting.done()
    downloading.rmdir()
    await clock.advance(1.0)
    assert (await waiting, host.wanted()) == (lost, [])
    with pytest.raises(StrataError) as unreadable:
        strata.verify_part(lost.parts[0].uri, digest)
    assert unreadable.value.code is Code.CORRUPT


@pytest.mark.parametrize("uri", ["store://../x/part", "store:///etc/passwd", "store://.parts/x", "store://a/../../x"])
async def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, uri: str) -> None:
    host = HostFolders(tmp_path)
    store = MemberCheckpoints(host.root, host.fetched, ManualClock())
    with pytest.raises(StrataError, match="names no part of a checkpoint"):
        store.delete(uri)
    with pytest.raises(StrataError, match="names no part of a checkpoint"):
        await store.resolve(Manifest("c", 1, 1, (Part(0, uri, 1, ""),)))
