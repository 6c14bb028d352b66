"""Old parts of checkpoints are deleted below the worker's own root, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest

import strata.coord.worker as strata
from strata.base.errors import Code, StrataError
from strata.coord.core.job_config import JobConfig
from strata.coord.worker.garbage_collector import GarbageCollector
from strata.coord.worker.stores import Stores
from tests.shell.coord.running import in_process
from tests.shell.coord_worker.corpora import settings
from tests.shell.coord_worker.test_calls import worker
from tests.support.s3 import S3Server


def keys(server: S3Server, bucket: str) -> set[str]:
    return {each["path"] for page in obstore.list(server.store(bucket)) for each in page}


def test_files_and_folders_below_the_root_are_deleted_and_may_be_gone_already(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for name in ("a.bin", "step-1/part.bin", "step-1/deep/x", "step-10/part.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    tombstones = GarbageCollector(str(root), Stores())
    named = [str(root / "a.bin"), str(root / "step-1"), f"file://{root}/never", str(root / "no/such/folder")]
    assert tombstones.collect(named) == strata.Swept(tuple(named), (), ())
    assert sorted(each.name for each in root.rglob("*")) == ["part.bin", "step-10"]
    # Named again and again, until the coordinator forgets it; then it may mean something new.
    assert tombstones.collect(named).deleted == ()
    (root / "a.bin").write_bytes(b"new")
    assert tombstones.collect(named[1:]).deleted == ()
    assert (root / "a.bin").exists()
    assert tombstones.collect(named).deleted == (named[0],)
    assert not (root / "a.bin").exists()


def test_nothing_outside_the_root_is_deleted(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    (root / "way-out").symlink_to(outside)
    (root / "link").symlink_to(outside / "precious")
    for named in (
        str(outside / "precious"),
        f"{root}/../outside/precious",
        f"{root}/way-out/precious",
        f"file://{outside}/precious",
        str(root),
        f"{root}/",
        f"{root}x/precious",
        "outside/precious",
        "s3://bucket/key",
        "mem://part",
        "",
    ):
        swept = GarbageCollector(str(root), Stores()).collect([named])
        assert swept == strata.Swept((), (named,), ()), named
    # A link inside is deleted itself, not what it leads to.
    assert GarbageCollector(str(root), Stores()).collect([f"{root}/link"]).deleted
    assert not (root / "link").is_symlink()
    assert (outside / "precious").exists()
    with pytest.raises(StrataError, match="no root is set"):
        GarbageCollector("", Stores()).delete(str(outside / "precious"))


def test_objects_below_the_prefix_are_deleted_and_no_others(s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    kept = {"run/step-10/a", "run/step-2", "running/a", "other"}
    for key in (*kept, "run/step-1/a", "run/step-1/b/c", "run/part.bin"):
        obstore.put(s3_server.store(bucket), key, b"x")
    stores = Stores(settings(s3_server))
    tombstones = GarbageCollector(f"s3://{bucket}/run/", stores)
    here = f"s3://{bucket}"
    inside = [f"{here}/run/step-1", f"{here}/run/part.bin", f"{here}/run/gone"]
    assert tombstones.collect(inside) == strata.Swept(tuple(inside), (), ())
    outside = [f"{here}/running/a", f"{here}/other", f"{here}/run", f"{here}/run/../other", "s3://another/run/a", here]
    assert tombstones.collect(outside) == strata.Swept((), tuple(outside), ())
    assert keys(s3_server, bucket) == kept


def test_what_the_store_does_not_let_go_of_is_tried_again(s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    obstore.put(s3_server.store(bucket), "run/a", b"x")
    named = f"s3://{bucket}/run/a"
    stranger = GarbageCollector(f"s3://{bucket}/run", Stores(settings(s3_server, access_key="nobody")))
    assert stranger.collect([named]) == stranger.collect([named])
    assert stranger.collect([named]).deleted == ()
    assert keys(s3_server, bucket) == {"run/a"}


async def test_a_worker_deletes_its_old_parts_when_a_checkpoint_is_committed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    job = JobConfig(settle_s=0.05, keep_checkpoints=2)
    async with in_process(job) as running, worker(running, checkpoint_root=str(root)) as found:
        for step in range(6):
            part = root / f"part-{step}.bin"
            part.write_bytes(b"state")
            await found.checkpoint(step, part)
        # The answer to a report does not know yet what that report buries.
        assert sorted(each.name for each in root.iterdir()) == ["part-3.bin", "part-4.bin", "part-5.bin"]
        manifest = await found.recover()
        assert manifest is not None
        assert Path(manifest.parts[0].uri).exists()


async def test_a_path_that_is_used_again_is_not_deleted(tmp_path: Path) -> None:
    job = JobConfig(settle_s=0.05, keep_checkpoints=1)
    async with in_process(job) as running, worker(running, checkpoint_root=str(tmp_path)) as found:
        for step in range(9):
            part = tmp_path / f"part-{step % 3}.bin"
            part.write_bytes(str(step).encode())
            reported = await found.checkpoint(step, part)
            assert part.exists(), (step, reported)
            assert (await found.recover()) is not None


async def test_without_a_root_nothing_is_deleted(tmp_path: Path) -> None:
    job = JobConfig(settle_s=0.05, keep_checkpoints=1)
    async with in_process(job) as running, worker(running) as found:
        parts = [tmp_path / f"part-{step}.bin" for step in range(4)]
        for part in parts:
            part.write_bytes(b"state")
        reported = [await found.checkpoint(step, part) for step, part in enumerate(parts)][-1]
        assert len(list(tmp_path.iterdir())) == 4
        assert len((await found.sweep(reported)).refused) == len(reported.tombstones) > 0
        with pytest.raises(StrataError) as caught:
            found._garbage.delete(reported.tombstones[0])
        assert caught.value.code is Code.FORBIDDEN
