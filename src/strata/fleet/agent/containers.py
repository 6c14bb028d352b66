"""Runs a job in an OCI image with podman or apptainer: allowed registries, pulls (at most an hour), options of the
container, its variables and devices.

The runtime is started by the agent's user, with variables of the agent alone: those of a job are in a file that the
runtime reads, so that they cannot change what the runtime does. The process in the container is the job's user and has
no capabilities.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from strata.base import log
from strata.base.atomic import write_file
from strata.base.errors import Code, StrataError
from strata.fleet.agent.attempt_folder import AttemptPaths, JobUser
from strata.fleet.agent.settings import ContainerSettings, SandboxSettings
from strata.fleet.agent.supervised import SupervisorSpec

PULL_S: Final = 3600.0
INSPECT_S: Final = 30.0
_POLL_S: Final = 0.2
_LINES: Final = 20
_CLIENT: Final = ("PATH", "HOME", "XDG_RUNTIME_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "LANG")
_OF_THE_HOST: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH")
"""Variables that mean something on the host and not in an image."""
_PRIVATE: Final = ("localhost", "local", "internal", "lan", "home", "corp", "intranet", "arpa")
"""Last parts of names that the public name service does not have, or that are addresses."""
_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    kind: Literal["podman", "apptainer"]
    program: str
    settings: ContainerSettings
    environ: Mapping[str, str]
    """The environment of the agent, for the runtime itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerView:
    """What a job sees and may use in its container."""

    readable: Sequence[Path] = ()
    writable: Sequence[Path] = ()
    devices: tuple[int | str, ...] | None = None
    sandbox: SandboxSettings
    memory_bytes: int = 0
    cores: int = 0
    job_user: JobUser | None = None


def find_runtime(settings: ContainerSettings, environ: Mapping[str, str], *, is_root: bool) -> ContainerRuntime:
    """The runtime that the settings name, or the first that is installed. PRECONDITION if there is none.

    `is_root`: the agent is root. Apptainer has no option for another user, so it would run the job as root.
    """
    kinds: tuple[Literal["podman", "apptainer"], ...] = ("podman", "apptainer")
    reason = "this host has neither podman nor apptainer"
    for kind in kinds if settings.program is None else (settings.program,):
        program = shutil.which(kind, path=environ.get("PATH"))
        if program and kind == "apptainer" and is_root:
            reason = "apptainer of this host would run it as root, as which the agent runs: install podman"
        elif program:
            client = {name: environ[name] for name in _CLIENT if name in environ}
            return ContainerRuntime(kind, program, settings, client)
    raise StrataError(Code.PRECONDITION, f"the job needs an image, and {reason}")


def registry_reference(image: str, registries: Sequence[str]) -> str:
    """The image with its registry. PRECONDITION unless this host pulls from there.

    `image_problem` has accepted the image. Without a list of registries every public name is good: no address, and no
    name that is known on this machine or in its network alone.
    """
    first, slash, rest = image.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, rest = "docker.io", image if slash else f"library/{image}"
    allowed = first in registries if registries else _is_public(first.partition(":")[0].lower())
    if not allowed:
        raise StrataError(
            Code.PRECONDITION,
            f"this host pulls no images from {first}",
            hint="agent.containers.registries of the host lists the registries that are allowed",
        )
    return f"{first}/{rest}"


def _is_public(host: str) -> bool:
    name, _, top = host.rpartition(".")
    # The last part of an address is a number, in whatever spelling.
    return bool(name) and not top[:1].isdigit() and top not in _PRIVATE


def ensure_image(runtime: ContainerRuntime, image: str, wanted: Callable[[], bool]) -> None:
    """Pull the image, from `registry_reference`, unless it is on this host. PRECONDITION if that fails."""
    # Apptainer pulls it when it starts.
    if runtime.kind == "apptainer" or not _run(runtime, ("image", "exists", image), wanted)[0]:
        return
    began_s = time.monotonic()
    status, output = _run(runtime, ("pull", "--quiet", f"docker://{image}"), wanted)
    if status:
        lines = output.strip().splitlines()[-_LINES:] or [f"status {status}"]
        raise StrataError(Code.PRECONDITION, f"the image {image} cannot be pulled:\n" + "\n".join(lines))
    _log.info("image_pulled", image=image, took_s=round(time.monotonic() - began_s, 3))


@dataclass(frozen=True, slots=True)
class RunningContainer:
    pid: int
    """Its first process, as the host numbers it."""
    cwd: str
    env: Mapping[str, str]


def inspect_container(runtime: ContainerRuntime, paths: AttemptPaths) -> RunningContainer:
    """The container of the attempt. PRECONDITION if it is not running, or the runtime cannot say."""
    if runtime.kind == "apptainer":
        raise StrataError(Code.PRECONDITION, "commands cannot be run in the images of apptainer")
    try:
        done = subprocess.run(
            [runtime.program, *runtime.settings.options, "inspect", "--type", "container", _container_name(paths)],
            env=dict(runtime.environ),
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=INSPECT_S,
            check=True,
        )
        (found,) = msgspec.json.decode(done.stdout, type=tuple[_Inspected])
    except (subprocess.SubprocessError, msgspec.DecodeError):
        found = _Inspected(state=_State(), config=_Config())
    if not found.state.pid:
        raise StrataError(Code.PRECONDITION, "the container of the job is not running any more")
    env = dict(variable.partition("=")[::2] for variable in found.config.env)
    return RunningContainer(found.state.pid, found.config.cwd or "/", env)


