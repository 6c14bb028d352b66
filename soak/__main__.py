"""Run a campaign: many seeds on all cores, a record that survives being cut off, and the seed of every finding."""

from __future__ import annotations

import multiprocessing
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from soak import record
from soak.campaigns import CAMPAIGNS, quiet

RECORD = Path(__file__).parents[1] / "docs" / "proof.md"
CHUNK = 25
"""Seeds a worker takes at a time."""
SAVE_EVERY_S = 20.0


@click.command()
@click.argument("campaign", type=click.Choice(sorted(CAMPAIGNS)))
@click.option("--seeds", default=1000, show_default=True, help="How many seeds to add to the record.")
@click.option("--processes", default=multiprocessing.cpu_count(), show_default=True)
@click.option("--no-record", is_flag=True, help="Start at seed 0 and leave the record alone.")
def main(campaign: str, seeds: int, processes: int, *, no_record: bool) -> None:
    """Run seeds of CAMPAIGN and add them to docs/proof.md. Exit 1 if any of them is a violation."""
    runs = record.read(RECORD)
    first = 0 if no_record else record.next_seed(runs, campaign)
    started_s = saved_s = time.monotonic()
    done = violations = 0

    def row() -> record.Run:
        return record.Run(
            campaign=campaign,
            date=datetime.now(UTC).date().isoformat(),
            command=f"make soak CAMPAIGN={campaign} SEEDS={seeds}",
            first_seed=first,
            seeds=done,
            violations=violations,
            seeds_per_s=done / (time.monotonic() - started_s),
        )

    with multiprocessing.get_context("spawn").Pool(processes, initializer=quiet) as pool:
        for finding in pool.imap(CAMPAIGNS[campaign], range(first, first + seeds), chunksize=CHUNK):
            done += 1
            if finding.problem is not None:
                violations += 1
                click.echo(f"seed {finding.seed}: {finding.problem}\n")
            if not no_record and time.monotonic() - saved_s > SAVE_EVERY_S:
                saved_s = time.monotonic()
                record.write(RECORD, [*runs, row()])
                click.echo(f"{done}/{seeds} seeds, {violations} violations, {row().seeds_per_s:.1f} seeds/s", err=True)
    if not no_record:
        record.write(RECORD, [*runs, row()])
    click.echo(
        f"{campaign}: seeds {first} to {first + seeds - 1}: {violations} violations, {row().seeds_per_s:.1f} seeds/s"
    )
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
