"""The ranks as one group: bytes to all, to each, from each, and agreeing on what went wrong.

Only tensors of bytes and numbers travel. Nothing here pickles, unlike the object collectives of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from strata.base.errors import Code, StrataError
from strata.base.settings import own_environment

IDLE: Final = timedelta(days=3650)
"""How long a rank waits for the next command: for ever, as far as the engine can say so. A rank 0 that dies closes its
connections, which ends the wait."""


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """What one rank could not do."""

    code: Code
    message: str


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Trouble]).decode


class RankGroup:
    """This rank among the others. Every method that communicates is called by all of them, in the same order."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.here = int(own_environment().get("LOCAL_WORLD_SIZE", self.size))
        """How many of them are on this machine."""
        self.device = device
        self._idle = dist.new_group(backend="gloo", timeout=IDLE)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def announce(self, kind: int, sizes: Sequence[int]) -> None:
        """Rank 0 says what comes next, and how many bytes of it each rank gets."""
        if self.size > 1:
            dist.broadcast(torch.tensor([kind, *sizes], dtype=torch.int64), 0, group=self._idle)

    def await_announcement(self) -> tuple[int, list[int]]:
        header = torch.zeros(1 + self.size, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._idle)
        kind, *sizes = header.tolist()
        return int(kind), [int(size) for size in sizes]

    def send_to_all(self, data: bytes) -> None:
        if self.size > 1:
            dist.broadcast(_bytes_tensor(data), 0)

    def receive(self, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    def scatter(self, parts: Sequence[bytes]) -> None:
        """To each rank its own part; rank 0 keeps the first."""
        if self.size == 1:
            return
        longest = max(len(part) for part in parts)
        padded = [_bytes_tensor(part.ljust(longest, b"\0")) for part in parts]
        dist.scatter(torch.empty(longest, dtype=torch.uint8), padded, src=0)

    def receive_part(self, sizes: Sequence[int]) -> bytes:
        buffer = torch.empty(max(sizes), dtype=torch.uint8)
        dist.scatter(buffer, None, src=0)
        return buffer.numpy().tobytes()[: sizes[self.rank]]

    def gather(self, data: bytes) -> list[bytes]:
        """What each rank said, in their order; on rank 0 only, the others get an empty list."""
        if self.size == 1:
            return [data]
        sizes = self.numbers(len(data))
        longest = max(sizes)
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if self.first else None
        dist.gather(_bytes_tensor(data.ljust(longest, b"\0")), buffers, dst=0)
        if buffers is None:
            return []
        return [buffer.numpy().tobytes()[:size] for buffer, size in zip(buffers, sizes, strict=True)]

    def numbers(self, own: int) -> list[int]:
        """A number of each rank, on every rank."""
        if self.size == 1:
            return [own]
        found = torch.zeros(self.size, dtype=torch.int64)
        dist.all_gather_single(found, torch.tensor([own], dtype=torch.int64))
        return [int(number) for number in found.tolist()]

    def all_reduce_any(self, flags: Sequence[bool]) -> list[bool]:
        """Flag by flag, whether it is set on some rank."""
        if self.size == 1 or not flags:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [bool(flag) for flag in found.tolist()]

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Over the ranks, in place. What is returned waits for it; meanwhile others can be begun."""
        travelling = dist.all_reduce(tensor, async_op=True) if self.size > 1 else None

        def summed() -> torch.Tensor:
            if travelling is not None:
                travelling.wait()
            return tensor

        return summed

    @contextmanager
    def collective_errors(self) -> Iterator[None]:
        """What fails inside on one rank fails on all of them, with the same words. Nothing inside may communicate.

        So no rank goes on alone into a collective that the others never enter.
        """
        own: StrataError | None = None
        try:
            yield
        except StrataError as error:
            own = error
        except (OSError, SafetensorError) as error:
            own = StrataError(Code.UNAVAILABLE, f"rank {self.rank}: {error}")
        self.agree(own)

    def agree(self, own: StrataError | None) -> None:
        if not self.all_reduce_any([own is not None])[0]:
            return
        trouble = [] if own is None else [Trouble(own.code, str(own))]
        everybodys = self.share(_encode(trouble))
        found = next(one for said in everybodys for one in _decode(said))
        raise StrataError(found.code, found.message) from own

    def share(self, data: bytes) -> list[bytes]:
        """What each rank said, on every rank."""
        if self.size == 1:
            return [data]
        sizes = self.numbers(len(data))
        longest = max(sizes)
        found = torch.zeros(self.size * longest, dtype=torch.uint8)
        dist.all_gather_single(found, _bytes_tensor(data.ljust(longest, b"\0")))
        return [row.numpy().tobytes()[:size] for row, size in zip(torch.split(found, longest), sizes, strict=True)]


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
