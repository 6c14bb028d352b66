"""How this server says its errors.

The clients of this protocol repeat 408, 409, 429 and everything from 500 on by themselves. So what would fail again is
none of these where that can be helped, and says so in `x-should-retry` where it cannot.
"""

from __future__ import annotations

from typing import Final

from strata.base.errors import Code
from strata.http.errors import ErrorTable

ERRORS: Final = ErrorTable(
    instead={Code.CONFLICT: 422, Code.PRECONDITION: 422},
    final=frozenset({Code.CONFLICT, Code.PRECONDITION, Code.UNSUPPORTED, Code.CORRUPT}),
)
