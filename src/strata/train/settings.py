"""Settings of the training server, one file for all its processes: sections `server`, `model`, `ranks`, `limits`,
`sampling`, `snapshots`, `checkpoints`, `inference`.

Launcher, orchestrator, API server and ranks read the same file, so that no setting has to be handed from one to the
other. What they say to each other and where their files lie is derived here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from strata.base.errors import Code, StrataError
from strata.base.loopback import is_loopback_host
from strata.base.settings import Secret, load

REQUESTS_PORT: Final = 6000
OUTPUTS_PORT: Final = 6001
RANK0_PORT: Final = 5556
LONGEST_SOCKET: Final = 100
"""Characters of a path that a Unix socket can have on every system, with a little room."""

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Kind = TypeVar("Kind", bound=msgspec.Struct)


class Server(msgspec.Struct, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "default"
    """Of the run: its journal is the stream `train/<name>`."""
    host: str = "127.0.0.1"
    port: Port = 5555
    """HTTP; 0 takes a free one."""
    api_servers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Processes that answer HTTP, all on this port: the system spreads connections over them."""
    data: Path = Path("strata-train")
    """The folder for everything that is no setting: journal, payloads, checkpoints, sockets, keys."""
    database: str = ""
    """Of the journal: `sqlite:PATH` or `postgresql://…`; `journal.db` in the data folder unless set."""
    identity_database: str = ""
    """Of API keys; `keys.db` in the data folder unless set. A hub's database makes its keys good here too."""
    operator_token: Secret | None = None
    """None: the one in `operator.token` of the data folder, which is made at the first start."""
    transport: Literal["ipc", "tcp"] = "ipc"
    """Between the processes: sockets in a folder of the owner alone, or TCP with CURVE encryption and keys."""
    sockets: Path | None = None
    """The folder of the sockets; `run` in the data folder unless set. Their paths must be short."""
    link_host: str = "127.0.0.1"
    """Where the API server's side of the link to the orchestrator listens when the transport is TCP."""
    requests_port: Port = REQUESTS_PORT
    outputs_port: Port = OUTPUTS_PORT
    keys: Path | None = None
    """The file with the keys of the links; `link.keys` in the data folder unless set. Of the owner alone."""
    max_body_bytes: Count = 256 << 20
    poll_s: Positive = 30.0
    """How long a request for a result waits for it."""
    lease_s: Positive = 3.0
    """An orchestrator on another machine may take over this long after the last one was heard from."""
    snapshot_every: Count = 10_000
    """Facts between two snapshots of the orchestrator's state."""
    timelines: Count = 1_000
    """Operations whose times are kept, in memory: the last so many that were accepted."""
    log_format: Literal["json", "console"] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """A local folder in Hugging Face's form, or the id of a model in the local cache."""
    name: str = ""
    """What clients call it; the last part of the path unless set."""
    tokenizer_id: str = ""
    """What clients load the tokenizer by: an id of a Hugging Face Hub. Unless set it is `path`, if that is such an id,
    else the absolute path of the folder, which clients on other machines do not have."""
    training: Literal["lora", "full"] = "lora"
    """Adapters of many models over one frozen base, or one model that owns the base."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    slots: Count = 8
    """Models with adapters on the device at a time, and in one pass."""
    max_models: Count = 64
    """Models with adapters at all. Those that were not used for longest wait in memory and come back when needed."""
    models_in_memory: Annotated[int, msgspec.Meta(ge=0)] = 32
    """Of those that wait; the others wait on the disk of each rank."""
    max_lora_rank: Count = 64
    max_tokens_per_row: Count = 4096
    """Datums are packed into sequences of so many tokens; a longer one gets a sequence of its own."""
    row_tokens: Count | None = None
    """Tokens of one row that fit into the memory of a rank; the ranks measure it when they start unless set. An
    operation with a longer datum fails before it is dispatched."""
    activation_checkpointing: bool = False
    initial_checkpoint: bool = True
    """Save every new model as `000000` before anything is trained."""

    @property
    def base_model(self) -> str:
        return self.name or self._folder

    @property
    def base_models(self) -> tuple[str, ...]:
        """All that clients may call it: its name, the folder's, and the whole path, which may be a model's id."""
        return tuple(dict.fromkeys((self.base_model, self._folder, self.path)))

    @property
    def tokenizer(self) -> str:
        """Never relative: clients have another working directory."""
        return self.tokenizer_id or (str(Path(self.path).absolute()) if Path(self.path).is_dir() else self.path)

    @property
    def public_name(self) -> str:
        """What adapters are said to be for: nothing of this machine, and a whole id where there is one."""
        return self.base_model if self.name or Path(self.path).is_dir() else self.path

    @property
    def _folder(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]


class Ranks(msgspec.Struct, frozen=True, kw_only=True):
    nproc: Count = 1
    """Ranks on this machine; the launcher starts them in mode `auto`."""
    backend: Literal["gloo", "nccl", "auto"] = "auto"
    mode: Literal["auto", "connect"] = "auto"
    """Start the ranks, or attach to ranks that somebody else starts."""
    rank0: str = ""
    """Where rank 0 listens: `ipc://…`, `tcp://HOST:PORT`, or `file:PATH` of a file it writes its address into.
    Unless set it follows from the transport."""
    threads: Count = 1
    """Threads of each rank for arithmetic (OMP_NUM_THREADS)."""
    start_timeout_s: Positive = 600.0
    """How long the ranks may take to load the model."""
    collective_timeout_s: Positive = 1800.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_running_requests: Count = 2
    """Dispatches at the ranks: one computes, the others wait there, so that the ranks never wait for the link."""
    max_pending_requests: Count = 100
    """Operations that were accepted and not dispatched, of all tenants."""
    max_pending_per_tenant: Count | None = None
    """Of these, of one tenant; half of all unless set, because those that a gap holds up may wait for ever."""
    max_models_per_tenant: Count | None = None
    """Of the places for models; as many as there are unless set."""
    operation_timeout_s: Positive = 1800.0
    """A dispatch that takes longer means that the ranks are stuck: they are started again, and it fails."""
    result_ttl_s: Positive = 86_400.0
    """How long a result can be asked for after it was there."""
    max_kept_results: Count = 200_000
    """Beyond this the oldest results go before their time."""
    silent_session_s: Annotated[float, msgspec.Meta(ge=0)] = 86_400.0
    """A session of which nothing is heard for so long is finished, and its models are let go; 0 is never."""
    gap_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """Operations that wait so long for one before them that does not come are given up; 0 is never."""
    pack_tenants: bool = True
    """Let operations of different models share a pass. In the last bits their results then depend on who came when."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    quantum_steps: Count = 32
    """Tokens of each sequence before training may go on in between."""
    max_pending_requests: Count = 2048
    """That are accepted and wait to be sampled, half of them of one tenant; beyond, clients are told to come again."""
    max_running_requests: Count = 256
    """At the ranks at a time, three quarters of them of one tenant."""
    sequences: Count = 64
    """That each rank samples at once."""
    cached_tokens: Count = 32_768
    """That each rank can remember at once."""
    samplers: Count | None = None
    """Weights that are kept for sampling at a time; 64 adapters, or 2 whole models, unless set."""

    def places(self, *, full: bool) -> int:
        return self.samplers or (2 if full else 64)


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    keep: Count | None = None
    """Of each run and kind, the newest; all unless set. One that a sampler or a waiting operation needs stays, and
    `000000` is not counted."""
    sweep_s: Positive = 60.0
    """How often files are looked for that no checkpoint has any more."""
    archive_valid_s: Positive = 900.0
    """How long the address of an archive can be used."""
    storage: str = ""
    """`s3://BUCKET/PREFIX` for a copy of every checkpoint; where files are gone they are brought back from there."""
    endpoint: str = ""
    """Of a store that is not AWS."""
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: Secret | None = None


