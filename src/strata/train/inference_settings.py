"""The section `inference` of the settings: engines that a training server starts, endpoints that it may reach, and what
is pushed and routed to both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from strata.train.parallel import Count

Positive = Annotated[float, msgspec.Meta(gt=0)]


class InferenceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Inference engines to which weights are published and samples are routed."""

    allow: tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://[^/@?#\\\s]+/?$")], ...] = ()
    """Origins of engines, with scheme, host and port: `http://127.0.0.1:8000`. The server connects to no others."""
    keys: dict[str, Path] = {}
    """The file with the engine's API key, by origin; only the owner may read it."""
    push: bool = False
    """Push everything that is saved for sampling to all endpoints, not only what is synced."""
    sample: bool = False
    """Route samples to endpoints that have the sampler's weights."""
    keep: Count = 2
    """Versions of a model on an endpoint; older ones are unloaded."""
    max_samples: Count = 64
    """Samples that are routed to endpoints at a time."""
    push_timeout_s: Positive = 300.0
    """How long an engine may take to load new weights."""
    sample_timeout_s: Positive = 300.0
    """How long an engine may take for a sample."""
    engine: Literal["", "vllm"] = ""
    """The engine that the server starts, supervises and samples with; empty: none. Then `push` and `sample` hold."""
    python: str = ""
    """The interpreter that has the engine; that of the server unless set."""
    count: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """Engines to start, each with the whole base model."""
    devices: tuple[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*$")], ...] = ()
    """The CUDA devices of each engine, by the numbers of `nvidia-smi` or UUIDs: `["2", "3"]`, or `["4,5", "6,7"]`.
    Unset: each takes `devices_per_engine` of the last ones, and the ranks take the first."""
    devices_per_engine: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """CUDA devices that each engine takes; 0: none, it computes on CPUs. Unset: as many as its arguments ask for, one
    unless they do."""
    share_devices: Literal["no", "memory", "turns"] = "no"
    """Let engines and ranks be on the same devices. `memory`: each engine takes the share of the memory that its
    arguments say (`--gpu-memory-utilization`), and the ranks need the rest. `turns`: they take turns, and who has not
    the turn sleeps (experimental)."""
    turn_s: Positive = 60.0
    """How long ranks or engines keep devices that they share in turns, while the other side waits."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the engine. They are visible to all users of the machine."""
    environment: dict[str, str] = {}
    """Further variables of the engine's environment."""
    start_timeout_s: Positive = 600.0
    """How long an engine may take to load the model; it is restarted then."""
    stall_s: Positive = 60.0
    """An engine that has requests and makes no token for so long hangs, and is restarted."""
    fallback: bool = False
    """Let the ranks sample what engines that the server started fail to deliver. Unless set, such samples wait until an
    engine is back."""
    unroutable: Literal["ranks", "refuse"] = "ranks"
    """What becomes of samples that no engine can draw, as of the base model: the ranks draw them, counted by reason, or
    they fail with the reason."""

    @property
    def routes(self) -> bool:
        return self.sample or bool(self.engine)

    @property
    def pushes(self) -> bool:
        return self.push or bool(self.engine)

    @property
    def takes_turns(self) -> bool:
        return bool(self.engine) and self.share_devices == "turns"

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines that the server starts: of their endpoints and of their sockets."""
        return tuple(f"engine-{number}" for number in range(self.count)) if self.engine else ()
