"""The supervisor of one child, a small script of its own: starts it, bounds its log, watches limits, ends it with all
its processes, and writes its exit status.

The supervisor outlives the agent, so the next agent finds everything in files. It runs as a script, on the standard
library alone, to start fast and stay small: `python -I -S supervisor.py FOLDER`. In FOLDER:

    supervisor.json   what to run; written by the agent
    supervisor.lock   held while the supervisor lives; the agent checks it
    pid.json          supervisor and child, written once: a second supervisor for the same attempt exits
    log               what the child and its descendants wrote, bounded; the end is always kept
    stop.json         {"grace_s": …} from the agent: end the child. It may be written again with less grace
    exit.json         how the child ended; written last

Agents of other versions read these files: their names and keys do not change.
"""

from __future__ import annotations

import base64
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
"""Seconds between two scans for zombies: a scan of all processes costs milliseconds, and a zombie can wait."""
TAIL_BYTES: Final = 256 * 1024
ALREADY_SUPERVISED: Final = 3
_LINUX: Final = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_KILL_TIMEOUT_S: Final = 10.0
_SHELL_SIGNAL: Final = 128
_SETUP_ERRNOS: Final = frozenset(
    {
        errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
        errno.ENAMETOOLONG, errno.E2BIG, errno.EINVAL,
    }
)  # fmt: skip


def main(folder: Path) -> int:
    lock = _lock(folder / "supervisor.lock")
    if lock is None or (folder / "pid.json").exists():
        return ALREADY_SUPERVISED
    spec = json.loads((folder / "supervisor.json").read_bytes())
    sigterm = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        # Handlers and not SIG_IGN, which the child would inherit.
        signal.signal(number, lambda received, _: sigterm.set() if received == signal.SIGTERM else None)
    if _LINUX:
        # Orphaned descendants of the child become children of this process, so that it can find and end them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    write_json(folder / "pid.json", {"supervisor": os.getpid(), "supervisor_started": started_at(os.getpid())})
    log = BoundedLog((folder / "log").open("ab", buffering=0), spec["max_log_bytes"])
    job_limits = _load_sibling("job_limits")
    limits = job_limits.JobLimits(spec.get("limits") or {}, _load_sibling("cgroup"), oom_kills)
    began_s = time.monotonic()
    try:
        limits.apply()
        child, status = _start(spec, limits)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # ValueError: an environment variable whose name or value no process can have.
        log.finish()
        limits.remove()
        message = f"cannot start {spec['command'][0]!r}: {error}"
        write_json(folder / "exit.json", {"started": False, "error": message, "setup": _is_setup_error(error)})
        return 0
    write_json(
        folder / "pid.json",
        {
            "supervisor": os.getpid(),
            "supervisor_started": started_at(os.getpid()),
            "child": child.pid,
            "child_started": started_at(child.pid),
        },
    )
    copier = threading.Thread(target=_copy_output, args=(child.stdout, log), daemon=True)
    copier.start()
    monitor = ChildMonitor(child, folder, spec, limits)
    stop_reason = monitor.run(sigterm, lambda: job_limits.TreeUsage(*_usage_of_descendants()))
    copier.join(_KILL_TIMEOUT_S)
    left_out = log.finish()
    kills = limits.remove()
    write_json(
        folder / "exit.json",
        stop_reason
        | {
            "status": child.returncode,
            "oom_kills": kills,
            "left_out": left_out,
            "ran_s": time.monotonic() - began_s,
            "max_rss_bytes": _max_rss(),
        }
        | (_sandbox_status(spec, status, child.returncode) if status is not None else {"started": True}),
    )
    return 0


