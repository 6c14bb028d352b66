"""The process between agent and child: starts the child once, keeps its output and its exit code, ends all of it.

It outlives the agent, so the next agent finds everything in files. It runs as a script, on the standard library alone,
to start fast and stay small: `python -I -S waiter.py FOLDER`. In FOLDER:

    waiter.json   what to run; written by the agent
    waiter.lock   held while this process lives: that is how the agent knows
    pid.json      this process and its child, written once: a second waiter for the same attempt goes away
    log           what the child and its children wrote, bounded, the end always kept
    stop.json     {"grace_s": …} from the agent: end the child. It may be written again with less grace
    exit.json     how it ended; written last
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

POLL_S: Final = 0.1
REAP_S: Final = 10.0
"""Looking through all processes costs milliseconds, and a dead orphan can wait."""
TAIL_BYTES: Final = 256 * 1024
ALREADY: Final = 3
_LINUX: Final = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_KILLING_S: Final = 10.0
_UNUSABLE: Final = frozenset(
    {
        errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
        errno.ENAMETOOLONG, errno.E2BIG, errno.EINVAL,
    }
)  # fmt: skip


def main(folder: Path) -> int:
    lock = _lock(folder / "waiter.lock")
    if lock is None or (folder / "pid.json").exists():
        return ALREADY
    spec = json.loads((folder / "waiter.json").read_bytes())
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        # Handlers and not SIG_IGN, which the child would inherit.
        signal.signal(number, lambda seen, _: asked.set() if seen == signal.SIGTERM else None)
    if _LINUX:
        # Whoever of the child's children loses its parent becomes ours, and can be found and ended.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    write(folder / "pid.json", {"waiter": os.getpid(), "waiter_started": started_at(os.getpid())})
    log = Log((folder / "log").open("ab", buffering=0), spec["max_log_bytes"])
    oom_before = oom_kills()
    began_s = time.monotonic()
    try:
        child = _start(spec)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # ValueError: a name or a value that no environment can hold.
        log.finish()
        said = f"cannot start {spec['command'][0]!r}: {error}"
        write(folder / "exit.json", {"started": False, "error": said, "setup": _is_setup_error(error)})
        return 0
    write(
        folder / "pid.json",
        {
            "waiter": os.getpid(),
            "waiter_started": started_at(os.getpid()),
            "child": child.pid,
            "child_started": started_at(child.pid),
        },
    )
    pump = threading.Thread(target=_pump, args=(child.stdout, log), daemon=True)
    pump.start()
    ended = Ending(child, folder, spec).run(asked)
    pump.join(_KILLING_S)
    left_out = log.finish()
    write(
        folder / "exit.json",
        ended
        | {
            "started": True,
            "status": child.returncode,
            "oom_kills": oom_kills() - oom_before,
            "left_out": left_out,
            "ran_s": time.monotonic() - began_s,
            "max_rss_bytes": _max_rss(),
        },
    )
    return 0


class Ending:
    """Waits for the child, ends it when it is time, and leaves none of its processes behind."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path, spec: dict[str, Any]) -> None:
        self._child = child
        self._stop_file = folder / "stop.json"
        self._timeout_s: float = spec["timeout_s"]
        self._grace_s: float = spec["grace_s"]
        self._job = _job_object(child)
        self._began_s = time.monotonic()
        self._kill_at_s: float | None = None
        self._reap_at_s = self._began_s + REAP_S

    def run(self, asked: threading.Event) -> dict[str, Any]:
        stopped = timed_out = False
        while self._child.poll() is None:
            now_s = time.monotonic()
            grace_s = self._grace_asked(asked)
            overdue = 0 < self._timeout_s <= now_s - self._began_s
            if grace_s is not None or overdue:
                if self._kill_at_s is None:
                    stopped, timed_out = grace_s is not None, grace_s is None
                self._end(now_s, self._grace_s if grace_s is None else grace_s)
            if now_s >= self._reap_at_s:
                self._reap()
                self._reap_at_s = now_s + REAP_S
            time.sleep(POLL_S)
        self._kill_rest()
        return {"stopped": stopped, "timed_out": timed_out}

    def _grace_asked(self, asked: threading.Event) -> float | None:
        try:
            return float(json.loads(self._stop_file.read_bytes())["grace_s"])
        except (FileNotFoundError, ValueError, KeyError):
            return self._grace_s if asked.is_set() else None

    def _end(self, now_s: float, grace_s: float) -> None:
        if self._kill_at_s is None:
            self._kill_at_s = now_s + grace_s
            if grace_s > 0:
                self._ask_to_end()
        # Asked again with less grace.
        self._kill_at_s = min(self._kill_at_s, now_s + grace_s)
        if now_s >= self._kill_at_s:
            self._kill()

    def _ask_to_end(self) -> None:
        """SIGTERM, once to each: a second one while a program is ending would cut that short."""
        if self._job is not None:
            self._child.terminate()
            return
        below = descendants(os.getpid())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not below:
                os.killpg(self._child.pid, signal.SIGTERM)
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)

    def _kill(self) -> None:
        if self._job is not None:
            self._job()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _kill_rest(self) -> None:
        """Processes that outlived the child. Again and again, because a process may start another while it dies."""
        until_s = time.monotonic() + _KILLING_S
        self._kill()
        while descendants(os.getpid()) and time.monotonic() < until_s:
            self._kill()
            self._reap()
            time.sleep(0.01)
        self._reap()

    def _reap(self) -> None:
        """Orphans that became ours and ended; never the child itself, whose status `poll` has to see."""
        if not _LINUX:
            return
        for pid, parent, state in processes():
            if parent == os.getpid() and state == "Z" and pid != self._child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


