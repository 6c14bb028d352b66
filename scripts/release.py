"""The release checklist as one command: `make release`, or `.venv/bin/python scripts/release.py [--only STEP ...]`.

Builds the wheel and the sdist of the committed tree twice and compares them, builds the documents, installs the wheel
with every extra into clean environments, starts the servers from there, installs it by its name from an index on
loopback, writes a CycloneDX bill of materials and the table of licences. The files of the release are left in `dist/`.
Any failed line makes the exit status 1; without one, a line that could not run here makes it 77. The workflow
.github/workflows/release.yml runs the same lines, and then uploads.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
DIST: Final = ROOT / "dist"
UV: Final = str(Path(sys.executable).with_name("uv"))
OLDEST: Final = "3.11"
LATER: Final = ("3.12", "3.13", "3.14")
ON_LATER: Final = ("", "agent", "hub")
"""The extras that are tried on every Python; the others are tried on the oldest one."""
TORCH: Final = "torch==2.13.0"
"""Named apart, because an index may hold several builds of it."""
SBOM_TOOL: Final = "cyclonedx-bom==7.5.0"
READY_S: Final = 60.0
NOT_RUN: Final = 77
"""The exit status of a test that was skipped, by the convention of Automake."""

CHECKS: Final[Mapping[str, Sequence[str]]] = {
    "": ("strata --version", "strata journal list --help"),
    "sdk": ("python -c 'import strata.sdk.train, strata.sdk.fleet'",),
    "agent": ("python -c 'import strata.fleet.agent.start, strata.identity.enroll'",),
    "worker": ("python -c 'import strata.coord.worker'",),
    "worker-data": ("python -c 'import strata.coord.worker.columns, pyarrow'",),
    "coordinator": ("python -c 'import strata.coord.server'",),
    "hub": ("python -c 'import strata.hub.compose'",),
    "postgres": ("python -c 'import strata.journal.postgres, strata.fleet.store.postgres'",),
    "sweep": ("python -c 'import cmaes, optuna, strata.fleet.core.search'",),
    "notify": ("python -c 'import apprise'",),
    "train": ("python -c 'import strata.train.runner, strata.train.api'", "strata models tiny model"),
}
"""What each extra must be able to do, beside `pip check`."""
SERVERS: Final[Mapping[str, tuple[str, str]]] = {
    "hub": ("strata up", "ready"),
    "coordinator": ("strata coordinator --listen 127.0.0.1:0 --database sqlite:coord.db", "leadership_acquired"),
}
"""A server that must start from the wheel, and what it prints when it serves."""
LICENCES: Final = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python|0BSD|Unlicense|Zlib|HPND|MPL|Mozilla Public|LGPL|Lesser General Public)\b",
    re.IGNORECASE,
)
"""Licences that allow Strata to depend on a distribution. Weak copyleft is fine: nothing is copied or linked."""
LICENCE_FIELDS: Final = """
import importlib.metadata, json
print(json.dumps({each.metadata["Name"]: each.metadata["License"] for each in importlib.metadata.distributions()}))
"""
"""Prints the field `License` of each distribution: the bill of materials leaves it out."""


FROM_CLONE: Final = re.compile(r"(?ms)^<!-- install -->\n.*?^(?P<fence>```\w*)\n(?P<body>.*?)^```\n+")
"""A marker, prose about the clone, and the block of commands that install from it."""
NEEDS_CLONE: Final = re.compile(r"(?m)^(?:\$ )?(?:git clone|cd strata|pip wheel|export PIP_FIND_LINKS)\b.*\n")
UNTIL_RELEASE: Final = re.compile(r"(?m)^.*<!-- until release -->\n")
IN_A_CLONE: Final = re.compile(r"\b[Ii]n a clone[^`\n]{1,30}(?=`pip install )")
PATH_OF_CLONE: Final = re.compile(r"'\.(?:/strata)?\[(?P<extras>[\w,-]+)\]'")
UNCHANGED: Final = ("docs/decisions", "docs/reference")
"""Pages about what was, and pages that are written from the code."""


class ReleaseError(Exception):
    """A line of the checklist that does not hold."""


class NotRunError(Exception):
    """A line of the checklist that this machine lacks something for."""


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(
            f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}".rstrip()
        )
    return done.stdout


def version() -> str:
    return run(sys.executable, "-c", "import strata; print(strata.__version__)").strip()


def by_name(text: str) -> str:
    """Returns a document as a release has it: the package is installed by its name, and not from a clone."""

    def commands(block: re.Match[str]) -> str:
        body = NEEDS_CLONE.sub("", block["body"])
        return f"{block['fence']}\n{body}```\n\n" if body else ""

    text = UNTIL_RELEASE.sub("", FROM_CLONE.sub(commands, text))
    return PATH_OF_CLONE.sub(r"'strata-train[\g<extras>]'", IN_A_CLONE.sub("", text))


def documents(root: Path) -> list[Path]:
    """The documents that a release rewrites."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in pages if not str(page.relative_to(root)).startswith(UNCHANGED)]


