from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import obstore
import psutil  # type: ignore[import-untyped]
import pytest
from obstore.exceptions import AlreadyExistsError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

from tests.support.s3 import S3Server

OWNER = """
import sys
from tests.support.s3 import S3Server
server = S3Server().__enter__()
print(server.directory, server.process_id, *server.ports.values(), flush=True)
sys.stdin.read()
"""


def test_it_checks_signatures_and_conditions_as_s3_does(s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    assert s3_server.create_bucket(bucket) == bucket
    store = s3_server.store(bucket)
    obstore.put(store, "a", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"2", mode="create")
    with pytest.raises(PreconditionError):
        obstore.get(store, "a", options={"if_match": '"other"'})
    wrong = S3Store(
        bucket,
        endpoint=s3_server.endpoint,
        region=s3_server.region,
        access_key_id=s3_server.access_key,
        secret_access_key="wrong",
        client_options={"allow_http": True},
    )
    with pytest.raises(PermissionDeniedError):
        obstore.get(wrong, "a")


def test_nothing_of_it_outlives_an_owner_that_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    with owner, owner.stdout, owner.stdin:
        directory, server, *ports = owner.stdout.readline().split()
        assert [left for port in ports for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")] != []
        processes = [psutil.Process(int(server)), psutil.Process(int(server)).parent()]
        owner.kill()
        assert psutil.wait_procs(processes, timeout=20)[1] == []
        assert not Path(directory).exists()
        assert [left for port in ports for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")] == []