class ChildMonitor:
    """Waits for the child, ends it on request or at its timeout, and leaves none of its processes behind."""

    def __init__(self, child: subprocess.Popen[bytes], folder: Path, spec: dict[str, Any], limits: Any) -> None:
        self._child = child
        self._limits = limits
        self._wrapped = bool(spec.get("wrapper"))
        self._stop_file = folder / "stop.json"
        self._timeout_s: float = spec["timeout_s"]
        self._grace_s: float = spec["grace_s"]
        self._began_s = time.monotonic()
        self._kill_at_s: float | None = None
        self._reap_at_s = self._began_s + REAP_S

    def run(self, sigterm: threading.Event, measure: Callable[[], Any]) -> dict[str, Any]:
        """`measure` returns what the child and its descendants have and have used."""
        stopped = timed_out = False
        exceeded: dict[str, Any] = {}
        while self._child.poll() is None:
            now_s = time.monotonic()
            grace_s = self._requested_grace_s(sigterm)
            overdue = 0 < self._timeout_s <= now_s - self._began_s
            if grace_s is not None or overdue:
                if self._kill_at_s is None:
                    stopped, timed_out = grace_s is not None, grace_s is None
                self._stop_child(now_s, self._grace_s if grace_s is None else grace_s)
            elif not exceeded:
                exceeded = self._limits.exceeded(now_s, measure, _memory_of_descendants)
            if exceeded:
                self._kill()
            if now_s >= self._reap_at_s:
                self._reap_zombies()
                self._reap_at_s = now_s + REAP_S
            time.sleep(POLL_S)
        self._kill_descendants()
        return {"stopped": stopped, "timed_out": timed_out} | exceeded

    def _requested_grace_s(self, sigterm: threading.Event) -> float | None:
        """None: no stop was requested."""
        try:
            return float(json.loads(self._stop_file.read_bytes())["grace_s"])
        except (FileNotFoundError, ValueError, KeyError):
            return self._grace_s if sigterm.is_set() else None

    def _stop_child(self, now_s: float, grace_s: float) -> None:
        if self._kill_at_s is None:
            self._kill_at_s = now_s + grace_s
            if grace_s > 0:
                self._terminate()
        # The agent may request it again with less grace.
        self._kill_at_s = min(self._kill_at_s, now_s + grace_s)
        if now_s >= self._kill_at_s:
            self._kill()

    def _terminate(self) -> None:
        """SIGTERM, once to each process: a second one could interrupt a program's shutdown."""
        if sys.platform == "win32":
            # It has no SIGTERM.
            self._kill()
            return
        pids = descendants(os.getpid())
        if self._wrapped:
            # Bubblewrap would end at once, and with it the job. Its process inside, the first there, ignores SIGTERM.
            pids = [pid for pid in pids if pid != self._child.pid]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not pids and not self._wrapped:
                os.killpg(self._child.pid, signal.SIGTERM)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)

    def _kill(self) -> None:
        if sys.platform == "win32":
            # By the parents that processes name: what outlives the child stays.
            command = ["taskkill", "/F", "/T", "/PID", str(self._child.pid)]
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._limits.kill()

    def _kill_descendants(self) -> None:
        """Kill the processes that outlived the child; repeatedly, because a process may start another while it dies."""
        until_s = time.monotonic() + _KILL_TIMEOUT_S
        self._kill()
        while (descendants(os.getpid()) or self._limits.kill()) and time.monotonic() < until_s:
            self._kill()
            self._reap_zombies()
            time.sleep(0.01)
        self._reap_zombies()

    def _reap_zombies(self) -> None:
        """Reap adopted orphans that have ended; never the child itself, whose status `poll` has to see."""
        if not _LINUX:
            return
        for pid, parent, state in processes():
            if parent == os.getpid() and state == "Z" and pid != self._child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


