"""Manifests and paths: one spelling, nothing outside, nothing that another host cannot have."""

from __future__ import annotations

import posixpath
import string
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.fleet.artifacts.manifest import (
    CHUNK_BYTES,
    EMPTY_SHA256,
    ArtifactFile,
    ArtifactKind,
    ArtifactLimits,
    ArtifactManifest,
    Lineage,
    check_manifest,
)
from strata.fleet.artifacts.paths import check_collisions, check_path
from strata.http.body import decode_json
from tests.conformance.artifacts.making import manifest_of


def refusal_of(run: Callable[[], object]) -> Code | None:
    """The code it is refused with; None if it is not."""
    try:
        run()
    except StrataError as error:
        return error.code
    return None


LIMITS = ArtifactLimits(max_files=50, max_bytes=1 << 40)
DECODER = msgspec.json.Decoder(ArtifactManifest)
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


def decode_manifest(encoded: bytes, limits: ArtifactLimits) -> ArtifactManifest:
    """As the hub reads the body of a commit."""
    return check_manifest(decode_json(DECODER, encoded), limits)


@pytest.mark.parametrize(
    "path",
    [
        "", "/etc/passwd", "..", "../x", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "/", "a\\b", "..\\x", "C:/x",
        "c:x", "a:b", "\\\\server\\share", "a\0b", "a\nb", "a\x7fb", "\x85", "con", "CON", "Aux.txt", "x/nul", "com1",
        "LPT9.log", "com\u00b9", "nul .txt", "CONIN$", "a.", "a ", "a./b", "a*", "a?", "a|b", 'a"b', "<a>",
        "e\u0301", "x" * 256, "/".join(["d"] * 33), "/".join(["x" * 200] * 6), "\ud800",
    ],
)  # fmt: skip
def test_a_path_that_could_mean_another_file_somewhere_is_refused(path: str) -> None:
    with pytest.raises(StrataError) as refused:
        check_path(path)
    assert refused.value.code is Code.INVALID
    refused.value.message.encode()


@pytest.mark.parametrize(
    "path", ["a", "a/b/c.txt", ".hidden", "..a", "a..b", "console", "com", "com10", "lpt", "nulls", "é", "模型/权重"]
)
def test_an_ordinary_path_is_kept_as_it_is(path: str) -> None:
    assert check_path(path) == path


@given(st.text(alphabet=st.one_of(st.sampled_from("./\\:~ \0CONcon*aé"), st.characters()), max_size=40))
@example("a/../../b")
def test_an_accepted_path_stays_inside_on_posix_and_on_windows(path: str) -> None:
    if (code := refusal_of(lambda: check_path(path))) is not None:
        assert code is Code.INVALID
        return
    assert posixpath.normpath(path) == path
    assert not PurePosixPath(path).is_absolute()
    windows = PureWindowsPath(path)
    assert (windows.drive, windows.root) == ("", "")
    assert not windows.is_reserved()
    assert ".." not in windows.parts
    assert windows.as_posix() == path


@pytest.mark.parametrize("paths", [["A", "a"], ["d/x", "D/y"], ["straße", "STRASSE"], ["a", "a/b"], ["a/b/c", "a/B"]])
def test_paths_that_meet_where_case_is_ignored_are_refused(paths: list[str]) -> None:
    for order in (paths, paths[::-1]):
        with pytest.raises(StrataError, match="together"):
            check_collisions(order)


def test_equal_content_has_an_equal_id_and_the_mode_counts() -> None:
    files = {"b": b"2", "a/c": b"1", "empty": b""}
    manifest = manifest_of(files)
    assert manifest.id == manifest_of(dict(reversed(files.items()))).id
    assert manifest_of(files, b="0755").id != manifest.id
    assert decode_manifest(manifest.encode(), LIMITS) == manifest
    spaced = msgspec.json.format(manifest.encode(), indent=4)
    assert decode_manifest(spaced, LIMITS).id == manifest.id


def test_the_id_of_a_manifest_does_not_change_between_versions() -> None:
    manifest = manifest_of({"model/weights.bin": bytes(CHUNK_BYTES + 1), "run": b"#!"}, run="0755")
    assert manifest.id == "artifact1_6576c6615f94c6ec9e4c4c7b02897d88f1f9b87bd4ad07571041423ce7d9006d"


def broken(**change: Any) -> bytes:
    file: dict[str, Any] = {"path": "a", "size": 1, "sha256": sha256_hex(b"x"), "chunks": [sha256_hex(b"x")]}
    return msgspec.json.encode({"files": [{**file, **change}]})


