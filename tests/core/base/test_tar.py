"""Archives of strangers: what `tarfile` and GNU tar write is read, and a header cannot cost more than its bytes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.base.tar import BLOCK, MAX_EXTENSIONS, MAX_HEADER_BYTES, TarKind, TarMember, TarReader, decompress_stream
from tests.support.archives import header, pax_archive

LONG = "d/" * 60 + "n" * 200


def read(raw: bytes) -> list[tuple[TarMember, bytes]]:
    reader = TarReader(decompress_stream(io.BufferedReader(io.BytesIO(raw))))
    return [(member, b"".join(reader.pieces())) for member in reader]


def refused(raw: bytes, match: str = "not a tar file that can be read") -> None:
    with pytest.raises(StrataError, match=match) as error:
        read(raw)
    assert error.value.code is Code.INVALID


def an_archive(form: int, names: list[str]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=form) as tar:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size, member.mode = number * 300, 0o755
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "t" * 150
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(link)
        tar.addfile(folder)
    return written.getvalue()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_what_tarfile_writes_is_read_as_tarfile_reads_it(form: int, compress: Callable[[bytes], bytes]) -> None:
    raw = an_archive(form, ["a", LONG, "ä", "b/c"])
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        told = [(each.name, each.size, each.mode, each.linkname) for each in tar]
    seen = read(compress(raw))
    assert [(each.name.rstrip("/"), each.size, each.mode, each.target) for each, _ in seen] == told
    assert [content for _, content in seen] == [bytes(size) for _, size, _, _ in told]
    assert [each.kind for each, _ in seen][-2:] == [TarKind.LINK, TarKind.FOLDER]


@pytest.mark.parametrize("form", ["v7", "ustar", "gnu", "pax"])
def test_what_gnu_tar_writes_is_read(tmp_path: Path, form: str) -> None:
    name = "n" * (90 if form in ("v7", "ustar") else 200)
    (tmp_path / name).write_bytes(b"x" * 1000)
    (tmp_path / "other").hardlink_to(tmp_path / name)
    command = ["tar", f"--format={form}", "-C", str(tmp_path), "-cf", "-", name, "other"]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    assert [(each.name, each.kind, each.size) for each, _ in read(raw)] == [
        (name, TarKind.FILE, 1000),
        ("other", TarKind.HARD_LINK, 0),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0" * 1024,
        b"not a tar file",
        b"x" * 512,
        gzip.compress(b"x" * 512, mtime=0),
        gzip.compress(header("a", 0), mtime=0)[:-4],
        b"\x1f\x8b" + b"x" * 100,
        b"BZh9" + b"x" * 100,
        b"\xfd7zXZ\0" + b"x" * 100,
        header("a", 1000) + b"x" * 999,
        header("a", 0, kind=b"S"),
        pax_archive(b"not a record\n"),
        pax_archive(b"9 path=aa\n"),
        pax_archive(b"99 path=a\n"),
        pax_archive(b"0 path=a\n"),
        pax_archive(b"6 path\n"),
        pax_archive(b"11 size=-10\n"),
        pax_archive(b"22 GNU.sparse.major=1\n"),
        pax_archive(b"25 hdrcharset=ISO-8859-1\n"),
        pax_archive(b"10 path=a\n", kind=b"g"),
        header("a", 0, kind=b"x") * (MAX_EXTENSIONS + 1) + header("a", 0),
    ],
    ids=lambda raw: f"crc32 {zlib.crc32(raw):08x}",
)
def test_what_is_damaged_or_odd_is_refused(raw: bytes) -> None:
    refused(raw)


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"X"])
def test_a_header_that_is_too_long_is_refused_before_it_is_read(kind: bytes) -> None:
    refused(header("a", MAX_HEADER_BYTES + 1, kind=kind), "at most 65536 are allowed")
    refused(header("a", 2**40, kind=kind), "at most 65536 are allowed")


def _time(raw: bytes) -> float:
    began_s = time.process_time()
    with contextlib.suppress(StrataError):
        read(raw)
    return time.process_time() - began_s


@pytest.mark.proves("Never again: a tar header of 62 KB stopped the agent for 13 s, one of 2 GiB took as much memory")
@pytest.mark.parametrize("hostile", ["digits", "digits in a value", "records without end", "short records"])
def test_a_pax_header_takes_time_in_proportion_to_its_length(hostile: str) -> None:
    def archive(size: int) -> bytes:
        if hostile == "digits":
            return pax_archive(b"1" * size)
        if hostile == "digits in a value":
            return pax_archive(b"%d comment=%s\n" % (size, b"1" * (size - 15)))
        if hostile == "records without end":
            return pax_archive(b"4 a " * (size // 4))
        return pax_archive(b"5 a=\n" * (size // 5))

    once, twice = archive(31_000), archive(62_000)
    assert _time(twice) < 0.5
    # Ten of each, so that the clock sees them; quadratic work would be four times as much.
    one_s = sum(_time(once) for _ in range(10))
    two_s = sum(_time(twice) for _ in range(10))
    assert two_s < 3 * one_s + 0.05


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2048), st.integers(0, 1500))
def test_no_bytes_break_it(noise: bytes, at: int) -> None:
    raw = bytearray(an_archive(tarfile.PAX_FORMAT, ["a", LONG]))
    raw[at : at + len(noise)] = noise
    for each in (bytes(raw), noise):
        # Nothing else is raised.
        with contextlib.suppress(StrataError):
            read(each)


def test_a_binary_size_is_read_and_a_negative_one_refused() -> None:
    def sized(field: bytes) -> bytes:
        block = bytearray(header("a", 0))
        block[124:136] = field
        return seal(block)

    assert read(sized(b"\x80" + (3).to_bytes(11)) + b"xyz" + bytes(BLOCK - 3))[0][1] == b"xyz"
    refused(sized(b"\xff" * 12), "negative")


def seal(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)
