"""The environments of this host: one for each content of a lock file, shared by the jobs that use it.

environments/NAME.lock         held while an attempt builds the environment, or this process removes it
environments/NAME/python/      the virtual environment; when it is complete it belongs to the agent's user
environments/NAME/build/       what a build needs; removed at its end
environments/NAME/users/KEY    the attempt KEY uses it: it is not removed while the attempt's folder is there
environments/NAME/ready.json   written last: a folder without it is the rest of a build that was killed
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import strata
from strata.base import log
from strata.base.atomic import read_json, write_json
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.attempt_folder import JobUser
from strata.fleet.agent.file_lock import try_lock
from strata.fleet.agent.path_names import PathName, environment_name
from strata.fleet.agent.privsep import stream_output
from strata.fleet.agent.privsep_worker import BuildEnvironment, ReadSourceFiles
from strata.fleet.agent.uv import MAX_FILE, BuiltEnvironment, EnvironmentPlan
from strata.fleet.core.jobspec import EnvironmentSpec

POLL_S: Final = 0.1
MAX_IDLE_S: Final = 30 * 86_400.0
_PASSED: Final = ("PATH", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR")
_PASSED_TO_BUILDS: Final = (
    "UV_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
_SET_BY_US: Final = ("UV_PROJECT_ENVIRONMENT", "UV_WORKING_DIRECTORY", "UV_PROJECT")
_MAX_REPLY: Final = 4 << 20
_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentCache:
    """The folder of the environments, and what their builds need of this host."""

    folder: Path
    attempts: Path
    """The folders of attempts: an environment is in use while one of its users is there."""
    program: str
    """uv, from `find_uv`; empty if this host has none."""
    interpreter: str
    variables: Mapping[str, str]
    """Variables of the agent for uv, from `build_variables`."""
    max_bytes: int
    job_user: JobUser | None


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of one attempt."""

    path: str
    """The virtual environment."""
    facts: dict[str, Any]
    """What the hub keeps with the attempt."""


class _Ready(msgspec.Struct, frozen=True, kw_only=True):
    """`ready.json`."""

    built: BuiltEnvironment
    size_bytes: int


def build_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The agent's own variables that uv gets: where packages come from. Jobs do not get them."""
    return {
        name: value
        for name, value in environ.items()
        if name in _PASSED or (name.startswith(_PASSED_TO_BUILDS) and name not in _SET_BY_US)
    }


def find_uv(variables: Mapping[str, str]) -> str:
    """The program beside the agent's Python, or the one in the PATH; empty if there is none."""
    beside = Path(sys.executable).with_name("uv.exe" if sys.platform == "win32" else "uv")
    return str(beside) if beside.is_file() else shutil.which("uv", path=variables.get("PATH")) or ""


def provide_environment(
    cache: EnvironmentCache,
    spec: EnvironmentSpec,
    source: Path,
    key: PathName,
    wanted: Callable[[], bool] = lambda: True,
) -> JobEnvironment:
    """The environment that this file of the source describes, built if this host does not have it.

    `key` is the attempt that uses it. StrataError PRECONDITION if it cannot be built; STALE when it is no longer
    `wanted`.
    """
    began_s = time.monotonic()
    plan = _plan(cache, spec, source)
    name = environment_name(hashlib.sha256(msgspec.json.encode([plan, _platform(cache, plan)])).hexdigest())
    cache.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    with _locked(cache, name, wanted):
        ready, folder = _read_ready(cache, name), cache.folder / name
        cached = ready is not None
        if ready is None:
            evict_environments(cache, time.time())
            ready = _build(cache, name, plan, wanted)
        os.utime(folder / "ready.json")
        (folder / "users" / key).touch()
    waited_s = round(time.monotonic() - began_s, 3)
    _log.info("environment_provided", environment=name[:12], cached=cached, waited_s=waited_s)
    packages = list(ready.built.packages)
    facts = {"digest": name, "file": spec.file, "cached": cached, "waited_s": waited_s, "packages": packages}
    return JobEnvironment(path=str(folder / "python"), facts=facts)