@pytest.mark.parametrize(
    "encoded",
    [
        b"", b"[]", b"{}", b'{"files":[]}', b"\xff", b"[" * 100_000, broken(extra=1), broken(mode="0777"),
        broken(size=-1), broken(size=2**53), broken(size=0), broken(size=CHUNK_BYTES + 1), broken(size="1"),
        broken(chunks=[]), broken(chunks=["x"]), broken(sha256="0" * 64), broken(sha256=sha256_hex(b"x").upper()),
        broken(path="../a"), broken(size=1e300), broken(size=True),
        broken(size=0, chunks=[], sha256="0" * 64), b'{"files":[{"path":"\\ud800"}]}',
        broken(size=2 * CHUNK_BYTES - 1, chunks=[sha256_hex(b"x")] * 2),
    ],
)  # fmt: skip
def test_what_is_not_a_manifest_is_invalid(encoded: bytes) -> None:
    with pytest.raises(StrataError) as refused:
        decode_manifest(encoded, LIMITS)
    assert refused.value.code is Code.INVALID


def test_files_are_sorted_and_each_path_is_there_once() -> None:
    one, two = manifest_of({"a": b"1", "b": b"2"}).files
    for files in ((two, one), (one, one)):
        with pytest.raises(StrataError, match="sorted"):
            decode_manifest(msgspec.json.encode(ArtifactManifest(files=files)), LIMITS)


def test_counts_and_sizes_have_limits() -> None:
    many = manifest_of({f"f{number:03}": b"x" for number in range(51)})
    large = manifest_of({"a": bytes(100)})
    for manifest, limits in ((many, LIMITS), (large, msgspec.structs.replace(LIMITS, max_bytes=99))):
        with pytest.raises(StrataError) as refused:
            decode_manifest(manifest.encode(), limits)
        assert refused.value.code is Code.INVALID


@st.composite
def manifests(draw: st.DrawFn) -> ArtifactManifest:
    names = draw(st.lists(st.text(string.ascii_lowercase + "0123456789_-", min_size=1, max_size=8), unique=True))
    files = []
    for name in sorted({f"{name}_d/f" for name in names} | {"only"}):
        size = draw(st.integers(0, 3 * CHUNK_BYTES))
        chunks = [draw(HEX) for _ in range(-(-size // CHUNK_BYTES))]
        whole = EMPTY_SHA256 if not chunks else chunks[0] if len(chunks) == 1 else draw(HEX)
        files.append(ArtifactFile(path=name, size=size, sha256=whole, chunks=tuple(chunks)))
    return ArtifactManifest(files=tuple(files))


@given(manifests())
def test_every_manifest_survives_its_own_encoding(manifest: ArtifactManifest) -> None:
    # Two chunks drawn alike may have two sizes.
    assume(len(manifest.chunks()) == sum(len(file.chunks) for file in manifest.files))
    decoded = decode_manifest(manifest.encode(), LIMITS)
    assert decoded == manifest
    assert decoded.id == manifest.id
    assert sum(chunk.size for file in decoded.files for chunk in file.sized_chunks()) == decoded.size


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.one_of(st.binary(max_size=200), JSON.map(msgspec.json.encode)))
def test_any_bytes_are_a_manifest_or_invalid(encoded: bytes) -> None:
    with pytest.raises(StrataError) as refused:
        decode_manifest(encoded, LIMITS)
    assert refused.value.code is Code.INVALID


@given(manifests(), st.data())
def test_a_manifest_with_anything_put_into_it_is_checked_or_invalid(
    manifest: ArtifactManifest, data: st.DataObject
) -> None:
    plain = msgspec.json.decode(manifest.encode())
    file = data.draw(st.sampled_from(plain["files"]))
    file[data.draw(st.sampled_from(["path", "size", "sha256", "chunks", "mode", "other"]))] = data.draw(JSON)
    encoded = msgspec.json.encode(plain)
    if (code := refusal_of(lambda: decode_manifest(encoded, LIMITS))) is not None:
        assert code is Code.INVALID
        return
    for each in decode_manifest(encoded, LIMITS).files:
        check_path(each.path)
        assert len(each.chunks) == -(-each.size // CHUNK_BYTES)


@pytest.mark.parametrize(
    "change",
    [
        {"metrics": {"a": float("nan")}}, {"metrics": {"a": float("inf")}}, {"model": "a\0"}, {"model": "x" * 300},
        {"parents": ["x"]}, {"kind": "other"}, {"epoch": -1}, {"surprise": 1},
        {"metrics": {str(number): 1.0 for number in range(1001)}},
    ],
)  # fmt: skip
def test_a_lineage_that_could_not_be_stored_or_compared_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "result", **change}, Lineage)


def test_the_same_lineage_has_the_same_id_whatever_the_order_of_its_metrics() -> None:
    one = Lineage(kind=ArtifactKind.RESULT, metrics={"a": 1.0, "b": 2.0})
    two = Lineage(kind=ArtifactKind.RESULT, metrics={"b": 2.0, "a": 1.0})
    assert one.id_for("artifact1_x") == two.id_for("artifact1_x") != one.id_for("artifact1_y")
