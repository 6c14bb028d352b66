"""The counters see launches, reads and copies of tensors on CPU, and of tensors without content on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.device_counters import CPU_DEVICE, DeviceCounters, DeviceCounts

CUDA = torch.device("cuda", 0)


def figures_of(counts: DeviceCounts) -> tuple[int, int, int, int]:
    return counts.launches, counts.reads.total(), counts.to_device.total(), counts.to_host.total()


def test_views_and_allocations_are_no_launches() -> None:
    with DeviceCounters(CPU_DEVICE) as counters:
        numbers = torch.empty(4, 4)
        numbers.view(2, 8).transpose(0, 1)[1:].unsqueeze(0).detach()
        assert counters.counts.launches == 0
        numbers.view(2, 8).add_(1)
    assert counters.counts.operations == {"add_": 1}
    assert counters.counts.bytes == 2 * 64


def test_the_backward_pass_is_counted() -> None:
    weights = torch.ones(3, requires_grad=True)
    total = (weights * weights).sum()
    with DeviceCounters(CPU_DEVICE) as counters:
        total.backward()  # type: ignore[no-untyped-call]
    assert counters.counts.operations["mul"] == 2


def test_a_read_in_the_backward_pass_is_counted() -> None:
    weights = torch.ones(3, requires_grad=True)
    weights.register_hook(lambda gradient: gradient.tolist() and None)  # type: ignore[no-untyped-call]
    total = weights.sum()
    with DeviceCounters(CPU_DEVICE) as counters:
        total.backward()  # type: ignore[no-untyped-call]
    assert counters.counts.reads.total() == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda numbers: numbers[0].item(),
        lambda numbers: float(numbers[0]),
        lambda numbers: bool((numbers > 0).all()),
        lambda numbers: numbers.tolist(),
        lambda numbers: numbers[0].tolist(),
        lambda numbers: numbers.cpu(),
        lambda numbers: numbers.to("cpu"),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: numbers.nonzero(),
        lambda numbers: torch.equal(numbers, numbers),
    ],
)
def test_each_way_to_read_a_tensor_counts_once(read: object) -> None:
    numbers = torch.ones(3)
    with DeviceCounters(CPU_DEVICE) as counters:
        assert callable(read)
        read(numbers)
    assert counters.counts.reads.total() == 1


def test_copies_are_counted_by_their_direction() -> None:
    numbers = torch.ones(3)
    with DeviceCounters(CPU_DEVICE) as counters:
        values = torch.tensor([1, 2])
        on_device = values.to(CPU_DEVICE)
        values.to(device=CPU_DEVICE, dtype=torch.float64)
        torch.tensor([1, 2], device=CPU_DEVICE)
        on_device.to(CPU_DEVICE)
        values.to("cpu")
        on_device.to("cpu", non_blocking=True)
        numbers.to(torch.float64)
    _, *copies = figures_of(counters.counts)
    assert copies == [0, 3, 1]


def test_work_on_the_host_is_no_work_of_the_device() -> None:
    with DeviceCounters(CPU_DEVICE) as counters:
        values = torch.tensor([1.0, 2.0])
        assert torch.frombuffer(bytearray(4), dtype=torch.float32).view(1)[0].item() == 0.0
        assert bool((values * 2).isfinite().all())
        on_host = (values.to(CPU_DEVICE) + 1).to("cpu")
        assert on_host.tolist() == [2.0, 3.0]
        assert float(on_host[0]) == 2.0
    assert figures_of(counters.counts) == (1, 1, 1, 0)


def test_tensors_without_content_are_counted_on_their_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceCounters(CUDA, lambda place, tensor: 7) as counters:
        host = torch.ones(3)
        numbers = host.to(CUDA)
        host.add_(1)
        doubled = numbers * 2
        assert doubled.sum().item() == 7
        doubled.cpu()
        doubled.to("cpu", non_blocking=True)
    assert figures_of(counters.counts) == (2, 2, 1, 1)
    assert counters.counts.operations == {"mul": 1, "sum": 1}


def test_a_place_is_the_innermost_function_of_the_package() -> None:
    from strata.train.runner.experts import invert

    with DeviceCounters(CPU_DEVICE) as counters:
        torch.ones(1).item()
        invert(torch.tensor([1, 0]))
    assert counters.counts.reads == {"elsewhere": 1}