class Log:
    """Writes until it is full, remembers the end of what follows, and appends that at last."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file = file
        self._room = most - file.tell()
        self._tail = bytearray()
        self._beyond = 0
        self._lock = threading.Lock()

    def write(self, piece: bytes) -> None:
        with self._lock:
            if self._room > 0:
                taken, piece = piece[: self._room], piece[self._room :]
                self._room -= len(taken)
                self._put(taken)
            self._beyond += len(piece)
            self._tail += piece
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]

    def finish(self) -> int:
        """How many bytes are missing in the middle."""
        with self._lock:
            tail = bytes(self._tail[-TAIL_BYTES:])
            missing = self._beyond - len(tail)
            if missing:
                self._put(f"\n[strata: {missing} bytes of output are left out here]\n".encode())
            self._put(tail)
            self._tail.clear()
            self._beyond = 0
            os.fsync(self._file.fileno())
            return missing

    def _put(self, piece: bytes) -> None:
        # A full disk costs the log and not the job.
        with contextlib.suppress(OSError):
            left = memoryview(piece)
            while left:
                left = left[os.write(self._file.fileno(), left) :]


def _start(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        options["start_new_session"] = True
        options["umask"] = 0o077
        # Before any thread exists, so what runs between fork and exec is safe.
        options["preexec_fn"] = _before_exec()
        if spec.get("uid") is not None:
            options |= {"user": spec["uid"], "group": spec["gid"], "extra_groups": spec["groups"]}
    return subprocess.Popen(
        spec["command"],
        cwd=spec["cwd"],
        env=spec["env"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        **options,
    )


def _is_setup_error(error: Exception) -> bool:
    """Whether command, folder or environment cannot be used on this host, rather than the host being out of order."""
    return isinstance(error, ValueError) or getattr(error, "errno", None) in _UNUSABLE


def _before_exec() -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl if _LINUX else None

    def prepare() -> None:
        if prctl is not None:
            # A waiter that is killed takes its child along: nobody would know what became of it.
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            # If memory runs out, the job goes and not the agent.
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("500")

    return prepare


def _pump(output: BinaryIO, log: Log) -> None:
    while piece := os.read(output.fileno(), 65_536):
        log.write(piece)


def processes() -> list[tuple[int, int, str]]:
    """(pid, parent, state) of all processes that can be seen; empty where there is no /proc."""
    found = []
    for entry in os.listdir("/proc") if _LINUX else ():  # noqa: PTH208 - ten times a second, and names are enough
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields:
                found.append((int(entry), int(fields[1]), fields[0]))
    return found


def descendants(pid: int) -> list[int]:
    """Living processes below this one."""
    children: dict[int, list[tuple[int, str]]] = {}
    for one, parent, state in processes():
        children.setdefault(parent, []).append((one, state))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for one, state in children.get(waiting.pop(), ()):
            waiting.append(one)
            if state not in ("Z", "X"):
                found.append(one)
    return found


def started_at(pid: int) -> str:
    """Tells a process from a later one of the same number: boot, and ticks since then; empty if it is gone."""
    fields = _stat(pid)
    if not fields:
        return ""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"


def _stat(pid: int) -> list[str]:
    """The fields behind the name, which may have spaces and brackets itself: state, parent, …"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def oom_kills() -> int:
    """How often memory ran out in this control group so far; 0 where nobody counts."""
    for path in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _oom_counters() -> list[Path]:
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found.append(Path("/sys/fs/cgroup" + path) / "memory.events")
            if "memory" in controllers.split(","):
                found += [Path(f"/sys/fs/cgroup/memory{at}") / "memory.oom_control" for at in (path, "")]
    return found


def _max_rss() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _lock(path: Path) -> int | None:
    """The agent looks at this lock by taking it for a moment, so one refusal is none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(100):
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return descriptor
    return None


def _job_object(child: subprocess.Popen[bytes]) -> Callable[[], None] | None:
    """On Windows: what ends the child and all it started."""
    if os.name != "nt":
        return None
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("windows", Path(__file__).with_name("windows.py"))
    assert spec is not None
    assert spec.loader is not None
    windows = module_from_spec(spec)
    spec.loader.exec_module(windows)
    ending: Callable[[], None] = windows.job_object_of(child.pid).terminate
    return ending


def write(path: Path, value: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
