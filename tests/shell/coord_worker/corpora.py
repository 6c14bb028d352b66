"""The same samples in every format, on disk and in a bucket."""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import obstore
import pyarrow as pa  # type: ignore[import-untyped]
from pyarrow import parquet

from strata.base.settings import Secret
from strata.coord.core.facts import DataFile, Dataset
from strata.coord.pb import coordinator_pb2 as pb
from strata.coord.server.wire import slices
from strata.coord.worker.stores import S3Settings
from tests.support.s3 import S3Server

SUFFIXES: Final = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz", ".tar")
LOCAL_SUFFIXES: Final = (*SUFFIXES, ".arrow")
SCHEMA: Final = pa.schema([("number", pa.int64()), ("text", pa.string())])


def write(path: Path, texts: Sequence[str], rows_in_group: int = 4, end: str = "\n") -> list[Any]:
    """A file with these texts as samples; what they are when they are read. `end` ends the last line."""
    rows: list[Any] = [{"number": number, "text": text} for number, text in enumerate(texts)]
    match path.suffixes[0]:
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows, SCHEMA), path, row_group_size=rows_in_group)
            return rows
        case ".arrow":
            # Half of them as a stream, as Hugging Face `datasets` writes them.
            kind = pa.ipc.new_stream if len(texts) % 2 else pa.ipc.new_file
            with kind(path, SCHEMA) as writer:
                writer.write_table(pa.Table.from_pylist(rows, SCHEMA), rows_in_group)
            return rows
        case ".tar":
            return _write_tar(path, texts)
        case ".jsonl":
            samples, lines = rows, [json.dumps(each, ensure_ascii=False) for each in rows]
        case _:
            samples, lines = list(texts), list(texts)
    content = ("\n".join(lines) + (end if lines else "")).encode()
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return samples


def _write_tar(path: Path, texts: Sequence[str]) -> list[Any]:
    """By GNU tar, as WebDataset has samples; some names are too long for a plain header, and one file is of none."""
    folder = path.with_name(f"{path.name}.files")
    folder.mkdir()
    long = "x" * 120
    samples, names = [], []
    for number, text in enumerate(texts):
        key = f"./{long}/{number:04}" if number % 3 else f"{number:04}"
        sample: dict[str, Any] = {"__key__": key, "txt": text.encode(), "seg.json": str(number).encode()}
        for field in ("TXT", "seg.json"):
            file = folder / f"{key}.{field}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(sample[field.lower()])
            names.append(f"{key}.{field}")
        samples.append(sample)
    (folder / "README").write_text("of no sample", encoding="utf-8")
    kind = "gnu" if len(texts) % 2 else "pax"
    command = ["tar", f"--format={kind}", "-C", str(folder), "-cf", str(path), "README", *names]
    subprocess.run(command, check=True)
    return samples


def upload(server: S3Server, bucket: str, path: Path) -> str:
    obstore.put(server.store(bucket), f"corpus/{path.name}", path.read_bytes())
    return f"s3://{bucket}/corpus/{path.name}"


def settings(server: S3Server, **other: Any) -> S3Settings:
    given = {"access_key": server.access_key, "secret_key": Secret(server.secret_key), "retries": 1, **other}
    return S3Settings(endpoint=server.endpoint, region=server.region, **given)


def cut(files: Iterable[tuple[str, int]], cuts: Sequence[int]) -> list[list[pb.FileSlice]]:
    """Shards between the cuts, as the coordinator maps them to files."""
    defined = tuple(DataFile(path, samples) for path, samples in files)
    ends: list[int] = []
    for each in defined:
        ends.append((ends[-1] if ends else 0) + each.samples)
    dataset = Dataset(dataset_id="d", files=defined, samples=ends[-1], shard_size=1)
    return [slices(dataset, ends, start, end) for start, end in pairwise(cuts)]
