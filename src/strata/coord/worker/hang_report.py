"""Reports what the training thread does while no worker makes a step: its stack, processor time and collectives; which
functions count as waiting or busy; and `if_hung`, which ends the process.

The coordinator compares the reports of all ranks (`core.hang_diagnosis`). torch is looked at only if the program has
imported it: this module works without.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import linecache
import os
import signal
import sys
from collections.abc import Callable
from pathlib import PurePath
from types import FrameType, TracebackType
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from strata.base import log
from strata.coord.core.hang_diagnosis import FRAMES, HangReport, stands
from strata.coord.pb import coordinator_pb2 as pb

DISTRIBUTED: Final = "/torch/distributed/"
BUSY_FILES: Final = ("/torch/distributed/checkpoint/", "/torch/serialization.py")
"""Writing a checkpoint has collectives of its own and may take long."""
BUSY_CALLS: Final = (".synchronize(", ".item(", ".cpu(", ".tolist(")
"""The device may compute, or wait for a collective itself: the thread cannot tell."""
COLLECTIVE_CALLS: Final = (".run_backward(", "TCPStore(", ".wait(")
"""Where a thread waits for other ranks without a frame of torch.distributed: hooks of a backward pass, the store, the
handle of an asynchronous operation."""


HANG_CHECK_S: Final = 2.0
"""The training thread must not move for so long before its process is ended."""

_log = log.get(__name__)


class HangReporter:
    """Reports what the training thread does when no worker makes a step, and ends the process if the thread hangs."""

    def __init__(self, step: Callable[[], int | None], heartbeat_soon: Callable[[], None]) -> None:
        self._step, self._heartbeat_soon = step, heartbeat_soon
        self.training_thread: int | None = None
        """The thread that reported the last step."""
        self.generation_began_ns = 0
        self.pending: pb.HangReport | None = None
        """Sent with every heartbeat until one was received."""
        self._probe = 0
        """The last probe about a hang that was reported, or is about to be."""
        self._probed: tuple[int | None, HangReport] | None = None
        """The step and what the training thread did then."""

    def is_new(self, probe: int) -> bool:
        """Says whether this probe is to be reported to; it is not new a second time."""
        if not probe or probe == self._probe:
            return False
        self._probe = probe
        return True

    def on_received(self, sent: pb.HangReport) -> None:
        if self.pending is not None and self.pending.probe == sent.probe:
            self.pending = None

    async def report(self, probe: int) -> None:
        """Reports from a thread: what is looked at may hang too."""
        look = await asyncio.to_thread(look_at, self.training_thread)
        step = self._step()
        self._probed = (step, look)
        found = await asyncio.to_thread(report, probe, look, self.generation_began_ns)
        _log.warning("no_worker_makes_a_step", step=step, waits=found.waits, stack=" < ".join(found.frames[:4]))
        self.pending = found
        self._heartbeat_soon()

    async def end_if_hung(self, reason: str) -> None:
        """Others wait for this worker in a collective, and no call of its program will ever see the stop command."""
        if self._probed is None:
            return
        # As it was at the last probe: the command may come late, to a worker that has gone on since.
        step, before = self._probed
        await asyncio.sleep(HANG_CHECK_S)
        now = await asyncio.to_thread(look_at, self.training_thread)
        if self._step() != step or not stands(before, now):
            _log.warning("still_moving_after_stop", reason=reason)
            return
        unprinted = print_stacks()
        _log.error("ending_hung_process", reason=reason, stack=" < ".join(now.frames), unprinted=unprinted)
        os.kill(os.getpid(), signal.SIGKILL)


def look_at(thread_id: int | None) -> HangReport:
    """Returns what this thread does, without its collectives. None, or a thread that has ended: nothing is known, which
    is never a hang."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    if thread_id is None or frame is None:
        return HangReport(waits=False, busy=True, collective=None, cpu_s=None)
    found = _walk(frame)
    files = [file for file, _, _ in found]
    line = linecache.getline(*found[0][:2])
    busy = any(part in file for part in BUSY_FILES for file in files) or any(call in line for call in BUSY_CALLS)
    frames = tuple(f"{'/'.join(PurePath(file).parts[-2:])}:{number} in {name}" for file, number, name in found)
    waits = not busy and _is_collective(files[0], line)
    return HangReport(waits, busy, collective=None, cpu_s=_cpu_s(), frames=frames)


def is_collective_error(error: RuntimeError) -> bool:
    """Says whether a collective raised it: another rank may have gone."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    return _is_collective(file, linecache.getline(file, trace.tb_lineno))


def report(probe: int, look: HangReport, since_ns: int) -> pb.HangReport:
    """`since_ns`: the time of day at which the worker's generation began; collectives from before do not count."""
    return pb.HangReport(
        probe=probe,
        waits=look.waits,
        busy=look.busy,
        collective=_collectives_begun(),
        cpu_s=look.cpu_s,
        frames=look.frames,
        operation=_last_operation(since_ns),
    )


def print_stacks() -> str:
    """Print the stacks of all threads to stderr. Returns why it could not; empty if it could."""
    try:
        faulthandler.dump_traceback(file=sys.stderr)
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        # No stderr, or one that is no file.
        return repr(error)
    return ""


def _walk(frame: FrameType | None) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _is_collective(file: str, line: str) -> bool:
    return DISTRIBUTED in file or any(call in line for call in COLLECTIVE_CALLS)


def _cpu_s() -> float | None:
    """Returns the processor time of all threads of the process, and of children that live or have ended. None: this
    system does not tell."""
    try:
        children = psutil.Process().children(recursive=True)
        return sum(os.times()[:4]) + sum(sum(child.cpu_times()[:2]) for child in children)
    except (OSError, psutil.Error):
        return None


def _collectives_begun() -> int | None:
    """Returns the number of collectives begun in the process group of all ranks; None without one. None without one."""
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        return int(distributed.group.WORLD._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # A backend that does not count, or a group that ends just now.
        return None


def _last_operation(since_ns: int) -> str:
    """The newest entry of the flight recorder, if it is on; for people."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    try:
        entries = json.loads(c10d._dump_fr_trace_json())["entries"] if c10d is not None else []
        last = max(entries, key=lambda entry: int(entry["time_created_ns"]), default=None)
        if last is None or int(last["time_created_ns"]) < since_ns:
            return ""
        return f"{last['profiling_name']} {last['input_sizes']}"
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return ""
