"""Nothing that comes from a lease is joined to a path without a full match.

A lease is written by whoever may submit jobs. In the agent every path is joined with a constant, or with a name from
the list below: what `path_names` has matched, what the agent has read from its own folders, and what it has made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
AGENT: Final = ROOT / "src/strata/fleet/agent"
JOINS: Final = ("joinpath", "with_name", "with_stem", "with_suffix")
PATHS: Final = ("Path", "PurePath", "PurePosixPath", "PosixPath", "os.path.join")
ALLOWED: Final = {
    "attempt.py": {
        "host.attempts / record.key": "path_names.attempt_name",
    },
    "exec_session.py": {
        "job.folder / exec_name(pending.id)": "path_names.exec_name",
        "Path(__file__)": "our own program",
    },
    "gang_member.py": {
        "paths.fetched / name": "path_names.parts_name",
        "paths.fetched / f'.{name}'": "path_names.parts_name",
    },
    "exec_in_sandbox.py": {
        "Path(f'/proc/{pid}/stat')": "a number",
        "Path(group, 'cgroup.procs')": "path_names.attempt_name behind a prefix of our own, or as the kernel names it",
        "Path(sys.argv[1])": "the agent's own folder",
    },
    "privsep.py": {
        "Path(group)": "path_names.environment_name, behind a prefix of our own",
    },
    "server_job.py": {
        "work / 'servers' / server_name(job_id)": "path_names.server_name",
        "data.with_name(f'{data.name}.restored')": "path_names.server_name",
    },
    "state.py": {
        "self._attempts / record.key": "path_names.attempt_name",
    },
    "trainer_source.py": {
        "cache / name": "a PathName of path_names",
        "Path(trainer.directory)": "the host's own folder: the job's user enters it, and the agent does not",
    },
    "environment_variables.py": {
        "Path(venv)": "for the PATH of the job; the agent opens nothing there",
    },
    "host_cache.py": {
        "self.folder / name": "a PathName of path_names, or a name that the agent has read there",
        "self.folder / f'{name}.lock'": "a PathName of path_names",
        "self.folder / f'{folder.name}.lock'": "a name that the agent has read there",
        "self.folder / name / 'users' / key": "path_names.attempt_name",
        "self.attempts / user.name": "a name that the agent has written",
    },
    "data_cache.py": {
        "Path(place)": "a folder that the agent has written",
        "Path(place, name)": "a file that the agent has written",
    },
    "environment_cache.py": {
        "Path(strata.__file__)": "our own program",
        "Path(cache.program)": "uv, as the host has it",
    },
    "uv.py": {
        "folder / file": "in the process of the job's user, by a path that has no `..`",
        "run.folder / name": "in the process of the job's user: the name of a file that it has read",
        "Path(sys.executable)": "our own program",
    },
    "unpack.py": {
        "folder / _relative_path(member.target)": "in the process of the job's user; nothing leads outside",
        "folder / name": "in the process of the job's user; nothing leads outside",
        "PurePosixPath(name.lstrip('/'))": "in the process of the job's user",
        "PurePosixPath(target)": "in the process of the job's user",
    },
    "privsep_worker.py": {
        "Path(request.folder)": "in the process of the job's user",
        "Path(request.scratch)": "in the process of the job's user",
        "Path(request.target)": "in the process of the job's user",
        "Path(tempfile.mkdtemp(prefix='source-', dir=request.scratch))": "in the process of the job's user",
    },
    "probe.py": {
        "(self._before[0] - before[0]) / (self._before[1] - before[1])": "a number",
    },
    "prepare.py": {
        "Path(folder)": "an environment of the cache, by path_names.environment_name",
    },
    "sandbox.py": {
        "parent / name": "path_names.attempt_name, behind a prefix of our own",
        "Path(groups[-1])": "path_names.attempt_name, behind a prefix of our own",
        "found.parents.groups[-1] / f'strata-try-{os.getpid()}'": "of our own making",
        "Path(needed)": "compared with folders; the agent opens nothing there",
        "Path(name)": "of our own making",
        "Path(text)": "the home of a user",
        "Path(program)": "our own program, and the interpreter of the owner's settings",
        "Path(sys.prefix)": "our own program",
        "Path(sys.base_prefix)": "our own program",
    },
    "job_limits.py": {
        "(usage.cpu_s - before_s) / (now_s - since_s)": "a number",
        "Path(group)": "path_names.attempt_name, behind a prefix of our own",
        "Path(folder)": "path_names.attempt_name, and path_names.server_name",
    },
    "supervised.py": {
        "Path(group)": "path_names.attempt_name, behind a prefix of our own",
    },
    "supervisor.py": {
        "Path(__file__)": "our own program",
        "Path(__file__).with_name(f'{name}.py')": "our own program",
        "Path(f'/proc/{pid}/stat')": "a number",
        "Path(f'/proc/{pid}/smaps_rollup')": "a number",
        "ticks / os.sysconf('SC_CLK_TCK')": "a number",
        "Path('/sys/fs/cgroup' + path)": "of this process",
        "Path(f'/sys/fs/cgroup/memory{at}')": "of this process",
        "Path(sys.argv[1])": "the agent's own folder",
        "path.with_name(f'.{path.name}.new')": "beside a file of our own",
    },
    "selftest.py": {
        "folder / f'.probe-{secrets.token_hex(4)}'": "of our own making",
        "work / name": "of our own making",
        "state / name": "of our own making",
    },
}
"""Per module: the expression, and why it is safe."""


WITHOUT_LEASES: Final = {"cgroup.py"}
"""Reads and writes what the kernel has in groups that it is given, and knows of no lease: it imports nothing of
Strata."""


def _joined(tree: ast.Module) -> Iterator[tuple[str, list[ast.expr]]]:
    """Every expression that makes a path, with what is joined in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield ast.unparse(node), [node.right]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in PATHS or name.rpartition(".")[2] in JOINS:
                yield ast.unparse(node), node.args


