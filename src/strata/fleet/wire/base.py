"""The bases of all messages, and the bounds that they share: longest wait (60 s), page size (1,000), lengths of texts
and reasons.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

MAX_WAIT_S: Final = 60.0
MAX_PAGE: Final = 1000
Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
WaitS = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]
Page = Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)]
ClaimId = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
Reason = Annotated[str, msgspec.Meta(max_length=1000)]
ErrorText = Annotated[str, msgspec.Meta(max_length=65_536)]
Prefix = Annotated[str, msgspec.Meta(max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Is the base of all requests: frozen, and unknown fields are refused."""


class HubReply(msgspec.Struct, frozen=True, kw_only=True):
    """Is the base of all replies. Clients ignore unknown fields, so agents may be older than the hub."""
