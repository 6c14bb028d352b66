"""A disk that can lose its power: what a program did to a folder is recorded, and every state it may leave is built.

Content that was not synced is there, half there, zeros or nothing. Of the changes in a folder that was not synced, any
may have reached the disk and any not, each as a whole. A change of names within one folder is one change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from threading import RLock
from typing import Any, Final

import pytest

from strata.train.checkpoints import checkpoint

ROOT: Final = 0
LOSSES: Final = ("kept", "half", "zeros", "nothing")
Names = dict[int, dict[str, int]]
Change = Mapping[str, int | None]
"""Names in one folder, and what each is now: the number of a file or folder, or nothing."""


@dataclass(frozen=True)
class Event:
    kind: str
    """`names`, `content`, `sync`, `acked`."""
    number: int
    """Of the file or folder, or what was acked."""
    change: Change = field(default_factory=dict)
    content: bytes = b""


class Recorder:
    """Sees the calls that name and sync; what happened in between it finds by looking."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.tape: list[Event] = []
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}
        self._content: dict[int, bytes] = {}
        self._next = ROOT
        self._lock = RLock()
        self._hook(patch, os, "fsync", self._synced)
        self._hook(patch, os, "rename", self._named)
        self._hook(patch, os, "mkdir", lambda *_: self.look())
        self._hook(patch, checkpoint, "exchange_folders", self._exchanged)

    def acked(self, number: int) -> None:
        self.look()
        self.tape.append(Event("acked", number))

    def _hook(self, patch: pytest.MonkeyPatch, where: Any, name: str, after: Callable[..., None]) -> None:
        real = getattr(where, name)

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                self.look()
                found = real(*args, **options)
                after(*args)
                return found

        patch.setattr(where, name, call)

    def _synced(self, descriptor: int) -> None:
        number = self._number(Path(f"/proc/self/fd/{descriptor}").readlink())
        if number is not None:
            self.tape.append(Event("sync", number))

    def _named(self, old: Any, new: Any) -> None:
        above = self._number(Path(new).parent)
        assert above is not None
        number = self._folders[above].pop(Path(old).name)
        self._change(above, {Path(old).name: None, Path(new).name: number})

    def _exchanged(self, one: Path, other: Path) -> None:
        above = self._number(one.parent)
        assert above is not None
        names = self._folders[above]
        self._change(above, {one.name: names[other.name], other.name: names[one.name]})

    def look(self) -> None:
        with self._lock:
            self._look(ROOT, self.root)

    def _look(self, number: int, path: Path) -> None:
        names = self._folders[number]
        there = {entry.name: entry for entry in path.iterdir()} if path.is_dir() else {}
        for name in sorted(names.keys() - there.keys()):
            gone = names[name]
            if gone in self._folders:
                self._look(gone, path / name)
            self._change(number, {name: None})
        for name, entry in sorted(there.items()):
            if name not in names:
                self._next += 1
                if entry.is_dir():
                    self._folders[self._next] = {}
                self._change(number, {name: self._next})
            own = names[name]
            if own in self._folders:
                self._look(own, entry)
            elif (content := entry.read_bytes()) != self._content.get(own):
                self._content[own] = content
                self.tape.append(Event("content", own, content=content))

    def _change(self, above: int, change: Change) -> None:
        self.tape.append(Event("names", above, change))
        _apply(self._folders[above], change)

    def _number(self, path: Path) -> int | None:
        if not path.is_relative_to(self.root):
            return None
        number = ROOT
        for name in path.relative_to(self.root).parts:
            number = self._folders[number][name]
        return number


@dataclass
class Disk:
    """After some of the events: what surely is there, and what may be."""

    content: dict[int, bytes] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)
    names: Names = field(default_factory=lambda: {ROOT: {}})
    pending: dict[int, list[Change]] = field(default_factory=dict)
    acked: int = 0

    def play(self, event: Event) -> None:
        match event.kind:
            case "names":
                self.pending.setdefault(event.number, []).append(event.change)
            case "content":
                self.content[event.number] = event.content
            case "acked":
                self.acked = event.number
            case _ if event.number in self.content:
                self.synced[event.number] = self.content[event.number]
            case _:
                for change in self.pending.pop(event.number, []):
                    _apply(self.names.setdefault(event.number, {}), change)

    def states(self) -> Iterator[dict[str, bytes]]:
        """Each way the disk may look after the cut: path to content."""
        folders = list(self.pending)
        for chosen in product(*(_subsets(self.pending[number]) for number in folders)):
            names = {number: dict(own) for number, own in self.names.items()}
            for number, changes in zip(folders, chosen, strict=True):
                for change in changes:
                    _apply(names.setdefault(number, {}), change)
            for loss in LOSSES:
                yield dict(self._files(ROOT, "", names, loss))

    def _files(
        self, number: int, path: str, names: dict[int, dict[str, int]], loss: str
    ) -> Iterator[tuple[str, bytes]]:
        for name, own in names.get(number, {}).items():
            if own in self.content:
                yield f"{path}{name}", self._left(own, loss)
            else:
                yield f"{path}{name}/", b""
                yield from self._files(own, f"{path}{name}/", names, loss)

    def _left(self, number: int, loss: str) -> bytes:
        written = self.content[number]
        if self.synced.get(number) == written:
            return written
        return {
            "kept": written,
            "half": written[: len(written) // 2],
            "zeros": bytes(len(written)),
            "nothing": b"",
        }[loss]


def _apply(names: dict[str, int], change: Change) -> None:
    for name, number in change.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _subsets(changes: Sequence[Change]) -> list[tuple[Change, ...]]:
    return list(chain.from_iterable(combinations(changes, count) for count in range(len(changes) + 1)))


def cuts(tape: Sequence[Event]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """For every moment and every state that is not like an earlier one: what was acked by then, and the disk."""
    disk = Disk()
    seen: set[tuple[int, int]] = set()
    for event in (None, *tape):
        if event is not None:
            disk.play(event)
        for state in disk.states():
            key = disk.acked, hash(frozenset(state.items()))
            if key not in seen:
                seen.add(key)
                yield disk.acked, state


def build(state: Mapping[str, bytes], root: Path) -> None:
    for path, content in sorted(state.items()):
        if path.endswith("/"):
            (root / path).mkdir(parents=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
