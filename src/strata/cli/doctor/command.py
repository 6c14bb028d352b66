"""The command: all looks, one after the other, and the exit status that sums them up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from strata.cli.backup import hub_location_options
from strata.cli.doctor import agent, client, hub, machine
from strata.cli.doctor.findings import DoctorFinding, FindingState
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import hub_option
from strata.cli.output import Column, Format, Rows, output_option, printable, redact, write

_COLUMNS: Final = (Column("state"), Column("check"), Column("why"), Column("fix"))


@click.command()
@hub_location_options
@click.option("--state", metavar="FOLDER", help="Of the agent; ~/.local/state/strata/agent unless set.")
@hub_option
@output_option
def doctor(
    *,
    config: Path | None,
    data: str | None,
    database: str | None,
    state: str | None,
    context: str | None,
    output: Format,
) -> None:
    """Look for what you would stumble over: here, at the hub, in the agent.

    Each line says ok, warning or problem, why, and what to do. Exits with 100 if there is a problem.
    """
    worst = FindingState.OK
    with _Lines() if output is Format.TABLE else Rows(output, _COLUMNS) as rows:
        for finding in _looks(config, data, database, state, context):
            told = {"state": finding.state.value, "why": redact(finding.why), "fix": redact(finding.fix) or None}
            rows.add(finding._asdict() | told)
            worst = FindingState.PROBLEM if finding.state is FindingState.PROBLEM else worst
    if worst is FindingState.PROBLEM:
        click.get_current_context().exit(ExitCode.FAILED)


def _looks(
    config: Path | None, data: str | None, database: str | None, state: str | None, context: str | None
) -> Iterator[DoctorFinding]:
    yield from machine.check()
    yield from client.check(context)
    yield from agent.check(state)
    yield from hub.check(config, data, database)


class _Lines:
    """For people, as they come: the reason in full, and what to do below it."""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept back."""

    def add(self, row: Mapping[str, Any]) -> None:
        write(f"{row['state']:<8} {row['check']}: {printable(row['why'])}")
        if row["fix"]:
            write(f"{'':<8} → {printable(row['fix'])}")
