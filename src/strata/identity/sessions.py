"""Lifetimes of browser sessions: 12 h idle, 7 days in all, login codes of 120 s; opening and extending one."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Final

from strata.base.secret import Secret
from strata.identity.records import BrowserSession
from strata.identity.tokens import hash_secret

IDLE_S: Final = 12 * 3600.0
"""A session without a request for so long ends."""
SESSION_S: Final = 7 * 86_400.0
"""A session ends after so long in any case."""
CODE_S: Final = 120.0
"""A login link is good for so long, and once."""
_EXTEND_S: Final = 600.0
"""A session is extended at most so often: each time is a write."""


def new_session(credential: str, now_s: float) -> tuple[str, BrowserSession]:
    """The token of the session, which is shown only here, and its row."""
    token = secrets.token_hex(32)
    return token, BrowserSession(hash_secret(Secret(token)), credential, now_s, now_s + IDLE_S)


def new_code(credential: str, now_s: float) -> tuple[str, BrowserSession]:
    """A code with which a browser opens one session, soon."""
    code, session = new_session(credential, now_s)
    return code, replace(session, expires_at_s=now_s + CODE_S, code=True)


def has_ended(session: BrowserSession, now_s: float) -> bool:
    return session.code or now_s >= session.expires_at_s


def extended_until_s(session: BrowserSession, now_s: float) -> float | None:
    """The end of a session that is used now; None: as it is."""
    until_s = min(now_s + IDLE_S, session.made_at_s + SESSION_S)
    return until_s if until_s - session.expires_at_s > _EXTEND_S else None