def _constant(node: ast.expr) -> bool:
    """A text or number that is written there, or named as a constant of the module."""
    if isinstance(node, ast.Constant):
        return True
    if isinstance(node, ast.IfExp):
        return _constant(node.body) and _constant(node.orelse)
    if isinstance(node, ast.BinOp):
        return _constant(node.left) and _constant(node.right)
    return isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2].isupper()


def unmatched(text: str, allowed: dict[str, str]) -> list[str]:
    found = []
    for expression, joined in _joined(ast.parse(text)):
        if expression not in allowed and not all(_constant(part) for part in joined):
            found.append(expression)
    return sorted(set(found))


@pytest.mark.parametrize("module", sorted({path.name for path in AGENT.glob("*.py")} - WITHOUT_LEASES))
def test_a_path_of_the_agent_is_joined_with_constants_and_matched_names_alone(module: str) -> None:
    text = (AGENT / module).read_text(encoding="utf-8")
    assert unmatched(text, ALLOWED.get(module, {})) == []


def test_every_exception_is_still_needed() -> None:
    for module, allowed in ALLOWED.items():
        there = {expression for expression, _ in _joined(ast.parse((AGENT / module).read_text(encoding="utf-8")))}
        assert set(allowed) <= there, module


@pytest.mark.parametrize("module", sorted(WITHOUT_LEASES))
def test_a_module_that_is_left_out_knows_no_lease(module: str) -> None:
    text = (AGENT / module).read_text(encoding="utf-8")
    assert "import strata" not in text
    assert "from strata" not in text


@pytest.mark.parametrize(
    "planted",
    [
        "kept = cache / bundle",
        "kept = cache / trainer.bundle.removeprefix('sha256:')",
        "folder = site.attempts / f'{lease.job_id}-{lease.epoch}'",
        "folder = cache.joinpath(lease.checkpoint)",
        "folder = Path(f'/jobs/{lease.job_id}')",
        "folder = os.path.join(cache, trainer.commit)",
    ],
)
def test_a_field_of_a_lease_in_a_path_is_found(planted: str) -> None:
    assert unmatched(planted, {}) != []


def test_only_full_matches_make_names_of_leases() -> None:
    tree = ast.parse((AGENT / "path_names.py").read_text(encoding="utf-8"))
    calls = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert "fullmatch" in calls
    assert not calls & {"match", "search", "startswith", "removeprefix"}