def check_tree() -> str:
    if changed := run("git", "status", "--porcelain"):
        raise ReleaseError(f"the tree has changes that are not committed:\n{changed}")
    current = version()
    if "dev" in current:
        raise ReleaseError(f"{current} is a development version: set the version in src/strata/__init__.py")
    if not re.search(rf"(?m)^## {re.escape(current)} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8")):
        raise ReleaseError(f"CHANGELOG.md has no section '## {current} - DATE'")
    tags = run("git", "tag", "--points-at", "HEAD", "v*").split()
    if tags not in ([], [f"v{current}"]):
        raise ReleaseError(f"the commit has the tags {tags}, and the version is {current}")
    return f"version {current}, nothing uncommitted, {tags[0] if tags else 'no tag yet'}"


def run_build(source: Path, target: Path, *options: str) -> None:
    """Build with the time of the commit in place of the clock's, so that every build has the same bytes."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct").strip()}
    run(sys.executable, "-m", "hatchling", "build", *options, "-d", target, cwd=source, env=env)


def release_tree(source: Path) -> None:
    """The committed tree in a new place, with the documents of a release."""
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    for page in documents(source):
        page.write_text(by_name(page.read_text("utf-8")), "utf-8")


def build(folder: Path) -> dict[str, bytes]:
    """Wheel and sdist of the committed tree, built in a new place."""
    source = folder / "source"
    release_tree(source)
    run_build(source, folder / "dist")
    return {file.name: file.read_bytes() for file in (folder / "dist").iterdir()}


def check_build() -> str:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        built, again = build(Path(first) / "a"), build(Path(second) / "a-longer-name")
        if built != again:
            raise ReleaseError(f"two builds differ: {sorted(name for name in built if built[name] != again.get(name))}")
        (sdist,) = (name for name in built if name.endswith(".tar.gz"))
        (wheel,) = (name for name in built if name.endswith(".whl"))
        unpacked = Path(first) / "sdist"
        unpacked.mkdir()
        subprocess.run(["tar", "-xz", "-C", unpacked, "--strip-components=1"], input=built[sdist], check=True)
        run_build(unpacked, unpacked / "dist", "-t", "wheel")
        if (unpacked / "dist" / wheel).read_bytes() != built[wheel]:
            raise ReleaseError("the wheel built from the sdist differs from the wheel built from the tree")
    DIST.mkdir(exist_ok=True)
    for file in DIST.iterdir():
        file.unlink()
    for name, content in built.items():
        (DIST / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(built.items())}
    (DIST / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()), "utf-8")
    sizes = f"wheel {len(built[wheel]) // 1024} KiB, sdist {len(built[sdist]) // 1024} KiB"
    return f"{sizes}, equal in two builds and from the sdist"


def wheel_file() -> Path:
    found = list(DIST.glob("strata_train-*.whl"))
    if len(found) != 1:
        raise ReleaseError(f"{DIST} holds {len(found)} wheels: run the step 'build' first")
    return found[0]


def check_contents() -> str:
    names = zipfile.ZipFile(wheel_file()).namelist()
    strange = [name for name in names if not re.match(r"strata/|strata_train-[^/]+\.dist-info/", name)]
    if strange:
        raise ReleaseError(f"the wheel holds what is not the package: {strange}")
    if not any(name.endswith("/licenses/LICENSE") for name in names) or "strata/py.typed" not in names:
        raise ReleaseError("the wheel lacks its licence or py.typed")
    if "strata/documents/docs/index.md" not in names:
        raise ReleaseError("the wheel lacks the documents that the dashboard shows")
    return f"{len(names)} files, all of the package, with licence and py.typed"


def check_documents() -> str:
    """The documents of this release, as pages that a browser opens without a server."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        release_tree(source)
        run(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", cwd=source)
        pages = len(list((source / "site").rglob("*.html")))
        archive = shutil.make_archive(str(DIST / f"strata_train-{version()}.docs"), "zip", source / "site")
    return f"{pages} pages in {Path(archive).name}"


def python_of(series: str) -> str:
    """An interpreter of this series that the machine has: in PATH, or one of pyenv's."""
    places = [str(place) for place in sorted(Path.home().glob(f".pyenv/versions/{series}.*/bin"))]
    env = {**os.environ, "PATH": os.pathsep.join([*places, os.environ["PATH"]])}
    try:
        return run(UV, "python", "find", "--no-python-downloads", series, env=env).strip()
    except ReleaseError as error:
        raise NotRunError(f"there is no Python {series} here") from error


def install(folder: Path, series: str, extra: str) -> Path:
    run(UV, "venv", "--quiet", "--python", python_of(series), "--seed", folder)
    wanted = f"{wheel_file()}[{extra}]" if extra else str(wheel_file())
    packages = [TORCH, wanted] if extra in ("train", "all") else [wanted]
    # pip and not uv: of torch it takes the build that the machine's index offers first.
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", *packages)
    run(*pip, "check")
    return folder / "bin"


def environment(programs: Path, folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STRATA_", "VIRTUAL_ENV"))}
    own = {"STRATA_CLIENT_CONFIG_HOME": str(folder / "config"), "STRATA_CLIENT_DATA_HOME": str(folder / "data")}
    return kept | own | {"STRATA_HUB_LISTEN": "127.0.0.1:0", "PATH": f"{programs}:{os.defpath}"}


def start_and_stop(command: Sequence[str], until: str, folder: Path, env: Mapping[str, str]) -> float:
    """Seconds until it served. It must end with status 0 on SIGINT."""
    began_s = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        printed = []
        # Also ends the reading of a server that prints nothing.
        overdue = threading.Timer(READY_S, server.kill)
        overdue.start()
        for line in server.stdout:
            printed.append(line)
            if until in line:
                break
        overdue.cancel()
        took_s = time.monotonic() - began_s
        server.send_signal(signal.SIGINT)
        printed.append(server.communicate(timeout=READY_S)[0])
    if until not in "".join(printed) or server.returncode != 0:
        raise ReleaseError(f"{' '.join(command)}: status {server.returncode}\n{''.join(printed)}")
    return took_s


def check_extra(series: str, extra: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = install(folder / "venv", series, extra)
        env = environment(programs, folder)
        for command in CHECKS[extra]:
            run("bash", "-c", command, cwd=folder, env=env)
        said = f"{len(CHECKS[extra])} checks"
        if extra in SERVERS:
            command, until = SERVERS[extra]
            took_s = start_and_stop(command.split(), until, folder, env)
            said += f", '{command.split(' --')[0]}' served after {took_s:.1f} s"
    return said


def check_uvx() -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = (UV, "tool", "run", "--python", python_of(OLDEST), "--from", f"{wheel_file()}[hub]", "strata", "up")
        took_s = start_and_stop(command, "ready", folder, environment(Path(UV).parent, folder))
    return f"uvx --from 'WHEEL[hub]' strata up served after {took_s:.1f} s"


@contextmanager
def index_on_loopback(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of an index (PEP 503) that has the wheel alone, and the paths that were fetched from it."""
    wheel = wheel_file()
    page = folder / "simple" / "strata-train"
    page.mkdir(parents=True)
    shutil.copy(wheel, page)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (page / "index.html").write_text(f'<!DOCTYPE html>\n<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')
    fetched: list[str] = []

    class Index(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """A missing page is no problem: so an index says that it does not have a package."""

    handler = functools.partial(Index, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple", fetched
        finally:
            server.shutdown()


def check_named(series: str) -> str:
    """An install by name: the wheel from an index on loopback, its dependencies from the index of this machine."""
    with tempfile.TemporaryDirectory() as name, index_on_loopback(Path(name) / "index") as (address, fetched):
        folder = Path(name)
        python = python_of(series)
        run(UV, "venv", "--quiet", "--python", python, folder / "venv")
        index = ("--index", address, "--refresh-package", "strata-train")
        run(UV, "pip", "install", "--quiet", "--python", folder / "venv", *index, "strata-train")
        if f"/simple/strata-train/{wheel_file().name}" not in fetched:
            raise ReleaseError(f"strata-train came from elsewhere; of the index on loopback were fetched {fetched}")
        tool = (UV, "tool", "run", "--quiet", "--python", python, *index)
        commands: list[tuple[str | Path, ...]] = [
            *((folder / "venv" / "bin" / program,) for program in ("strata-train", "strata")),
            (*tool, "strata-train"),
            (*tool, "--from", "strata-train", "strata-train"),
        ]
        env = environment(Path(UV).parent, folder)
        for command in commands:
            if (said := run(*command, "--version", env=env, cwd=folder).strip()) != f"strata {version()}":
                raise ReleaseError(f"{' '.join(map(str, command))} --version: {said}")
    return f"uv pip install strata-train and uvx strata-train, {len(commands)} times version {version()}"


def check_materials() -> str:
    """The bill of materials of an install with all extras, and the licences of what it brings."""
    with tempfile.TemporaryDirectory() as name:
        python = install(Path(name) / "venv", OLDEST, "all") / "python"
        tool = (UV, "tool", "run", "--python", python_of(OLDEST), "--from", SBOM_TOOL, "cyclonedx-py")
        file = DIST / f"strata_train-{version()}.cdx.json"
        options = ("--output-reproducible", "--of", "JSON", "-o", file, "--pyproject", ROOT / "pyproject.toml")
        run(*tool, "environment", *options, python)
        fields = json.loads(run(python, "-c", LICENCE_FIELDS))
    bill = json.loads(file.read_text("utf-8"))
    rows, unclear = [], []
    for component in sorted(bill["components"], key=lambda each: str(each["name"]).lower()):
        if not component.get("licenses") and fields.get(component["name"]):
            component["licenses"] = [{"license": {"name": fields[component["name"]]}}]
        licence = "; ".join(licences_of(component)) or "not declared"
        rows.append(f"| {component['name']} | {component['version']} | {licence} |\n")
        if not LICENCES.search(licence) and component["name"] not in ("pip", "setuptools"):
            unclear.append(f"{component['name']}: {licence}")
    file.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", "utf-8")
    (DIST / "LICENCES.md").write_text("| distribution | version | licence |\n|---|---|---|\n" + "".join(rows), "utf-8")
    if unclear:
        raise ReleaseError("licences that nobody has looked at: " + ", ".join(unclear))
    return f"{len(bill['components'])} components, all licences allowed"


def licences_of(component: Mapping[str, object]) -> Iterator[str]:
    declared = component.get("licenses", [])
    assert isinstance(declared, list)
    for entry in declared:
        licence = entry.get("license", {})
        yield entry.get("expression") or licence.get("id") or licence.get("name", "").replace("License :: ", "")


def checklist() -> dict[str, Callable[[], str]]:
    steps: dict[str, Callable[[], str]] = {
        "tree": check_tree,
        "build": check_build,
        "contents": check_contents,
        "documents": check_documents,
    }
    for series in (OLDEST, *LATER):
        for extra in CHECKS if series == OLDEST else ON_LATER:
            steps[f"{extra or 'base'}-{series}"] = functools.partial(check_extra, series, extra)
        steps[f"named-{series}"] = functools.partial(check_named, series)
    return steps | {"uvx": check_uvx, "materials": check_materials}


def steps_of(wanted: Sequence[str]) -> list[str]:
    """The steps that are meant by names of steps, and by Pythons: 3.12 is what is tried there."""
    found = [[name for name in checklist() if name == each or name.endswith(f"-{each}")] for each in wanted]
    if unknown := [each for each, names in zip(wanted, found, strict=True) if not names]:
        raise SystemExit(f"no such step: {', '.join(unknown)}; there are {', '.join(checklist())}")
    return [name for names in found for name in names]


def main() -> int:
    steps = checklist()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="STEP", help=f"some steps, or Pythons: {', '.join(steps)}")
    wanted = steps_of(parser.parse_args().only or list(steps))
    failed = not_run = 0
    for name in wanted:
        began_s = time.monotonic()
        try:
            said = steps[name]()
        except (ReleaseError, subprocess.SubprocessError) as error:
            failed += 1
            said = f"FAILED: {error}"
        except NotRunError as reason:
            not_run += 1
            said = f"NOT RUN: {reason}"
        print(f"{name:<18} {time.monotonic() - began_s:6.1f} s  {said}", flush=True)
    print(f"{len(wanted) - failed - not_run} of {len(wanted)} lines hold, {not_run} did not run")
    return 1 if failed else NOT_RUN if not_run else 0


if __name__ == "__main__":
    sys.exit(main())
