"""Environments of the `verifiers` library: starts the process of one, and draws episodes in place of single answers.

An environment has tasks, tools, several turns and rewards. Its own client, which speaks OpenAI's protocol, asks for the
turns; the server records each with its exact tokens in a session. Only what the model has sampled is learned.
"""

from __future__ import annotations

import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import IO, Any, Final

import msgspec

from strata.base import log
from strata.base.digest import sha256_hex
from strata.base.errors import Code, StrataError
from strata.base.parent import TIED_COMMAND
from strata.base.unix_socket import listen_unix
from strata.sdk.operations import Sample
from strata.sdk.recipes import environment_program
from strata.sdk.recipes.batches import derive_seed
from strata.sdk.recipes.recipe import Recipe, RecipeEnvironment
from strata.sdk.recipes.relay import Relay
from strata.sdk.recipes.rollouts import Groups, PromptRow, Rollout
from strata.sdk.recipes.rows import RowSet
from strata.sdk.recipes.sandbox import TMP, Confinement, confined
from strata.sdk.train import RolloutBranch, Sampler, TrainingServer

LOG: Final = "environment.log"
SESSIONS: Final = "/v1/rollout_sessions"
SOCKET: Final = "relay.sock"
OWN: Final = Path("/environment")
"""Where a file or a folder beside the recipe is in the sandbox."""
START_S: Final = 300.0
GRACE_S: Final = 60.0
"""How much longer than its limit an episode may take to end."""
_GIB: Final = 1 << 30
_SHOWN: Final = 3
"""Last lines of its log, when it ends, within so many bytes."""
_TAIL: Final = 4096
_logger = log.get(__name__)


class _Reply(msgspec.Struct, frozen=True):
    """A line of the process: its tasks, or why there are none, or how an episode ended."""

    tasks: Sequence[str] = ()
    failed: str = ""
    id: int = -1
    reward: float = 0.0
    error: str = ""