class BoundedLog:
    """A log file of bounded size: when it is full, the end of the output is kept in memory and appended at `finish`."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._free_bytes = max_bytes - file.tell()
        self._tail = bytearray()
        self._overflow_bytes = 0
        self._lock = threading.Lock()

    def write(self, piece: bytes) -> None:
        with self._lock:
            if self._free_bytes > 0:
                head, piece = piece[: self._free_bytes], piece[self._free_bytes :]
                self._free_bytes -= len(head)
                self._append(head)
            self._overflow_bytes += len(piece)
            self._tail += piece
            if len(self._tail) > 2 * TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]

    def finish(self) -> int:
        """The number of bytes that are missing in the middle."""
        with self._lock:
            tail = bytes(self._tail[-TAIL_BYTES:])
            missing = self._overflow_bytes - len(tail)
            if missing:
                self._append(f"\n[strata: {missing} bytes of output are left out here]\n".encode())
            self._append(tail)
            self._tail.clear()
            self._overflow_bytes = 0
            os.fsync(self._file.fileno())
            return missing

    def _append(self, piece: bytes) -> None:
        # When the disk is full, the log is lost and the job goes on.
        with contextlib.suppress(OSError):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]


def _start(spec: dict[str, Any], limits: Any) -> tuple[subprocess.Popen[bytes], int | None]:
    """The child, and with a wrapper the descriptor that says whether the job's command was executed in it."""
    options: dict[str, Any] = {}
    command, env, cwd, status = spec["command"], spec["env"], spec["cwd"], None
    to_close: list[int] = []
    if sys.platform == "win32":
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        options["start_new_session"] = True
        options["umask"] = 0o077
        # No thread exists yet, so the code between fork and exec is safe.
        options["preexec_fn"] = _before_exec(spec, limits)
        if spec.get("wrapper"):
            request, (status, status_in) = _request_file(spec), os.pipe()
            to_close = [request, status_in]
            wrapper = list(spec["wrapper"])
            if spec.get("filter"):
                to_close.append(memory_file("filter", base64.b64decode(spec["filter"])))
                wrapper += ["--seccomp", str(to_close[-1])]
            script = Path(__file__).with_name("enter.py").read_text(encoding="utf-8")
            enter = [sys.executable, "-I", "-S", "-c", script, str(request), str(status_in)]
            command, env, cwd = [*wrapper, "--", *enter], {}, "/"
            options["pass_fds"] = to_close
    try:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            **options,
        )
    finally:
        for descriptor in to_close:
            os.close(descriptor)
    return child, status


def _request_file(spec: dict[str, Any]) -> int:
    """Returns what `enter` reads: the environment of a job belongs neither in arguments nor on a disk."""
    inside = {key: spec.get(key) for key in ("command", "env", "cwd", "uid", "gid", "groups")}
    if not spec.get("switch_inside"):
        inside |= {"uid": None}
    return memory_file("request", json.dumps(inside).encode())


def memory_file(name: str, content: bytes) -> int:
    """The descriptor of a file with this content that is on no disk."""
    descriptor = os.memfd_create(name)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _sandbox_status(spec: dict[str, Any], status: int, returncode: int) -> dict[str, Any]:
    """Returns whether the job's command was executed, and how it ended. All writers of the descriptor have ended."""
    with os.fdopen(status, "rb") as file:
        entered, _, failure = file.read().partition(b"\n")
    if entered != b"entered":
        # Killed by a stop before it came so far, or the sandbox cannot be made, which the log explains.
        return {"started": returncode < 0, "status": returncode, "error": "the sandbox of the job could not be made"}
    if failure:
        reason = json.loads(failure)
        message = f"cannot start {spec['command'][0]!r}: {reason['error']}"
        return {"started": False, "error": message, "setup": reason["errno"] in (None, *_SETUP_ERRNOS)}
    # Bubblewrap ends like a shell: 128 and the number of the signal.
    signalled = returncode - _SHELL_SIGNAL
    return {"started": True, "status": -signalled if 0 < signalled < signal.NSIG else returncode}


def _is_setup_error(error: Exception) -> bool:
    """Says whether command, folder or environment cannot be used on this host; otherwise the host itself is at
    fault."""
    return isinstance(error, ValueError) or getattr(error, "errno", None) in _SETUP_ERRNOS


