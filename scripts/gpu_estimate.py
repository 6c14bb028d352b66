"""Estimates what devices will take for rows and steps, from what was counted without one: computed, not measured.

`tests/cuda_lane/published.json` has calls, floating-point operations and bytes of each operation of a published model.
An operation takes as long as the slower of its arithmetic and its memory traffic, each at a share of what the data
sheet says; the host needs a time for each call, beside the device. A row takes the longer of both. What ranks exchange
is from `tests/cuda_lane/collectives.json`. `--write` puts the table into docs/gpu-estimate.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

ROOT: Final = Path(__file__).parents[1]
PUBLISHED: Final = ROOT / "tests" / "cuda_lane" / "published.json"
COLLECTIVES: Final = ROOT / "tests" / "cuda_lane" / "collectives.json"
PAGE: Final = ROOT / "docs" / "gpu-estimate.md"
BEGIN: Final = "<!-- computed by scripts/gpu_estimate.py -->\n"
END: Final = "<!-- end -->\n"


class Shares(NamedTuple):
    """What devices reach of their data sheets, and the time of the host. All but `attention` is assumed."""

    products: float
    """Of the FLOP/s, in large products in bfloat16."""
    attention: float
    """The same in attention. FlashAttention-2 on H100: 0.35, as the paper of FlashAttention-3 reports it."""
    bandwidth: float
    """Of the bandwidth of memory, in other operations."""
    link: float
    """Of the bandwidth of links, in collectives."""
    host_s: float
    """For a call of torch from Python, with autograd. Reports have 5 to 25 microseconds."""


EXPECTED: Final = Shares(0.7, 0.35, 0.8, 0.7, 10e-6)
LOW: Final = Shares(0.55, 0.3, 0.65, 0.5, 25e-6)
HIGH: Final = Shares(0.8, 0.4, 0.9, 0.85, 5e-6)
TRACED_TOKENS: Final = 4096
"""Tokens of the rows in `COLLECTIVES`: exchanges of tokens grow with them."""


class OperationCost(msgspec.Struct, frozen=True, array_like=True):
    calls: int
    flops: int
    bytes: int
    """Of the arguments and results of all calls."""


class PublishedCost(msgspec.Struct, frozen=True):
    """What was counted of a published model on one device that has all of it."""

    tokens: int
    parameters: int
    row: Mapping[str, OperationCost]
    step: Mapping[str, OperationCost]


class Collective(msgspec.Struct, frozen=True):
    """What is read of a row of the table of collectives."""

    name: str
    over: str
    per: str
    calls: int
    bytes: int


class Device(NamedTuple):
    """Data sheet: dense products in bfloat16, memory bandwidth, and bandwidth to the other devices in one direction."""

    name: str
    flops: float
    bytes_s: float
    link_bytes_s: float = 0.0


H100: Final = Device("H100 SXM, 80 GB", 989e12, 3.35e12, 450e9)
H100_500W: Final = Device("H100 with HBM2e, 96 GB", 989e12, 2.4e12, 450e9)
"""Those of torchtitan's measurement, whose power was limited to 500 W; its peak is unknown and below this."""
RTX_4090: Final = Device("RTX 4090, 24 GB", 165e12, 1.008e12)


class Estimated(NamedTuple):
    title: str
    case: str
    device: Device
    devices: int = 1
    collectives: str = ""
    active: float = 0.0
    """Parameters that a token meets; all if 0."""
    full: bool = False


ESTIMATED: Final[Sequence[Estimated]] = (
    Estimated("Llama 3.1 8B, LoRA of rank 32", "llama 8B lora, 2,048 tokens, recomputed", RTX_4090),
    Estimated("Llama 3.1 8B, LoRA of rank 32, a copy on each", "llama 8B lora, 8,192 tokens", H100, 8),
    Estimated(
        "Llama 3.1 8B, full",
        "llama 8B full, 8,192 tokens, every second layer recomputed",
        H100,
        8,
        "llama 8B full, 8 shards",
        full=True,
    ),
    Estimated(
        "Llama 3.1 8B, full, on the devices of torchtitan's measurement",
        "llama 8B full, 16,384 tokens, recomputed",
        H100_500W,
        8,
        "llama 8B full, 8 shards",
        full=True,
    ),
    Estimated(
        "Qwen3 30B-A3B, LoRA of rank 32, experts on all 8",
        "qwen3_moe 30B lora, 16,384 tokens, recomputed",
        H100,
        8,
        "qwen3_moe 30B lora, 8 expert groups, recomputed",
        active=3.3e9,
    ),
)


