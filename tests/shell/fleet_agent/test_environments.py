"""Environments that a host builds with uv: from requirements, a lock file and a project, once for each content."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from strata.base.errors import Code, StrataError
from strata.fleet.agent import host_cache
from strata.fleet.agent.attempt_folder import find_job_user
from strata.fleet.agent.environment_cache import EnvironmentCache, JobEnvironment, provide_environment
from strata.fleet.agent.host_cache import CacheEntry, HostCache
from strata.fleet.agent.path_names import PathName
from strata.fleet.agent.uv import build_variables
from strata.fleet.core.jobspec import EnvironmentSpec
from tests.shell.fleet_agent.waiting import eventually
from tests.support.wheels import make_sdist, make_wheel

UV = Path(sys.executable).with_name("uv")
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    make_wheel(folder, "greeting", "1.0", "TEXT = 'hello'\n")
    make_wheel(folder, "greeting", "2.0", "TEXT = 'hello again'\n")
    return folder


def offline(wheels: Path) -> dict[str, str]:
    return {"UV_OFFLINE": "1", "UV_FIND_LINKS": str(wheels), "PATH": os.environ["PATH"]}  # noqa: TID251 - of the test


def a_cache(tmp_path: Path, wheels: Path, **changes: Any) -> EnvironmentCache:
    entries = HostCache(tmp_path / "environments", tmp_path / "attempts", changes.pop("max_bytes", 1 << 30))
    values: dict[str, Any] = {
        "entries": entries,
        "program": str(UV),
        "interpreter": sys.executable,
        "variables": offline(wheels),
        "job_user": None,
    }
    return EnvironmentCache(**values | changes)


def a_source(tmp_path: Path, name: str = "source", **files: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    for file, text in files.items():
        (folder / file.replace("_", ".", 1)).write_text(text)
    return folder


def provide(cache: EnvironmentCache, source: Path, file: str, key: str = "a", **more: Any) -> JobEnvironment:
    (cache.entries.attempts / key).mkdir(parents=True, exist_ok=True)
    return provide_environment(cache, EnvironmentSpec(file=file, **more), source, PathName(key))


def says(environment: JobEnvironment, program: str) -> str:
    python = Path(environment.path) / "bin" / "python"
    done = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_requirements_are_installed_once_and_again_when_they_change(tmp_path: Path, wheels: Path) -> None:
    cache = a_cache(tmp_path, wheels)
    source = a_source(tmp_path, requirements_txt="greeting==1.0\n")
    first = provide(cache, source, "requirements.txt")
    assert says(first, "import greeting; print(greeting.TEXT)") == "hello"
    assert (first.facts["cached"], first.facts["packages"]) == (False, ["greeting==1.0"])
    second = provide(cache, source, "requirements.txt", "b")
    assert (second.path, second.facts["cached"]) == (first.path, True)
    (source / "requirements.txt").write_text("greeting==2.0\n")
    third = provide(cache, source, "requirements.txt", "c")
    assert says(third, "import greeting; print(greeting.TEXT)") == "hello again"
    assert third.path != first.path


def test_a_trainer_in_an_environment_can_import_the_helpers_of_trainers(tmp_path: Path, wheels: Path) -> None:
    made = provide(a_cache(tmp_path, wheels), a_source(tmp_path, requirements_txt=""), "requirements.txt")
    program = "import strata.fleet.trainer as t; t.report(loss=1.0); print('ok')"
    assert says(made, program) == "ok"


def test_a_lock_file_is_installed_as_it_is_locked(tmp_path: Path, wheels: Path) -> None:
    project = '[project]\nname = "mine"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = ["greeting<2"]\n'
    source = a_source(tmp_path, pyproject_toml=project)
    subprocess.run([UV, "lock", "--quiet"], cwd=source, env=offline(wheels), check=True)
    cache = a_cache(tmp_path, wheels)
    locked = provide(cache, source, "uv.lock")
    assert locked.facts["packages"] == ["greeting==1.0"]
    (source / "pyproject.toml").write_text(project.replace("greeting<2", "greeting"))
    assert provide(cache, source, "pyproject.toml", "b").facts["packages"] == ["greeting==2.0"]


def test_a_failed_build_says_what_uv_said_and_leaves_nothing(tmp_path: Path, wheels: Path) -> None:
    index = {"UV_INDEX_URL": "https://person:secret@127.0.0.1:1/simple", "UV_HTTP_RETRIES": "0"}
    cache = a_cache(tmp_path, wheels, variables=index)
    with pytest.raises(StrataError) as raised:
        provide(cache, a_source(tmp_path, requirements_txt="nosuchpackage\n"), "requirements.txt")
    assert raised.value.code is Code.PRECONDITION
    assert "nosuchpackage" in raised.value.message
    assert "secret" not in raised.value.message
    assert [each for each in cache.entries.folder.iterdir() if each.is_dir()] == []


def test_without_namespaces_no_code_of_a_package_runs_unless_the_host_allows_it(tmp_path: Path) -> None:
    packages, ran = tmp_path / "packages", tmp_path / "ran"
    make_sdist(packages, "built", "1.0", f"open({str(ran)!r}, 'w').close()\nTEXT = 'built'\n")
    wheel = make_wheel(packages, "starts", "1.0", "")
    with zipfile.ZipFile(wheel, "a") as content:
        content.writestr("starts.pth", f"import os; os.mkdir({str(tmp_path / 'started')!r})\n")
    cache = a_cache(tmp_path, packages)
    made = provide(cache, a_source(tmp_path, "wheel", requirements_txt="starts\n"), "requirements.txt")
    assert made.facts["packages"] == ["starts==1.0"]
    assert not (tmp_path / "started").exists(), "a wheel ran code while it was installed"
    for name, text in {"plain": "built\n", "own": "--no-binary :all:\nbuilt\n", "place": "-e .\nbuilt\n"}.items():
        with pytest.raises(StrataError, match="this host installs wheels only") as raised:
            provide(cache, a_source(tmp_path, name, requirements_txt=text), "requirements.txt")
        assert raised.value.code is Code.PRECONDITION
        assert "agent.environments.allow_builds" in raised.value.message
    assert not ran.exists()
    allowed = a_cache(tmp_path, packages, allow_builds=True)
    built = provide(allowed, tmp_path / "plain", "requirements.txt")
    assert (ran.exists(), says(built, "import built; print(built.TEXT)")) == (True, "built")


@pytest.mark.parametrize("file", ["requirements.txt", "uv.lock"])
def test_a_file_that_the_source_does_not_have_is_named(tmp_path: Path, wheels: Path, file: str) -> None:
    with pytest.raises(StrataError, match=f"the source has no file {file}"):
        provide(a_cache(tmp_path, wheels), a_source(tmp_path), file)


def test_attempts_at_once_build_it_once(tmp_path: Path, wheels: Path) -> None:
    cache, source = a_cache(tmp_path, wheels), a_source(tmp_path, requirements_txt="greeting\n")
    made: list[JobEnvironment] = []
    threads = [
        threading.Thread(target=lambda key=key: made.append(provide(cache, source, "requirements.txt", key)))
        for key in ("a", "b", "c", "d")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.facts["cached"] for each in made) == [False, True, True, True]


def test_eviction_takes_the_least_recently_used_and_never_one_in_use(tmp_path: Path, wheels: Path) -> None:
    cache = a_cache(tmp_path, wheels, max_bytes=1)
    one = a_source(tmp_path, "one", requirements_txt="greeting==1.0\n")
    two = a_source(tmp_path, "two", requirements_txt="greeting==2.0\n")
    old, new = (Path(provide(cache, each, "requirements.txt", each.name).path) for each in (one, two))
    now_s = new.parent.stat().st_mtime
    cache.entries.evict(now_s)
    assert old.exists()
    assert new.exists()
    (cache.entries.attempts / "one").rmdir()
    cache.entries.evict(now_s)
    assert (old.exists(), new.exists()) == (False, True)
    (cache.entries.attempts / "two").rmdir()
    roomy = a_cache(tmp_path, wheels)
    roomy.entries.evict(now_s)
    assert new.exists()
    roomy.entries.evict(now_s + host_cache.MAX_IDLE_S + 60)
    assert not new.exists()


def test_the_size_of_a_cache_counts_its_entries_and_not_their_locks(tmp_path: Path) -> None:
    cache = HostCache(tmp_path / "data", tmp_path / "attempts", 1 << 30)
    assert cache.size_bytes() == 0
    cache.provide(PathName("one"), PathName("a"), lambda _: CacheEntry(size_bytes=5), lambda: True)
    assert (cache.folder / "one.lock").is_file()
    assert cache.size_bytes() == 5


def slow_uv(tmp_path: Path) -> str:
    """A uv that writes its process id to `uv.pid` and sleeps, as a long download does."""
    program = tmp_path / "uv"
    pid = tmp_path / "uv.pid"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}\nexec sleep 300\n")
    program.chmod(0o755)
    return str(program)


def uv_has_ended(tmp_path: Path) -> bool:
    return not Path(f"/proc/{(tmp_path / 'uv.pid').read_text().strip()}").exists()


def test_a_stopped_attempt_ends_its_build(tmp_path: Path, wheels: Path) -> None:
    cache = a_cache(tmp_path, wheels, program=slow_uv(tmp_path))
    source, spec = a_source(tmp_path, requirements_txt="greeting\n"), EnvironmentSpec(file="requirements.txt")
    with pytest.raises(StrataError) as raised:
        provide_environment(cache, spec, source, PathName("a"), lambda: not (tmp_path / "uv.pid").exists())
    assert raised.value.code is Code.STALE
    eventually(lambda: uv_has_ended(tmp_path))
    assert [each for each in cache.entries.folder.iterdir() if each.is_dir()] == []


BUILDER: Final = """\
import sys
from pathlib import Path
from strata.fleet.agent.environment_cache import EnvironmentCache, provide_environment
from strata.fleet.agent.host_cache import HostCache
from strata.fleet.core.jobspec import EnvironmentSpec
folder, attempts, program, interpreter, source = sys.argv[1:]
cache = EnvironmentCache(HostCache(Path(folder), Path(attempts), 1), program, interpreter, {}, None)
provide_environment(cache, EnvironmentSpec(file="requirements.txt"), Path(source), "a")
"""


def test_what_an_agent_that_was_killed_left_half_is_never_used(tmp_path: Path, wheels: Path) -> None:
    cache, source = a_cache(tmp_path, wheels), a_source(tmp_path, requirements_txt="greeting==1.0\n")
    words = [str(cache.entries.folder), str(cache.entries.attempts), slow_uv(tmp_path), cache.interpreter, str(source)]
    with subprocess.Popen([sys.executable, "-c", BUILDER, *words]) as builder:
        eventually((tmp_path / "uv.pid").exists)
        builder.kill()
    eventually(lambda: uv_has_ended(tmp_path))
    assert [each for each in cache.entries.folder.iterdir() if each.is_dir()] != []
    made = provide(cache, source, "requirements.txt")
    assert (says(made, "import greeting; print(greeting.TEXT)"), made.facts["cached"]) == ("hello", False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_environment_of_another_user_belongs_to_the_agent_when_it_is_complete(tmp_path: Path, wheels: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    user = find_job_user("nobody")
    cache = a_cache(tmp_path, wheels, job_user=user, interpreter=SYSTEM_PYTHON)
    source = a_source(tmp_path, requirements_txt="greeting==1.0\n")
    others = os.umask(0o077)
    try:
        made = provide(cache, source, "requirements.txt")
    finally:
        os.umask(others)
    owners = {path.lstat().st_uid for path in (Path(made.path), *Path(made.path).rglob("*"))}
    assert owners == {0}
    done = subprocess.run(
        [Path(made.path) / "bin" / "python", "-I", "-c", "import greeting; print(greeting.TEXT)"],
        user="nobody",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "hello\n"


def test_only_what_uv_needs_of_the_agents_variables_reaches_a_build() -> None:
    given = {"UV_INDEX_URL": "x", "HTTPS_PROXY": "p", "PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "s", "UV_PROJECT": "y"}
    assert build_variables(given) == {"UV_INDEX_URL": "x", "HTTPS_PROXY": "p", "PATH": "/bin"}
