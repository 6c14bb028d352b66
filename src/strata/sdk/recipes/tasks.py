"""Evaluation on tasks of lm-eval while a model trains: its command, environment, time limit, and how scores are read.

lm-eval runs in a process of its own, that of any interpreter which has it, and asks the server's completions through
a relay. It gets no key of the server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.parent import TIED_COMMAND
from strata.base.private import private_folder
from strata.base.settings import process_environment
from strata.sdk.recipes.recipe import RecipeEvaluation
from strata.sdk.recipes.relay import loopback_relay
from strata.sdk.server_calls import ServerCalls

CONCURRENT: Final = 8
"""Requests that lm-eval sends at a time."""
EXTRA: Final = "lm-eval"
LOG: Final = "lm-eval.log"
_PASSED: Final = ("PATH", "HOME", "LANG", "TMPDIR", "TZ", "XDG_CACHE_HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
_PASSED_PREFIXES: Final = ("HF_", "LC_", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_SHOWN: Final = 3
"""Last lines of its log, when it fails."""
_LOOK: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lm_eval') is None)"


@dataclass(frozen=True)
class TaskPlace:
    """What a run of lm-eval needs beside its tasks."""

    calls: ServerCalls
    tokenizer: Path
    recipe_folder: Path
    """Relative paths in the recipe count from here."""


def require_tasks(evaluation: RecipeEvaluation | None, folder: Path) -> None:
    """UNSUPPORTED if the recipe names tasks and there is no lm-eval."""
    if evaluation is None or not evaluation.tasks:
        return
    python = _python(evaluation, folder)
    try:
        found = subprocess.run([python, "-I", "-c", _LOOK], check=False, timeout=60, capture_output=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StrataError(Code.NOT_FOUND, f"eval.task_python: cannot run {python}: {error}") from error
    if found.returncode:
        raise StrataError(
            Code.UNSUPPORTED,
            f"eval.tasks needs lm-eval, which {python} does not have: pip install 'strata-train[{EXTRA}]'",
            hint="or name an interpreter that has it: eval.task_python",
        )


def run_tasks(evaluation: RecipeEvaluation, place: TaskPlace, model: str, out: Path) -> list[dict[str, float]]:
    """The scores of a model of the server for each task, as `eval_TASK_METRIC`. What lm-eval writes goes into the
    folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    private_folder(out)
    with loopback_relay(place.calls) as relay:
        command = _command(evaluation, place, model, relay.url, out)
        _run(command, relay.key, out, evaluation.task_timeout_s)
    return read_scores(out, evaluation.tasks)


def read_scores(out: Path, tasks: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of these tasks and groups in the results that lm-eval has written, without standard errors."""
    files = list(out.rglob("results_*.json"))
    if len(files) != 1:
        raise StrataError(Code.CORRUPT, f"lm-eval has left {len(files)} files of results in {out}")
    results: Mapping[str, Mapping[str, Any]] = msgspec.json.decode(files[0].read_bytes())["results"]
    scores = []
    for task in tasks:
        found = {
            _name(task, key): float(value)
            for key, value in results.get(task, {}).items()
            if isinstance(value, float | int) and "," in key and "_stderr" not in key
        }
        if not found:
            raise StrataError(
                Code.INVALID,
                f"lm-eval gives no score of its own to {task!r}",
                hint="name the tasks of a group that has no mean: eval.tasks",
            )
        scores.append(found)
    return scores


def _name(task: str, key: str) -> str:
    """`acc,none` is the metric and the filter of the answers, `none` for most."""
    metric, _, filtered = key.partition(",")
    return f"eval_{task}_{metric}" if filtered == "none" else f"eval_{task}_{metric}_{filtered}"


def _python(evaluation: RecipeEvaluation, folder: Path) -> str:
    return str(folder / Path(evaluation.task_python).expanduser()) if evaluation.task_python else sys.executable


def _command(evaluation: RecipeEvaluation, place: TaskPlace, model: str, url: str, out: Path) -> list[str]:
    arguments = {
        "model": model,
        "base_url": f"{url}/completions",
        "tokenizer": str(place.tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": CONCURRENT,
        "max_length": evaluation.task_tokens,
    }
    command = [
        *(_python(evaluation, place.recipe_folder), "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", msgspec.json.encode(arguments).decode()),
        *("--tasks", ",".join(evaluation.tasks), "--output_path", str(out)),
    ]
    if evaluation.task_folder:
        command += ["--include_path", str(place.recipe_folder / Path(evaluation.task_folder).expanduser())]
    if evaluation.task_limit is not None:
        command += ["--limit", str(evaluation.task_limit)]
    return command


def _run(command: Sequence[str], key: str, out: Path, timeout_s: float) -> None:
    passed = {
        name: value
        for name, value in process_environment().items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    log_file = out / LOG
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*TIED_COMMAND, *command],
            # The relay's, which is worth nothing after this process: lm-eval's client reads a key nowhere else.
            env={**passed, "OPENAI_API_KEY": key, "TOKENIZERS_PARALLELISM": "false"},
            cwd=out,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StrataError(
                Code.DEADLINE, f"lm-eval did not end within eval.task_timeout_s = {timeout_s:g}", hint=f"see {log_file}"
            ) from None
        finally:
            _end(process)
    if status:
        last = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN:]
        raise StrataError(Code.INVALID, "lm-eval failed: " + "\n".join(last), hint=f"see {log_file}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what it has started too: its session is its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
