"""What a store of objects that speaks S3 answers, in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions

from strata.base.errors import Code, StrataError


@contextmanager
def translated(key: str) -> Iterator[None]:
    """What obstore raises, as our one error; only the first line of its messages is for people."""
    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise StrataError(
            Code.FORBIDDEN, "the object store refuses access: the server's keys are wrong or may not do this", key=key
        ) from error
    except (exceptions.BaseError, OSError) as error:
        said = str(error).partition("\n")[0]
        raise StrataError(Code.UNAVAILABLE, f"the object store does not answer for {key}: {said}", key=key) from error
