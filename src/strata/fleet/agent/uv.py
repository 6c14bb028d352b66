"""Builds a Python environment with uv: supported lock and requirements files, refused settings and editables, index
credentials, variables, timeout (1 h), and the wording of its errors.

uv runs in a folder that holds these files and nothing else, so the content of the files is all that the environment
depends on: another file that they name is an error of uv. The variables of a job have no influence, and its project
file has none on the network, the credentials and the folders of uv. This runs in the process of the job's user
(`privsep_worker`), never in the agent.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.parent import end_with_parent

BUILD_S: Final = 3600.0
"""Time limit for one build."""
LOCK: Final = "uv.lock"
PROJECT: Final = "pyproject.toml"
_CONFIGURATION: Final = "uv.toml"
"""uv takes its settings from a file of this name, whatever it is given it as."""
MAX_FILE: Final = 16 << 20
_LINES: Final = 20
_MAX_PACKAGES: Final = 1000
_CREDENTIALS: Final = re.compile(r"(://)[^/@\s]+@")
_PASSED: Final = ("PATH", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR")
_PASSED_TO_BUILDS: Final = ("UV_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_SET_BY_US: Final = ("UV_PROJECT_ENVIRONMENT", "UV_WORKING_DIRECTORY", "UV_PROJECT")
_INDEXES: Final = ("UV_INDEX", "UV_DEFAULT_INDEX")
_CREDENTIAL_VARIABLE: Final = re.compile(r"UV_.*(USERNAME|PASSWORD|TOKEN|API_KEY)")
_EDITABLE: Final = re.compile(r"^\s*-e|editable", re.IGNORECASE | re.MULTILINE)
_RESOLVING: Final = frozenset((
    "index-url", "extra-index-url", "no-index", "find-links", "index-strategy", "resolution", "prerelease",
    "prerelease-package", "fork-strategy", "dependency-metadata", "config-settings", "config-settings-package",
    "no-build-isolation", "no-build-isolation-package", "require-build-hashes", "extra-build-dependencies",
    "extra-build-variables", "exclude-newer", "exclude-newer-package", "link-mode", "compile-bytecode",
    "no-sources", "no-sources-package", "upgrade", "upgrade-package", "reinstall", "reinstall-package",
    "no-build", "no-build-package", "no-binary", "no-binary-package", "torch-backend",
))  # fmt: skip
_PROJECT_SETTINGS: Final = _RESOLVING | frozenset((
    "required-version", "offline", "no-cache", "python-preference", "concurrent-downloads", "concurrent-builds",
    "concurrent-installs", "index", "publish-url", "trusted-publishing", "check-url", "add-bounds", "audit",
    "pip", "cache-keys", "override-dependencies", "exclude-dependencies", "constraint-dependencies",
    "build-constraint-dependencies", "environments", "required-environments", "minimum-libc-version", "conflicts",
    "workspace", "sources", "managed", "package", "default-groups", "dependency-groups", "dev-dependencies",
    "build-backend", "preview", "preview-features",
))  # fmt: skip
_PIP_SETTINGS: Final = _RESOLVING | frozenset((
    "only-binary", "strict", "extra", "all-extras", "no-extra", "no-deps", "group", "allow-empty-requirements",
    "output-file", "no-strip-extras", "no-strip-markers", "no-annotate", "no-header", "custom-compile-command",
    "generate-hashes", "python-version", "python-platform", "universal", "no-emit-package", "emit-index-url",
    "emit-find-links", "emit-build-options", "emit-marker-expression", "emit-index-annotation",
    "annotation-style", "require-hashes", "verify-hashes",
))  # fmt: skip
_INDEX_SETTINGS: Final = frozenset((
    "name", "url", "explicit", "default", "format", "publish-url", "authenticate", "ignore-error-codes",
    "cache-control", "exclude-newer",
))  # fmt: skip


def build_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The agent's own variables that uv gets: where packages come from. Jobs do not get them.

    Credentials of an index are moved into its address. uv would send `UV_INDEX_NAME_PASSWORD` to whatever address a
    job's project file gives to an index of that name; credentials in an address go to that host alone. INVALID if the
    agent has no index of that name.
    """
    passed = {
        name: value
        for name, value in environ.items()
        if name in _PASSED or (name.startswith(_PASSED_TO_BUILDS) and name not in _SET_BY_US)
    }
    credentials = {name: passed.pop(name) for name in list(passed) if _CREDENTIAL_VARIABLE.fullmatch(name)}
    for variable in _INDEXES:
        if variable in passed:
            passed[variable] = " ".join(_with_credentials(index, credentials) for index in passed[variable].split())
    unbound = sorted(name for name in credentials if name.startswith("UV_INDEX_"))
    if unbound:
        raise StrataError(
            Code.INVALID,
            f"{unbound[0]} belongs to no index of the agent's {' or '.join(_INDEXES)}",
            hint="name the index and its address there: UV_INDEX=NAME=https://HOST/simple",
        )
    return passed


