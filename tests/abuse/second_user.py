"""A host whose jobs run as another user, and processes of that user: real ones, so root is needed."""

from __future__ import annotations

import hashlib
import io
import os
import pwd
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from strata.fleet.agent.attempt_folder import JobUser, find_job_user
from strata.fleet.agent.prepare import HostContext, create_work_folder
from strata.fleet.agent.settings import AgentSettings
from strata.fleet.client.hub_api import HubApi
from strata.fleet.client.hub_client import HubClient
from strata.fleet.wire.artifacts import CommitReply

USER: Final = "nobody"
PYTHON: Final = "/usr/bin/python3"
"""One that every user can execute."""
HOST_KEY: Final = "-----BEGIN PRIVATE KEY----- of the host"
# Exchanges pairs of names without a moment in which either is missing, until it is killed.
EXCHANGE: Final = """
import ctypes, os, sys
paths = [os.fsencode(path) for path in sys.argv[1:]]
pairs = list(zip(paths[::2], paths[1::2]))
renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
print("up", flush=True)
while True:
    for one, other in pairs:
        renameat2(-100, one, -100, other, 2)
"""


@contextmanager
def a_host(client: HubClient | None = None, user: str = USER) -> Iterator[HostContext]:
    """State with a key that only root can read; work that the job's user can reach."""
    assert os.geteuid() == 0, "only root can become another user: run this as root"
    folder = Path(tempfile.mkdtemp(prefix="strata-abuse-"))
    folder.chmod(0o711)
    try:
        settings = AgentSettings(state=folder / "state", work=folder / "work", run_as=user)
        create_work_folder(settings)
        identity = settings.state_folder / "identity"
        identity.mkdir(mode=0o700, parents=True)
        settings.state_folder.chmod(0o700)
        (identity / "host.key").write_text(HOST_KEY)
        (identity / "host.key").chmod(0o600)
        calls = HubApi(client or HubClient("http://127.0.0.1:1"))
        yield HostContext(settings, calls, {"PATH": "/usr/bin:/bin", "HOME": "/h/agent"}, find_job_user(user))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def host_key(site: HostContext) -> Path:
    return site.settings.state_folder / "identity" / "host.key"


def is_untouched(site: HostContext) -> bool:
    """Whether the key and the way to it are still root's alone."""
    key = host_key(site)
    ways = [key, key.parent, key.parent.parent]
    return all(path.lstat().st_uid == 0 and path.lstat().st_mode & 0o077 == 0 for path in ways)


def owner(site: HostContext) -> JobUser:
    assert site.job_user is not None
    return site.job_user


@contextmanager
def as_user(code: str, *args: object, uid: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the job's user that runs this code."""
    entry = pwd.getpwnam(USER)
    process = subprocess.Popen(
        [PYTHON, "-c", code, *map(str, args)],
        user=entry.pw_uid if uid is None else uid,
        group=entry.pw_gid,
        extra_groups=[],
        env={},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said_by_user(code: str, *args: object, uid: int | None = None) -> str:
    with as_user(code, *args, uid=uid) as process:
        return process.communicate(timeout=60)[0].decode()


def a_bundle(*names: str, content: bytes = b"x") -> bytes:
    """A tar file with these files, or folders if they end in a slash."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def send_bundle(client: HubClient, content: bytes) -> str:
    """Its digest."""
    digest = hashlib.sha256(content).hexdigest()
    client.send("PUT", f"/v1/source/{digest}", content, CommitReply)
    return digest
