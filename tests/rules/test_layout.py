"""Every module and folder that the layout of ARCHITECTURE.md names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "strata"
_TOP: Final = re.compile(r"  ([a-z_]+)/?(?:  +(.*))?")
_HEAD: Final = re.compile(r"([a-z_]+/?(?:, [a-z_]+/?)*)  +(\S.*)")
"""Names, and at least two spaces before what they are for."""
_INNER: Final = 13
"""The column of what a layer holds; texts that go on are indented further or have no name."""
_BETWEEN: Final = re.compile(r"[,;:()/]| and ")
_WORD: Final = re.compile(r"[a-z_]+")
_COMPOUND: Final = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
FEWEST: Final = 40
FEWEST_LISTED: Final = 80
TOPICS: Final = frozenset(
    word
    for line in (
        "artifacts async authority backup benchmarks blocking claim decide digests dispatcher engines",
        "eviction failpoints follow handlers heartbeats hosts index ipc lead logs manifest matching msgspec",
        "observe on operations packing protobuf pure ranks restore results routes run saving scrubbing slots",
        "snapshot spans stdlib submit ticks timelines traces upload",
    )
    for word in line.split()
)
"""Words of its lists that are no modules: what a module does, or what it is about. Names of layers need not be here."""


@dataclass
class Row:
    """What the layout says of a layer, or of modules of it."""

    layer: str
    names: list[str]
    text: str


def rows(text: str) -> Iterator[Row]:
    row = Row("", [], "")
    for line in text.splitlines():
        inner = line[_INNER:] if line.startswith(" " * _INNER) and line[_INNER : _INNER + 1].strip() else ""
        if not line.startswith(" " * 3) and (top := _TOP.fullmatch(line)):
            yield row
            row, inner = Row(top[1], [top[1]], ""), top[2] or ""
        if head := _HEAD.fullmatch(inner):
            yield row
            row = Row(row.layer, [f"{row.layer}/{name.rstrip('/')}" for name in head[1].split(", ")], head[2])
        else:
            row.text += f" {inner or line.strip()}"
    yield row


def listed(row: Row) -> set[str]:
    """The words that the text of a row lists one by one, also in brackets and in the lines that go on."""
    items = (re.sub(r"^(and|by) ", "", item.strip()) for item in _BETWEEN.split(row.text))
    return ({item for item in items if _WORD.fullmatch(item)} | set(_COMPOUND.findall(row.text))) - TOPICS


def is_there(name: str) -> bool:
    return (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()


def is_in_layer(layer: str, word: str) -> bool:
    below = (SOURCE / layer).rglob("*")
    return is_there(word) or any(path.name == word if path.is_dir() else path.name == f"{word}.py" for path in below)


def missing(text: str) -> list[str]:
    return [
        name
        for row in rows(text)
        for name in (
            *(name for name in row.names if not is_there(name)),
            *(f"{row.layer}: {word}" for word in sorted(listed(row)) if not is_in_layer(row.layer, word)),
        )
    ]


def layout() -> str:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return text.partition("```\nsrc/strata/\n")[2].partition("\ntests/ ")[0]


def leveled() -> list[str]:
    """The modules and folders that the table of levels names."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.partition("\n| level | modules |\n")[2].partition("\n## ")[0]
    return re.findall(r"`([a-z_/]+)`", table)


def test_every_module_with_a_level_exists() -> None:
    names = leveled()
    assert len(names) > FEWEST_LISTED // 4
    assert [name for name in names if not is_there(name)] == []


def test_every_name_of_the_layout_exists() -> None:
    assert len([name for row in rows(layout()) for name in row.names]) >= FEWEST
    assert len([word for row in rows(layout()) for word in listed(row)]) >= FEWEST_LISTED
    assert missing(layout()) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert missing(
        "  train/     store/    copies of it\n             payload, archived  its files\n  nothing    of it\n"
    ) == [
        "train/store",
        "train/archived",
        "nothing",
    ]


def test_a_name_in_a_list_of_a_text_that_does_not_exist_is_found() -> None:
    text = (
        "  coord/     core     facts, inputs, gone; machine: observe (the only writer)\n"
        "                      liveness (eviction, graves), lost_and_found of it: pure\n"
        "             server/  service leads; heartbeat and departed\n"
    )
    assert missing(text) == ["coord: gone", "coord: graves", "coord: lost_and_found", "coord: departed"]
