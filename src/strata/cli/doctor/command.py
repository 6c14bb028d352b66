"""`strata doctor`: runs all checks in order, prints each finding, and exits with the worst one's status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from strata.cli.backup import hub_location_options
from strata.cli.doctor import hub, machine
from strata.cli.doctor.findings import DoctorFinding, FindingState
from strata.cli.exit_codes import ExitCode
from strata.cli.fleet.client import hub_view_options
from strata.cli.output import Format, printable, redact, write
from strata.cli.rows import Column, Rows

_COLUMNS: Final = (Column("state"), Column("check"), Column("why"), Column("fix"))


@click.command()
@hub_location_options
@click.option("--state", metavar="FOLDER", help="The agent's state folder (default ~/.local/state/strata/agent).")
@hub_view_options
def doctor(
    *,
    config: Path | None,
    data: str | None,
    database: str | None,
    state: str | None,
    context: str | None,
    output: Format,
) -> None:
    """Diagnose this machine, the agent and the hub.

    Prints for each check: ok, warning or problem, the reason, and what to do. Exit status 100 if there is a problem.
    """
    worst = FindingState.OK
    with _FindingPrinter() if output is Format.TABLE else Rows(output, _COLUMNS) as rows:
        for finding in _run_checks(config, data, database, state, context):
            cells = {"state": finding.state.value, "why": redact(finding.why), "fix": redact(finding.fix) or None}
            rows.add(finding._asdict() | cells)
            worst = FindingState.PROBLEM if finding.state is FindingState.PROBLEM else worst
    if worst is FindingState.PROBLEM:
        click.get_current_context().exit(ExitCode.FAILED)


def _run_checks(
    config: Path | None, data: str | None, database: str | None, state: str | None, context: str | None
) -> Iterator[DoctorFinding]:
    yield from machine.check_install()
    yield from hub.check_context(context)
    yield from machine.check_agent(state)
    yield from hub.check_data(config, data, database)


class _FindingPrinter:
    """Prints each finding at once: the full reason, and what to do on the next line."""

    def __enter__(self) -> _FindingPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        """Every finding is printed already."""

    def add(self, row: Mapping[str, Any]) -> None:
        write(f"{row['state']:<8} {row['check']}: {printable(row['why'])}")
        if row["fix"]:
            write(f"{'':<8} → {printable(row['fix'])}")
