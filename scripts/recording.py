"""A recording of a real run: three workers of a gang share a dataset, and two of them are killed with SIGKILL.

The program is worker.py of docs/starts.md, which adds up numbers: the sum stands for a model. Here it waits until all
three have joined. The lines are those that the commands printed, at the times at which they came.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from strata.base.settings import process_environment
from tests.e2e.blocks import blocks
from tests.e2e.machines import ROOT, Program
from tests.support.ports import port_of, reserve_port

WORKERS: Final = ("one", "two", "three")
NUMBERS: Final = 15000
JOIN: Final = "strata.join("
TRAINS_S: Final = 2.0
"""How long a generation works before one of its workers is killed."""
SILENT_S: Final = 300.0
"""After so long without a line the recording has failed."""
SERVES: Final = re.compile("leadership_acquired")


class Line(NamedTuple):
    at_s: float
    text: str
    kind: str
    """Its class in the style."""


class Terminal:
    """What commands of one shell print, in the order and at the times at which it came."""

    def __init__(self, folder: Path, address: str) -> None:
        self.lines: list[Line] = []
        self._folder = folder
        own = {"STRATA_WORKER_ADDRESS": address, "STRATA_WORKER_JOB": "sum"}
        self._environ = {**process_environment(), **own}
        self._printed: queue.Queue[str] = queue.Queue()
        self._began_s = time.monotonic()

    def note(self, text: str, kind: str) -> None:
        self.lines.append(Line(time.monotonic() - self._began_s, text, kind))

    def start(self, worker: str) -> subprocess.Popen[str]:
        self.note(f"$ STRATA_WORKER_ID={worker} python worker.py &", "typed")
        process = subprocess.Popen(
            [sys.executable, "worker.py"],
            cwd=self._folder,
            env={**self._environ, "STRATA_WORKER_ID": worker},
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._printed.put(line.rstrip("\n"))

    def follow(self, text: str, times: int = 1) -> None:
        """Show what is printed, up to so many lines with this text."""
        while times:
            line = self._printed.get(timeout=SILENT_S)
            self.note(line, "printed")
            times -= text in line

    def kill(self, process: subprocess.Popen[str], what: str) -> None:
        self.note(f"$ kill -9 {process.pid}  # {what}", "killed")
        process.kill()
        process.wait()


def play(terminal: Terminal) -> None:
    processes = [terminal.start(worker) for worker in WORKERS]
    try:
        for left, process in zip(range(len(WORKERS), 1, -1), processes, strict=False):
            terminal.follow(f" of {left}", left)
            time.sleep(TRAINS_S)
            terminal.kill(process, f"worker {WORKERS[len(WORKERS) - left]}")
        terminal.follow(f"{WORKERS[-1]} has {NUMBERS * (NUMBERS + 1) // 2}")
        if processes[-1].wait(SILENT_S):
            raise RuntimeError(f"the last worker ended with status {processes[-1].returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def record() -> str:
    with tempfile.TemporaryDirectory(prefix="strata-") as name, reserve_port() as guard:
        folder, address = Path(name), f"127.0.0.1:{port_of(guard)}"
        page = (ROOT / "docs" / "starts.md").read_text(encoding="utf-8")
        (program,) = (block.body for block in blocks(page) if block.title == "worker.py")
        waiting = program.replace(JOIN, f"{JOIN}wait_for={len(WORKERS)}, ")
        (folder / "worker.py").write_text(waiting, encoding="utf-8")
        (folder / "numbers.txt").write_text("".join(f"{n}\n" for n in range(1, NUMBERS + 1)), encoding="utf-8")
        coordinator = Program(folder / "server", "coordinator", STRATA_COORDINATOR_LISTEN=address)
        try:
            coordinator.until_it_says(SERVES)
            terminal = Terminal(folder, address)
            play(terminal)
        finally:
            coordinator.close()
    return render(terminal.lines)


ROW: Final = 22
TOP: Final = 74
LEFT: Final = 24
WIDTH: Final = 760
HELD_S: Final = 6.0
"""How long the end stays before it begins again."""
TITLE: Final = "Three workers add up 1 to 15000; two are killed, and every number counts once"
STYLE: Final = """
  text { font: 14px ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
  .title { font-weight: 600 }
  .ground { fill: #f6f8fa; stroke: #d0d7de }
  .printed, .title { fill: #1f2328 } .typed { fill: #0550ae } .at { fill: #59636e }
  .killed { fill: #b42318; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #30363d }
    .printed, .title { fill: #e6edf3 } .typed { fill: #79c0ff } .at { fill: #9198a1 } .killed { fill: #ff8f86 }
  }
  g { animation-iteration-count: infinite; animation-timing-function: step-end }
  @media (prefers-reduced-motion: reduce) { g { animation: none !important } }
"""


def render(lines: Sequence[Line]) -> str:
    """An SVG that shows each line at its time, and all of them where nothing moves."""
    total_s = lines[-1].at_s + HELD_S
    height = TOP + ROW * len(lines)
    frames, rows = [], []
    for number, line in enumerate(lines):
        share = 100 * line.at_s / total_s
        if share:
            frames.append(f"  @keyframes l{number} {{ 0% {{ opacity: 0 }} {share:.2f}%, 100% {{ opacity: 1 }} }}")
        style = f' style="animation-name: l{number}; animation-duration: {total_s:.2f}s"' if share else ""
        y = TOP + ROW * number
        rows.append(
            f'<g{style}><text class="at" x="{LEFT + 56}" y="{y}" text-anchor="end">{line.at_s:.1f} s</text>'
            f'<text class="{line.kind}" x="{LEFT + 76}" y="{y}">{escape(line.text)}</text></g>'
        )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n<title>{TITLE}</title>\n'
        f"<style>{STYLE}{chr(10).join(frames)}\n</style>\n"
        f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>\n'
        f'<text class="title" x="{LEFT}" y="32">{TITLE}</text>\n'
    )
    return head + "\n".join(rows) + "\n</svg>\n"
