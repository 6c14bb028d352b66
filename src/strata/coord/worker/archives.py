"""Samples from tar archives as WebDataset has them: files whose names are the same up to the first dot are one sample,
a dict from what follows the dot to the content.

An archive has an index beside it, like a file of lines: segments of whole samples, each with its digest.
"""

from __future__ import annotations

import io
import re
import tarfile
from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from strata.base.errors import Code, StrataError
from strata.coord.worker.lines import LineIndex, blocks_of, digest_of, grain_of, open_index
from strata.coord.worker.stores import Source, SourceFile, Stores

KEY: Final = "__key__"
"""The key under which a sample has the name of its files up to the dot."""
_NAME: Final = re.compile(r"((?:.*/)?[^./]+)[.]([^/]+)", re.DOTALL)


class TarSamples:
    def __init__(self, source: Source, stores: Stores) -> None:
        self._index = open_index(source, stores, build_index)

    @property
    def samples(self) -> int:
        return self._index.samples

    def read(self, source: Source, start: int, end: int) -> Iterator[list[Any]]:
        found = self._index.read(source, start, end, lambda segment: list(_samples(segment, source.path)))
        return (samples for _, samples in found)


def build_index(source: Source) -> LineIndex:
    """The archive is read twice: for its headers, and for digests of segments."""
    counts, offsets = array("Q", [0]), array("Q", [0])
    grain, counted, end, key = grain_of(source.seen.size), 0, 0, None
    for member, name in _members(SourceFile(source), source):
        if name[0] != key:
            # What is before the first sample belongs to its segment.
            if counted and member.offset - offsets[-1] >= grain:
                counts.append(counted)
                offsets.append(member.offset)
            key, counted = name[0], counted + 1
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if counted:
        counts.append(counted)
        offsets.append(end)
    digests = array("Q", (digest_of(blocks_of(source, first, last)) for first, last in pairwise(offsets)))
    return LineIndex(counts, offsets, digests)


def _samples(segment: bytes, path: str) -> Iterator[dict[str, Any]]:
    sample: dict[str, Any] = {}
    with tarfile.open(fileobj=io.BytesIO(segment), mode="r:") as archive:
        for member in archive:
            name = _name_of(member)
            if name is None:
                continue
            key, field = name
            if sample and sample[KEY] != key:
                yield sample
                sample = {}
            sample.setdefault(KEY, key)
            if field in sample:
                raise StrataError(Code.CORRUPT, f"{path} has {key}.{field} twice in one sample", path=path)
            content = archive.extractfile(member)
            assert content is not None
            sample[field] = content.read()
    if sample:
        yield sample


def _members(file: SourceFile, source: Source) -> Iterator[tuple[tarfile.TarInfo, tuple[str, str]]]:
    """The files of samples, with key and field of each."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(file, source.block), mode="r:") as archive:
            while (member := archive.next()) is not None:
                if member.issparse():
                    raise tarfile.ReadError(f"{member.name} is a sparse file")
                if (name := _name_of(member)) is not None:
                    yield member, name
                # It would keep all of them.
                archive.members = []  # type: ignore[attr-defined]
    except tarfile.TarError as error:
        raise StrataError(Code.CORRUPT, f"{source.path} cannot be read: {error}", path=source.path) from error


def _name_of(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Key and field; None: it is no part of a sample, as WebDataset sees it."""
    found = _NAME.fullmatch(member.name) if member.isreg() else None
    return None if found is None else (found[1], found[2].lower())
