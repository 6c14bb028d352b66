"""The command line as a whole: what it imports, what it says on stderr, and its exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from strata import __version__
from strata.base.errors import Code, StrataError
from strata.cli.examples import EXAMPLES
from strata.cli.exit_codes import EXIT_CODE_OF, ExitCode
from strata.cli.extras import distribution_of, extras_by_distribution
from strata.cli.groups import CommandEntry, LazyGroup
from strata.cli.main import ALIASES, COMMANDS, FIRST, SYNONYMS, Root, run, strata
from tests.rules.documents import unknown_command

STRATA = str(Path(sys.executable).with_name("strata"))


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=60, check=False
    )


def failing(error: BaseException) -> click.Group:
    @click.group()
    @click.pass_context
    @click.option("--debug", is_flag=True)
    def group(ctx: click.Context, debug: bool) -> None:
        ctx.obj.debug = debug

    @group.command()
    def work() -> None:
        raise error

    return group


def every_command(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    ctx = click.Context(group)
    found = [path]
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        found += every_command(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


def test_help_imports_no_command_and_nothing_slow() -> None:
    done = python(
        """
        import json, sys
        from strata.cli.main import run
        status = run(["--help"])
        print(json.dumps([status, sorted(sys.modules)]), file=sys.stderr)
        """
    )
    status, modules = json.loads(done.stderr)
    assert status == 0
    assert "journal" in done.stdout
    assert not {"rich", "msgspec", "asyncio", "strata.cli.journal", "strata.journal"} & set(modules)


def test_every_help_works_in_a_base_install() -> None:
    paths = every_command(strata)
    assert ("journal", "dump") in paths
    optional = extras_by_distribution()
    absent = {
        "google",
        "opentelemetry",
        *(name for name in packages_distributions() if distribution_of(name) in optional),
    }
    assert {"grpc", "psycopg", "torch", "yaml", "zmq"} <= absent
    done = python(
        """
        import json, sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in json.loads(sys.argv[1]):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        from strata.cli.main import run
        for path in json.loads(sys.argv[2]):
            assert run([*path, "--help"]) == 0, path
        """,
        json.dumps(sorted(absent)),
        json.dumps(paths),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(paths)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_repeats_the_short_help_of_the_command(name: str) -> None:
    command = strata.get_command(click.Context(strata), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(limit=200) == COMMANDS[name].help
    assert len(COMMANDS[name].help) <= 70


def test_every_alias_names_a_command_and_hides_none() -> None:
    assert set(ALIASES.values()) <= COMMANDS.keys()
    assert not ALIASES.keys() & COMMANDS.keys()


def test_an_alias_runs_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    group = LazyGroup(name="strata", table=COMMANDS, aliases={"log": "journal"})
    assert run(["log", "--help"], group) == 0
    assert "dump" in capsys.readouterr().out


def test_a_target_that_does_not_exist_is_a_defect_and_not_an_unknown_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = LazyGroup(name="strata", table={"gone": CommandEntry("gone:gone", "")}, aliases={})
    assert run(["gone"], group) == ExitCode.INTERNAL
    assert "internal error: ModuleNotFoundError" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"strata {__version__}\n"


def test_strata_alone_shows_where_to_start_and_not_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == ExitCode.OK
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "Start here" in shown.out
    assert [name for name in COMMANDS if f"strata {name} " in shown.out] == [name for name in COMMANDS if name in FIRST]
    assert "strata --help" in shown.out
    assert len(shown.out.splitlines()) <= 20


def test_the_commands_are_listed_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "Options:",
        *dict.fromkeys(f"{entry.section}:" for entry in COMMANDS.values()),
    ]
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == [*COMMANDS]


def test_every_command_has_examples_that_exist() -> None:
    paths = [" ".join(path) for path in every_command(strata) if path]
    assert [path for path in paths if path not in EXAMPLES] == []
    assert EXAMPLES.keys() <= {*paths}
    for path, examples in EXAMPLES.items():
        for example in examples:
            command = example[example.index("strata ") :].partition(" > ")[0].partition(" < ")[0]
            inner = re.search(r"\$\((.*)\)", command)
            commands = [command.replace(inner[0], "JOB"), inner[1]] if inner else [command]
            assert [unknown_command(strata, each) for each in commands if unknown_command(strata, each)] == [], example
            words = command.split()[1:]
            resolved = ALIASES.get(words[0], words[0])
            assert resolved == path.split()[0] or path in ("data", "secrets"), example


def test_help_shows_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["artifacts", "get", "--help"]) == 0
    assert capsys.readouterr().out.endswith("  Examples:\n    strata artifacts get tree-small ./result\n")


@pytest.mark.parametrize(("word", "meant"), SYNONYMS.items())
def test_a_word_of_another_program_leads_to_what_has_that_meaning_here(word: str, meant: str) -> None:
    assert word not in COMMANDS
    assert word not in ALIASES
    first = meant.split(maxsplit=1)[0]
    assert first in ("--version", "--help") or ALIASES.get(first, first) in COMMANDS


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["ps"], "list"),
        (["kill", "x"], "cancel"),
        (["rm", "x"], "archive"),
        (["stop"], "cancel"),
        (["retry"], "requeue"),
        (["describe"], "show"),
        (["version"], "--version"),
        (["tail"], "logs -f"),
        (["cancle"], "cancel"),
    ],
)
def test_a_suggestion_goes_by_meaning_and_then_by_letters(
    args: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == ExitCode.USAGE
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_subcommands_have_the_verbs_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", "ls", "--help"]) == 0
    assert run(["secrets", "remove", "--help"]) == 0
    assert run(["artifacts", "rm", "--help"]) == 0
    assert run(["hosts", "ls", "--help"]) == 0
    capsys.readouterr()
    assert run(["keys", "creat"]) == ExitCode.USAGE
    assert "did you mean 'create'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (["jurnal"], ["strata: there is no command 'jurnal', did you mean 'journal'?", "hint: strata --help"]),
        (["zzz"], ["strata: there is no command 'zzz'", "hint: strata --help"]),
        (["journal", "list"], ["strata: Missing argument 'DATABASE'.", "hint: strata journal list --help"]),
    ],
)
def test_a_usage_error_says_where_help_is(
    args: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(args) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.err.splitlines() == lines
    assert captured.out == ""


@pytest.mark.parametrize("code", Code)
def test_a_refusal_is_one_line_its_hint_another_and_its_code_the_exit_status(
    code: Code, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["work"], failing(StrataError(code, "it is full", hint="free some space"))) == EXIT_CODE_OF[code]
    assert capsys.readouterr().err == "strata: it is full\nhint: free some space\n"
    assert run(["work"], failing(StrataError(code, "it is full"))) == EXIT_CODE_OF[code]
    assert capsys.readouterr().err == "strata: it is full\n"


def test_an_unexpected_error_is_one_line_and_the_way_to_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["work"], failing(KeyError("x"))) == 70
    first, hint = capsys.readouterr().err.splitlines()
    assert first == "strata: internal error: KeyError: 'x'"
    assert "--debug" in hint


def test_debug_shows_the_traceback_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    error = KeyError("postgresql://me:hunter2@db/x")
    assert run(["--debug", "work"], failing(error)) == 70
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "hunter2" not in shown


def test_the_debug_flag_reaches_the_handler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--debug", "journal", "list", str(tmp_path / "none")]) == ExitCode.NOT_FOUND
    assert "Traceback" in capsys.readouterr().err
    assert run(["journal", "list", str(tmp_path / "none")]) == ExitCode.NOT_FOUND
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_is_exit_130(error: BaseException) -> None:
    assert run(["work"], failing(error)) == 130


@pytest.mark.skipif(find_spec("psycopg") is None, reason="only a package that is there can be taken away")
def test_a_missing_extra_is_exactly_one_line() -> None:
    done = python(
        """
        import sys
        sys.modules["psycopg"] = None
        from strata.cli.main import main
        sys.argv = ["strata", "journal", "list", "postgresql://me:hunter2@127.0.0.1:1/x"]
        main()
        """
    )
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == (
        "strata: this command needs psycopg, which is not installed: pip install 'strata-train[postgres]'\n"
    )


def test_a_reader_that_leaves_is_no_error(journal_file: Callable[[int], Path]) -> None:
    database = journal_file(5_000)
    read, write = os.pipe()
    process = subprocess.Popen(
        [STRATA, "journal", "dump", str(database), "a", "-o", "jsonl"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert os.read(read, 20)
    os.close(read)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (ExitCode.BROKEN_PIPE, "")


@click.command()
def hang_up() -> None:
    raise BrokenPipeError


def test_a_connection_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    package, _, module = __name__.rpartition(".")
    table = {"hang-up": CommandEntry(f"{module}:hang_up", "")}
    group = Root(name="strata", table=table, aliases={}, package=package)
    assert run(["hang-up"], group) == ExitCode.UNREACHABLE
    assert capsys.readouterr().err == "strata: the other side closed the connection\n"


def test_the_console_script_is_installed() -> None:
    done = subprocess.run([STRATA, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"strata {__version__}\n"
