"""Run a campaign and add it to the record."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import click

from soak import real, simulated
from soak.campaigns import REAL, SIMULATED
from soak.trials import Database

RECORD = Path(__file__).parents[1] / "docs" / "campaign-record.md"


@click.command()
@click.argument("campaign", type=click.Choice(sorted([*SIMULATED, *REAL])))
@click.option("--seeds", default=1000, show_default=True, help="Simulations: how many seeds to add to the record.")
@click.option(
    "--processes",
    default=multiprocessing.cpu_count(),
    show_default=True,
    help="Simulations: how many processes to use.",
)
@click.option("--kills", type=int, help="Number of faults to inject into real processes.")
@click.option("--on", "database", type=click.Choice(["sqlite", "postgres"]), default="sqlite", show_default=True)
@click.option("--workers", type=int, help="Real processes: how many workers to connect.")
@click.option("--no-record", is_flag=True, help="Start at the first seed or trial and leave the record alone.")
def main(  # noqa: PLR0913 - the options of a command
    campaign: str,
    *,
    seeds: int,
    processes: int,
    kills: int | None,
    database: Database,
    workers: int | None,
    no_record: bool,
) -> None:
    """Run CAMPAIGN and add the result to docs/campaign-record.md. Exit status 1 if a property was violated."""
    record = None if no_record else RECORD
    if campaign in SIMULATED:
        violations = simulated.run(campaign, seeds, processes, record)
    else:
        violations = real.run(campaign, kills, workers, database, record)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
