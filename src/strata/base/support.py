"""The table of capabilities: level (core, supported, experimental), test and hardware of each; and the warning about
experimental ones.

`core` is what the README promises, `supported` is tested and kept, `experimental` may change or fail. What never ran on
the hardware it is for is experimental there. Help, logs, docs/support.md and a rule test read this table.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

Level = Literal["core", "supported", "experimental"]
ProofTier = Literal["check", "unit", "pr", "merge", "weekly", "none"]


class SupportRow(NamedTuple):
    name: str
    cpu: Level | None
    """None: it needs another device or platform."""
    cuda: Level | None
    """None: it uses no device."""
    tier: ProofTier
    """How often its tests run."""
    tests: str
    """A file or folder of them; the tier `none` has none."""
    ran: str
    """Where they ran, or why that is not the hardware it is for."""
    marks: tuple[str, ...] = ()
    """Settings, platforms, commands and options with which it is in use."""

    @property
    def level(self) -> Level | None:
        """Its level on the device or platform that it is for."""
        return self.cpu or self.cuda


INFLIGHT: Final = "in-flight samplers"
_CI: Final = "Linux x86-64"
_GLOO: Final = "CPU ranks with gloo"
_NAMESPACES: Final = "processes and network namespaces of one machine"


def _training(
    name: str, level: Level, tier: ProofTier, tests: str, ran: str = _GLOO, marks: tuple[str, ...] = ()
) -> SupportRow:
    """A capability of the ranks: none of them ran on a CUDA device."""
    return SupportRow(name, level, "experimental", tier, f"tests/shell/{tests}", ran, marks)


FLEET: Final = (
    SupportRow("jobs: apply, claim, lease, retry", "core", None, "pr", "tests/conformance/fleet", _CI),
    SupportRow("agent: run, supervise, survive a kill", "core", None, "pr", "tests/shell/fleet_agent", _CI),
    SupportRow("scheduling: fair share, reservations, quotas", "supported", None, "pr", "tests/conformance/fleet", _CI),
    SupportRow("artifacts and data", "core", None, "pr", "tests/conformance/artifacts", _CI),
    SupportRow("metrics, logs, goodput", "core", None, "pr", "tests/shell/fleet/test_streams.py", _CI),
    SupportRow("dashboard", "core", None, "pr", "tests/shell/web", _CI),
    SupportRow("identity: join tokens, certificates, keys", "core", None, "pr", "tests/conformance/identity", _CI),
    SupportRow("hub on PostgreSQL, several hubs", "core", None, "pr", "tests/conformance/fleet", _NAMESPACES),
    SupportRow("backup, restore, move", "supported", None, "pr", "tests/shell/cli_fleet/test_backup.py", _CI),
    SupportRow("projects, schedules", "supported", None, "pr", "tests/conformance/fleet/test_projects.py", _CI),
    SupportRow("sweeps that search", "supported", None, "pr", "tests/conformance/fleet/test_sweeps.py", _CI),
    SupportRow(
        "messages about jobs", "supported", None, "pr", "tests/shell/cli_fleet/test_notify.py", "doubles of services"
    ),
    SupportRow(
        "trackers", "supported", None, "pr", "tests/shell/cli_fleet/test_mirror.py", "their libraries; no account"
    ),
    SupportRow("sandbox: namespaces, seccomp, network", "supported", None, "pr", "tests/abuse/test_sandbox.py", _CI),
    SupportRow(
        "limits by control groups",
        "experimental",
        None,
        "pr",
        "tests/shell/fleet_agent/test_job_limits.py",
        "never on a kernel with the controllers; memory and disk are watched instead",
    ),
    SupportRow(
        "Python environments of jobs", "supported", None, "pr", "tests/shell/fleet_agent/test_environments.py", _CI
    ),
    SupportRow(
        "jobs in OCI images", "supported", "experimental", "pr", "tests/shell/fleet_agent/test_images.py", "podman"
    ),
    SupportRow("secrets of jobs", "supported", None, "pr", "tests/shell/fleet_http/test_secrets.py", _CI),
    SupportRow("events and webhooks", "supported", None, "pr", "tests/shell/fleet_http/test_webhooks.py", _CI),
    SupportRow("strata exec", "supported", None, "pr", "tests/shell/fleet_agent/test_exec.py", _CI),
    SupportRow(
        "AI agents by MCP (strata mcp)",
        "experimental",
        None,
        "pr",
        "tests/shell/cli_fleet/test_mcp.py",
        "the client of the protocol's Python library",
        ("strata mcp",),
    ),
    SupportRow("gangs as jobs", "core", None, "merge", "tests/e2e/test_fleet_gang.py", _NAMESPACES),
    SupportRow(
        "training servers as jobs", "core", "experimental", "merge", "tests/e2e/test_hub_training.py", _NAMESPACES
    ),
    SupportRow(
        "ephemeral hosts, nodes of Slurm",
        "supported",
        None,
        "merge",
        "tests/e2e/test_slurm.py",
        "slurmctld and slurmd of Debian, one node",
    ),
    SupportRow(
        "container images, compose, Kubernetes",
        "experimental",
        None,
        "check",
        "tests/rules/test_images.py",
        "built on debootstrap's base, run by compose.yaml in podman: job, training run; no Docker, no cluster",
    ),
    SupportRow(
        "agent as a systemd service",
        "experimental",
        None,
        "pr",
        "tests/shell/deploy/test_units.py",
        "the text of the units; no systemd started them",
        ("strata join --service",),
    ),
    SupportRow(
        "reading of GPUs (NVML, AMD SMI)",
        None,
        "experimental",
        "pr",
        "tests/shell/fleet_agent/test_probe.py",
        "doubles made after the documentation",
        ("gpus",),
    ),
)
COORDINATOR: Final = (
    SupportRow("membership, shards, barriers, checkpoints", "core", None, "pr", "tests/conformance/coordinator", _CI),
    SupportRow("worker SDKs in Python and C++", "core", None, "pr", "tests/conformance/coordinator", _CI),
    SupportRow("standby and failover", "supported", None, "pr", "tests/shell/coord/test_failover.py", _NAMESPACES),
    SupportRow("partitions", "supported", None, "pr", "tests/shell/coord/test_partitions.py", _NAMESPACES),
    SupportRow("stragglers and hangs", "supported", "experimental", "unit", "tests/core/coord", _GLOO),
    SupportRow(
        "readers: JSONL, Parquet, Arrow, tar, S3", "core", None, "pr", "tests/shell/coord_worker/test_formats.py", _CI
    ),
    SupportRow(
        "check of hosts before a gang starts",
        "supported",
        "experimental",
        "pr",
        "tests/shell/coord_worker/test_host_check.py",
        _GLOO,
    ),
    SupportRow(
        "gangs of a host (strata gang run)", "supported", None, "pr", "tests/shell/coord/test_gang_launcher.py", _CI
    ),
)
TRAINING: Final = (
    _training("LoRA adapters", "core", "pr", "train_runner/test_slots.py"),
    _training("full fine-tunes", "core", "merge", "train_runner/test_mesh.py"),
    _training("shards and copies (FSDP2)", "core", "merge", "train_runner/test_mesh.py"),
    _training("tensor groups", "core", "merge", "train_runner/test_mesh.py", marks=("parallel.tensor",)),
    _training("context groups", "core", "merge", "train_runner/test_mesh.py", marks=("parallel.context",)),
    _training("expert groups", "core", "merge", "train_runner/test_mesh.py", marks=("parallel.expert",)),
    _training("pipeline stages", "core", "merge", "train_runner/test_mesh.py", marks=("parallel.pipeline",)),
    _training("Muon", "supported", "pr", "train_runner/test_numerics.py"),
    _training("custom losses", "supported", "pr", "train_runner/test_custom_loss.py"),
    _training("quantised bases", "supported", "pr", "train_runner/test_quantised.py", marks=("model.quantise",)),
    _training(
        "compiled layers",
        "experimental",
        "pr",
        "train_runner/test_numerics.py",
        "CPU ranks, where it is slower",
        ("model.compile",),
    ),
    _training(
        "fused kernels of others",
        "experimental",
        "pr",
        "train_runner/test_fused_kernels.py",
        "Liger in Triton's interpreter; FA3, FA4 nowhere",
        ("model.fused_layers", "model.attention"),
    ),
    _training(
        "offload of weights",
        "experimental",
        "pr",
        "train_runner/test_numerics.py",
        "CPU ranks, where it moves nothing",
        ("model.offload", "strata plan --offload"),
    ),
    _training("model families", "core", "pr", "train_runner/test_families.py", "tiny models in float32, one CPU rank"),
    _training(
        "model families with one document per row",
        "experimental",
        "pr",
        "train_runner/test_families.py",
        "tiny models in float32, CPU ranks, without the kernels for CUDA",
    ),
    _training(
        "image chunks (mistral3)",
        "experimental",
        "pr",
        "train_runner/test_images.py",
        "a tiny model in float32, one and two CPU ranks",
        ("images",),
    ),
    _training("built-in sampler", "core", "pr", "train_sampler", marks=("sampling",)),
    _training("in-flight samplers", "experimental", "pr", "train_sampler/test_inflight.py", marks=(INFLIGHT,)),
    _training("snapshots and replay", "core", "pr", "train_orchestrator"),
    _training("deterministic kernels (ranks.deterministic)", "supported", "pr", "train_runner/test_determinism.py"),
    _training("checkpoints, export, import", "core", "pr", "train_store"),
    _training("memory plans and row limits", "supported", "pr", "train_runner/test_plan.py"),
    _training("rollouts, gap between sampler and trainer", "supported", "pr", "train_orchestrator/test_sampler_gap.py"),
    _training(
        "router replay (R3)",
        "experimental",
        "pr",
        "train_sampler/test_router_replay.py",
        "tiny mixtures in float32, CPU ranks",
        ("router_replay",),
    ),
    _training("tenants and their limits", "core", "pr", "train_runner/test_tenants.py"),
    _training("recipes", "core", "pr", "recipes"),
    _training("answers drawn ahead (grpo.pipeline)", "supported", "pr", "recipes/test_pipeline.py"),
    SupportRow(
        "recipes: environments of verifiers",
        "experimental",
        None,
        "weekly",
        "tests/engines/test_environments.py",
        "tiny models; verifiers 0.4",
    ),
    SupportRow(
        "recipes: tasks of lm-eval", "experimental", None, "weekly", "tests/engines/test_lm_eval.py", "tiny models"
    ),
    SupportRow("tinker SDK", "core", None, "pr", "tests/e2e/test_tinker_sdk.py", _CI),
    SupportRow("OpenAI-compatible endpoints", "core", None, "merge", "tests/e2e/test_openai.py", _CI),
    SupportRow("rollout sessions", "supported", None, "merge", "tests/e2e/test_openai_sessions.py", _CI),
    _training("samples by schemas and forced calls", "experimental", "pr", "train_sampler/test_logits_shape.py"),
    SupportRow(
        "vLLM beside the ranks",
        "supported",
        "experimental",
        "weekly",
        "tests/engines/test_vllm_sampler.py",
        "vLLM on a CPU, one engine",
        ("inference.engine",),
    ),
    SupportRow(
        "all sampling parameters on vLLM",
        "supported",
        "experimental",
        "weekly",
        "tests/engines/test_vllm.py",
        "vLLM on a CPU, one engine",
    ),
    SupportRow(
        "turns of ranks and vLLM",
        "experimental",
        "experimental",
        "merge",
        "tests/shell/train_endpoints/test_device_turns.py",
        "gloo, a double of vLLM",
        ("inference.share_devices",),
    ),
    SupportRow(
        "weights for `transformers serve`",
        "supported",
        "experimental",
        "weekly",
        "tests/engines/test_transformers_serve.py",
        "CPU",
    ),
    SupportRow(
        "models of the Hugging Face Hub",
        "experimental",
        None,
        "pr",
        "tests/shell/cli/test_models.py",
        "a double of the Hub's API",
        ("strata models pull", "strata models push"),
    ),
    SupportRow(
        "ranks on several hosts",
        "experimental",
        "experimental",
        "merge",
        "tests/e2e/test_train_hosts.py",
        "network namespaces of one machine, gloo; never on separate machines",
        ("hosts.listen", "ranks.mode"),
    ),
)
SHARED: Final = (
    SupportRow("journal on SQLite and PostgreSQL", "core", None, "pr", "tests/conformance/journal", _CI),
    SupportRow("kills of processes and databases", "core", None, "pr", "tests/shell/journal/test_crash.py", _CI),
    SupportRow("command line in a base install", "core", None, "pr", "tests/e2e/test_base_install.py", _CI),
    SupportRow(
        "a first manifest or recipe (strata init)", "supported", None, "pr", "tests/shell/cli/test_init.py", _CI
    ),
    SupportRow("strata demo", "supported", None, "merge", "tests/e2e/test_demo.py", _CI),
    SupportRow("object stores", "supported", None, "pr", "tests/shell/train_store/test_objects.py", "SeaweedFS"),
    SupportRow("traces (OpenTelemetry)", "supported", None, "pr", "tests/shell/http/test_otel.py", _CI),
    SupportRow("metrics for Prometheus", "supported", None, "pr", "tests/shell/http/test_metrics.py", _CI),
)
PLATFORMS: Final = (
    SupportRow("Linux on x86-64, CPython 3.11", "core", None, "pr", "tests/shell", _CI),
    SupportRow("CPython 3.12 and 3.13", "supported", None, "none", "", "the whole suite, by hand"),
    SupportRow(
        "CUDA devices", None, "experimental", "none", "", "never; `make gpu` runs the tests on CUDA devices", ("cuda",)
    ),
    SupportRow("NCCL", None, "experimental", "none", "", "never; all ranks met over gloo", ("nccl",)),
    SupportRow("arm64", "experimental", None, "none", "", "an agent under qemu; a hub never", ("arm64",)),
    SupportRow(
        "Windows",
        "experimental",
        None,
        "pr",
        "tests/shell/deploy/test_windows_script.py",
        "its text alone",
        ("windows",),
    ),
    SupportRow("macOS", "experimental", None, "none", "", "never", ("macos",)),
)
CAPABILITIES: Final = {
    "All layers": SHARED,
    "Fleet": FLEET,
    "Coordinator": COORDINATOR,
    "Training server": TRAINING,
    "Platforms": PLATFORMS,
}


def find_experimental(marks: Iterable[str]) -> Iterator[SupportRow]:
    """Yields the experimental capabilities that these settings, commands or platforms use."""
    used = set(marks)
    for rows in CAPABILITIES.values():
        yield from (row for row in rows if row.level == "experimental" and used.intersection(row.marks))


def say_experimental(text: str, *marks: str) -> str:
    """Returns the help of a command, an option or a setting, with a word if it is experimental. Adds it once."""
    word = " (experimental)" if any(find_experimental(marks)) else ""
    sentence = text.rstrip().removesuffix(".")
    return text if sentence.endswith(word) else sentence + word + text.rstrip()[len(sentence) :]


def platform_marks() -> tuple[str, ...]:
    """Returns the marks of this machine's system and processor."""
    system = {"win32": ("windows",), "darwin": ("macos",)}.get(sys.platform, ())
    return (*system, *(("arm64",) if platform.machine() in ("aarch64", "arm64") else ()))


def report_experimental(marks: Iterable[str] = ()) -> None:
    """Logs a line for each experimental capability in use, on this machine too."""
    # Help reads the table too, and must not import what logs need.
    from strata.base import log

    for row in find_experimental((*marks, *platform_marks())):
        log.get(__name__).warning("experimental_feature", name=row.name, reason=f"it ran: {row.ran}")
