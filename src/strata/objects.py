"""Object storage (S3) through obstore: connecting, reading, writing, signing, timeouts, and the wording of its errors.

`connect` opens a bucket for servers and for workers. `Bucket` is for servers: asynchronous, keys below a prefix, every
error as a `StrataError`. A worker reads ranges of large objects in threads, if the object has not changed,
and its errors name the path and the variables that a person set: `strata.coord.worker.stores` does that on `connect`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import obstore
from obstore import exceptions
from obstore.store import S3Store

from strata.base.errors import Code, StrataError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_PAGE: Final = 1000
"""Keys that one request lists or deletes."""


class S3Access(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store is and with which credentials it is used."""

    endpoint: str = ""
    """Empty: AWS itself."""
    region: str
    credentials: Callable[[], S3Credential] | None = None
    """None: anonymous, or those that the cloud gives the machine."""
    anonymous: bool = False
    connect_timeout_s: float | None = None
    timeout_s: float | None = None
    """Time for one request; None leaves obstore's own."""
    retries: int | None = None
    retry_timeout_s: float = 180.0
    """Time for a request and all of its retries."""


class ObjectEntry(msgspec.Struct, frozen=True):
    key: str
    """The key without the prefix of the bucket."""
    modified_s: float


def static_credentials(access_key: str, secret_key: str, token: str | None = None) -> Callable[[], S3Credential]:
    def provide() -> S3Credential:
        return {"access_key_id": access_key, "secret_access_key": secret_key, "token": token, "expires_at": None}

    return provide


def connect(bucket: str, access: S3Access) -> S3Store:
    """A client of one bucket. It sends nothing yet."""
    config: dict[str, Any] = {"region": access.region}
    if access.endpoint:
        config["endpoint"] = access.endpoint
    if access.anonymous:
        config["skip_signature"] = True
    client: dict[str, Any] = {"allow_http": access.endpoint.startswith("http://")}
    if access.connect_timeout_s is not None:
        client["connect_timeout"] = timedelta(seconds=access.connect_timeout_s)
    if access.timeout_s is not None:
        client["timeout"] = timedelta(seconds=access.timeout_s)
    options: dict[str, Any] = {}
    if access.retries is not None:
        options["retry_config"] = {
            "max_retries": access.retries,
            "retry_timeout": timedelta(seconds=access.retry_timeout_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        }
    # Without a provider obstore reads the environment and the credentials that the cloud gives the machine.
    return S3Store(bucket, config=config, credential_provider=access.credentials, client_options=client, **options)  # type: ignore[arg-type]


class Bucket:
    """The objects below a prefix of a bucket."""

    def __init__(self, store: S3Store, prefix: str = "") -> None:
        self._store = store
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    async def open(self, key: str) -> ObjectReader | None:
        """None if there is no such object."""
        with translate_errors(key):
            try:
                return ObjectReader(key, await obstore.get_async(self._store, self._prefix + key))
            except FileNotFoundError:
                return None

    async def size(self, key: str) -> int | None:
        """None if there is no such object."""
        with translate_errors(key):
            try:
                return (await obstore.head_async(self._store, self._prefix + key))["size"]
            except FileNotFoundError:
                return None

    async def put(self, key: str, content: bytes | Path) -> None:
        """A large file goes in several parts."""
        with translate_errors(key):
            await obstore.put_async(self._store, self._prefix + key, content)

    async def put_if_absent(self, key: str, content: bytes) -> bool:
        """Says whether it was written: False if there is an object of that key already."""
        with translate_errors(key):
            try:
                await obstore.put_async(self._store, self._prefix + key, content, mode="create")
            except exceptions.AlreadyExistsError:
                return False
        return True

    async def copy(self, key: str, target: str) -> bool:
        """Copies inside the store; False if there is nothing to copy."""
        with translate_errors(key):
            try:
                await obstore.copy_async(self._store, self._prefix + key, self._prefix + target)
            except FileNotFoundError:
                return False
        return True

    async def list(self, prefix: str = "") -> Sequence[ObjectEntry]:
        """A prefix counts in whole segments of a key, not in characters."""
        entries: list[ObjectEntry] = []
        with translate_errors(self._prefix + prefix):
            async for page in obstore.list(self._store, self._prefix + prefix or None, chunk_size=_PAGE):
                entries += [
                    ObjectEntry(each["path"].removeprefix(self._prefix), each["last_modified"].timestamp())
                    for each in page
                ]
        return entries

    async def delete(self, *keys: str) -> None:
        """Deletes keys; to delete what is not there is no error."""
        for start in range(0, len(keys), _PAGE):
            paths = [self._prefix + key for key in keys[start : start + _PAGE]]
            with translate_errors(paths[0]), suppress(FileNotFoundError):
                await obstore.delete_async(self._store, paths)

    async def sign(self, method: Literal["GET", "PUT"], keys: Sequence[str], expires_s: float) -> Sequence[str]:
        """URLs that need no credentials until they expire."""
        if not keys:
            return []
        with translate_errors(keys[0]):
            paths = [self._prefix + key for key in keys]
            return await obstore.sign_async(self._store, method, paths, timedelta(seconds=expires_s))


class ObjectReader:
    """An object whose content has not been fetched yet."""

    def __init__(self, key: str, reply: obstore.GetResult) -> None:
        self._key = key
        self._reply = reply

    @property
    def size(self) -> int:
        return self._reply.meta["size"]

    async def read(self) -> bytes:
        with translate_errors(self._key):
            return (await self._reply.bytes_async()).to_bytes()

    async def stream(self) -> AsyncIterator[bytes]:
        with translate_errors(self._key):
            async for part in self._reply.stream():
                yield bytes(part)


@contextmanager
def translate_errors(key: str) -> Iterator[None]:
    """Raises errors of obstore as a StrataError with the first line of its message."""
    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StrataError(
            Code.FORBIDDEN, "the object store refuses access: the server's keys are wrong or may not do this", key=key
        ) from error
    except (exceptions.BaseError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise StrataError(Code.UNAVAILABLE, f"the object store does not answer for {key}: {reason}", key=key) from error
