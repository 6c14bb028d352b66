"""Run a simulated campaign: many seeds on all cores, a record that survives being cut off, and every finding."""

from __future__ import annotations

import multiprocessing
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from soak.campaigns import SIMULATED, quiet
from soak.record import RUNS, Run, next_number, rate

SAVE_EVERY_S: Final = 20.0


def run(campaign: str, seeds: int, processes: int, record: Path | None) -> int:
    """The number of violations. Without a record it starts at seed 0."""
    rows = RUNS.read(record) if record else []
    first = next_number(rows, campaign)
    started_s = saved_s = time.monotonic()
    done = violations = 0
    chosen = SIMULATED[campaign]

    def row() -> Run:
        return Run(
            campaign=campaign,
            date=datetime.now(UTC).date().isoformat(),
            command=f"make soak CAMPAIGN={campaign} SEEDS={seeds}",
            first=first,
            seeds=done,
            violations=violations,
            seeds_per_s=done / (time.monotonic() - started_s),
        )

    with multiprocessing.get_context("spawn").Pool(processes, initializer=quiet) as pool:
        for finding in pool.imap(chosen.run, range(first, first + seeds), chunksize=chosen.chunk):
            done += 1
            if finding.problem is not None:
                violations += 1
                click.echo(f"seed {finding.seed}: {finding.problem}\n")
            if record and time.monotonic() - saved_s > SAVE_EVERY_S:
                saved_s = time.monotonic()
                RUNS.put(record, row())
                click.echo(
                    f"{done}/{seeds} seeds, {violations} violations, {rate(row().seeds_per_s)} seeds/s", err=True
                )
    if record:
        RUNS.put(record, row())
    pace = rate(row().seeds_per_s)
    click.echo(f"{campaign}: seeds {first} to {first + seeds - 1}: {violations} violations, {pace} seeds/s")
    return violations