class _State(msgspec.Struct):
    pid: int = msgspec.field(name="Pid", default=0)


class _Config(msgspec.Struct):
    env: list[str] = msgspec.field(name="Env", default_factory=list)
    cwd: str = msgspec.field(name="WorkingDir", default="")


class _Inspected(msgspec.Struct):
    state: _State = msgspec.field(name="State")
    config: _Config = msgspec.field(name="Config")


def contain(
    runtime: ContainerRuntime, image: str, spec: SupervisorSpec, paths: AttemptPaths, view: ContainerView
) -> SupervisorSpec:
    """The spec of the runtime that runs this spec's command in the image."""
    variables = paths.folder / "environment"
    job = {name: value for name, value in spec.env.items() if name not in _OF_THE_HOST} | {"HOME": str(paths.home)}
    write_file(variables, _variables_file(runtime, job))
    removal: tuple[str, ...] = ()
    if runtime.kind == "podman":
        name = _container_name(paths)
        removal = (runtime.program, *runtime.settings.options, "rm", "--force", "--ignore", "--time", "0", name)
        options = _podman_options(spec, paths, view)
        command = ["run", *options, "--env-file", str(variables), *runtime.settings.run_options, image, *spec.command]
    else:
        options = _apptainer_options(spec, paths, view)
        command = ["exec", *options, "--env-file", str(variables), *runtime.settings.run_options]
        command += [f"docker://{image}", *spec.command]
    return msgspec.structs.replace(
        spec,
        command=[runtime.program, *runtime.settings.options, *command],
        cwd=str(paths.folder),
        env=dict(runtime.environ),
        uid=None,
        gid=None,
        groups=(),
        removal=removal,
    )


def _container_name(paths: AttemptPaths) -> str:
    return f"strata-{paths.folder.name}"


def _podman_options(spec: SupervisorSpec, paths: AttemptPaths, view: ContainerView) -> list[str]:
    options = ["--rm", "--pull", "never", "--name", _container_name(paths), "--workdir", spec.cwd]
    options += ["--cap-drop", "all", "--security-opt", "no-new-privileges", "--network", _network(view.sandbox)]
    options += [word for folder in (paths.folder, *view.writable) for word in ("--mount", _mount(folder))]
    options += [word for folder in view.readable for word in ("--mount", f"{_mount(folder)},ro=true")]
    if view.job_user is not None:
        options += ["--user", f"{view.job_user.uid}:{view.job_user.gid}"]
    elif hasattr(os, "geteuid") and os.geteuid() != 0:
        options += ["--userns", "keep-id"]
    if view.memory_bytes:
        options += ["--memory", str(view.memory_bytes)]
    if view.cores:
        options += ["--cpus", str(view.cores)]
    if view.sandbox.processes:
        options += ["--pids-limit", str(view.sandbox.processes)]
    for device in view.devices or ():
        options += ["--device", f"nvidia.com/gpu={device}"]
    return options


def _apptainer_options(spec: SupervisorSpec, paths: AttemptPaths, view: ContainerView) -> list[str]:
    options = ["--containall", "--no-home", "--no-privs", "--pwd", spec.cwd]
    options += [word for folder in (paths.folder, *view.writable) for word in ("--bind", f"{_plain(folder)}")]
    options += [word for folder in view.readable for word in ("--bind", f"{_plain(folder)}:{folder}:ro")]
    options += ["--net", "--network", "none"] if _network(view.sandbox) == "none" else []
    return [*options, "--nv"] if view.devices else options


def _network(sandbox: SandboxSettings) -> str:
    if sandbox.network == "allow":
        raise StrataError(
            Code.PRECONDITION, 'this host restricts the network of jobs (network = "allow"), and cannot do so in images'
        )
    return sandbox.network


def _mount(folder: Path) -> str:
    return f"type=bind,src={_plain(folder)},dst={folder}"


def _plain(folder: Path) -> Path:
    if any(character in str(folder) for character in ",:\n"):
        raise StrataError(Code.PRECONDITION, f"{str(folder)[:200]!r} cannot be mounted into an image")
    return folder


def _variables_file(runtime: ContainerRuntime, environ: Mapping[str, str]) -> bytes:
    for name, value in environ.items():
        if "\n" in value:
            raise StrataError(Code.PRECONDITION, f"{name} has several lines, which a job in an image cannot get")
    quote = shlex.quote if runtime.kind == "apptainer" else str
    return "".join(f"{name}={quote(value)}\n" for name, value in environ.items()).encode()


def _run(runtime: ContainerRuntime, args: Sequence[str], wanted: Callable[[], bool]) -> tuple[int, str]:
    """The status of a command of the runtime, and what it wrote."""
    deadline_s = time.monotonic() + PULL_S
    with subprocess.Popen(
        [runtime.program, *runtime.settings.options, *args],
        env=dict(runtime.environ),
        cwd=os.sep,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                if wanted() and time.monotonic() < deadline_s:
                    continue
                process.kill()
                if not wanted():
                    raise StrataError(Code.STALE, "the attempt was stopped while its image was pulled") from None
                raise StrataError(Code.PRECONDITION, f"{args[0]} took more than {PULL_S:.0f} s") from None
            return process.returncode, output.decode(errors="replace")
