"""Reads rows from JSONL, JSON, Parquet and Arrow files, local, `s3://` or `hf://`: formats, splits, choice of files,
errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError

Row = Mapping[str, Any]
FetchObject = Callable[[str], bytes]
"""The content of `s3://BUCKET/KEY`."""
HUB: Final = "hf://"
STORE: Final = "s3://"
FORMATS: Final = (".jsonl", ".json", ".parquet", ".arrow")
_SPLITS: Final = frozenset({"train", "test", "validation", "valid", "dev", "eval"})
_WORD: Final = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class RowSet:
    rows: Sequence[Row]
    digest: str
    """The digest of the rows, whatever files they came from."""


def read_rows(source: str, split: str, folder: Path, fetch_object: FetchObject) -> RowSet:
    """All rows of the split of a source. A relative path counts from `folder`."""
    if source.startswith(STORE):
        rows = list(_decode(fetch_object(source), source))
    elif source.startswith(HUB):
        rows = _read_folder(_fetch_dataset(parse_dataset(source)), split)
    else:
        path = folder / Path(source).expanduser()
        if not path.exists():
            raise StrataError(Code.NOT_FOUND, f"there is no {path}", hint="data.path counts from the recipe's folder")
        rows = _read_folder(path, split) if path.is_dir() else list(_decode(path.read_bytes(), str(path)))
    if not rows:
        raise StrataError(Code.INVALID, f"{source} has no rows")
    return RowSet(rows, sha256_hex(msgspec.json.encode(rows, order="deterministic")))


def choose_files(names: Sequence[str], split: str) -> list[str]:
    """The files of a split, by a part of their paths that names it; all files where no path names a split."""
    words = {name: set(_WORD.findall(name.lower())) for name in names if Path(name).suffix.lower() in FORMATS}
    chosen = sorted(name for name, found in words.items() if split.lower() in found)
    named = any(found & _SPLITS for found in words.values())
    return chosen if chosen or named else sorted(words)


def require_one_dataset(folder: Path, names: Sequence[str], split: str) -> None:
    """INVALID if the files are in several folders or formats: those are configurations, or copies, of a dataset."""
    groups = sorted({f"{Path(name).parent}/*{Path(name).suffix.lower()}".removeprefix("./") for name in names})
    if len(groups) > 1:
        listed = ", ".join(groups[:8]) + (", …" if len(groups) > 8 else "")
        raise StrataError(
            Code.INVALID,
            f"{folder} has files of the split {split!r} in several folders or formats: {listed}",
            hint="name one of the folders or files: data.path = FOLDER/SUBFOLDER, or hf://OWNER/NAME/SUBFOLDER",
        )


def _read_folder(folder: Path, split: str) -> list[Row]:
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    # What `datasets` writes beside its data.
    names = [name for name in names if Path(name).name not in ("dataset_info.json", "state.json", "dataset_dict.json")]
    chosen = choose_files(names, split)
    if not chosen:
        listed = ", ".join(sorted(names)[:8]) or "no files"
        raise StrataError(Code.NOT_FOUND, f"{folder} has no files of the split {split!r}", hint=f"it has {listed}")
    require_one_dataset(folder, chosen, split)
    return [row for name in chosen for row in _decode((folder / name).read_bytes(), str(folder / name))]


@dataclass(frozen=True)
class HubDataset:
    repository: str
    revision: str
    """Empty for the newest."""
    subfolder: str
    """Empty for all of its files."""


def parse_dataset(source: str) -> HubDataset:
    """`hf://OWNER/NAME`, with `/SUBFOLDER` and `@REVISION` where they are there."""
    path, _, revision = source.removeprefix(HUB).partition("@")
    owner, name, subfolder = [*path.strip("/").split("/", 2), "", ""][:3]
    return HubDataset(f"{owner}/{name}".rstrip("/"), revision, subfolder)


def _fetch_dataset(dataset: HubDataset) -> Path:
    """The files of a dataset on the Hub, in the local cache. With HF_HUB_OFFLINE=1 only the cache is used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    below = f"{dataset.subfolder}/" if dataset.subfolder else ""
    try:
        snapshot = snapshot_download(
            dataset.repository,
            repo_type="dataset",
            revision=dataset.revision or None,
            allow_patterns=[f"{below}*{suffix}" for suffix in FORMATS],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise StrataError(Code.UNAVAILABLE, f"cannot fetch the dataset {dataset.repository}: {reason}") from error
    folder = Path(snapshot) / dataset.subfolder
    if not folder.is_dir():
        raise StrataError(Code.NOT_FOUND, f"the dataset {dataset.repository} has no folder {dataset.subfolder!r}")
    return folder


def _decode(content: bytes, source: str) -> Iterator[Row]:
    suffix = Path(source).suffix.lower()
    if suffix in (".parquet", ".arrow"):
        yield from _decode_table(content, source, suffix)
    elif suffix == ".json" and content.lstrip()[:1] == b"[":
        yield from _decode_array(content, source)
    elif suffix in (".json", ".jsonl"):
        yield from _decode_lines(content, source)
    else:
        raise StrataError(Code.INVALID, f"cannot read {source}", hint=f"a file of data ends with {', '.join(FORMATS)}")


def _decode_lines(content: bytes, source: str) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise StrataError(Code.INVALID, f"{source}:{number}: not a JSON object: {error}") from error


def _decode_array(content: bytes, source: str) -> list[Row]:
    try:
        rows: list[Row] = msgspec.json.decode(content, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StrataError(Code.INVALID, f"{source}: not an array of JSON objects: {error}") from error
    return rows


def _decode_table(content: bytes, source: str, suffix: str) -> list[Row]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import ipc, parquet

    try:
        if suffix == ".parquet":
            table = parquet.read_table(pyarrow.BufferReader(content))
        else:
            table = ipc.open_stream(pyarrow.BufferReader(content)).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise StrataError(Code.CORRUPT, f"{source} cannot be read: {reason}") from error
    rows: list[Row] = table.to_pylist()
    return rows
