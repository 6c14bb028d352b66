"""Turns fields of a lease (job, artifact, commit, digest) into names of folders and files, only by a full match of a
pattern.

`tests/rules` enforces it: the rest of the agent joins a path with a constant or with a name from here.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NewType

from strata.base.errors import Code, StrataError

PathName = NewType("PathName", str)
"""One component of a path: no separator, not `..`, not empty."""

_JOB: Final = re.compile(r"job[0-9]{1,4}_([0-9a-f]{16})[0-9a-f]{48}")
_ARTIFACT: Final = re.compile(r"artifact1_[0-9a-f]{64}")
_BLOB: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_EXEC: Final = re.compile(r"[0-9a-f]{16}")
_PARTS: Final = re.compile(r"([0-9a-f]{16})\.json")
EXEC: Final = "exec-"
_MAX_EPOCH: Final = 2**53


def attempt_name(job_id: str, epoch: int) -> PathName:
    """The name of the folders of an attempt. Short, because the paths of sockets must be short."""
    match = _JOB.fullmatch(job_id)
    if match is None or type(epoch) is not int or not 0 < epoch < _MAX_EPOCH:
        raise StrataError(Code.INVALID, f"{job_id[:80]!r} at epoch {epoch!r} is not an attempt of a job")
    return PathName(f"{match[1]}-{epoch}")


def server_name(job_id: str) -> PathName:
    """The name of the folder of a server's data, for all its attempts. Short, because sockets lie in it."""
    match = _JOB.fullmatch(job_id)
    if match is None:
        raise StrataError(Code.INVALID, f"{job_id[:80]!r} is not a job")
    return PathName(match[1])


def exec_name(exec_id: str) -> PathName:
    """The name of the folder of a command that runs beside an attempt."""
    match = _EXEC.fullmatch(exec_id)
    if match is None:
        raise StrataError(Code.INVALID, f"{exec_id[:80]!r} is not a command in a job")
    return PathName(f"{EXEC}{match[0]}")


def parts_name(file: str) -> PathName | None:
    """The name of the folder with the parts that the workers of a gang request by this file; None for other files."""
    match = _PARTS.fullmatch(file)
    return None if match is None else PathName(match[1])


def blob_digest(bundle: str) -> str:
    """The SHA-256 of a bundle that was uploaded as one file; empty for an artifact."""
    match = _BLOB.fullmatch(bundle)
    return "" if match is None else match[1]


def artifact_id(text: str) -> str:
    match = _ARTIFACT.fullmatch(text)
    if match is None:
        raise StrataError(Code.PRECONDITION, f"{text[:80]!r} is not an uploaded source or artifact")
    return match[0]


def bundle_name(bundle: str) -> PathName:
    """The name of the file that caches a bundle."""
    return PathName(f"{blob_digest(bundle) or artifact_id(bundle)}.tar")


def commit_name(url: str, commit: str) -> PathName:
    """The name of the file that caches the files of a commit."""
    match = _COMMIT.fullmatch(commit)
    if match is None:
        raise StrataError(Code.INVALID, f"{url[:200]!r} at {commit[:80]!r} is no commit of a repository")
    return PathName(f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{match[0]}.tar")


def artifact_name(text: str) -> PathName:
    """The name of the folder that caches an artifact."""
    return PathName(artifact_id(text))


def environment_name(digest: str) -> PathName:
    """The name of the folder of an environment."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise StrataError(Code.INVALID, f"{digest[:80]!r} is not the digest of an environment")
    return PathName(match[0][:32])
