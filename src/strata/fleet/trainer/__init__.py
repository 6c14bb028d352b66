"""What a trainer imports: `report` and `progress` while it runs, `describe_…` and `handle_describe` at its start.

    from strata.fleet.trainer import describe_argparse, handle_describe, progress, report

    handle_describe(describe_argparse(parser))      # `trainer --describe` prints the schema and ends
    report(step=10, loss=0.4)
    progress(0.4)

Outside of an agent `report` and `progress` do nothing, so a trainer runs by hand as well.
"""

from __future__ import annotations

from strata.fleet.trainer.describe import describe_argparse, describe_dataclass, describe_pydantic, handle_describe
from strata.fleet.trainer.lines import progress, report

__all__ = ["describe_argparse", "describe_dataclass", "describe_pydantic", "handle_describe", "progress", "report"]
