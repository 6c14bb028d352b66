"""A section of a settings file that a program reads is one that no other program refuses."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from strata.base.settings import SECTIONS
from strata.train.settings import ServerSettings

SOURCE = Path(__file__).parents[2] / "src" / "strata"
_SECTION = re.compile(r'^SECTION: Final = "(\w+)"$', re.MULTILINE)


def test_every_section_that_is_read_is_known_to_all() -> None:
    named = {name for path in SOURCE.rglob("*.py") for name in _SECTION.findall(path.read_text(encoding="utf-8"))}
    # The section of the field `checkpoint` is called `checkpoints`.
    served = {
        "checkpoints" if field.name == "checkpoint" else field.name for field in msgspec.structs.fields(ServerSettings)
    }
    assert named | served == set(SECTIONS)