class Environment:
    """A process that plays episodes. Thread-safe."""

    def __init__(self, process: subprocess.Popen[bytes], recipe: Recipe, folder: Path, log_file: Path) -> None:
        assert recipe.env is not None, "it has an environment"
        self._process = process
        self._recipe = recipe
        self._settings = recipe.env
        self._folder = folder
        self._log = log_file
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[_Reply]] = {-1: Future()}
        self._numbers = 0
        self._seats: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._server: TrainingServer | None = None
        self._relay: Relay | None = None
        threading.Thread(target=self._read, name="environment", daemon=True).start()
        first = self._result(self._waiting[-1], START_S)
        if first.failed or not first.tasks:
            raise StrataError(Code.INVALID, f"env.name: {first.failed or 'the environment has no tasks'}")
        self.tasks = first.tasks
        """The keys of its tasks, in their order."""

    def rows(self) -> RowSet:
        """A row for each task, by its number."""
        rows = [{"task": number} for number in range(len(self.tasks))]
        return RowSet(rows, sha256_hex(msgspec.json.encode(self.tasks)))

    def serve(self, server: TrainingServer) -> None:
        """Lets its requests reach this server from now on."""
        self._server = server
        self._relay = Relay(server.calls, listen_unix(self._folder / SOCKET))
        # A path has one episode after the other: the library keeps a client and its connections for each address.
        for _ in range(self._settings.concurrent):
            self._seats.put(self._relay.new_path())

    def close(self) -> None:
        # Its whole process tree, which is in a namespace of its own, or ends with its input.
        self._process.kill()
        self._process.wait()
        if self._relay is not None:
            self._relay.close()

    def draw(self, sampler: Sampler, prompts: Sequence[PromptRow], step: int | str, size: int = 0) -> Groups:
        """Plays a group of episodes of each task. One that fails teaches nothing: it earns the mean of its group."""
        size = size or self._recipe.sampling.group_size
        temperature = self._recipe.sampling.temperature
        return self._draw(sampler, prompts, size, temperature, step)

    def draw_likeliest(self, sampler: Sampler, prompts: Sequence[PromptRow]) -> list[Rollout]:
        return [group[0] for group in self._draw(sampler, prompts, 1, 0.0, "likeliest")]

    def _draw(
        self, sampler: Sampler, prompts: Sequence[PromptRow], size: int, temperature: float, step: int | str
    ) -> Groups:
        def play(position: int, number: int) -> Rollout | StrataError:
            seed = derive_seed("episode", self._recipe.train.seed, step, position, number)
            sampling = {"temperature": temperature, "max_tokens": self._recipe.sampling.max_tokens, "seed": seed}
            return self._play(sampler, prompts[position], sampling)

        with ThreadPoolExecutor(self._settings.concurrent) as pool:
            futures = [[pool.submit(play, at, number) for number in range(size)] for at in range(len(prompts))]
            groups = [[future.result() for future in group] for group in futures]
        failures = [each for group in groups for each in group if isinstance(each, StrataError)]
        if len(failures) == len(prompts) * size:
            raise failures[0]
        if failures:
            _logger.warning("episodes_failed", count=len(failures), error=failures[0].message)
        return [with_failed(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]

    def _play(self, sampler: Sampler, prompt: PromptRow, sampling: dict[str, Any]) -> Rollout | StrataError:
        assert self._server is not None, "it serves"
        assert self._relay is not None, "it serves"
        path = following = self._seats.get()
        try:
            session = self._server.open_rollout()
            self._relay.lead(path, f"{SESSIONS}/{session.id}", model=sampler.sampler_id)
            try:
                done = self._ask(prompt.row["task"], path, sampler.sampler_id, sampling)
            except StrataError as error:
                if error.code is not Code.DEADLINE:
                    raise
                # It may still be played, and must not reach the session of the next one.
                following = self._relay.new_path()
                done = _Reply(error=error.message)
            finally:
                delivered = self._relay.end(path)
        finally:
            self._seats.put(following)
        branches = [] if done.error else kept_branches(session.branches(), delivered)
        session.delete()
        if done.error:
            return StrataError(Code.UNAVAILABLE, f"an episode failed: {done.error}", hint=f"see {self._log}")
        return _rollout(prompt, branches, done.reward)

    def _ask(self, task: int, path: str, model: str, sampling: dict[str, Any]) -> _Reply:
        with self._lock:
            number = self._numbers
            self._numbers += 1
            future = self._waiting[number] = Future()
        request = {"id": number, "task": task, "path": path, "model": model, "sampling": sampling}
        self._write(request)
        try:
            # Its turns have this time, and what ends it has it again.
            return self._result(future, 2 * self._settings.timeout_s + GRACE_S)
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(msgspec.json.encode(message) + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._ended() from None

    def _result(self, future: Future[_Reply], timeout_s: float) -> _Reply:
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise StrataError(
                Code.DEADLINE, f"the environment did not reply within {timeout_s:g} s", hint=f"see {self._log}"
            ) from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(environment_program.LINE):
            try:
                reply = msgspec.json.decode(line, type=_Reply)
            except (msgspec.DecodeError, UnicodeDecodeError):
                # It writes what it likes, and no reply is what it writes otherwise.
                break
            with self._lock:
                future = self._waiting.pop(reply.id, None)
            if future is not None:
                future.set_result(reply)
        self._process.kill()
        error = self._ended()
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(error)

    def _ended(self) -> StrataError:
        status = self._process.wait()
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL))
            last = file.read(_TAIL).decode(errors="replace").splitlines()[-_SHOWN:]
        words = "\n".join(["the process of the environment has ended", *last])
        return StrataError(Code.UNAVAILABLE, words, hint=f"see {self._log} (status {status})")


@contextmanager
def open_environment(recipe: Recipe, recipe_folder: Path, run_folder: Path) -> Iterator[Environment]:
    """The process of the recipe's environment, until the block ends."""
    wanted = recipe.env
    assert wanted is not None, "it has an environment"
    python = recipe_folder / Path(wanted.python).expanduser() if wanted.python else Path(sys.executable)
    if not python.exists():
        raise StrataError(Code.NOT_FOUND, f"env.python: there is no {python}")
    with ExitStack() as stack:
        # A short path: that of a socket has few characters.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-env-")))
        log_file = run_folder / LOG
        file = stack.enter_context(log_file.open("wb"))
        own = own_code(wanted, recipe_folder)
        confined_to = None if wanted.sandbox == "off" else _confinement(own, python, folder, run_folder)
        process = stack.enter_context(_started(confined_to, python, file))
        paths = [] if own is None else [str(own.parent if confined_to is None else OWN)]
        settings = {
            "name": wanted.name if own is None else own.stem,
            "arguments": wanted.arguments,
            "tasks": wanted.tasks,
            "max_turns": wanted.max_turns,
            "timeout_s": wanted.timeout_s,
            "memory_bytes": int(wanted.memory_gib * _GIB),
            "processes": wanted.processes,
            "paths": paths,
            "socket": str(folder / SOCKET),
        }
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        environment = Environment(process, recipe, folder, log_file)
        stack.callback(environment.close)
        yield environment


