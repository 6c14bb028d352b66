"""Opens files at a local path or `s3://bucket/key`: sizes of read blocks, checks that a file did not change, and the
settings of S3 (`[s3]`: endpoint, keys, timeout, retries).

A `Source` is one file, opened: it knows its size and reads ranges of bytes. Errors of a store become a
`StrataError` here; the readers interpret the bytes.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from strata.base import atomic
from strata.base.errors import Code, StrataError
from strata.base.settings import Secret, load, process_environment

if TYPE_CHECKING:
    from obstore.store import S3Credential, S3Store

SECTION: Final = "s3"
ALIASES: Final = {
    "AWS_ENDPOINT_URL_S3": "endpoint",
    "AWS_ENDPOINT_URL": "endpoint",
    "AWS_REGION": "region",
    "AWS_DEFAULT_REGION": "region",
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
}
"""The names that the tools of AWS use."""

LOCAL_BLOCK: Final = 1 << 20
REMOTE_BLOCK: Final = 4 << 20
"""A request costs some ten milliseconds, whatever it brings."""
CONNECT_S: Final = 5.0

PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class S3Settings(msgspec.Struct, frozen=True, kw_only=True):
    """STRATA_S3_ENDPOINT, STRATA_S3_SECRET_KEY_FILE and so on; else what the tools of AWS use, such as AWS_REGION."""

    endpoint: str = ""
    """URL of the store. Empty: AWS itself."""
    region: str = "us-east-1"
    """The region of the bucket."""
    access_key: str = ""
    """The id of the access key."""
    secret_key: Secret | None = None
    """The secret of the access key."""
    session_token: Secret | None = None
    """Belongs to temporary keys."""
    identity: Literal["keys", "anonymous", "machine"] = "keys"
    """The credentials: keys, none, or the role of the machine in its cloud."""
    allow_http: bool = False
    """Let samples and checkpoints pass a network in the clear."""
    timeout_s: PositiveSeconds = 30.0
    """Time for one request with all of its answer, at most 4 MiB or, of a Parquet file, a row group."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 5
    """How often a request is repeated."""
    patience_s: PositiveSeconds = 60.0
    """Time for a request and all of its retries."""

    def __post_init__(self) -> None:
        if bool(self.access_key) != (self.secret_key is not None):
            raise StrataError(Code.INVALID, "access_key and secret_key are needed together")
        if not self.endpoint:
            return
        url = urlsplit(self.endpoint)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise StrataError(Code.INVALID, f"the endpoint {self.endpoint!r} is no URL such as https://s3.example.org")
        if url.scheme == "http" and not self.allow_http and not _stays_here(url.hostname):
            raise StrataError(
                Code.INVALID, f"data would be sent to {self.endpoint} in the clear", hint="use https, or set allow_http"
            )


def load_s3() -> S3Settings:
    """Loads the settings from the environment. A session token belongs to the keys that it came with."""
    environment = process_environment()
    of_aws = "STRATA_S3_ACCESS_KEY" not in environment and environment.get("AWS_ACCESS_KEY_ID")
    aliases = {name: setting for name, setting in ALIASES.items() if of_aws or setting != "session_token"}
    return load(S3Settings, section=SECTION, file=None, flags={}, aliases=aliases)


@dataclass(frozen=True)
class Seen:
    """A file as it was when it was first opened. Indexes of its content are valid only while it is the same."""

    size: int
    version: str


class Source(Protocol):
    """One file, opened for reading."""

    @property
    def path(self) -> str: ...

    @property
    def seen(self) -> Seen: ...

    @property
    def block(self) -> int:
        """Returns how much to read at once."""

    def read(self, start: int, end: int) -> bytes:
        """All bytes from `start` up to, without, `end`, which must not be beyond the size."""

    def locked(self) -> AbstractContextManager[None]:
        """While one process of the host is in here, others wait. A store of objects has no locks."""

    def check_unchanged(self) -> None:
        """CORRUPT if it was written to since it was opened."""


@dataclass(frozen=True)
class LocalFile:
    path: str
    seen: Seen
    descriptor: int
    block: int

    def read(self, start: int, end: int) -> bytes:
        parts = []
        while start < end:
            try:
                part = os.pread(self.descriptor, end - start, start)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not part:
                raise changed(self.path)
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextmanager
    def locked(self) -> Iterator[None]:
        # A file system without locks costs the same work twice, no more.
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def check_unchanged(self) -> None:
        if _seen(self.descriptor) != self.seen:
            raise changed(self.path)


