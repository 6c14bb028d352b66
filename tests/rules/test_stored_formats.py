"""What one version has stored the next one reads, or its number says that it does not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.rules.stored_formats import StoredFormat, differences, read_golden, shape, stored_formats, text


class Written(msgspec.Struct, tag="written"):
    name: str
    size: int = 0
    kind: str = ""


class Removed(msgspec.Struct, tag="removed"):
    name: str


def test_every_stored_format_is_read_by_this_version() -> None:
    now = stored_formats()
    broken = {name: differences(before, now[name]) for name, before in read_golden().items()}
    assert not {name: each for name, each in broken.items() if each}, "raise the version of the format"


def test_every_stored_format_is_recorded() -> None:
    assert stored_formats().keys() == read_golden().keys(), "python -m tests.rules.stored_formats"


class WithoutSize(msgspec.Struct, tag="written"):
    name: str
    kind: str = ""


class OtherKind(msgspec.Struct, tag="written"):
    name: str
    size: int = 0
    kind: int = 0


class Demanding(msgspec.Struct, tag="written"):
    name: str
    owner: str
    size: int = 0
    kind: str = ""


@pytest.mark.parametrize(
    ("planted", "reasons"),
    [
        (WithoutSize, ["|written.size int: gone"]),
        (OtherKind, ["|written.kind str: gone"]),
        (Demanding, ["|written.owner required: demanded of older values"]),
        (
            Removed,
            ["|written object: gone", "|written.kind str: gone", "|written.name str: gone", "|written.size int: gone"],
        ),
    ],
)
def test_a_planted_change_is_found_unless_the_version_grows(planted: type, reasons: Sequence[str]) -> None:
    before = shape(Written, 3)
    assert differences(before, shape(planted, 3)) == reasons
    assert differences(before, shape(planted, 4)) == []


class Grown(msgspec.Struct, tag="written"):
    name: str = ""
    size: int = 0
    kind: str = ""
    owner: str = ""


def test_a_field_with_a_default_and_a_new_tag_may_come_without_a_number() -> None:
    assert differences(shape(Written), shape(Grown | Removed)) == []


def test_tables_change_with_their_number_alone() -> None:
    before = text("CREATE TABLE job (id TEXT)", 3)
    assert differences(before, text("CREATE  TABLE job\n(id TEXT)", 3)) == []
    assert len(differences(before, text("CREATE TABLE job (id TEXT, size INTEGER)", 3))) == 1
    assert differences(before, text("CREATE TABLE job (id TEXT, size INTEGER)", 4)) == []


def test_a_number_never_falls() -> None:
    assert differences(StoredFormat(3, frozenset()), StoredFormat(2, frozenset())) == ["its version fell from 3 to 2"]
