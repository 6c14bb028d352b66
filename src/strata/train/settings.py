"""Settings of the training server with all defaults and checks, one file for all its processes: sections `server`,
`model`, `ranks`, `hosts`, `limits`, `sampling`, `snapshots`, `checkpoints`, `inference`, `parallel`; also ports and
names of files.

Launcher, orchestrator, API servers and ranks read the same file, so that no setting has to be passed from one to the
other. The addresses of their links and the paths of their files are derived here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_host
from strata.base.settings import Secret, load
from strata.train.inference_settings import InferenceSettings, Positive
from strata.train.parallel import Count, ParallelSettings
from strata.train.plan.device_values import DeviceValues, Dtype
from strata.train.plan.fused_kernels import AttentionKernel, FusedLayers
from strata.train.plan.quantisation import Quantise
from strata.train.status.rollouts import RolloutLimits

REQUESTS_PORT: Final = 6000
OUTPUTS_PORT: Final = 6001
RANK0_PORT: Final = 5556
LAUNCHER_LOCK: Final = "launcher.lock"
"""A lock in the data folder: one launcher at a time."""
ADDRESS_FILE: Final = "api.address"
"""A file in the data folder: where the server listens, also when it has chosen the port itself."""
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]

METRICS_PREFIX: Final = "strata_train_"


class ServerSection(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "default"
    """The name of the run: its journal is the stream `train/<name>`."""
    host: str = "127.0.0.1"
    """The address to listen on, a loopback one."""
    port: Port = 5555
    """The HTTP port; 0 takes a free one."""
    listen: Literal["tcp", "unix"] = "tcp"
    """`unix`: on no port. Only processes of the server's own user connect, by the socket in the folder of sockets."""
    api_servers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Processes that serve HTTP, all on this port: the kernel distributes connections over them."""
    data: Path = Path("strata-train")
    """The folder for all data: journal, payloads, checkpoints, sockets, keys."""
    database: str = ""
    """The journal's database: `sqlite:PATH` or `postgresql://…`; `journal.db` in the data folder unless set."""
    identity_database: str = ""
    """The database of API keys; `keys.db` in the data folder unless set. A hub's database makes its keys valid here."""
    operator_token: Secret | None = None
    """Unless set: the one in `operator.token` of the data folder, which is created at the first start."""
    transport: Literal["ipc", "tcp"] = "ipc"
    """How the processes connect: by Unix sockets in a folder that only the owner can access, or by TCP with CURVE
    encryption."""
    sockets: Path | None = None
    """The folder of the sockets; `run` in the data folder unless set."""
    requests_port: Port = REQUESTS_PORT
    """The port on which API servers send requests to the orchestrator, if the transport is TCP. Each further API
    server takes the next two."""
    outputs_port: Port = OUTPUTS_PORT
    """The port on which the orchestrator returns results, if the transport is TCP."""
    keys: Path | None = None
    """The file with the keys of the links; `link.keys` in the data folder unless set. Only the owner may read it."""
    front_key: Secret | None = None
    """The key of a hub that forwards the requests of its callers and names them. Without it the server takes no
    caller's word for who another is."""
    address_file: Path | None = None
    """A file to which the server writes its socket and the names of its model when it is ready, for a fleet's agent."""
    copy_every_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    """How often the data folder of a server in a fleet is copied, so that the server can continue from the copy when
    its host is lost; 0 disables this. Only a SQLite journal in the data folder is copied."""
    lost: str = ""
    """What was lost with an earlier host of this server, for clients that ask for what is not there: set by a fleet."""
    max_body_bytes: Count = 256 << 20
    """The largest request body, in bytes."""
    poll_s: Positive = 30.0
    """How long a long-poll request waits for a result."""
    lease_s: Positive = 10.0
    """The leader lease: an orchestrator on another machine may take over this long after the last renewal."""
    snapshot_every: Count = 10_000
    """Facts between two snapshots of the orchestrator's state."""
    timelines: Count = 1_000
    """The number of operations whose timelines are kept in memory: the last ones that were accepted."""
    log_format: Literal["json", "console"] | None = None
    """Unset: console on a terminal, JSON elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """A local folder in Hugging Face's format, or the id of a model in the local cache."""
    name: str = ""
    """The name that clients use; the last part of the path unless set."""
    tokenizer_id: str = ""
    """The tokenizer that clients load: an id of the Hugging Face Hub. Unless set it is `path`, if that is such an id,
    else the absolute path of the folder, which clients on other machines do not have."""
    training: Literal["lora", "full"] = "lora"
    """LoRA adapters of many models over one frozen base, or one full fine-tune of the base."""
    dtype: Dtype | None = None
    """The type of the arithmetic, and of weights that are not trained: those are in float32. Unset, by device:
    bfloat16 on CUDA devices that multiply it in hardware, else float32."""
    quantise: Quantise = ""
    """`nf4` or `int8`: the linear layers of a frozen base are quantised when they are loaded (bitsandbytes)."""
    slots: Count = 8
    """LoRA models that are resident on the device at a time, and in one pass."""
    max_models: Count = 64
    """LoRA models in all. The least recently used are offloaded to memory and loaded when they are needed."""
    models_in_memory: Annotated[int, msgspec.Meta(ge=0)] = 32
    """Offloaded models in memory; further ones are offloaded to the disk of each rank."""
    max_lora_rank: Count = 64
    """The largest rank of an adapter."""
    max_tokens_per_row: Count | None = None
    """Datums are packed into rows of so many tokens, as far as that fits into memory; a longer datum gets a row of its
    own. Unset, by device: 16,384 on CUDA devices, 4,096 on CPUs."""
    row_tokens: Count | None = None
    """Tokens of one row that fit into the memory of a rank; the ranks measure it when they start unless set. An
    operation with a longer datum fails before it is dispatched."""
    replicated_mb: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """A frozen base of at most so many MiB is on every rank in full; a larger one is sharded. In full training,
    gradients of at most so many MiB are reduced over the ranks once in a pass; larger ones after every row. Unset, by
    device: a share of the free memory of CUDA devices, 256 on CPUs."""
    activation_checkpointing: bool | Count = False
    """Compute activations again in the backward pass: those of every layer (`true`) or of every n-th."""
    compile: bool = False
    """Compile the layers for passes (`torch.compile`)."""
    fused_layers: FusedLayers = ""
    """`liger`: norms, rotary embeddings and gated MLPs by Liger's kernels. The server starts only if they agree with
    the plain layers."""
    attention: AttentionKernel = ""
    """`FA3` or `FA4`: the attention of rows by another version of FlashAttention than torch's own. The server starts
    only if the two agree."""
    offload: bool = False
    """Keep weights, their gradients and the optimizer state in the memory of the host, and copy a layer to the device
    when it computes (FSDP's CPU offload). A model may be larger than its devices; every pass waits for copies."""
    initial_checkpoint: bool = True
    """Save every new model as `000000` before anything is trained."""

    @property
    def places(self) -> int:
        """Returns how many models there can be at a time."""
        return 1 if self.training == "full" else max(self.max_models, self.slots)

    @property
    def base_model(self) -> str:
        return self.name or self._folder

    @property
    def base_models(self) -> tuple[str, ...]:
        """All names that clients may use: its name, the folder's, and the full path, which may be a model's id."""
        return tuple(dict.fromkeys((self.base_model, self._folder, self.path)))

    @property
    def tokenizer(self) -> str:
        """Never a relative path: clients have another working directory."""
        return self.tokenizer_id or (str(Path(self.path).absolute()) if Path(self.path).is_dir() else self.path)

    @property
    def public_name(self) -> str:
        """The base model that exported adapters name: no path of this machine, and the full id where there is one."""
        return self.base_model if self.name or Path(self.path).is_dir() else self.path

    @property
    def _folder(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    nproc: Count | None = None
    """Ranks on this machine; the launcher starts them in mode `auto`. Unset, by device: one on each CUDA device that no
    engine has, one on CPUs."""
    backend: Literal["gloo", "nccl", "auto"] = "auto"
    """The backend of torch.distributed; `auto`: NCCL with CUDA devices, else gloo."""
    mode: Literal["auto", "connect"] = "auto"
    """`auto`: the launcher starts the ranks. `connect`: it attaches to ranks that the operator starts."""
    rank0: str = ""
    """Where rank 0 listens: `ipc://…`, `tcp://HOST:PORT`, or `file:PATH` of a file to which it writes its address.
    Unless set it follows from the transport."""
    threads: Count | None = None
    """Threads of each rank for arithmetic (OMP_NUM_THREADS). Unset, by device: one; with CUDA devices and
    `model.offload`, a rank's share of the cores."""
    start_timeout_s: Positive = 600.0
    """How long the ranks may take to load the model."""
    first_pass_timeout_s: Positive | None = None
    """How long a collective may take until the first pass has ended. Unset: `collective_timeout_s` if that is set; else
    by device: 300 on CUDA devices, 1,800 on CPUs."""
    collective_timeout_s: Positive | None = None
    """How long a collective may take after that. Unset, by device: 120 on CUDA devices, 1,800 on CPUs."""
    deterministic: bool = False
    """Only kernels and collectives that give the same bits again on the same devices and mesh. A model whose replay
    differs by more than rounding is then stopped. Slower on CUDA devices, on which it is experimental."""


class HostsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks on several hosts: this one, on which the server runs, and others that join it."""

    listen: str = ""
    """`IP:PORT` on this host, for hosts that join: an IPv4 address of a network of their own. Unless set the ranks are
    on this host alone."""
    count: Count = 1
    """Hosts with ranks, this one among them. Each has `ranks.nproc`."""
    wait_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """How long a server that starts waits for that many; then it goes on with those that are there."""
    lost_after_s: Annotated[float, msgspec.Meta(ge=2)] = 10.0
    """A host that is silent for so long is lost: the others go on without it."""
    grow_after_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """A host that joins gets ranks after the next snapshot, or so long after it joined: all ranks start again then."""


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    max_running_requests: Count = 2
    """Dispatches at the ranks: one computes, the others queue there, so that the ranks never wait for the link."""
    max_pending_requests: Count = 100
    """Operations of all tenants that are accepted and not yet dispatched."""
    max_pending_per_tenant: Count | None = None
    """Pending operations of one tenant; half of all unless set, because those behind a gap may wait for long."""
    max_models_per_tenant: Count | None = None
    """Models of one tenant; half of `max_models` unless set, so that one tenant cannot take all places."""
    max_sessions_per_tenant: Count = 1000
    """Sessions of one tenant that have not ended."""
    ended_session_ttl_s: Positive = 30 * 86_400.0
    """How long an ended session without models is known."""
    max_ended_sessions: Count = 1000
    """Ended sessions of one tenant without models; beyond this the oldest are forgotten early."""
    max_imports_per_tenant: Count = 1000
    """Checkpoints of one tenant that were imported or copied, and not deleted."""
    max_loss_bytes_per_tenant: Count = 1 << 20
    """Encoded bytes of all custom losses of one tenant, in sessions that have not ended."""
    operation_timeout_s: Positive = 1800.0
    """A dispatch that takes longer fails, and the ranks, which are stuck, are restarted."""
    result_ttl_s: Positive = 86_400.0
    """How long a result can be retrieved after it was complete."""
    silent_session_s: Annotated[float, msgspec.Meta(ge=0)] = 86_400.0
    """A session without a heartbeat for so long expires, and its models are unloaded; 0 disables this."""
    gap_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """Operations that wait so long for a missing predecessor are aborted; 0 disables this."""
    fairness_quantum_tokens: Count | None = None
    """Tokens that a tenant's turn in the queue gives it; those of a row (`model.max_tokens_per_row`) unless set."""
    pack_tenants: bool = True
    """Let operations of different models share a pass. Rounding in the last bits then depends on what shares it."""


class SamplingSettings(msgspec.Struct, frozen=True, kw_only=True):
    slice_steps: Count = 32
    """Decode steps of one time slice, after which training may continue."""
    max_pending_requests: Count = 2048
    """Sample requests that wait, half of them of one tenant; beyond this, clients are told to retry."""
    max_running_requests: Count = 256
    """Sample requests at the ranks at a time, three quarters of them of one tenant."""
    sequences: Count = 64
    """Sequences that run at once on each rank."""
    cached_tokens: Count = 32_768
    """Capacity of each rank's KV cache, in tokens."""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 8192
    """Tokens of earlier prompts that each rank keeps for prompts that begin alike, in room of its KV cache that no
    sequence needs; 0 disables this."""
    samplers: Count | None = None
    """Open samplers at a time; 64 adapters, or 2 full models, unless set."""
    gap_alarm_nats: Annotated[float, msgspec.Meta(ge=0)] = 0.05
    """Warn when sampler and trainer differ by more than so many nats per token in the mean of a pass, over tokens that
    the same weights drew; 0 disables this."""

    def max_samplers(self, *, full: bool) -> int:
        return self.samplers or (2 if full else 64)


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    keep: Count | None = None
    """How many checkpoints of each run and kind are retained, the newest ones; all unless set. One that a sampler or a
    pending operation needs stays, and `000000` is not counted."""
    sweep_s: Positive = 60.0
    """How often the garbage collection looks for files that belong to no checkpoint any more."""
    storage: str = ""
    """`s3://BUCKET/PREFIX` for a copy of every checkpoint; missing local files are fetched from there."""
    endpoint: str = ""
    """The endpoint of a store that is not AWS."""
    region: str = "us-east-1"
    """The region of the bucket."""
    access_key: str = ""
    """The id of the access key."""
    secret_key: Secret | None = None
    """The secret of the access key."""


class SnapshotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots of all models, so that ranks that restart need not replay everything. One is taken when any of these is
    reached since the last; 0 disables that reason."""

    every_dispatches: Annotated[int, msgspec.Meta(ge=0)] = 500
    """Dispatches that change a model."""
    every_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """Time since the first change that is in no snapshot."""
    every_payload_mb: Annotated[int, msgspec.Meta(ge=0)] = 1024
    """MiB of batches since the last snapshot."""
    every_replay_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """Time that a replay would take: ranks that restart are ready that much later. It is twenty times the duration of
    the last snapshot if that is more."""
    payload_grace_s: Annotated[float, msgspec.Meta(ge=1)] = 3600.0
    """Unreferenced payloads are deleted when they are this old: a request that refers to one may be in flight."""


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts of models whose clients chose to keep them, in the memory of the orchestrator."""

    max_per_tenant: Annotated[int, msgspec.Meta(ge=0)] = 200
    """The newest; 0 keeps none, whatever clients choose."""
    ttl_s: Positive = 86_400.0
    """How long one is kept at most."""

    @property
    def limits(self) -> RolloutLimits:
        return RolloutLimits(
            per_tenant=self.max_per_tenant,
            ttl_s=self.ttl_s,
        )


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is a section of the file."""

    server: ServerSection
    model: ModelSettings
    ranks: RankSettings
    limits: LimitSettings
    hosts: HostsSettings = HostsSettings()
    sampling: SamplingSettings = SamplingSettings()
    snapshots: SnapshotSettings = SnapshotSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    inference: InferenceSettings = InferenceSettings()
    rollouts: RolloutSettings = RolloutSettings()
    parallel: ParallelSettings = ParallelSettings()

    @property
    def by_device(self) -> DeviceValues:
        """Returns the settings that depend on the device. What is unset has its value for CPUs: for other devices
        `resolve_settings` sets it before the processes of the server read it."""
        set_here = {
            name: value
            for name in DeviceValues.__struct_fields__
            if (value := getattr(self.model, name, getattr(self.ranks, name, None))) is not None
        }
        if self.ranks.collective_timeout_s is not None:
            set_here.setdefault("first_pass_timeout_s", self.ranks.collective_timeout_s)
        return DeviceValues(**set_here)

    @property
    def stream(self) -> str:
        return f"train/{self.server.name}"

    @property
    def data(self) -> Path:
        return self.server.data.expanduser().absolute()

    @property
    def database(self) -> str:
        return self.server.database or f"sqlite:{self.data / 'journal.db'}"

    @property
    def identity_database(self) -> str:
        return self.server.identity_database or f"sqlite:{self.data / 'keys.db'}"

    @property
    def payloads(self) -> Path:
        return self.data / "payloads"

    @property
    def curves_file(self) -> Path:
        """The learning curves, for the next orchestrator."""
        return self.data / "curves"

    @property
    def checkpoint_folder(self) -> Path:
        return self.data / "checkpoints"

    @property
    def published(self) -> Path:
        """Weights for engines that identify a model by its folder."""
        return self.data / "published"

    @property
    def imports(self) -> Path:
        """Uploads that are not checkpoints yet, each in its own folder, under the name `staged`."""
        return self.data / "imports"

    @property
    def fetched(self) -> Path:
        """Checkpoints that are being fetched from the object store."""
        return self.data / "fetched"

    @property
    def staged(self) -> str:
        return "checkpoint"

    @property
    def snapshot_folder(self) -> Path:
        return self.data / "snapshots"

    @property
    def compile_folder(self) -> Path:
        """Code that the ranks compiled for this machine. A launcher that starts them removes it before: the data folder
        may come from another one."""
        return self.data / "compiled"

    @property
    def makes_copies(self) -> bool:
        return self.server.address_file is not None and self.server.copy_every_s > 0 and not self.server.database

    @property
    def copies(self) -> Path:
        """Copies of all the rest, made while the server runs."""
        return self.data / "copies"

    @property
    def sockets(self) -> Path:
        return self.server.sockets.expanduser().absolute() if self.server.sockets else self.data / "run"

    @property
    def api_socket(self) -> Path:
        """The API's socket for the server's own user: `strata serve status` and the commands for keys use it."""
        return self.sockets / "api"

    def engine_socket(self, name: str) -> Path:
        return self.sockets / name

    @property
    def engine_key(self) -> Path:
        """The API key of the engines that the server starts; the launcher makes a new one at each start."""
        return self.sockets / "engine.key"

    def engine_report(self, name: str) -> Path:
        """Returns what the launcher reports of an engine, for the orchestrator's status."""
        return self.sockets / f"{name}.json"

    def engine_log(self, name: str) -> Path:
        """The output of an engine since its last start; that before is beside it with the suffix `.1`."""
        return self.data / "logs" / f"{name}.log"

    @property
    def rendezvous_file(self) -> Path:
        """The file through which ranks on a single node rendezvous."""
        return self.sockets / "ranks.store"

    @property
    def keys(self) -> Path:
        return self.server.keys.expanduser().absolute() if self.server.keys else self.data / "link.keys"

    @property
    def requests(self) -> str:
        return self.requests_of(0)

    @property
    def outputs(self) -> str:
        return self.outputs_of(0)

    def requests_of(self, number: int) -> str:
        """Returns where the ROUTER of this API server listens. Over TCP each further one has the next two ports."""
        name = f"requests-{number}" if number else "requests"
        return self._endpoint(name, _port_of(self.server.requests_port, number))

    def outputs_of(self, number: int) -> str:
        """Returns where the PULL of this API server listens."""
        name = f"outputs-{number}" if number else "outputs"
        return self._endpoint(name, _port_of(self.server.outputs_port, number))

    @property
    def rank0(self) -> str:
        """Returns where rank 0's PAIR listens, or `file:PATH` of the file that holds the address."""
        return self.ranks.rank0 or self._endpoint("rank0", RANK0_PORT)

    def _endpoint(self, name: str, port: int) -> str:
        if self.server.transport == "tcp":
            return f"tcp://127.0.0.1:{port}"
        return f"ipc://{self.sockets / name}"


def count_ranks(settings: ServerSettings) -> int:
    """Returns how many ranks there are on all hosts."""
    return settings.by_device.nproc * settings.hosts.count


def _port_of(port: int, number: int) -> int:
    return port + 2 * number


def load_settings(
    file: Path | None, *, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> ServerSettings:
    """Load all sections; the error lists the problems of all of them. Flags are named as in `server.port`."""
    problems: list[str] = []
    loaded: dict[str, msgspec.Struct] = {}
    for section in msgspec.structs.fields(ServerSettings):
        prefix = f"{section.name}."
        section_flags = {
            key.removeprefix(prefix): value for key, value in (flags or {}).items() if key.startswith(prefix)
        }
        try:
            loaded[section.name] = load(
                section.type, section=section.name, file=file, environ=environ, flags=section_flags
            )
        except StrataError as error:
            problems.extend(error.detail.get("problems", (str(error),)))
    if problems:
        distinct = tuple(dict.fromkeys(problems))
        raise StrataError(Code.INVALID, "\n".join(distinct), problems=distinct)
    return ServerSettings(**loaded)  # type: ignore[arg-type]


def check_quantise_package(quantise: Quantise) -> None:
    """UNSUPPORTED if the package that quantises is not installed."""
    if quantise and find_spec("bitsandbytes") is None:
        raise StrataError(
            Code.UNSUPPORTED,
            f"model.quantise is {quantise}, which needs bitsandbytes, and that is not installed",
            hint="pip install 'strata-train[quantised]'",
        )


def check_exposure(host: str) -> None:
    """INVALID for a host that other machines can reach: keys and batches would be sent unencrypted."""
    if not is_loopback_host(host.strip("[]")):
        raise StrataError(
            Code.INVALID,
            f"{host} can be reached from other machines, and everything would be sent in the clear",
            hint="listen on 127.0.0.1, and put a TLS proxy in front",
        )
