"""Failpoints: named places where a test can make the process die, fail or stop.

When nothing is armed a failpoint is one truth test of an empty dict. Arming is explicit (`arm`), never read from the
environment here: the process that wants it passes the setting in. Names are literals, so the tests that kill a process
at every failpoint find them by reading the source.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

from strata.base.errors import Code, StrataError

Action = Callable[[str], None]
"""Called with the failpoint's name when its turn comes; returning lets the process go on."""

_armed: Final[dict[str, tuple[int, Action]]] = {}


def failpoint(name: str) -> None:
    if _armed:
        _hit(name)


def arm(name: str, action: Action, *, skip: int = 0) -> None:
    """Run `action` at the hit after the first `skip` ones, once."""
    _armed[name] = (skip, action)


def disarm_all() -> None:
    _armed.clear()


def kill(name: str) -> None:
    """The process is gone before the next instruction: no handlers, no flushes."""
    del name
    os.kill(os.getpid(), signal.SIGKILL)


def fail(name: str) -> None:
    raise StrataError(Code.UNAVAILABLE, f"failpoint {name} fired")


def _hit(name: str) -> None:
    found = _armed.get(name)
    if found is None:
        return
    skip, action = found
    if skip:
        _armed[name] = (skip - 1, action)
        return
    del _armed[name]
    action(name)
