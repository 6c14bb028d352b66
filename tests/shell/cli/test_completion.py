"""A real bash completes what the command prints for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata.cli.main import run

PROGRAMS = Path(sys.executable).parent


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    script = f"""
        source <(strata completion bash)
        COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()
        _strata_completion strata
        printf '%s\\n' "${{COMPREPLY[@]}}"
        complete -p strata
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={"PATH": f"{PROGRAMS}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *offered, registered = done.stdout.splitlines()
    assert registered.endswith("-F _strata_completion strata")
    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("strata", "requ"), ["requeue"]),
        (("strata", "re"), ["recipes", "reload", "requeue", "restore", "resume", "revoke"]),
        (("strata", "host"), ["hosts"]),
        (("strata", "keys", "cr"), ["create"]),
        (("strata", "list", "--stat"), ["--status"]),
        (("strata", "keys", "create", "--role", "op"), ["operator"]),
        (("strata", "zzz"), [""]),
    ],
)
def test_bash_completes_commands_options_and_choices(words: tuple[str, ...], offered: list[str]) -> None:
    assert sorted(completed(*words)) == offered


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef strata"), ("fish", "complete --no-files --command")])
def test_the_other_shells_get_theirs(shell: str, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert mark in capsys.readouterr().out


def test_a_shell_that_is_not_known_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "csh"]) == 2
    assert "'csh'" in capsys.readouterr().err
