"""Sizes of quantised layers (`nf4` in blocks of 64, `int8`), and which layers can be quantised."""

from __future__ import annotations

from typing import Final, Literal

QuantisedKind = Literal["nf4", "int8"]
Quantise = Literal["", "nf4", "int8"]
"""The setting; empty: not at all."""
NF4_BLOCK: Final = 64
"""Numbers that share a scale."""
SCALE_BYTES: Final = 4


def can_be_quantised(kind: QuantisedKind, layer: str | None, columns: int) -> bool:
    """Says whether a linear layer of this kind (`attn`, `mlp`) and with so many inputs is quantised. A block of NF4
    must not reach into the next row, which may be on another rank."""
    return layer in ("attn", "mlp") and (kind == "int8" or columns % NF4_BLOCK == 0)


def row_bytes(kind: QuantisedKind, columns: int) -> tuple[int, int]:
    """Bytes of the numbers of one row, and of its scales."""
    match kind:
        case "nf4":
            return columns // 2, columns // NF4_BLOCK * SCALE_BYTES
        case "int8":
            return columns, SCALE_BYTES


def saved_bytes(kind: QuantisedKind, rows: int, columns: int, item_bytes: int) -> int:
    """Returns by how many bytes a matrix is smaller than one whose numbers have so many bytes."""
    return rows * (columns * item_bytes - sum(row_bytes(kind, columns)))
