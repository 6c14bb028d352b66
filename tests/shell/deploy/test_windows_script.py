"""The installer for Windows, as far as it can be looked at elsewhere: it parses, and no program is told the token.

It has never run on Windows; the document of limits says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import tree_sitter_powershell
from tree_sitter import Language, Node, Parser

SCRIPT: Final = Path(__file__).parents[3] / "scripts" / "install-training-worker-windows.ps1"
SOURCE: Final = SCRIPT.read_bytes()
PARSER: Final = Parser(Language(tree_sitter_powershell.language()))
SECRETS: Final = ("$carried", "$asked", "$text", "get-jointoken", "$env:strata_join_token")


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from nodes(child)


def text(node: Node) -> str:
    return (node.text or b"").decode()


def errors(source: bytes) -> list[str]:
    tree = PARSER.parse(source)
    return [
        f"line {n.start_point[0] + 1}: {text(n)[:60]!r}" for n in nodes(tree.root_node) if n.is_error or n.is_missing
    ]


def commands(source: bytes) -> list[Node]:
    return [node for node in nodes(PARSER.parse(source).root_node) if node.type == "command"]


def secrets_in_arguments(source: bytes) -> list[str]:
    """Programs (`& …`) and our own function for them that get a secret among their words."""
    found = []
    for command in commands(source):
        words = text(command)
        arguments = words.partition("-Text")[0] if words.startswith("Invoke-Program") else words
        starts_a_program = words.startswith(("&", "Invoke-Program", "Start-Process"))
        if starts_a_program and any(secret in arguments.lower() for secret in SECRETS):
            found.append(words)
    return found


def test_it_has_no_syntax_error() -> None:
    assert errors(SOURCE) == []


@pytest.mark.parametrize("wrong", ["if ($x { 1 }", "function Broken { param([string $a) }", "$a = @('x', "])
def test_a_syntax_error_is_found(wrong: str) -> None:
    assert errors(SOURCE + b"\n" + wrong.encode())


def test_no_program_gets_the_token_as_a_word() -> None:
    assert len(commands(SOURCE)) > 20, "the commands were found"
    assert secrets_in_arguments(SOURCE) == []
    assert "$Text | & $Program @Arguments" in SOURCE.decode(), "it is given through the pipe"


@pytest.mark.parametrize(
    "wrong",
    [
        "& $strata join $Hub $carried",
        "Invoke-Program $strata @('join', $Hub, (Get-JoinToken))",
        "& $strata join $Hub $env:STRATA_JOIN_TOKEN",
    ],
)
def test_a_token_among_the_words_is_found(wrong: str) -> None:
    assert secrets_in_arguments(SOURCE + b"\n" + wrong.encode())


def test_there_is_no_parameter_for_the_token_and_no_place_for_a_stray_one() -> None:
    script = SOURCE.decode()
    parameters = re.findall(r"(?m)^    \[(?:string|switch)\] \$(\w+)", script.partition("\nSet-StrictMode")[0])
    assert set(parameters) == {
        "Hub", "TokenFile", "From", "Name", "Python", "Prefix", "DryRun", "Uninstall", "Force",
    }  # fmt: skip
    assert "PositionalBinding = $false" in script


def test_it_stops_at_the_first_failure_and_forgets_the_variable_first() -> None:
    lines = [line for line in SOURCE.decode().splitlines() if line and not line.startswith(("#", " ", ".", "<"))]
    body = lines[lines.index("Set-StrictMode -Version Latest") :]
    assert body[:4] == [
        "Set-StrictMode -Version Latest",
        "$ErrorActionPreference = 'Stop'",
        "$carried = $env:STRATA_JOIN_TOKEN",
        "$env:STRATA_JOIN_TOKEN = $null",
    ]


def test_the_task_runs_the_agent_with_its_folders_and_without_a_time_limit() -> None:
    (arguments,) = [line for line in SOURCE.decode().splitlines() if line.startswith('    $arguments = "agent ')]
    assert arguments.endswith('"agent --state `"$state`" --work `"$work`" --log-format json"')
    parts = {text(command).partition(" ")[0]: text(command) for command in commands(SOURCE)}
    assert "-Execute $strata -Argument $arguments" in parts["New-ScheduledTaskAction"]
    assert "-ExecutionTimeLimit 0" in parts["New-ScheduledTaskSettingsSet"]
    assert "-RunLevel Limited" in parts["New-ScheduledTaskPrincipal"]
    assert "@definition" in parts["Register-ScheduledTask"]


def test_both_installers_have_the_same_options() -> None:
    script = SCRIPT.with_name("install-training-worker.sh").read_text()
    for option in ("hub", "token-file", "from", "name", "python", "prefix", "dry-run", "uninstall", "force"):
        assert f"--{option}" in script
        assert re.search(rf"\${option.replace('-', '')}\b", SOURCE.decode(), re.IGNORECASE), option
