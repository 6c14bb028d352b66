"""A promise in seconds holds for a machine that has nothing else to do; a test run has."""

from __future__ import annotations

from typing import Final

BUSY: Final = 2.5
"""How much longer something may take while other tests run beside it. The figure itself is printed."""
