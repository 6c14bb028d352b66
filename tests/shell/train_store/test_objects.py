"""Checkpoints in a real object store: there whole or not at all, verified on the way back, and gone when they are."""

from __future__ import annotations

import asyncio
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import obstore
import pytest

from strata.base.clock import SystemClock
from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.objects import Bucket
from strata.train.checkpoints import checkpoint
from strata.train.checkpoints.checkpoint import CheckpointManifest
from strata.train.checkpoints.object_store import CheckpointStore
from strata.train.core import client_commands, model_options, ops
from strata.train.orchestrator.maintenance.replication import CheckpointReplicator
from strata.train.peft.importer import stage
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG
from strata.train.status import queries, views
from tests.shell.train_orchestrator.leaders import RUN, leading, with_a_model
from tests.shell.train_orchestrator.stacks import running
from tests.support.memory_journal import MemoryJournal
from tests.support.s3 import S3Server

pytestmark = pytest.mark.proves(
    "A checkpoint in object storage is there whole, and a server that has lost its files brings it back from there"
)

NAME: Final = "r/weights/a@1"
PATIENCE_S: Final = 30.0
HEADER: Final = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
FILES: Final = {
    ADAPTER: len(HEADER).to_bytes(8, "little") + HEADER + bytes(4),
    ADAPTER_CONFIG: b"{}",
    "weights.json": b'{"weight": 2.5, "steps": 1}',
}
LORA: Final = model_options.LoraConfig(rank=4)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def made(folder: Path, model_id: str = "r", seq: int = 1) -> Path:
    manifest = CheckpointManifest(
        model_id=model_id, seq_id=seq, kind="weights", base_model="pretended", arch="pretended", lora=LORA, steps=0
    )
    stage(folder, manifest, FILES)
    return folder


async def test_what_was_put_comes_back_verified_and_is_gone_when_deleted(s3: S3Server, tmp_path: Path) -> None:
    store = CheckpointStore(Bucket(s3.store(s3.create_bucket()), "p"))
    folder = made(tmp_path / "here" / "a")
    assert not await store.fetch(NAME, tmp_path / "there" / "a", tmp_path / "beside")
    for _ in range(2):
        await store.put(folder, NAME)
    assert await store.names() == ({NAME}, set())
    assert await store.fetch(NAME, tmp_path / "there" / "a", tmp_path / "beside")
    assert checkpoint.read(tmp_path / "there" / "a") == checkpoint.read(folder)
    assert not (tmp_path / "beside").exists()
    await store.put(folder, f"{NAME}0")
    await store.delete(NAME)
    assert await store.names() == ({f"{NAME}0"}, set())


