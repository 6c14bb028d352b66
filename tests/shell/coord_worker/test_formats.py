"""Samples of every format, from disk and from a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore
import psutil  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet  # type: ignore[import-untyped]

from strata.base.errors import Code, StrataError
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.worker.lines import LineIndex, split_lines
from strata.coord.worker.readers import Readers
from strata.coord.worker.stores import S3Settings, Stores, load_s3
from tests.shell.coord_worker.corpora import LOCAL_SUFFIXES, SUFFIXES, cut, settings, upload, write
from tests.support.s3 import S3Server

TEXTS = ["", "one\r", "two\u2028half", "ä" * 50, "last"]

Change = Callable[[Path], object]


def whole(path: str, samples: int, start: int = 0) -> list[pb.FileSlice]:
    return [pb.FileSlice(path=path, start_index=start, end_index=samples)]


def code_of(call: Callable[[], object]) -> Code:
    with pytest.raises(StrataError) as caught:
        call()
    return caught.value.code


def test_all_formats_give_the_same_samples_from_disk_and_from_s3(tmp_path: Path, s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    readers = Readers(settings(s3_server))
    files: list[tuple[str, str, int]] = []
    expected: list[Any] = []
    for number, suffix in enumerate(SUFFIXES * 2):
        path = tmp_path / f"{number}{suffix}"
        samples = write(path, [f"{number} {text}" for text in TEXTS * 5])
        files.append((str(path), upload(s3_server, bucket, path), len(samples)))
        expected += samples
    for here in (True, False):
        named = [(local if here else remote, count) for local, remote, count in files]
        assert [readers.count(path) for path, _ in named] == [count for _, count in named]
        shards = cut(named, [*range(0, len(expected), 7), len(expected)])
        assert [sample for shard in shards for sample in readers.read(shard)] == expected
        # In any order, and with nothing known before.
        fresh = Readers(settings(s3_server))
        assert [list(fresh.read(shard)) for shard in reversed(shards)] == [
            list(readers.read(shard)) for shard in reversed(shards)
        ]


@st.composite
def corpora(draw: st.DrawFn) -> list[tuple[str, list[str], int, str]]:
    """Files: suffix, texts, rows of a row group, what ends the last line."""
    line = st.text(st.characters(exclude_characters="\n", codec="utf-8"), max_size=12)
    found = []
    for _ in range(draw(st.integers(1, 4))):
        texts = draw(st.lists(line, max_size=12))
        # An empty last line without a line feed is none.
        end = draw(st.sampled_from(("\n", ""))) if texts and texts[-1] else "\n"
        found.append((draw(st.sampled_from(LOCAL_SUFFIXES)), texts, draw(st.integers(1, 5)), end))
    return found


@given(corpora(), st.data())
def test_any_partition_gives_each_sample_once_and_in_order(
    corpus: list[tuple[str, list[str], int, str]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        readers = Readers(local_block=data.draw(st.integers(1, 40)))
        files: list[tuple[str, int]] = []
        expected: list[Any] = []
        for number, (suffix, texts, rows, end) in enumerate(corpus):
            path = Path(folder) / f"{number}{suffix}"
            expected += write(path, texts, rows, end)
            files.append((str(path), len(texts)))
        inner = data.draw(st.lists(st.integers(0, len(expected)), max_size=6))
        shards = cut(files, [0, *sorted(inner), len(expected)])
        read: dict[int, list[Any]] = {}
        for index in data.draw(st.permutations(range(len(shards)))):
            read[index] = list(readers.read(shards[index]))
        assert [sample for index in sorted(read) for sample in read[index]] == expected
        assert [readers.count(path) for path, _ in files] == [count for _, count in files]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_shard_at_the_end_of_a_known_file_does_not_read_all_of_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"large{suffix}"
    texts = [os.urandom(500).hex() for _ in range(10_000)]
    samples = write(path, texts, rows_in_group=500)
    size = path.stat().st_size
    assert size > 5 << 20
    readers = Readers()
    assert readers.count(path) == len(samples)
    before = psutil.Process().io_counters().read_chars
    assert list(readers.read(whole(str(path), len(samples), len(samples) - 3))) == samples[-3:]
    assert psutil.Process().io_counters().read_chars - before < size // 4


def bytes_read(call: Callable[[], object]) -> int:
    before = psutil.Process().io_counters().read_chars
    call()
    return int(psutil.Process().io_counters().read_chars - before)


@pytest.mark.parametrize(("suffix", "part", "share"), [(".jsonl", 50, 0.1), (".txt.gz", 20, 0.7)])
def test_only_the_first_reader_of_a_folder_reads_all_lines(
    tmp_path: Path, suffix: str, part: int, share: float
) -> None:
    path = tmp_path / f"large{suffix}"
    samples = write(path, [os.urandom(500).hex() for _ in range(10_000)])
    size = path.stat().st_size
    assert bytes_read(lambda: Readers().count(path)) >= size
    index = path.with_name(path.name + ".strata-index")
    assert index.stat().st_size < size // part
    assert bytes_read(lambda: Readers().count(path)) < size // part
    got: list[Any] = []
    assert bytes_read(lambda: got.extend(Readers().read(whole(str(path), 5_010, 5_000)))) < share * size
    assert got == samples[5_000:5_010]


def test_processes_that_start_together_read_the_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    write(path, [os.urandom(500).hex() for _ in range(20_000)])
    code = (
        "import psutil, sys; from strata.coord.worker.readers import Readers\n"
        "sys.stdin.readline(); before = psutil.Process().io_counters().read_chars\n"
        f"assert Readers().count({str(path)!r}) == 20_000\n"
        "print(psutil.Process().io_counters().read_chars - before)"
    )
    programs = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for each in programs:
        assert each.stdin is not None
        each.stdin.write(b"\n")
        each.stdin.flush()
    read = sorted(int(each.communicate(timeout=60)[0]) for each in programs)
    assert read[1] < 100_000 < path.stat().st_size <= read[2]


def test_an_index_of_lines_is_small_and_never_larger_than_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"x\n" * 50_000)
    with Stores().open(str(path)) as source:
        content = [source.read(0, source.seen.size)]
        index = LineIndex.build(content, grain=5)
        assert index.samples == 50_000
        # Each segment is the least number of whole lines that is large enough.
        assert len(index.encode(source.seen)) < 50_000 // 3 * 24 + 500
        assert list(index.read(source, 7, 9, split_lines)) == [(7, [b"x", b"x"])]
        assert len(LineIndex.build(content).encode(source.seen)) < 200


def test_an_archive_that_is_cut_off_sparse_or_ambiguous_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, ["one", "two" * 1_000])
    content = path.read_bytes()
    for number, end in enumerate((len(content) - 12_000, 700, 100)):
        (tmp_path / f"cut{number}.tar").write_bytes(content[:end])
    (tmp_path / "text.tar").write_bytes(b"this is no archive" * 100)
    (tmp_path / "0.txt").write_bytes(b"first")
    tar = ("tar", "-C", str(tmp_path), "-cf")
    subprocess.run([*tar, str(tmp_path / "twice.tar"), "--hard-dereference", "0.txt", "0.txt"], check=True)
    with (tmp_path / "hole.txt").open("wb") as file:
        file.truncate(1 << 30)
    subprocess.run([*tar, str(tmp_path / "hole.tar"), "--sparse", "hole.txt"], check=True)
    for name in ("cut0", "cut1", "cut2", "text", "twice", "hole"):
        assert code_of(lambda name=name: [*Readers().read(whole(str(tmp_path / f"{name}.tar"), 1))]) is Code.CORRUPT  # type: ignore[misc]


def test_a_file_that_changed_since_it_was_indexed_is_corrupt_for_new_readers_too(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    kept = path.stat()
    assert Readers().count(path) == 2
    # Other content of the same size, and even of the same time.
    path.write_text("one\ntwi\n", encoding="utf-8")
    with pytest.raises(StrataError, match=r"index was written: its content differs.*delete .*strata-index"):
        Readers().count(path)
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    with pytest.raises(StrataError, match="bytes 0 to 7") as caught:
        list(Readers().read(whole(str(path), 2)))
    assert caught.value.code is Code.CORRUPT
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    with pytest.raises(StrataError, match=r"it has 14 bytes and not 8"):
        Readers().count(path)
    # The same content again, with another time: a copy. The index is brought up to date.
    path.write_text("one\ntwo\n", encoding="utf-8")
    assert list(Readers().read(whole(str(path), 2))) == ["one", "two"]
    index = Path(f"{path}.strata-index")
    assert str(path.stat().st_mtime_ns) in index.read_bytes()[:100].decode(errors="replace")
    index.write_bytes(index.read_bytes()[:-3])
    with pytest.raises(StrataError, match="damaged"):
        Readers().count(path)


def test_a_folder_that_cannot_be_written_has_no_index_and_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Root may write everywhere.
    monkeypatch.setattr("strata.base.atomic.write_file", refuse)
    assert list(Readers().read(whole(str(path), 2))) == ["one", "two"]
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_compressed_text_that_was_cut_off_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    write(path, [os.urandom(50).hex() for _ in range(1_000)])
    path.write_bytes(path.read_bytes()[:-100])
    assert code_of(lambda: Readers().count(path)) is Code.CORRUPT


def append(path: Path) -> None:
    if path.suffix in (".parquet", ".gz"):
        write(path, ["x"] * 9)
    else:
        with path.open("ab") as file:
            file.write(b'"more"\n')


def rewrite(path: Path) -> None:
    """The same size, other content, another time."""
    if path.suffix == ".gz":
        write(path, ["a", "c", "c"])
    else:
        path.write_bytes(path.read_bytes().replace(b"b", b"c"))
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [append, rewrite])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_changed_since_it_was_first_read_is_corrupt(
    tmp_path: Path, s3_server: S3Server, suffix: str, change: Change
) -> None:
    path = tmp_path / f"a{suffix}"
    write(path, ["a", "b", "c"])
    bucket = s3_server.create_bucket()
    there = upload(s3_server, bucket, path)
    readers = Readers(settings(s3_server))
    for place in (str(path), there):
        assert readers.count(place) == 3
    change(path)
    upload(s3_server, bucket, path)
    for place in (str(path), there):
        with pytest.raises(StrataError, match="has changed") as caught:
            list(readers.read(whole(place, 3)))
        assert caught.value.code is Code.CORRUPT


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_with_fewer_samples_than_registered_is_corrupt(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    samples = write(path, ["a", "b", "c"])
    got: list[Any] = []
    with pytest.raises(StrataError, match="fewer samples than were registered: no sample 3") as caught:
        got.extend(Readers().read(whole(str(path), 5, 1)))
    assert got == samples[1:]
    assert caught.value.code is Code.CORRUPT


def test_what_is_not_there_is_not_found_and_what_is_no_parquet_is_corrupt(tmp_path: Path, s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    readers = Readers(settings(s3_server))
    for place in (str(tmp_path / "no.txt"), f"s3://{bucket}/no.jsonl", "s3://no-such-bucket/no.parquet"):
        assert code_of(lambda place=place: readers.count(place)) is Code.NOT_FOUND  # type: ignore[misc]
    for name, content in (("text.parquet", b"no parquet at all"), ("short.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(content)
        assert code_of(lambda name=name: readers.count(tmp_path / name)) is Code.CORRUPT  # type: ignore[misc]
    write(tmp_path / "cut.parquet", ["x" * 100] * 50)
    damaged = bytearray((tmp_path / "cut.parquet").read_bytes())
    damaged[20:200] = os.urandom(180)
    (tmp_path / "cut.parquet").write_bytes(damaged)
    assert code_of(lambda: list(readers.read(whole(str(tmp_path / "cut.parquet"), 50)))) is Code.CORRUPT


def test_a_wrong_secret_is_refused_in_clear_words_that_do_not_have_it(tmp_path: Path, s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    obstore.put(s3_server.store(bucket), "a.txt", b"x\n")
    from strata.base.settings import Secret

    for wrong in ({"secret_key": Secret("quite-wrong")}, {"access_key": "nobody"}, {"identity": "anonymous"}):
        readers = Readers(settings(s3_server, **wrong))
        with pytest.raises(StrataError, match="refuses access to s3://") as caught:
            readers.count(f"s3://{bucket}/a.txt")
        assert caught.value.code is Code.FORBIDDEN
        for shown in (str(caught.value), repr(caught.value.__cause__), repr(settings(s3_server))):
            assert "quite-wrong" not in shown
            assert s3_server.secret_key not in shown


def test_a_store_that_does_not_answer_is_given_up(s3_server: S3Server) -> None:
    silent = S3Settings(
        endpoint="http://127.0.0.1:1",
        access_key="a",
        secret_key=settings(s3_server).secret_key,
        retries=1,
        patience_s=2,
    )
    assert code_of(lambda: Readers(silent).count("s3://bucket/a.txt")) is Code.UNAVAILABLE


def test_settings_are_ours_or_those_of_aws_and_ours_win(monkeypatch: pytest.MonkeyPatch, s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    obstore.put(s3_server.store(bucket), "a.txt", b"x\n")
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    assert Readers().count(f"s3://{bucket}/a.txt") == 1
    # Keys for something else altogether, with a token that belongs to them.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "other")
    assert code_of(lambda: Readers().count(f"s3://{bucket}/a.txt")) is Code.FORBIDDEN
    monkeypatch.setenv("STRATA_S3_ACCESS_KEY", s3_server.access_key)
    monkeypatch.setenv("STRATA_S3_SECRET_KEY", s3_server.secret_key)
    assert Readers().count(f"s3://{bucket}/a.txt") == 1
    assert load_s3().session_token is None


def test_without_keys_it_says_how_to_give_them() -> None:
    with pytest.raises(StrataError, match="STRATA_S3_SECRET_KEY_FILE") as caught:
        Readers(S3Settings()).count("s3://bucket/a.txt")
    assert caught.value.code is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        ({"endpoint": "http://10.0.0.1:9000"}, "in the clear"),
        ({"endpoint": "ftp://x"}, "is no URL"),
        ({"access_key": "a"}, "needed together"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given_: dict[str, Any], problem: str) -> None:
    with pytest.raises(StrataError, match=problem):
        S3Settings(**given_)


def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, ["x"])
    monkeypatch.delitem(sys.modules, "strata.objects", raising=False)
    for name in ("pyarrow", "pyarrow.parquet", "obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)
    for place, package in ((str(path), "pyarrow"), ("s3://bucket/a.txt", "obstore")):
        with pytest.raises(StrataError, match=rf"{package}.*strata-train\[worker-data\]") as caught:
            Readers(S3Settings()).count(place)
        assert caught.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize(
    "path", ["gs://bucket/a.txt", "/data/none", "/data/a.jsonl.zst", "/data/a.gz", "s3://bucket/a.zip"]
)
def test_what_there_is_no_reader_for_is_unsupported(path: str) -> None:
    assert code_of(lambda: Readers(S3Settings()).count(path)) is Code.UNSUPPORTED


@pytest.mark.parametrize("path", ["s3://bucket", "s3://bucket/../a.txt", "s3:///a.txt", "s3://bucket//a.txt"])
def test_what_names_no_object_is_invalid(path: str, s3_server: S3Server) -> None:
    readers = Readers(settings(s3_server))
    assert code_of(lambda: list(readers.stores.open(path).__enter__().read(0, 1))) is Code.INVALID


def test_samples_before_a_broken_line_are_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('1\n2\n{"a": \n4\n', encoding="utf-8")
    got: list[Any] = []
    with pytest.raises(StrataError, match="line 3 of") as caught:
        got.extend(Readers().read(whole(str(path), 4)))
    assert got == [1, 2]
    assert caught.value.code is Code.CORRUPT


def test_a_parquet_file_without_rows_or_with_many_columns_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [])
    assert Readers().count(path) == 0
    import pyarrow as pa

    rows = [{"a": [1, 2], "b": {"c": None, "d": 1.5}, "e": b"\x00"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    assert list(Readers().read(whole(str(tmp_path / "b.parquet"), 1))) == rows