def _before_exec(spec: dict[str, Any], limits: Any) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl if _LINUX else None
    switch = spec.get("uid") is not None and not spec.get("switch_inside")

    def prepare() -> None:
        if prctl is not None:
            # The kernel's OOM killer takes the job and not the agent. Another user may not write this any more.
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("500")
        limits.enter()
        if switch:
            os.setgroups(spec["groups"])
            os.setgid(spec["gid"])
            os.setuid(spec["uid"])
        if prctl is not None:
            # The child dies with a killed supervisor: no other process would learn how it ended.
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    return prepare


def _copy_output(output: BinaryIO, log: BoundedLog) -> None:
    while piece := os.read(output.fileno(), 65_536):
        log.write(piece)


def processes() -> list[tuple[int, int, str]]:
    """(pid, parent, state) of all processes that can be seen; empty where there is no /proc."""
    rows = []
    for entry in os.listdir("/proc") if _LINUX else ():  # noqa: PTH208 - ten times a second, and names are enough
        if entry.isdigit():
            fields = _stat(int(entry))
            if fields:
                rows.append((int(entry), int(fields[1]), fields[0]))
    return rows


def descendants(pid: int, *, with_zombies: bool = False) -> list[int]:
    """Living processes below this one."""
    children: dict[int, list[tuple[int, str]]] = {}
    for child, parent, state in processes():
        children.setdefault(parent, []).append((child, state))
    living: list[int] = []
    to_visit = [pid]
    while to_visit:
        for descendant, state in children.get(to_visit.pop(), ()):
            to_visit.append(descendant)
            if with_zombies or state not in ("Z", "X"):
                living.append(descendant)
    return living


def _usage_of_descendants() -> tuple[int, int, float]:
    """Bytes of memory, where shared ones count for each process; threads; and seconds of CPU time, also of those that
    have ended: their parents have it."""
    stats = [fields for pid in descendants(os.getpid(), with_zombies=True) if (fields := _stat(pid))]
    ended = os.times()
    ticks = sum(int(field) for fields in stats for field in fields[11:15])
    return (
        sum(int(fields[21]) for fields in stats) * os.sysconf("SC_PAGE_SIZE"),
        sum(int(fields[17]) for fields in stats if fields[0] not in ("Z", "X")),
        ticks / os.sysconf("SC_CLK_TCK") + ended.children_user + ended.children_system,
    )


def _memory_of_descendants() -> int:
    """Bytes of memory, where each process counts its part of what it shares; as `_usage_of_descendants` where the
    kernel does not tell."""
    return sum(_memory_of(pid) for pid in descendants(os.getpid()))


def _memory_of(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    fields = _stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def started_at(pid: int) -> str:
    """Returns when the process started, as boot id and ticks since boot: tells it from a later process with the same
    pid.

    Empty if there is no such process.
    """
    fields = _stat(pid)
    if not fields:
        return ""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}:{fields[19]}"


def _stat(pid: int) -> list[str]:
    """The fields behind the program's name, which may itself hold spaces and brackets: state, parent, …"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def oom_kills() -> int:
    """Returns how many OOM kills the kernel has counted in this control group; 0 where there is no counter."""
    for path in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _oom_counters() -> list[Path]:
    paths = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                paths.append(Path("/sys/fs/cgroup" + path) / "memory.events")
            if "memory" in controllers.split(","):
                paths += [Path(f"/sys/fs/cgroup/memory{at}") / "memory.oom_control" for at in (path, "")]
    return paths


def _max_rss() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _lock(path: Path) -> int | None:
    """Take the lock. The agent checks it by taking it for a moment, so one failure does not mean that it is held."""
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


def _load_sibling(name: str) -> Any:
    """A module beside this file, by its path: this program runs without its package."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # A dataclass looks up its own module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
