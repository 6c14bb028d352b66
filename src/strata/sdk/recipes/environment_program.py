"""The process of an environment: loads it, and plays episodes as its parent asks, until its input ends.

It runs under the environment's interpreter, by its path, inside the sandbox: standard library and `verifiers` only. Its
parent writes lines of JSON to its input, first the settings and then episodes, and reads lines of JSON. The model is
behind a Unix socket, since the sandbox has no network; a port of the sandbox's own loopback leads there.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import sys
from functools import partial
from itertools import islice
from typing import Any

LINE = 1 << 20
"""Bytes of a line at most, also of a reply."""
PIECE = 1 << 16
FILES = 4096
FILE_BYTES = 256 << 20


def limit(memory_bytes: int, processes: int) -> None:
    """Limits this process for good: without capabilities it cannot raise them."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        number = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (number, number))


def load(settings: dict[str, Any]) -> Any:
    """The environment, with one agent that runs in this process or below it."""
    from verifiers.v1.configs.agent import AgentConfig  # type: ignore[import-not-found]
    from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found]
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    name = settings["name"]
    fields = env_config_type(name).model_fields
    roles = [role for role, field in fields.items() if isinstance(field.default, AgentConfig)]
    if len(roles) != 1:
        raise ValueError(f"it has the agents {', '.join(roles)}: one can be trained")
    agent = {"runtime": {"type": "subprocess"}, "max_turns": settings["max_turns"]}
    config = {
        "taskset": {**settings["arguments"], "id": name},
        "interception": {"type": "server"},
        "timeout": {"episode": settings["timeout_s"], "finalize": settings["timeout_s"]},
        roles[0]: agent,
    }
    return load_environment(resolve_env_config(config))


async def play(env: Any, task: Any, address: str, given: dict[str, Any]) -> dict[str, Any]:
    """One episode, whose turns the server records; its reward."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext  # type: ignore[import-not-found]
    from verifiers.v1.env import RunSlot  # type: ignore[import-not-found]
    from verifiers.v1.types import SamplingConfig  # type: ignore[import-not-found]

    # No key: the relay has one. The name of a variable that is not there says so.
    client = EvalClientConfig(base_url=f"{address}{given['path']}", api_key_var="STRATA_NO_KEY")
    context = ModelContext(model=given["model"], client=client, sampling=SamplingConfig(**given["sampling"]))
    episode = await env.run_slot(RunSlot(task), context)
    errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
    error = "; ".join(f"{each.type}: {each.message}" for each in errors) or "it did not end well"
    reward = sum(float(trace.reward) for trace in episode.traces)
    if not math.isfinite(reward):
        return {"id": given["id"], "error": f"its reward is {reward}"}
    return {"id": given["id"], "reward": reward, "error": "" if episode.ok else error[:2000]}


async def relay(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the loopback, to the socket at this path."""
    try:
        inner, outer = await asyncio.open_unix_connection(path)
    except OSError:
        writer.close()
        raise
    await asyncio.gather(pump(reader, outer), pump(inner, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def serve(settings: dict[str, Any], out: Any) -> None:
    def reply(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")

    try:
        env = load(settings)
        tasks = list(islice(env.taskset, settings["tasks"]))
        reply({"tasks": [task.key[:64] for task in tasks]})
    except Exception as error:  # noqa: BLE001 - others' code, and the parent says what it said
        reply({"failed": f"{type(error).__name__}: {error}"[:2000]})
        return
    server = await asyncio.start_server(partial(relay, settings["socket"]), "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    lines = asyncio.StreamReader(limit=LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing: set[asyncio.Task[None]] = set()

    async def answer(given: dict[str, Any]) -> None:
        try:
            reply(await play(env, tasks[given["task"]], address, given))
        except Exception as error:  # noqa: BLE001 - others' code
            reply({"id": given["id"], "error": f"{type(error).__name__}: {error}"[:2000]})

    async with env.serving():
        while line := await lines.readline():
            episode = asyncio.create_task(answer(json.loads(line)))
            playing.add(episode)
            episode.add_done_callback(playing.discard)


def main() -> None:
    # What the environment prints must not come between the replies.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    # Byte by byte: what comes after the line is for the loop.
    settings = json.loads(open(0, "rb", buffering=0, closefd=False).readline(LINE))  # noqa: SIM115
    limit(settings["memory_bytes"], settings["processes"])
    sys.path[:0] = settings["paths"]
    asyncio.run(serve(settings, out))


if __name__ == "__main__":
    main()
