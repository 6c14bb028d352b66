"""The estimate of devices that nobody has: how seconds follow from counts, and that the page has the table."""

from __future__ import annotations

import pytest

from scripts.gpu_estimate import (
    EXPECTED,
    H100,
    PAGE,
    Collective,
    Estimated,
    OperationCost,
    PublishedCost,
    estimate,
    page_with,
    seconds_of,
    table,
)

MODEL = Estimated("a model", "a case", H100, 8)


def cost(**row: OperationCost) -> PublishedCost:
    return PublishedCost(tokens=4096, parameters=1_000, row=row, step={})


def test_an_operation_takes_the_longer_of_arithmetic_and_memory() -> None:
    work = int(1e15)
    product = seconds_of("mm", OperationCost(1, work, 1), H100)
    assert product == pytest.approx((work / EXPECTED.products / H100.flops, 0.0))
    attention = seconds_of("_varlen_attn", OperationCost(1, work, 1), H100)
    assert attention == pytest.approx((work / EXPECTED.attention / H100.flops, 0.0))
    copied = seconds_of("mul", OperationCost(1, 0, work), H100)
    assert copied == pytest.approx((0.0, work / EXPECTED.bandwidth / H100.bytes_s))


def test_a_row_waits_for_the_slower_of_device_and_host_and_for_exchanges() -> None:
    row = cost(mm=OperationCost(1_000, int(7e14), 1))
    fast = EXPECTED._replace(host_s=1e-6)
    alone = estimate(MODEL, row, [], fast)
    assert alone.row_s == pytest.approx(7e14 / EXPECTED.products / H100.flops)
    assert estimate(MODEL, row, [], EXPECTED._replace(host_s=1.0)).row_s == 1_000
    sent = int(EXPECTED.link * H100.link_bytes_s * 8 / 7)
    gathered = Collective("all-gather", "shard", "row", 1, sent)
    exchanged = Collective("all-to-all", "expert", "row", 1, sent)
    step = Collective("all-reduce", "all", "step", 1, sent)
    assert estimate(MODEL, row, [gathered, step], fast).row_s == pytest.approx(alone.row_s)
    assert estimate(MODEL, row, [exchanged], fast).row_s == pytest.approx(alone.row_s + 1.0)


def test_the_page_has_the_table_that_is_computed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(text, table()) == text