def own_code(wanted: RecipeEnvironment, recipe_folder: Path) -> Path | None:
    """The file or the folder beside the recipe that the environment is; None for an installed package."""
    path = recipe_folder / Path(wanted.name).expanduser()
    if wanted.name.endswith(".py") and not path.is_file():
        raise StrataError(Code.NOT_FOUND, f"env.name: there is no {path}")
    return path if path.suffix == ".py" or (path / "__init__.py").is_file() else None


def _confinement(own: Path | None, python: Path, folder: Path, run_folder: Path) -> Confinement:
    program = Path(environment_program.__file__)
    # The socket comes into the folder later. Read-only is enough to connect to it.
    shown = [(program, OWN / program.name), (folder, folder)]
    if own is not None:
        shown.append((own, OWN / own.name))
    return Confinement(python, shown, [run_folder])


@contextmanager
def _started(confinement: Confinement | None, python: Path, file: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    program = Path(environment_program.__file__)
    with ExitStack() as stack:
        command, passed = [str(python), "-I", "-u", str(program)], list[int]()
        if confinement is not None:
            command[-1] = str(OWN / program.name)
            command, passed = stack.enter_context(confined(confinement, command))
        process = subprocess.Popen(
            [*TIED_COMMAND, command[0] if confinement else str(shutil.which(command[0])), *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            # Nothing of this process's own: it may have keys there.
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": TMP, "LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=passed,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def kept_branches(branches: Sequence[RolloutBranch], delivered: Collection[str]) -> list[RolloutBranch]:
    """The branches whose last reply was delivered: another one has taught the environment nothing, and earned nothing.

    The server counts the turns that several branches share in the first of them. Where that one is lost they count in
    the first that is kept.
    """
    kept = [each for each in branches if each.replies[-1] in delivered]
    for lost in branches:
        if lost.replies[-1] in delivered:
            continue
        owed = {at for at, weight in enumerate(lost.weights) if weight > 0}
        for number, each in enumerate(kept):
            shared = _shared_tokens(lost.tokens, each.tokens)
            handed = {at for at in owed if at < shared}
            kept[number] = _credited(each, lost, handed)
            owed -= handed
    return kept


def _shared_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    unequal = (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(unequal, min(len(one), len(other)))


def _credited(branch: RolloutBranch, source: RolloutBranch, places: Collection[int]) -> RolloutBranch:
    """The branch with the tokens at these places as sampled, unless it has sampled them itself."""
    weights, logprobs = list(branch.weights), list(branch.logprobs)
    for at in places:
        if not weights[at]:
            weights[at], logprobs[at] = source.weights[at], source.logprobs[at]
    return replace(branch, weights=weights, logprobs=logprobs)


def _rollout(prompt: PromptRow, branches: Sequence[RolloutBranch], reward: float) -> Rollout:
    """An episode that asked nothing has no tokens, and nothing to learn."""
    made = [
        Rollout(prompt, Sample(each.tokens, each.logprobs, "stop"), reward, [weight > 0 for weight in each.weights])
        for each in branches
    ]
    return replace(made[0], others=tuple(made[1:])) if made else _untaught(prompt, reward)


def _untaught(prompt: PromptRow, reward: float) -> Rollout:
    return Rollout(prompt, Sample([], [], "stop"), reward)


def with_failed(prompt: PromptRow, group: Sequence[Rollout | StrataError]) -> list[Rollout]:
    """The group, in which each failed episode has earned the mean: exactly what all have earned, if it is the same."""
    earned = [each.reward or 0.0 for each in group if isinstance(each, Rollout)] or [0.0]
    mean = earned[0] if min(earned) == max(earned) else fmean(earned)
    return [each if isinstance(each, Rollout) else _untaught(prompt, mean) for each in group]