def evict_environments(cache: EnvironmentCache, now_s: float) -> None:
    """Remove environments that were not used for long, and the least recently used ones of too many bytes."""
    entries = [] if not cache.folder.is_dir() else [each for each in cache.folder.iterdir() if each.is_dir()]
    sizes = {each: _read_ready(cache, each.name) for each in entries}
    total = sum(ready.size_bytes for ready in sizes.values() if ready is not None)
    for folder in sorted(entries, key=_used_at_s):
        ready = sizes[folder]
        if ready is not None and now_s - _used_at_s(folder) <= MAX_IDLE_S and total <= cache.max_bytes:
            continue
        lock = try_lock(cache.folder / f"{folder.name}.lock")
        if lock is None:
            continue
        try:
            if not _in_use(cache, folder):
                # First the mark, so that a removal that is interrupted leaves no environment that seems complete.
                (folder / "ready.json").unlink(missing_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                total -= 0 if ready is None else ready.size_bytes
                _log.info("environment_evicted", environment=folder.name[:12])
        finally:
            os.close(lock)


def _plan(cache: EnvironmentCache, spec: EnvironmentSpec, source: Path) -> EnvironmentPlan:
    request = ReadSourceFiles(folder=str(source), file=spec.file)
    content = b"".join(stream_output(request, cache.job_user, 8 * MAX_FILE))
    files = msgspec.json.decode(content, type=dict[str, str])
    python = spec.python or cache.interpreter
    return EnvironmentPlan(
        file=spec.file.rpartition("/")[2],
        files=files,
        python=python,
        extras=spec.extras,
        groups=spec.groups,
        library=str(Path(strata.__file__).parent),
    )


def _platform(cache: EnvironmentCache, plan: EnvironmentPlan) -> list[Any]:
    """What else an environment depends on: the machine, and the interpreter as it is now."""
    machine: list[Any] = [platform.machine(), sysconfig.get_platform(), platform.libc_ver()]
    if plan.python == cache.interpreter:
        binary = os.path.realpath(cache.interpreter)
        with suppress(OSError):
            machine += [binary, os.stat(binary).st_mtime_ns]  # noqa: PTH116 - the path is resolved already
    return machine


def _read_ready(cache: EnvironmentCache, name: str) -> _Ready | None:
    """None unless the environment is complete and its Python is still there."""
    folder = cache.folder / name
    ready = read_json(folder / "ready.json", _Ready)
    programs = [folder / "python" / "bin" / "python", folder / "python" / "Scripts" / "python.exe"]
    return ready if any(program.exists() for program in programs) else None


def _build(cache: EnvironmentCache, name: PathName, plan: EnvironmentPlan, wanted: Callable[[], bool]) -> _Ready:
    if not cache.program:
        raise StrataError(
            Code.PRECONDITION, "the job needs an environment, and uv is not on this host", hint="pip install uv"
        )
    folder = cache.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o711, parents=True)
    target, scratch = folder / "python", folder / "build"
    (folder / "users").mkdir(mode=0o700)
    for each, mode in ((target, 0o755), (scratch, 0o700)):
        each.mkdir(mode=mode)
        each.chmod(mode)
        if cache.job_user is not None:
            os.lchown(each, cache.job_user.uid, cache.job_user.gid)
    try:
        request = BuildEnvironment(
            program=cache.program,
            target=str(target),
            scratch=str(scratch),
            plan=plan,
            environ=_build_environ(cache, scratch),
        )
        failpoint("agent.environment.building")
        content = b"".join(stream_output(request, cache.job_user, _MAX_REPLY, wanted=wanted))
        built = msgspec.json.decode(content, type=BuiltEnvironment)
        shutil.rmtree(scratch, ignore_errors=True)
        ready = _Ready(built=built, size_bytes=_take_over(target, change_owner=cache.job_user is not None))
        failpoint("agent.environment.built")
        write_json(folder / "ready.json", ready)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _log.info(
        "environment_built",
        environment=name[:12],
        packages=len(built.packages),
        took_s=round(built.took_s, 3),
        size_bytes=ready.size_bytes,
    )
    return ready


def _build_environ(cache: EnvironmentCache, scratch: Path) -> dict[str, str]:
    environ = dict(cache.variables)
    environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
    if cache.job_user is not None:
        # Other jobs of this user can write to its home: no cache and no configuration is read from there.
        environ |= {"HOME": str(scratch), "UV_NO_CACHE": "1"}
    else:
        environ |= {"HOME": str(Path.home())}
    return environ


def _take_over(folder: Path, *, change_owner: bool) -> int:
    """The size in bytes. With `change_owner` the files become the agent's, so that no job can change them."""
    total = 0
    if sys.platform == "win32":
        return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    # By descriptors: the job's user cannot lead this out of the folder by a link.
    for _, folders, files, descriptor in os.fwalk(folder):
        for name in (*folders, *files):
            total += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size
            if change_owner:
                os.chown(name, os.geteuid(), os.getegid(), dir_fd=descriptor, follow_symlinks=False)
    if change_owner:
        os.lchown(folder, os.geteuid(), os.getegid())
    return total


def _used_at_s(folder: Path) -> float:
    with suppress(OSError):
        return (folder / "ready.json").stat().st_mtime
    return 0.0


def _in_use(cache: EnvironmentCache, folder: Path) -> bool:
    in_use = False
    for user in (folder / "users").iterdir() if (folder / "users").is_dir() else ():
        if (cache.attempts / user.name).exists():
            in_use = True
        else:
            user.unlink(missing_ok=True)
    return in_use


@contextmanager
def _locked(cache: EnvironmentCache, name: PathName, wanted: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of one environment; wait while another attempt builds it."""
    path = cache.folder / f"{name}.lock"
    while (lock := try_lock(path)) is None:
        if not wanted():
            raise StrataError(Code.STALE, "the attempt was stopped while it waited for its environment")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(lock)