async def test_damage_in_the_store_is_noticed_and_leaves_nothing(s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.store(s3.create_bucket())
    store = CheckpointStore(Bucket(bucket, "p"))
    await store.put(made(tmp_path / "here" / "a"), NAME)
    for damage in (FILES[ADAPTER][:-1], FILES[ADAPTER][:-1] + b"\x01", FILES[ADAPTER] + b"\0"):
        obstore.put(bucket, f"p/{NAME}/{ADAPTER}", damage)
        with pytest.raises(StrataError) as refused:
            await store.fetch(NAME, tmp_path / "there" / "a", tmp_path / "beside")
        assert refused.value.code is Code.CORRUPT
    assert not (tmp_path / "there").exists()
    assert not (tmp_path / "beside").exists()


@pytest.mark.parametrize(
    ("name", "action", "whole"),
    [
        ("train.store.after_file", "put", False),
        ("train.store.before_manifest", "put", False),
        ("train.store.after_manifest", "put", True),
        ("train.store.after_unlisting", "delete", False),
    ],
)
async def test_whoever_dies_leaves_a_whole_checkpoint_or_none(
    name: str, action: str, whole: bool, s3: S3Server, tmp_path: Path
) -> None:
    bucket = s3.create_bucket()
    store = CheckpointStore(Bucket(s3.store(bucket), "p"))
    folder = made(tmp_path / "here" / "a")
    if action == "delete":
        await store.put(folder, NAME)
    module = [sys.executable, "-m", "tests.shell.train_store.putting", name, action, str(folder), bucket]
    died = await asyncio.to_thread(
        subprocess.run, module, env={**process_environment(), **s3.environment}, timeout=PATIENCE_S, check=False
    )
    assert died.returncode == -signal.SIGKILL
    assert await store.names() == (({NAME}, set()) if whole else (set(), {NAME}))
    assert await store.fetch(NAME, tmp_path / "there" / "a", tmp_path / "beside") is whole
    # And whoever comes next makes it good.
    await store.put(folder, NAME)
    assert await store.names() == ({NAME}, set())
    await store.delete(NAME)
    assert await store.names() == (set(), set())


async def test_only_copies_that_the_facts_say_are_gone_are_deleted_and_only_by_whoever_leads(
    s3: S3Server, tmp_path: Path
) -> None:
    """A server whose data were lost has no facts of what is there."""
    store, journal = CheckpointStore(Bucket(s3.store(s3.create_bucket()), "p")), MemoryJournal(SystemClock())
    ours, lost = f"{RUN}/weights/x@12", "import-x/weights/theirs@0"
    for name in (ours, lost):
        await store.put(made(tmp_path / "here" / name), name)
    paused = await with_a_model(journal)
    leader = await leading(journal)
    with pytest.raises(StrataError) as refused:
        await CheckpointReplicator(paused, store, tmp_path / "there", tmp_path / "beside").run_once()
    assert refused.value.code is Code.STALE
    assert await store.names() == ({ours, lost}, set())
    await CheckpointReplicator(leader, store, tmp_path / "there", tmp_path / "beside").run_once()
    assert await store.names() == ({lost}, set())


async def test_a_disk_that_takes_nothing_fails_what_asks_for_the_copy_and_nothing_else(
    s3: S3Server, tmp_path: Path
) -> None:
    store = CheckpointStore(Bucket(s3.store(s3.create_bucket()), "p"))
    await store.put(made(tmp_path / "here" / "a"), NAME)
    (tmp_path / "file").write_text("no folder")
    storage = CheckpointReplicator(
        await leading(MemoryJournal(SystemClock())), store, tmp_path / "there", tmp_path / "file" / "b"
    )
    with pytest.raises(StrataError, match=r"cannot bring back") as refused:
        await storage.fetch(NAME)
    assert refused.value.code is Code.NOT_FOUND


async def test_a_disk_that_is_full_for_a_while_is_tried_again_and_leaves_nothing(s3: S3Server, tmp_path: Path) -> None:
    store = CheckpointStore(Bucket(s3.store(s3.create_bucket()), "p"))
    folder, there = made(tmp_path / "here" / "a"), tmp_path / "there"
    await store.put(folder, NAME)
    storage = CheckpointReplicator(await leading(MemoryJournal(SystemClock())), store, there, tmp_path / "beside")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel refuses to write more of any file: the same error that a full disk is for the writer.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(FILES[ADAPTER]) // 2, before[1]))
    try:
        with pytest.raises(StrataError, match=r"cannot bring back .* cannot write a copy") as refused:
            await storage.fetch(NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.code is Code.UNAVAILABLE
    assert not there.exists()
    await storage.fetch(NAME)
    assert checkpoint.read(there / NAME) == checkpoint.read(folder)


async def test_a_store_that_does_not_answer_is_out_of_reach_and_not_empty(tmp_path: Path) -> None:
    nobody = obstore.store.S3Store(
        "bucket",
        endpoint="http://127.0.0.1:9",
        region="us-east-1",
        skip_signature=True,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    store = await leading(MemoryJournal(SystemClock()))
    with pytest.raises(StrataError, match=r"cannot bring back") as refused:
        await CheckpointReplicator(
            store, CheckpointStore(Bucket(nobody, "p")), tmp_path / "there", tmp_path / "beside"
        ).fetch(NAME)
    assert refused.value.code is Code.UNAVAILABLE


async def test_a_server_that_lost_its_files_brings_them_back_to_load_them(s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.create_bucket()
    store = CheckpointStore(Bucket(s3.store(bucket), "p/default"))
    lines = f'sweep_s = 0.05\nstorage = "s3://{bucket}/p"\nendpoint = "{s3.endpoint}"\n'
    lines += f'access_key = "{s3.access_key}"\nsecret_key = "{s3.secret_key}"\n'
    async with running(tmp_path, checkpoints=lines) as stack:

        async def until(wanted: set[str]) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while (await store.names())[0] != wanted:
                    await stack.look(views.SessionList, queries.ListSessions())

        model = await stack.model()
        made(stack.settings.imports / "one" / stack.settings.staged, "import-x", 0)
        asked = client_commands.ImportCheckpoint("one", "theirs", "import-x", "pretended", LORA)
        await stack.look(client_commands.Done, asked)
        await until({"import-x/weights/theirs@0"})
        folder = stack.settings.checkpoint_folder / "import-x" / "weights" / "theirs@0"
        shutil.rmtree(folder)
        loading = ops.LoadWeights(model, 1, "import-x", "weights", "theirs", optimizer=True)
        assert isinstance(await stack.result(await stack.submit(loading)), ops.WeightsLoaded)
        stepped = await stack.result(await stack.submit(stack.step(model, 2)))
        assert isinstance(stepped, ops.StepDone)
        assert stepped.metrics == {"step": 2.0, "weight": 2.5, "grad_norm": 0.0}
        made(stack.settings.imports / "two" / stack.settings.staged, "import-y", 0)
        await stack.look(
            client_commands.Done, client_commands.ImportCheckpoint("two", "b", "import-y", "pretended", LORA)
        )
        await until({"import-x/weights/theirs@0", "import-y/weights/b@0"})
        await stack.look(client_commands.Done, client_commands.DeleteCheckpoint("import-y", "weights", "b"))
        await until({"import-x/weights/theirs@0"})
        assert checkpoint.read(folder).model_id == "import-x"