class Inference(msgspec.Struct, frozen=True, kw_only=True):
    """Engines beside this server that are told of new weights."""

    allow: tuple[Annotated[str, msgspec.Meta(pattern=r"^https?://[^/@?#\\\s]+/?$")], ...] = ()
    """Where engines may be: `http://127.0.0.1:8000`, with scheme, host and port. Nothing else is ever connected to."""
    keys: dict[str, Path] = {}
    """For those that ask for an API key, the file it is in; of the owner alone."""
    push: bool = False
    """Tell all endpoints of whatever is saved for sampling, not only of what is synced."""
    sample: bool = False
    """Let endpoints that have a sampler's weights sample for it."""
    keep: Count = 2
    """Versions of a model on an endpoint; older ones are let go of."""
    max_samples: Count = 64
    """Requests that endpoints are asked for at a time."""
    connect_timeout_s: Positive = 5.0
    push_timeout_s: Positive = 300.0
    """For an engine to take new weights."""
    sample_timeout_s: Positive = 300.0


class Snapshots(msgspec.Struct, frozen=True, kw_only=True):
    """Of all models, so that ranks that start anew need not do everything again. One is taken when any of these is
    reached since the last; 0 is never for this reason."""

    every_dispatches: Annotated[int, msgspec.Meta(ge=0)] = 500
    """That change something."""
    every_s: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """Since the first change that no snapshot holds."""
    every_payload_mb: Annotated[int, msgspec.Meta(ge=0)] = 1024
    write_timeout_s: Positive = 1800.0
    """Files that are not on the disk by then are given up."""
    payload_grace_s: Annotated[float, msgspec.Meta(ge=1)] = 3600.0
    """Payloads that nobody refers to are removed when they are this old: a request with one may be on its way."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    server: Server
    model: ModelSettings
    ranks: Ranks
    limits: Limits
    sampling: Sampling = Sampling()
    snapshots: Snapshots = Snapshots()
    kept: CheckpointSettings = CheckpointSettings()
    """Section `checkpoints`."""
    inference: Inference = Inference()

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
    def checkpoints(self) -> Path:
        return self.data / "checkpoints"

    @property
    def published(self) -> Path:
        """Weights in the form of engines that take a folder for a name."""
        return self.data / "published"

    @property
    def imports(self) -> Path:
        """Uploads that are not checkpoints yet, each in a folder of its own, under the name `staged`."""
        return self.data / "imports"

    @property
    def fetched(self) -> Path:
        """Checkpoints on their way from the object store."""
        return self.data / "fetched"

    @property
    def staged(self) -> str:
        return "checkpoint"

    @property
    def snapshot_folder(self) -> Path:
        return self.data / "snapshots"

    @property
    def sockets(self) -> Path:
        return self.server.sockets.expanduser().absolute() if self.server.sockets else self.data / "run"

    @property
    def api_socket(self) -> Path:
        """Where the server's own user reaches the API: `strata serve status` and whoever makes keys."""
        return self.sockets / "api"

    @property
    def rendezvous_file(self) -> Path:
        """The file through which ranks of one machine find each other."""
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
        """Where the ROUTER of this API server listens. Over TCP each further one has the next two ports."""
        name = f"requests-{number}" if number else "requests"
        return self._endpoint(name, self.server.link_host, _port_of(self.server.requests_port, number))

    def outputs_of(self, number: int) -> str:
        """Where the PULL of this API server listens."""
        name = f"outputs-{number}" if number else "outputs"
        return self._endpoint(name, self.server.link_host, _port_of(self.server.outputs_port, number))

    @property
    def rank0(self) -> str:
        """Where rank 0's PAIR listens, or `file:PATH` of the file that says so."""
        return self.ranks.rank0 or self._endpoint("rank0", "127.0.0.1", RANK0_PORT)

    def _endpoint(self, name: str, host: str, port: int) -> str:
        if self.server.transport == "tcp":
            return f"tcp://{host}:{port}"
        path = self.sockets / name
        if len(str(path)) > LONGEST_SOCKET:
            raise StrataError(
                Code.INVALID,
                f"{path} is too long for a Unix socket",
                hint="set server.sockets to a folder with a short path",
            )
        return f"ipc://{path}"


