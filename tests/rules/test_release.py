"""What scripts/release.py makes of the documents, and what the workflows may do. The whole script needs an index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml  # type: ignore[import-untyped]

from scripts.release import by_name, checklist, documents, steps_of

ROOT: Final = Path(__file__).parents[2]
WORKFLOWS: Final = ROOT / ".github" / "workflows"
PINNED: Final = re.compile(r"- uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
BY_NAME: Final = re.compile(r"(?:pip install|uv tool install|uvx)[^`\n]*(?<!-)\bstrata-train\b")
FROM_CLONE: Final = re.compile(
    r"(?i)pip install[^`\n]*[ ']\.(?:[\[' ]|$)|in a clone[^`\n]*`pip|release on PyPI|not on PyPI"
)
"""Of an installation; `git clone` alone also stands where examples are used."""
FOR_TAGS: Final = "github.ref_type == 'tag'"


def workflow(name: str) -> dict[Any, Any]:
    loaded = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def jobs(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from workflow(name)["jobs"].items()


def test_a_release_installs_by_name_what_a_clone_installs_by_path() -> None:
    text = (
        "Linux.\n<!-- install -->\nIn a clone, until then:\n\n```sh\ngit clone URL strata && cd strata\n"
        "pip install '.[hub]' torch==2.13.0\nstrata up\n```\n\nIn a clone `pip install '.[hub,sdk]'`, or `.[x]`.\n"
        "- old. <!-- until release -->\n```sh\npip install '.[train]'\n```\n"
    )
    assert by_name(text) == (
        "Linux.\n```sh\npip install 'strata-train[hub]' torch==2.13.0\nstrata up\n```\n\n"
        "`pip install 'strata-train[hub,sdk]'`, or `.[x]`.\n```sh\npip install 'strata-train[train]'\n```\n"
    )


def test_a_block_of_nothing_but_the_clone_is_left_out() -> None:
    text = "a\n\n<!-- install -->\nBuild it:\n\n```sh\ngit clone URL strata\nexport PIP_FIND_LINKS=dist\n```\n\nb\n"
    assert by_name(text) == "a\n\nb\n"


@pytest.mark.parametrize("page", documents(ROOT), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_document_installs_from_a_clone_now_and_by_name_in_a_release(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert BY_NAME.findall(text) == [], "write '.[hub]': the build of a release makes it 'strata-train[hub]'"
    assert FROM_CLONE.findall(by_name(text)) == []


def test_every_action_is_pinned_by_its_commit() -> None:
    lines = [line.strip() for file in WORKFLOWS.glob("*.yml") for line in file.read_text("utf-8").splitlines()]
    uses = [line for line in lines if "uses:" in line and not line.startswith("#")]
    assert uses
    assert [line for line in uses if not PINNED.fullmatch(line)] == []


def test_the_release_starts_for_a_tag_or_by_hand_and_writes_for_tags_only() -> None:
    # YAML 1.1 reads the key `on` as true.
    assert workflow("release.yml")[True] == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    assert workflow("release.yml")["permissions"] == {}
    writers = {name: job for name, job in jobs("release.yml") if "write" in job["permissions"].values()}
    assert {name for name, job in writers.items() if job.get("if") != FOR_TAGS} == set()
    assert {
        step["uses"] for job in writers.values() for step in job["steps"] if "checkout" in step.get("uses", "")
    } == set()
    assert writers["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text(encoding="utf-8")


def test_the_workflow_tries_every_line_of_the_checklist() -> None:
    tried: list[str] = []
    for _, job in jobs("release.yml"):
        series = job.get("strategy", {}).get("matrix", {}).get("python", [])
        for step in job["steps"]:
            _, called, names = step.get("run", "").partition("scripts/release.py --only ")
            if called:
                tried += series if names == '"$SERIES"' else names.split()
    assert sorted(steps_of(tried)) == sorted(checklist())


def test_every_image_of_the_workflow_is_a_stage_of_the_containerfile() -> None:
    stages = re.findall(r"(?m)^FROM \S+ AS (\S+)$", (ROOT / "Containerfile").read_text(encoding="utf-8"))
    targets = [job["strategy"]["matrix"]["target"] for name, job in jobs("release.yml") if "image" in name]
    assert len(targets) == 2
    assert targets[0] == targets[1]
    assert set(targets[0]) <= set(stages)
