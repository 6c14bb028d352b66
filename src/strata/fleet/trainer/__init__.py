"""The API for trainers: `report` and `progress` while training, `describe_…` and `handle_describe` at the start.

    from strata.fleet.trainer import describe_argparse, handle_describe, progress, report

    handle_describe(describe_argparse(parser))      # `trainer --describe` prints the schema and exits
    model, mode, seed = assigned()
    settings = hyper()
    if (folder := resume_from()) is not None: ...   # resume from the last checkpoint of any host
    report(step=10, loss=0.4)
    progress(0.4)
    with new_checkpoint("step-10") as folder: ...   # complete when the block ends
    save(output_folder() / "model.safetensors")     # exit code 0: this is the result

`strata apply` runs a trainer that calls `handle_describe` with `--describe`. Every other function here exits at once
then, so that a trainer is never run for its parameters.

Outside of an agent `report` and `progress` do nothing and the folders are in the working folder, so a trainer can also
be run by hand. SIGTERM means that the job is preempted: save a checkpoint and exit within the grace period, 30 s by
default.
"""

from __future__ import annotations

from strata.fleet.trainer.describe import describe_argparse, describe_dataclass, describe_pydantic, handle_describe
from strata.fleet.trainer.job import assigned, hyper, new_checkpoint, output_folder, progress, report, resume_from

__all__ = [
    "assigned",
    "describe_argparse",
    "describe_dataclass",
    "describe_pydantic",
    "handle_describe",
    "hyper",
    "new_checkpoint",
    "output_folder",
    "progress",
    "report",
    "resume_from",
]