def _port_of(port: int, number: int) -> int:
    return port + 2 * number


def load_settings(
    file: Path | None, *, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> ServerSettings:
    """All sections; problems of all of them are told at once. Flags are named as in `server.port`."""
    problems: list[str] = []

    def section(kind: type[Kind], name: str) -> Kind | None:
        own = {
            key.removeprefix(f"{name}."): value for key, value in (flags or {}).items() if key.startswith(f"{name}.")
        }
        try:
            return load(kind, section=name, file=file, environ=environ, flags=own)
        except StrataError as error:
            problems.extend(error.detail.get("problems", (str(error),)))
            return None

    server = section(Server, "server")
    model = section(ModelSettings, "model")
    ranks = section(Ranks, "ranks")
    limits = section(Limits, "limits")
    sampling = section(Sampling, "sampling")
    snapshots = section(Snapshots, "snapshots")
    kept = section(CheckpointSettings, "checkpoints")
    inference = section(Inference, "inference")
    if (
        server is None
        or model is None
        or ranks is None
        or limits is None
        or sampling is None
        or kept is None
        or inference is None
        or snapshots is None
    ):
        found = tuple(dict.fromkeys(problems))
        raise StrataError(Code.INVALID, "\n".join(found), problems=found)
    return ServerSettings(
        server=server,
        model=model,
        ranks=ranks,
        limits=limits,
        sampling=sampling,
        kept=kept,
        inference=inference,
        snapshots=snapshots,
    )


def check_exposure(host: str) -> None:
    """Refuse to be reached from other machines in the clear: keys and batches would be everybody's."""
    if not is_loopback_host(host.strip("[]")):
        raise StrataError(
            Code.INVALID,
            f"{host} can be reached from other machines, and everything would be sent in the clear",
            hint="listen on 127.0.0.1, and put a proxy that speaks TLS in front",
        )
