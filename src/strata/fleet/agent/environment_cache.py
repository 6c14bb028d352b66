"""Provides the Python environment of a job: its key in the host's cache by content of the lock file, the sandbox in
which it is built, and whether source builds are allowed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

import strata
from strata.base import log
from strata.base.errors import Code, StrataError
from strata.base.failpoint import failpoint
from strata.fleet.agent.attempt_folder import JobUser
from strata.fleet.agent.host_cache import CacheEntry, HostCache
from strata.fleet.agent.path_names import PathName, environment_name
from strata.fleet.agent.privsep import WorkerSandbox, stream_output
from strata.fleet.agent.privsep_worker import BuildEnvironment, ReadSourceFiles
from strata.fleet.agent.sandbox import UNCONFINED, HostSandbox
from strata.fleet.agent.uv import MAX_FILE, BuiltEnvironment, EnvironmentPlan, build_environ
from strata.fleet.core.jobspec import EnvironmentSpec

_MAX_REPLY: Final = 4 << 20
_WHEELS_ONLY: Final = (
    "this host installs wheels only, because it cannot confine a build from source"
    " (agent.environments.allow_builds = true allows one)"
)
_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentCache:
    """The cache of environments, and what their builds need of this host."""

    entries: HostCache
    program: str
    """uv, from `find_uv`; empty if this host has none."""
    interpreter: str
    variables: Mapping[str, str]
    """Variables of the agent for uv, from `build_variables`."""
    job_user: JobUser | None
    sandbox: HostSandbox = UNCONFINED
    allow_builds: bool = False
    """Packages may be built from source although their code is not confined as jobs are."""

    @property
    def wheels_only(self) -> bool:
        """A build from source runs code of the package. Without namespaces nothing would end it with the build, and
        it has the network of the host, whatever jobs have."""
        confined = bool(self.sandbox.bwrap) and self.sandbox.settings.network == "host"
        return not (confined or self.allow_builds or self.sandbox.settings.mode == "off")


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of one attempt."""

    path: str
    """The virtual environment."""
    facts: dict[str, Any]
    """What the hub keeps with the attempt."""


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
    entry, cached = cache.entries.provide(
        name, key, lambda folder: _build(cache, folder, plan, wanted), wanted, usable=_has_python
    )
    waited_s = round(time.monotonic() - began_s, 3)
    _log.info("environment_provided", environment=name, cached=cached, waited_s=waited_s)
    facts = {"digest": name, "file": spec.file, "cached": cached, "waited_s": waited_s}
    return JobEnvironment(path=str(cache.entries.content(name)), facts=facts | entry.facts)


def _has_python(content: Path) -> bool:
    """Says whether the interpreter of an environment is still on this host."""
    return (content / "bin" / "python").exists() or (content / "Scripts" / "python.exe").exists()


def _plan(cache: EnvironmentCache, spec: EnvironmentSpec, source: Path) -> EnvironmentPlan:
    request = ReadSourceFiles(folder=str(source), file=spec.file)
    content = b"".join(stream_output(request, cache.job_user, 8 * MAX_FILE))
    return EnvironmentPlan(
        file=spec.file.rpartition("/")[2],
        files=msgspec.json.decode(content, type=dict[str, str]),
        python=spec.python or cache.interpreter,
        extras=spec.extras,
        groups=spec.groups,
        library=str(Path(strata.__file__).parent),
    )


def _platform(cache: EnvironmentCache, plan: EnvironmentPlan) -> list[Any]:
    """Returns what else an environment depends on: the machine, and the interpreter as it is now."""
    machine: list[Any] = [platform.machine(), sysconfig.get_platform(), platform.libc_ver()]
    if plan.python == cache.interpreter:
        binary = os.path.realpath(cache.interpreter)
        with suppress(OSError):
            machine += [binary, os.stat(binary).st_mtime_ns]  # noqa: PTH116 - the path is resolved already
    return machine


def _build(cache: EnvironmentCache, folder: Path, plan: EnvironmentPlan, wanted: Callable[[], bool]) -> CacheEntry:
    if not cache.program:
        raise StrataError(
            Code.PRECONDITION, "the job needs an environment, and uv is not on this host", hint="pip install uv"
        )
    target, scratch = folder / "content", folder / "build"
    for each, mode in ((target, 0o755), (scratch, 0o711)):
        each.mkdir(mode=mode)
        each.chmod(mode)
        if cache.job_user is not None:
            os.lchown(each, cache.job_user.uid, cache.job_user.gid)
    private = cache.job_user is not None or bool(cache.sandbox.bwrap)
    request = BuildEnvironment(
        program=cache.program,
        target=str(target),
        scratch=str(scratch),
        plan=plan,
        environ=build_environ(cache.variables, scratch, private=private),
        wheels_only=cache.wheels_only,
    )
    failpoint("agent.environment.building")
    sandbox = _build_sandbox(cache, target, scratch)
    try:
        content = b"".join(stream_output(request, cache.job_user, _MAX_REPLY, wanted, sandbox))
    except StrataError as error:
        if error.code is not Code.PRECONDITION or not cache.wheels_only:
            raise
        raise StrataError(error.code, f"{error.message}\n{_WHEELS_ONLY}", hint=error.hint) from None
    built = msgspec.json.decode(content, type=BuiltEnvironment)
    shutil.rmtree(scratch, ignore_errors=True)
    size_bytes = _take_over(target, change_owner=cache.job_user is not None)
    failpoint("agent.environment.built")
    _log.info("environment_built", packages=len(built.packages), took_s=round(built.took_s, 3), size_bytes=size_bytes)
    return CacheEntry(size_bytes=size_bytes, facts={"packages": list(built.packages)})


def _build_sandbox(cache: EnvironmentCache, target: Path, scratch: Path) -> WorkerSandbox:
    """The limits and the namespaces of jobs, with the network of the host: packages come from there."""
    limits = cache.sandbox.limits_of(target.parent, host_network=True)
    if not cache.sandbox.bwrap:
        return WorkerSandbox((), b"", switch_inside=False, limits=limits)
    readable = [Path(strata.__file__).parent, Path(cache.program).parent]
    wrapper = cache.sandbox.build_wrapper(scratch, target, readable)
    return WorkerSandbox(wrapper, cache.sandbox.filter, cache.sandbox.as_root, limits)


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
