"""A folder becomes the same bytes on every machine, and carries no caches, environments or credentials."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.base.errors import StrataError
from strata.sdk import bundle as bundling
from strata.sdk.bundle import make_bundle

pytestmark = pytest.mark.proves("Never again: `.gitignore` dropped files that git keeps")


def files(folder: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(make_bundle(folder).content)) as tar:
        return tar.getnames()


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_times_owners_and_the_order_of_creation_make_no_difference(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", "a.py", "b/c.py", "d.py")
    other = fill(tmp_path / "other", "d.py", "b/c.py", "a.py")
    os.utime(other / "a.py", (1, 1))
    (other / "d.py").chmod(0o600)
    assert make_bundle(one) == make_bundle(other)
    (other / "d.py").chmod(0o700)
    assert make_bundle(one) != make_bundle(other)


def test_caches_environments_and_credentials_stay_here(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", ".git/config", "__pycache__/x.pyc", "old.pyc", ".env", "mine/pyvenv.cfg", "mine/bin/x")
    fill(tmp_path, "hub/operator.token", "hub/hub.db", "agent/identity/hub.json", "conf/contexts.json", "conf/tokens/t")
    assert files(tmp_path) == ["train.py"]


def test_an_ignore_file_names_files_globs_folders_and_paths(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "data/x.csv", "deep/data/y.csv", "notes.txt", "deep/keep.txt", "out/a", "deep/out/b")
    (tmp_path / ".strataignore").write_text("# comment\ndata/\n/notes.txt\n/out\n")
    (tmp_path / ".gitignore").write_text("train.py\n")
    assert files(tmp_path) == [".gitignore", ".strataignore", "deep/keep.txt", "deep/out/b", "train.py"]


def git(folder: Path, *words: str) -> str:
    environ = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}  # noqa: TID251
    done = subprocess.run(["git", *words], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return done.stdout


def listed_by_git(folder: Path) -> list[str]:
    listed = git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--cached")
    return sorted(name for name in listed.split("\0") if name)


def sent(folder: Path) -> list[str]:
    try:
        return files(folder)
    except StrataError as error:
        if "has no file to run" in error.message:
            return []
        raise


TREE = (
    "train.py", "notes.txt", "doc/a.txt", "doc/sub/a.txt", "logs/x.log", "logs/deep/y.log", "a/b", "a/x/b", "a/x/y/b",
    "tmp/one", "src/tmp/two", "src/keep.log", "src/other.log", "#hash", "!bang", "space ", "build/out.o",
    "build/keep.me", "src/build/out.o", "star*.txt", "[odd].txt",
)  # fmt: skip


@pytest.mark.parametrize(
    "lines",
    [
        ["doc/*.txt"],
        ["logs/**"],
        ["**/tmp"],
        ["a/**/b"],
        ["**/x/"],
        ["*.log", "!keep.log"],
        ["build/", "!build/keep.me"],
        ["build/*", "!build/keep.me"],
        ["/*", "!/src", "!/train.py"],
        ["*", "!*/", "!*.py"],
        ["\\#hash", "\\!bang", "space\\ "],
        ["space "],
        ["# comment", "", "notes.txt   "],
        ["star\\*.txt", "\\[odd].txt"],
        ["[!a-z]*.txt"],
        ["/tmp"],
        ["src/tmp"],
        ["tmp/", "!src/tmp/"],
        ["!"],
        ["doc/sub/", "a/x"],
        ["notes.txt\r", "train.p?\r"],
        ["*.t[xy]t", "!doc/a.txt"],
    ],
)
def test_an_ignore_file_means_what_git_takes_it_for(tmp_path: Path, lines: list[str]) -> None:
    fill(tmp_path, *TREE)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("\n".join(lines) + "\n", newline="")
    assert sent(tmp_path) == listed_by_git(tmp_path)


def test_nested_ignore_files_and_the_exclude_file_of_the_repository_count(tmp_path: Path) -> None:
    fill(tmp_path, *TREE)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".git" / "info").mkdir(exist_ok=True)
    (tmp_path / ".git" / "info" / "exclude").write_text("notes.txt\ntrain.py\n")
    (tmp_path / ".gitignore").write_text("*.log\n!train.py\n")
    (tmp_path / "src" / ".gitignore").write_text("!keep.log\n/build\n")
    (tmp_path / "doc" / ".gitignore").write_text("/a.txt\n")
    assert sent(tmp_path) == listed_by_git(tmp_path)
    assert {"train.py", "src/keep.log", "doc/sub/a.txt"} <= set(sent(tmp_path))
    assert not {"notes.txt", "doc/a.txt", "src/build/out.o"} & set(sent(tmp_path))


def test_a_folder_of_a_repository_keeps_the_rules_of_the_folders_above(tmp_path: Path) -> None:
    fill(tmp_path, *TREE)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("*.log\n/src/tmp\n")
    assert sent(tmp_path / "src") == listed_by_git(tmp_path / "src") == ["build/out.o"]


def test_a_folder_that_its_repository_ignores_is_sent_by_itself(tmp_path: Path) -> None:
    fill(tmp_path, *TREE)
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("build/\n*.me\n")
    assert sent(tmp_path / "build") == ["keep.me", "out.o"]


def test_a_second_work_tree_has_the_exclude_file_of_the_repository(tmp_path: Path) -> None:
    main = fill(tmp_path / "main", "train.py")
    git(main, "init", "--quiet")
    git(main, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "x")
    git(main, "worktree", "add", "--quiet", str(tmp_path / "second"))
    (main / ".git" / "info").mkdir(exist_ok=True)
    (main / ".git" / "info" / "exclude").write_text("notes.txt\n")
    fill(tmp_path / "second", "notes.txt", "train.py")
    assert sent(tmp_path / "second") == listed_by_git(tmp_path / "second") == ["train.py"]


def test_a_strataignore_stands_in_for_all_of_them_and_knows_the_same_patterns(tmp_path: Path) -> None:
    fill(tmp_path, "train.py", "data/x.csv", "data/keep.csv", "a/x/b")
    (tmp_path / ".gitignore").write_text("train.py\n")
    (tmp_path / "a" / ".gitignore").write_text("*\n")
    (tmp_path / ".strataignore").write_text("data/*\n!data/keep.csv\na/**/b\n.*\n")
    assert files(tmp_path) == ["data/keep.csv", "train.py"]


PARTS = st.sampled_from(["a", "b", "*", "**", "?", "a*", "[ab]", "*.x", "a.x", "\\a", "[!a]"])
PATTERNS = st.builds(
    lambda bang, first, parts, last: f"{bang}{first}{'/'.join(parts)}{last}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(PARTS, min_size=1, max_size=3),
    st.sampled_from(["", "", "/"]),
)
NAMES = ("a", "b", "a.x")
PATHS = [*NAMES, *(f"{one}d/{two}" for one in NAMES for two in NAMES)]
PATHS += [f"{one}d/{two}d/{three}" for one in NAMES for two in NAMES for three in NAMES]
DEEP = tuple(path.replace("d/", "/") for path in PATHS if path.count("/") == 2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(top=st.lists(PATTERNS, max_size=4), below=st.lists(PATTERNS, max_size=3))
def test_whatever_ignore_files_say_git_lists_the_same(
    tmp_path_factory: pytest.TempPathFactory, top: list[str], below: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    fill(folder, *DEEP)
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("\n".join(top) + "\n")
    (folder / "a" / ".gitignore").write_text("\n".join(below) + "\n")
    assert sent(folder) == listed_by_git(folder), (top, below)


def test_a_link_out_of_the_folder_is_left_out_and_one_inside_is_kept(tmp_path: Path) -> None:
    inside = fill(tmp_path / "project", "real.py")
    fill(tmp_path, "secret.txt")
    (inside / "alias.py").symlink_to(inside / "real.py")
    (inside / "leak.txt").symlink_to(tmp_path / "secret.txt")
    assert files(inside) == ["alias.py", "real.py"]
    with tarfile.open(fileobj=io.BytesIO(make_bundle(inside).content)) as tar:
        assert tar.getmember("alias.py").linkname == "real.py"


def test_a_folder_of_data_is_refused_with_the_name_of_the_largest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "train.py")
    (tmp_path / "huge.bin").write_bytes(bytes(4096))
    monkeypatch.setattr(bundling, "MAX_BYTES", 4096)
    with pytest.raises(StrataError, match=r"name what is not code in .strataignore; the largest is huge.bin"):
        make_bundle(tmp_path)
