"""The type of a token id in requests, and the error that names an invalid field."""

from __future__ import annotations

from typing import Annotated

import msgspec

from strata.base.errors import Code, StrataError

Token = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


def invalid_field(path: str, reason: str) -> StrataError:
    return StrataError(Code.INVALID, f"{path}: {reason}", path=path)
