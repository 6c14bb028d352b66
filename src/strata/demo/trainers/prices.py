"""Fits a line to a table in which a value is missing, and fails on it as such programs do."""

from __future__ import annotations

import csv
import io
import statistics
import sys
from typing import Final

from strata.fleet.trainer import report

TABLE: Final = """\
square_metres,price
48,151000
61,198500
73,n/a
80,260000
95,301000
"""


def main() -> None:
    rows = list(csv.DictReader(io.StringIO(TABLE)))
    sys.stdout.write(f"{len(rows)} rows\n")
    sys.stdout.flush()
    areas = [float(row["square_metres"]) for row in rows]
    prices = [float(row["price"]) for row in rows]
    report(slope=statistics.linear_regression(areas, prices).slope)


if __name__ == "__main__":
    main()