@dataclass(frozen=True)
class StoredObject:
    path: str
    seen: Seen
    store: S3Store
    key: str
    block: int = REMOTE_BLOCK

    def read(self, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        from obstore import get

        with translated(self.path):
            # The condition makes the store itself refuse to mix two versions of an object.
            found = get(self.store, self.key, options={"range": (start, end), "if_match": self.seen.version or None})
            content = found.bytes().to_bytes()
        if found.meta["size"] != self.seen.size or len(content) != end - start:
            raise changed(self.path)
        return content

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_unchanged(self) -> None:
        """Every read has checked it."""


class SourceFile(io.RawIOBase):
    """A source as libraries want a file. Not buffered: they ask for what they need, in large pieces."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.failure: StrataError | None = None
        """The last one of a read."""
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.source.seen.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.source.seen.size - self._at)
        take = left if size is None or size < 0 else min(size, left)
        try:
            content = self.source.read(self._at, self._at + take)
        except StrataError as error:
            self.failure = error
            raise
        self._at += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


class Stores:
    """Opens what a path names. One client for each bucket, made when it is needed first."""

    def __init__(self, s3: S3Settings | None = None, *, local_block: int = LOCAL_BLOCK) -> None:
        self._s3 = s3
        self._local_block = local_block
        self._buckets: dict[str, S3Store] = {}

    @contextmanager
    def open(self, path: str, known: Seen | None = None) -> Iterator[Source]:
        """CORRUPT if it is not as it was when it was `known`."""
        if path.startswith("s3://"):
            bucket, key = s3_place(path)
            store = self.bucket(bucket)
            # If it changed since, the first request will tell.
            yield StoredObject(path, known or _head(store, path, key), store, key)
            return
        file = local_path(path)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        try:
            seen = _seen(descriptor)
            if known not in (None, seen):
                raise changed(path)
            yield LocalFile(path, seen, descriptor, self._local_block)
        finally:
            os.close(descriptor)

    def get(self, path: str) -> bytes | None:
        """All of a small file; None if there is none. A store may say FORBIDDEN of an object that does not exist."""
        try:
            with self.open(path) as source:
                return source.read(0, source.seen.size)
        except StrataError as error:
            if error.code in (Code.NOT_FOUND, Code.FORBIDDEN):
                return None
            raise

    def put(self, path: str, content: bytes) -> None:
        """Write a small file as a whole: a reader sees the old content or the new one."""
        if path.startswith("s3://"):
            from obstore import put

            bucket, key = s3_place(path)
            with translated(path):
                put(self.bucket(bucket), key, content)
            return
        try:
            atomic.write_file(local_path(path), content, mode=0o644)
        except OSError as error:
            raise StrataError(Code.INVALID, f"cannot write {path}: {error.strerror}", path=path) from error

    def bucket(self, name: str) -> S3Store:
        if name not in self._buckets:
            if self._s3 is None:
                self._s3 = load_s3()
            self._buckets[name] = _client(name, self._s3)
        return self._buckets[name]


def _seen(descriptor: int) -> Seen:
    status = os.fstat(descriptor)
    return Seen(status.st_size, str(status.st_mtime_ns))


def local_path(path: str) -> Path:
    if "://" in path and not path.startswith("file://"):
        scheme = path.partition("://")[0]
        raise StrataError(
            Code.UNSUPPORTED, f"cannot read {path}: no store for {scheme}://", hint="a local path, or s3://BUCKET/KEY"
        )
    return Path(path.removeprefix("file://"))


def s3_place(path: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = path.removeprefix("s3://").partition("/")
    if not bucket or any(part in ("", ".", "..") for part in key.rstrip("/").split("/")):
        raise StrataError(Code.INVALID, f"{path!r} names no object: s3://BUCKET/KEY")
    return bucket, key


def changed(path: str) -> StrataError:
    return StrataError(Code.CORRUPT, f"{path} has changed since it was first read", path=path)


def unreadable(path: str, error: OSError) -> StrataError:
    code = Code.NOT_FOUND if isinstance(error, FileNotFoundError) else Code.INVALID
    return StrataError(code, f"cannot read {path}: {error.strerror}", path=path)


def needs(package: str, what: str) -> StrataError:
    return StrataError(
        Code.UNSUPPORTED,
        f"{what} needs {package}, which is not installed",
        hint="pip install 'strata-train[worker-data]'",
    )


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Errors of obstore as a `StrataError`. Only the first line of its messages is useful."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        raise StrataError(
            Code.NOT_FOUND, f"cannot read {path}: there is no such object or bucket", path=path
        ) from error
    except exceptions.PreconditionError as error:
        raise changed(path) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StrataError(
            Code.FORBIDDEN,
            f"the store refuses access to {path}: the keys are wrong or may not do this",
            hint="look at STRATA_S3_ACCESS_KEY and STRATA_S3_SECRET_KEY",
            path=path,
        ) from error
    except exceptions.BaseError as error:
        said = str(error).partition("\n")[0]
        raise StrataError(Code.UNAVAILABLE, f"the store does not give {path}: {said}", path=path) from error


def _head(store: S3Store, path: str, key: str) -> Seen:
    from obstore import head

    with translated(path):
        found = head(store, key)
    return Seen(found["size"], found["e_tag"] or "")


def _client(bucket: str, settings: S3Settings) -> S3Store:
    try:
        from strata.objects import S3Access, connect
    except ImportError:
        raise needs("obstore", "s3://") from None
    access = S3Access(
        endpoint=settings.endpoint,
        region=settings.region,
        credentials=_credentials(settings) if settings.identity == "keys" else None,
        anonymous=settings.identity == "anonymous",
        connect_timeout_s=CONNECT_S,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        retry_timeout_s=settings.patience_s,
    )
    return connect(bucket, access)


def _credentials(settings: S3Settings) -> Callable[[], S3Credential]:
    from strata.objects import static_credentials

    secret, token = settings.secret_key, settings.session_token
    if secret is None:
        raise StrataError(
            Code.UNAUTHENTICATED,
            "there are no keys for s3://",
            hint="set STRATA_S3_ACCESS_KEY and STRATA_S3_SECRET_KEY_FILE, or STRATA_S3_IDENTITY=anonymous or machine",
        )
    return static_credentials(settings.access_key, secret.reveal(), token.reveal() if token is not None else None)


def _stays_here(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