class Estimate(NamedTuple):
    """Seconds of a row on each device."""

    arithmetic_s: float
    traffic_s: float
    host_s: float
    exchanged_s: float
    """Collectives that nothing overlaps: exchanges between experts. Others run beside the arithmetic."""
    overlapped_s: float
    tokens: int
    calls: int
    mfu: float

    @property
    def row_s(self) -> float:
        return max(self.arithmetic_s + self.traffic_s, self.host_s, self.overlapped_s) + self.exchanged_s

    @property
    def rate(self) -> float:
        """Returns the tokens of a second."""
        return self.tokens / self.row_s


def seconds_of(name: str, cost: OperationCost, device: Device, shares: Shares = EXPECTED) -> tuple[float, float]:
    """Seconds of all calls: of arithmetic, or of memory traffic if that takes longer."""
    share = shares.attention if "attn" in name else shares.products
    arithmetic_s, traffic_s = cost.flops / (share * device.flops), cost.bytes / (shares.bandwidth * device.bytes_s)
    return (arithmetic_s, 0.0) if arithmetic_s >= traffic_s else (0.0, traffic_s)


def estimate(
    wanted: Estimated, cost: PublishedCost, collectives: Sequence[Collective], shares: Shares = EXPECTED
) -> Estimate:
    parts = [seconds_of(name, each, wanted.device, shares) for name, each in cost.row.items()]
    arithmetic_s, traffic_s = (sum(each) for each in zip(*parts, strict=True))
    calls = sum(each.calls for each in cost.row.values())
    exchanged_s = overlapped_s = 0.0
    for each in collectives:
        if each.per == "row":
            seconds = each.bytes * (wanted.devices - 1) / wanted.devices / (shares.link * wanted.device.link_bytes_s)
            if each.over == "shard":
                overlapped_s += seconds
            else:
                exchanged_s += seconds * cost.tokens / TRACED_TOKENS
    found = Estimate(arithmetic_s, traffic_s, calls * shares.host_s, exchanged_s, overlapped_s, cost.tokens, calls, 0.0)
    # As `bench train` counts it.
    needed = (6 if wanted.full else 4) * (wanted.active or cost.parameters) * cost.tokens
    return found._replace(mfu=needed / found.row_s / wanted.device.flops)


def estimates(shares: Shares = EXPECTED) -> Iterator[tuple[Estimated, Estimate]]:
    costs = msgspec.json.decode(PUBLISHED.read_bytes(), type=dict[str, PublishedCost])
    traced = msgspec.json.decode(COLLECTIVES.read_bytes(), type=dict[str, list[Collective]])
    for wanted in ESTIMATED:
        yield wanted, estimate(wanted, costs[wanted.case], traced.get(wanted.collectives, []), shares)


def table() -> str:
    lines = [
        "| computed, not measured | devices | tokens of a row | calls | arithmetic | memory | host | exchanges "
        "| tokens/s of a device | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (wanted, found), (_, low), (_, high) in zip(estimates(), estimates(LOW), estimates(HIGH), strict=True):
        lines.append(
            f"| {wanted.title} | {wanted.devices} of {wanted.device.name} | {found.tokens:,} | {found.calls:,} "
            f"| {found.arithmetic_s:.2f} s | {found.traffic_s:.2f} s | {found.host_s:.2f} s "
            f"| {found.exchanged_s + found.overlapped_s:.2f} s "
            f"| {found.rate:,.0f} ({low.rate:,.0f} to {high.rate:,.0f}) "
            f"| {found.mfu:.0%} ({low.mfu:.0%} to {high.mfu:.0%}) |"
        )
    return "\n".join(lines) + "\n"


def page_with(text: str, rows: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{rows}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu-estimate.md")
    if parser.parse_args().write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    print(table(), end="")


if __name__ == "__main__":
    main()