def _with_credentials(index: str, credentials: dict[str, str]) -> str:
    """An index, as uv takes it in a variable, with its credentials in the address; they are taken out of the rest."""
    name, has_name, address = index.partition("=")
    prefix = "UV_INDEX_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
    person, password = (credentials.pop(f"{prefix}_{kind}", None) for kind in ("USERNAME", "PASSWORD"))
    if not has_name or (person is None and password is None):
        return index
    parts = urlsplit(address)
    secret = "" if password is None else f":{quote(password, safe='')}"
    place = f"{quote(person or '', safe='')}{secret}@{parts.netloc.rpartition('@')[2]}"
    return f"{name}={urlunsplit(parts._replace(netloc=place))}"


def find_uv(variables: Mapping[str, str]) -> str:
    """The program beside the agent's Python, or the one in the PATH; empty if there is none."""
    beside = Path(sys.executable).with_name("uv.exe" if sys.platform == "win32" else "uv")
    return str(beside) if beside.is_file() else shutil.which("uv", path=variables.get("PATH")) or ""


def build_environ(variables: Mapping[str, str], scratch: Path, *, private: bool) -> dict[str, str]:
    """The variables of one build. A private one has neither a cache nor a configuration, because other jobs of its
    user can write to the home where they would be."""
    home = {"HOME": str(scratch), "UV_NO_CACHE": "1"} if private else {"HOME": str(Path.home())}
    return {"UV_PYTHON_DOWNLOADS": "never", **variables, **home}


class BuiltEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    packages: tuple[str, ...]
    """The packages as `uv pip freeze` lists them."""
    took_s: float


class EnvironmentPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the content of an environment depends on, on one host."""

    file: str
    """The name of the file that uv is given; one of `files`."""
    files: Mapping[str, str]
    python: str
    """A version, or the path of an interpreter."""
    extras: Sequence[str] = ()
    groups: Sequence[str] = ()
    library: str
    """The package `strata` of the agent, which trainers may import."""


def read_source_files(folder: Path, file: str) -> dict[str, str]:
    """The files that uv is given for this file of a source, by name; PRECONDITION if one is missing,
    INVALID if uv would take it for its own settings."""
    path = folder / file
    if path.name.casefold() == _CONFIGURATION:
        raise StrataError(Code.INVALID, f"{file} would be read as the settings of uv, which are for the host to make")
    paths = [path, path.with_name(PROJECT)] if path.name == LOCK else [path]
    texts = {}
    for each in paths:
        try:
            with each.open("rb") as source:
                content = source.read(MAX_FILE + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise StrataError(Code.PRECONDITION, f"the source has no file {each.relative_to(folder)}") from None
        if len(content) > MAX_FILE:
            raise StrataError(Code.PRECONDITION, f"{each.name} has more than {MAX_FILE} bytes")
        texts[each.name] = content.decode(errors="replace")
    return texts


def build_environment(run: UvProgram, plan: EnvironmentPlan, *, wheels_only: bool) -> bytes:
    """Build the target and return a `BuiltEnvironment`. Its folders are empty and belong to this user.

    `wheels_only`: no code of a package runs. uv builds nothing from source, and no Python of the target starts after
    the installation, because a wheel can bring a `.pth` file with code that every start of Python executes.
    """
    began_s = time.monotonic()
    # Other users run what is installed here.
    os.umask(0o022)
    target = run.target
    for name, text in plan.files.items():
        if name.casefold() == PROJECT:
            _check_settings(text)
    if wheels_only:
        _refuse_editables(plan)
    for name, text in plan.files.items():
        (run.folder / name).write_text(text, encoding="utf-8")
    run("venv", "--quiet", "--no-project", "--allow-existing", "--python", plan.python, str(target))
    options = ["--no-build"] if wheels_only else ["--compile-bytecode"]
    options += [word for extra in plan.extras for word in ("--extra", extra)]
    if plan.file == LOCK:
        options += [word for group in plan.groups for word in ("--group", group)]
        skipped = ("--no-install-project", "--no-install-workspace", "--no-install-local", "--no-dev")
        run("sync", "--quiet", "--frozen", *skipped, *options)
    else:
        options += [word for group in plan.groups for word in ("--group", f"{PROJECT}:{group}")]
        run("pip", "install", "--quiet", "--python", str(target), "-r", plan.file, *options)
    if wheels_only:
        packages = _installed(target)
    else:
        packages = run("pip", "freeze", "--quiet", "--python", str(target)).split("\n")
    _link_library(target, plan.library)
    took_s = time.monotonic() - began_s
    listed = tuple(_CREDENTIALS.sub(r"\1***@", each) for each in packages if each)[:_MAX_PACKAGES]
    return msgspec.json.encode(BuiltEnvironment(packages=listed, took_s=took_s))


def _check_settings(project: str) -> None:
    """INVALID if the project file changes more than what is installed.

    uv has the credentials of the host's indexes: with a proxy of the project file, or hosts whose certificates are not
    checked, it would send them there. What is not known to be harmless is refused, so a new setting of uv is too.
    """
    try:
        tool = tomllib.loads(project).get("tool", {})
    except (ValueError, RecursionError) as error:
        raise StrataError(Code.INVALID, f"{PROJECT} is no TOML: {error}") from None
    settings = tool.get("uv", {}) if isinstance(tool, dict) else {}
    _check_names("tool.uv", settings, _PROJECT_SETTINGS)
    if isinstance(settings, dict):
        _check_names("tool.uv.pip", settings.get("pip", {}), _PIP_SETTINGS)
        indexes = settings.get("index", [])
        for index in indexes if isinstance(indexes, list) else [indexes]:
            _check_names("tool.uv.index", index, _INDEX_SETTINGS)


def _check_names(table: str, settings: Any, allowed: frozenset[str]) -> None:
    if not isinstance(settings, dict):
        raise StrataError(Code.INVALID, f"{PROJECT}: {table} is no table")
    for name in settings:
        if name not in allowed:
            raise StrataError(
                Code.INVALID,
                f"{PROJECT} sets {table}.{name[:100]}: that is no setting of a project on a host of this fleet",
                hint="remove it; the owner of a host sets it with the agent's variables UV_*",
            )


def _refuse_editables(plan: EnvironmentPlan) -> None:
    """uv builds what is installed in place even with `--no-build`."""
    if any(_EDITABLE.search(text) for text in plan.files.values()):
        raise StrataError(Code.PRECONDITION, "this host installs wheels only, and the environment has an editable one")


def _installed(target: Path) -> list[str]:
    """The packages as `uv pip freeze` lists those of an index, by the names of their folders."""
    folders = (*target.glob("lib/python*/site-packages/*.dist-info"), *target.glob("Lib/site-packages/*.dist-info"))
    named = (folder.stem.rpartition("-") for folder in folders)
    return sorted(f"{name.replace('_', '-').lower()}=={version}" for name, _, version in named)


class UvProgram:
    """uv in a folder that holds what it is given and nothing else, for one target."""

    def __init__(self, uv: str, folder: Path, environ: Mapping[str, str], target: Path) -> None:
        self._uv = uv
        self.folder = folder
        self.target = target
        self._deadline_s = time.monotonic() + BUILD_S
        self._environ = dict(environ) | {
            "UV_PROJECT_ENVIRONMENT": str(target),
            "UV_NO_PROGRESS": "1",
            "NO_COLOR": "1",
            "TMPDIR": str(folder),
            "GIT_TERMINAL_PROMPT": "0",
        }

    def __call__(self, *args: str) -> str:
        """Returns what uv wrote to stdout; PRECONDITION with its last lines if it fails."""
        end_with_us = None
        if sys.platform != "win32":
            end_with_us = partial(end_with_parent, signal.SIGKILL, parent=os.getpid())
        try:
            process = subprocess.Popen(
                [self._uv, *args],
                env=self._environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=end_with_us,  # noqa: PLW1509 - this process has no threads
            )
        except OSError as error:
            raise StrataError(Code.PRECONDITION, f"uv cannot be run on this host: {error}") from None
        try:
            stdout, stderr = process.communicate(timeout=max(0.0, self._deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            raise StrataError(Code.PRECONDITION, f"uv took more than {BUILD_S:.0f} s") from None
        if process.returncode:
            raise _build_error(args[0], process.returncode, stderr.decode(errors="replace"))
        return stdout.decode(errors="replace")


def _build_error(command: str, status: int, output: str) -> StrataError:
    """The last lines of uv. The line that says what is wrong comes last: it is what lists of jobs show."""
    lines = _CREDENTIALS.sub(r"\1***@", output).strip().splitlines()[-_LINES:] or [f"status {status}"]
    reason = next((line for line in lines if "hint:" not in line and line.strip()), lines[0]).strip(
        " \N{MULTIPLICATION SIGN}"
    )
    details = "\n".join(lines)
    return StrataError(Code.PRECONDITION, f"uv {command} failed:\n{details}\nthe environment cannot be built: {reason}")


def _link_library(target: Path, library: str) -> None:
    """Let trainers import `strata`, unless the environment has a version of its own."""
    for packages in (*target.glob("lib/python*/site-packages"), *target.glob("Lib/site-packages")):
        if not (packages / "strata").exists():
            try:
                (packages / "strata").symlink_to(library, target_is_directory=True)
            except OSError:
                shutil.copytree(library, packages / "strata")
