"""The example programs in both languages, side by side on one dataset; and what happens where no compiler is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from strata.coord.core.facts import WorkerJoined
from tests.conformance.coordinator import drivers
from tests.conformance.coordinator.fleet import MARKS
from tests.shell.coord_worker.running import Site, acked, every_sample, every_word, site

pytestmark = MARKS

Commands = Mapping[str, Sequence[str]]
COUNT_WORDS = drivers.ROOT / "examples" / "count_words" / "count_words.py"


async def run(found: Site, name: str, command: Sequence[str]) -> str:
    """What a program says, once it has ended well."""
    environ = {
        "PATH": os.defpath,
        **drivers.SANITIZER,
        "STRATA_WORKER_ADDRESS": found.coordinator.address,
        "STRATA_WORKER_ID": name,
        "STRATA_WORKER_PATIENCE_S": "20",
    }
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def counted(found: Site, out: Path) -> Counter[str]:
    """The words of the shards that count, by the journal."""
    _, complete = acked(await found.facts())
    words: Counter[str] = Counter()
    for file in out.iterdir():
        if int(file.stem.partition("-")[2]) in complete:
            words.update(json.loads(file.read_text(encoding="utf-8")))
    return words


async def test_programs_of_two_languages_count_every_word_once(tmp_path: Path, commands: Commands) -> None:
    out = tmp_path / "counts"
    async with site(tmp_path, min_workers="2") as found:
        arguments = ["--out", str(out), "--epochs", "2", "--shard-size", "7", *found.corpus(2_000)]
        said = await asyncio.gather(
            run(found, "in-python", [sys.executable, str(COUNT_WORDS), *arguments]),
            run(found, "in-cpp", [commands["cpp"][0], *arguments]),
        )
        print(*said)
        assert await counted(found, out) == every_word(2, 2_000)
        facts = await found.facts()
        assert acked(facts)[0] == every_sample(2, 2_000)
        assert {fact.worker.worker_id for fact in facts if isinstance(fact, WorkerJoined)} == {"in-python", "in-cpp"}
        assert all(int(each.split()[3]) > 0 for each in said)


async def test_the_program_in_cpp_counts_a_field_of_json_lines(tmp_path: Path, commands: Commands) -> None:
    out = tmp_path / "counts"
    file = tmp_path / "texts.jsonl"
    file.write_text('{"body": "one two"}\n{"body": "two\\u00a0größer", "text": "no"}', encoding="utf-8")
    async with site(tmp_path) as found:
        await run(found, "w", [commands["cpp"][0], "--out", str(out), "--field", "body", str(file)])
        assert await counted(found, out) == {"one": 1, "two": 1, "two\u00a0größer": 1}


async def test_without_a_compiler_the_packages_to_install_are_named(tmp_path: Path) -> None:
    with pytest.raises(drivers.NotBuiltError) as caught:
        drivers.build_cpp(search=str(tmp_path))
    assert "no g++, cmake, make, pkg-config, protoc, grpc_cpp_plugin here" in str(caught.value)
    assert f"apt-get install -y --no-install-recommends {drivers.PACKAGES}" in str(caught.value)


async def test_a_suite_of_one_language_needs_no_compiler_of_another(tmp_path: Path) -> None:
    commands = drivers.DriverCommands(("python", "cpp"), search=str(tmp_path))
    assert commands["python"] == drivers.command_of("python")
    with pytest.raises(pytest.fail.Exception, match="run: apt-get install"):
        commands["cpp"]
