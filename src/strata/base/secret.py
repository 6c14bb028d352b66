"""`Secret`, a text that shows as `***`, and reading one from a private file of at most 64 KiB."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from strata.base.errors import Code, StrataError

MASK: Final = "***"
_MAX_BYTES: Final = 65_536


class Secret:
    """Shows `***` wherever it is printed; `reveal` is the only way to the text.

    Deliberately not a `str`: a secret passed where a text is wanted is then a type error, not a login with "***".
    Encoders refuse it.
    """

    __slots__ = ("_file", "_revealed")

    def __init__(self, revealed: str, file: Path | None = None) -> None:
        if not revealed:
            raise StrataError(Code.INVALID, "a secret cannot be empty")
        self._revealed = revealed
        self._file = file

    def reveal(self) -> str:
        return self._revealed

    def reload(self) -> Secret:
        """Returns what its file holds now; itself if it did not come from a file."""
        return self if self._file is None else read_secret(self._file)

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    def __str__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_bytes(self), _bytes(other))

    def __hash__(self) -> int:
        return hash((Secret, self._revealed))


def read_secret(path: Path) -> Secret:
    """The content of a file without its last line break. A file that others can read keeps no secret and is refused."""
    try:
        # The check before opening keeps a pipe from blocking; the check on the open file cannot be raced.
        _refuse_unless_private(path, path.stat())
        with path.open("rb") as file:
            _refuse_unless_private(path, os.fstat(file.fileno()))
            content = file.read(_MAX_BYTES + 1)
        text = content.decode()
    except OSError as error:
        raise StrataError(Code.INVALID, f"cannot read the secret file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        # Without the cause: it would carry the bytes of the secret into a traceback.
        raise StrataError(Code.INVALID, f"the secret file {path} is not UTF-8 text") from None
    if len(content) > _MAX_BYTES:
        raise StrataError(Code.INVALID, f"the secret file {path} is longer than {_MAX_BYTES} bytes")
    revealed = text.removesuffix("\n").removesuffix("\r")
    if not revealed:
        raise StrataError(Code.INVALID, f"the secret file {path} is empty")
    return Secret(revealed, path)


def _refuse_unless_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise StrataError(Code.INVALID, f"the secret file {path} is not a regular file")
    if os.name == "posix" and status.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        mode = stat.S_IMODE(status.st_mode)
        raise StrataError(
            Code.INVALID,
            f"the secret file {path} can be read by group or others (mode {mode:04o})",
            hint=f"chmod 600 {path}",
        )


def _bytes(secret: Secret) -> bytes:
    return secret.reveal().encode("utf-8", "surrogatepass")
