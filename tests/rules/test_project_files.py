"""Tracked files say nothing about the machine they were written on, and the license is where tools look for it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SKIPPED: Final = {"LICENSE"}

_MACHINE: Final = re.compile(
    r"(?<![\w.$}])/(?:work|root)(?:/|\b(?![\w-]))"  # absolute paths, not `net/work` or `$ROOT/root.pem`
    r"|(?<![\w.$}])/home/\w+/"
    r"|\bfiles\.pythonhosted\.org\b|\bpypi\.org/simple\b|\bregistry\.npmjs\.org\b|\bdeb\.debian\.org\b"
    r"|https?://[\w.-]*(?:artifactory|nexus|mirror|proxy)[\w.-]*[:/]"
)
_PARTS: Final = (
    "/work", "/root", "/home/", ".pythonhosted.", "pypi.org", "npmjs", "debian.org", "artifactory", "nexus", "mirror",
    "proxy",
)  # fmt: skip
"""Each match of the pattern has one of these."""


def machine_words(text: str) -> list[str]:
    # A search for each of these alone takes a tenth of the time, and few files have one.
    if not any(word in text for word in _PARTS):
        return []
    return [match[0] for match in _MACHINE.finditer(text)]


def tracked() -> list[Path]:
    """What is or could be committed; new files count before they are added."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [file for file in files if file.is_file() and str(file.relative_to(ROOT)) not in SKIPPED]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    found = {}
    for file in tracked():
        if file == Path(__file__):
            continue
        words = machine_words(file.read_bytes().decode("utf-8", errors="replace"))
        if words:
            found[str(file.relative_to(ROOT))] = words
    assert found == {}


def test_the_license_is_apache_and_the_metadata_says_so() -> None:
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "Apache License" in license_text
    assert "Version 2.0, January 2004" in license_text
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]
    assert not [line for line in project["classifiers"] if line.startswith("License ::")]


@pytest.mark.parametrize(
    "text",
    [
        "cd /work/main",
        "HOME=/root",
        "open('/root/.cache')",
        "/home/someone/strata",
        "https://files.pythonhosted.org/packages/x",
        "--index-url http://mirror.example:3141/simple",
    ],
)
def test_words_about_a_machine_are_found(text: str) -> None:
    assert machine_words(text)


@pytest.mark.parametrize("text", ["src/work/job.py", "the root/leaf order", "$DIR/root/x", "./work/", "/workers/7"])
def test_words_that_only_resemble_a_path_pass(text: str) -> None:
    assert machine_words(text) == []
