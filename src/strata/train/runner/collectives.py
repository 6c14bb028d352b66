"""The rank group over torch.distributed: joining it, broadcast, scatter, gather, all-reduce, errors that all ranks
raise together, groups that share flat tensors, and an exchange of rows with a gradient.

torch.distributed finds a rank and its peers in the environment that torchrun sets. Only tensors of bytes and numbers
travel. Nothing here pickles, unlike torch's object collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from strata.base.errors import Code, StrataError
from strata.base.settings import process_environment
from strata.train.runner.determinism import use_deterministic_kernels
from strata.train.runner.host_files import HostFiles, OwnFiles
from strata.train.runner.settings import RunnerSettings

SINGLE_NODE: Final = "strata-single-node"
"""The name of the rendezvous backend and of its run on a single node (`single_node`). A rank recognises by it that it
runs on a single node."""
IDLE: Final = timedelta(days=3650)
"""How long a rank waits for the next command: practically for ever. A rank 0 that dies closes its connections, which
ends the wait."""


HOST_TIMEOUT_S: Final = 1800.0
"""How long bytes between the hosts of ranks on CUDA devices may take: ranks wait there for files that others write.
What their devices exchange has a timeout of its own (`RankGroup.limit_collectives`)."""


class RankError(msgspec.Struct, frozen=True, array_like=True):
    """The error of one rank, as the others receive it."""

    code: Code
    message: str


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[RankError]).decode
_decode_places: Final = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


def join_process_group(
    settings: RunnerSettings, rendezvous_file: Path, meet: Callable[[], Store] | None = None
) -> torch.device:
    """Rendezvous with the other ranks: through a file on a single node, through the store of `meet` on hosts of one
    server, else as torchrun says. Returns the device."""
    if settings.deterministic:
        use_deterministic_kernels()
    with_cuda = settings.backend == "nccl" or (settings.backend == "auto" and torch.cuda.is_available())
    environment = process_environment()
    single_node = environment.get("TORCHELASTIC_RUN_ID") == SINGLE_NODE
    device = _cuda_device(int(environment["LOCAL_RANK"])) if with_cuda else torch.device("cpu")
    host_timeout_s = HOST_TIMEOUT_S if with_cuda else settings.first_pass_timeout_s
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if with_cuda else "gloo",
        init_method=None if meet is not None else f"file://{rendezvous_file}" if single_node else "env://",
        store=None if meet is None else meet(),
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        timeout=timedelta(seconds=host_timeout_s),
        # NCCL then connects here and not in the first pass, and the groups of a mesh are splits of this one.
        device_id=device if with_cuda else None,
    )
    return device


def _cuda_device(number: int) -> torch.device:
    """INVALID if this machine does not show so many."""
    if number >= (count := torch.cuda.device_count()):
        raise StrataError(
            Code.INVALID,
            f"rank {number} of this machine has no CUDA device: there are {count}; "
            'lower ranks.nproc, or set ranks.backend to "gloo"',
        )
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


class ShareGroup:
    """Ranks that have the same flat tensors, of which each has a share of its own: of a sum, or of the work on them.
    Without a process group it is all ranks, or this one."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def share(self, length: int) -> slice:
        """This rank's part of so many numbers, each rank having the same number of them: the last one may be short."""
        each = -(-length // self.size)
        return slice(min(self.rank * each, length), min((self.rank + 1) * each, length))

    def padded(self, length: int) -> int:
        """The next length that the ranks can share equally."""
        return -(-length // self.size) * self.size

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum a tensor over the ranks, in place. The returned function waits for the sum."""
        handle = dist.all_reduce(tensor, group=self._group, async_op=True) if self.size > 1 else None

        def wait() -> torch.Tensor:
            if handle is not None:
                handle.wait()
            return tensor

        return wait

    def start_reduce_scatter(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum a flat tensor over the ranks, whose size divides its length. The returned function waits for
        this rank's share of the sum; the tensor is then undefined."""
        if self.size == 1:
            return lambda: tensor
        summed = tensor.new_empty(len(tensor) // self.size)
        handle = dist.reduce_scatter_single(summed, tensor, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            handle.wait()
            return summed

        return wait

    def start_all_gather(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start to copy each rank's share of a flat tensor, whose length the number of ranks divides, to all ranks."""
        handle = None
        if self.size > 1:
            handle = dist.all_gather_single(tensor, tensor[self.share(len(tensor))], group=self._group, async_op=True)

        def wait() -> None:
            if handle is not None:
                handle.wait()

        return wait


ALONE: Final = ShareGroup(0, 1)


class MeshGroup:
    """The ranks of one dimension of a mesh, which compute together; without one, this rank alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.rank, self.size = 0, 1
        if mesh is not None:
            self.rank, self.size, self.mesh, self.group = mesh.get_local_rank(), mesh.size(), mesh, mesh.get_group()


class RankGroup:
    """This rank among the others. Every method that communicates is called by all of them, in the same order."""

    def __init__(self, device: torch.device, files: HostFiles | None = None) -> None:
        self.files: HostFiles = files or OwnFiles()
        """Where its host has checkpoints and snapshots."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        environment = process_environment()
        self.local_size = int(environment.get("LOCAL_WORLD_SIZE", self.size))
        """How many of the ranks are on this machine."""
        self.local_rank = int(environment.get("LOCAL_RANK", self.rank))
        self.device = device
        self.shares = ShareGroup(self.rank, self.size)
        """All ranks."""
        self._idle = dist.new_group(backend="gloo", timeout=IDLE)

    def limit_collectives(self, timeout_s: float) -> None:
        """Let a collective between the devices of ranks take so long, in all groups that there are. Only the wait for
        the next command has no end."""
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not self._idle:
                group._get_backend(self.device)._set_default_timeout(timedelta(seconds=timeout_s))

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def broadcast_header(self, kind: int, sizes: Sequence[int]) -> None:
        """Rank 0 announces what comes next, and how many bytes of it each rank gets."""
        if self.size > 1:
            dist.broadcast(torch.tensor([kind, *sizes], dtype=torch.int64), 0, group=self._idle)

    def receive_header(self) -> tuple[int, list[int]]:
        header = torch.zeros(1 + self.size, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._idle)
        kind, *sizes = header.tolist()
        return int(kind), [int(size) for size in sizes]

    def broadcast(self, data: bytes) -> None:
        if self.size > 1:
            dist.broadcast(_bytes_tensor(data), 0)

    def receive_broadcast(self, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def scatter(self, parts: Sequence[bytes]) -> None:
        """Send each rank its part; rank 0 keeps the first."""
        if self.size == 1:
            return
        longest = max(len(part) for part in parts)
        padded = [_bytes_tensor(part.ljust(longest, b"\0")) for part in parts]
        dist.scatter(torch.empty(longest, dtype=torch.uint8), padded, src=0)

    def receive_scatter(self, sizes: Sequence[int]) -> bytes:
        buffer = torch.empty(max(sizes), dtype=torch.uint8)
        dist.scatter(buffer, None, src=0)
        return buffer.numpy().tobytes()[: sizes[self.rank]]

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, in their order, on rank 0; the others get an empty list."""
        if self.size == 1:
            return [data]
        sizes = self.all_gather_int(len(data))
        longest = max(sizes)
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if self.is_rank0 else None
        dist.gather(_bytes_tensor(data.ljust(longest, b"\0")), buffers, dst=0)
        if buffers is None:
            return []
        return [buffer.numpy().tobytes()[:size] for buffer, size in zip(buffers, sizes, strict=True)]

    def all_gather_int(self, number: int) -> list[int]:
        """The numbers of all ranks, on every rank."""
        if self.size == 1:
            return [number]
        gathered = torch.zeros(self.size, dtype=torch.int64)
        dist.all_gather_single(gathered, torch.tensor([number], dtype=torch.int64))
        return [int(number) for number in gathered.tolist()]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, on every rank."""
        if self.size == 1:
            return [data]
        sizes = self.all_gather_int(len(data))
        longest = max(sizes)
        gathered = torch.zeros(self.size * longest, dtype=torch.uint8)
        dist.all_gather_single(gathered, _bytes_tensor(data.ljust(longest, b"\0")))
        return [row.numpy().tobytes()[:size] for row, size in zip(torch.split(gathered, longest), sizes, strict=True)]

    def all_reduce_any(self, flags: Sequence[bool]) -> list[bool]:
        """Flag by flag, whether it is set on any rank."""
        if self.size == 1 or not flags:
            return list(flags)
        reduced = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
        return [bool(flag) for flag in reduced.tolist()]

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum a tensor over the ranks, in place. The returned function waits for the sum."""
        return self.shares.start_all_reduce(tensor)

    def gather_places(
        self, own: Mapping[str, torch.Tensor], places: Sequence[tuple[int, int]], length: int
    ) -> dict[str, torch.Tensor]:
        """Flat tensors of this length on the host of rank 0; the others get none. Each rank has the numbers at some
        places, given by where they begin and end, one after the other. Rank 0 has those of one rank on its device."""
        by_rank = [_decode_places(data) for data in self.gather(_encode(list(places)))]
        gathered = {name: self._gather_places(tensor, by_rank, length) for name, tensor in own.items()}
        return {name: full for name, full in gathered.items() if full is not None}

    def _gather_places(
        self, own: torch.Tensor, by_rank: Sequence[Sequence[tuple[int, int]]], length: int
    ) -> torch.Tensor | None:
        if not self.is_rank0:
            if len(own):
                dist.send(own.contiguous(), 0)
            return None
        full = torch.empty(length, dtype=own.dtype)
        for rank, places in enumerate(by_rank):
            sizes = [end - start for start, end in places]
            if not sizes:
                continue
            part = own
            if rank:
                part = own.new_empty(sum(sizes))
                dist.recv(part, rank)
            # On the host at once: the places may be many.
            for (start, end), numbers in zip(places, torch.split(part.cpu(), sizes), strict=True):
                full[start:end] = numbers
        return full

    def send_to_rank0(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """Returns on rank 0 the tensor of the first rank that has it; the others get what they gave. `like` has its
        shape and dtype."""
        sender = self.all_gather_int(int(tensor is not None)).index(1)
        if sender and self.rank == sender:
            assert tensor is not None
            dist.send(tensor.contiguous(), 0)
        elif sender and self.is_rank0:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            dist.recv(tensor, sender)
        return tensor

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """An error inside on one rank is raised on all of them, with the same message. Nothing inside may communicate.

        So no rank enters a collective alone, which the others would never enter.
        """
        own: StrataError | None = None
        try:
            yield
        except StrataError as error:
            own = error
        except (OSError, SafetensorError) as error:
            own = StrataError(Code.UNAVAILABLE, f"rank {self.rank}: {error}")
        self.raise_on_all_ranks(own)

    def raise_on_all_ranks(self, own: StrataError | None) -> None:
        """Raise the error of the lowest rank that has one, on all ranks; return if none has."""
        if not self.all_reduce_any([own is not None])[0]:
            return
        errors = [] if own is None else [RankError(own.code, str(own))]
        gathered = self.all_gather_bytes(_encode(errors))
        first = next(error for data in gathered for error in _decode(data))
        raise StrataError(first.code, first.message) from own


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send so many rows to each rank of the group, in their order, and receive so many from each. Gradients take the
    way back."""
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        sent, received = ctx.sizes
        return _exchange(grads[0], received, sent, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output
