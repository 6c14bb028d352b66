"""A plain torchrun loop, for comparison: `torchrun … -m bench.train.bare --model DIR --batches FILE --endpoint URL`.

Nothing here is ours: the model as transformers loads it, adapters by PEFT, `fully_shard` on every block of the base,
torch's AdamW, batches in memory. The documents of a row have one length, so a row is a batch of (documents, tokens) and
causal attention suffices: no mask, no padding, the fastest that torch can do. Rank 0 receives commands on a ZMQ socket
and broadcasts them to the other ranks, so that the loop can alternate with the server under test.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
import zmq
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from bench.train.protocol import BETAS, EPS, LORA_ALPHA, LORA_RANK, RATE, BenchCommand, BenchResult, Tokens, load

KINDS: Final = ("empty", "pass", "train", "end")
LAYERS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
IDLE: Final = timedelta(hours=12)


class Loop:
    def __init__(self, path: str, training: str, dtype: torch.dtype, device: torch.device) -> None:
        # Weights that are trained stay in float32; adapters have the dtype of the arithmetic.
        storage = dtype if training == "lora" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=storage, local_files_only=True)
        if model._can_set_experts_implementation():
            # The grouped matrix multiplication of transformers; dense models have no experts.
            model.set_experts_implementation("grouped_mm")
        block = set(model._no_split_modules)
        if training == "lora":
            adapters = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=list(LAYERS))
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        model.to(device).train()
        # Adapters are small: the same on every rank, and summed once in a step instead of in every layer.
        self.replicated = {one for one in model.parameters() if one.requires_grad and training == "lora"}
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in list(model.modules()):
            if type(module).__name__ in block:
                fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=self.replicated)
        fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=self.replicated)
        self.model: nn.Module = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.adam = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)

    def step(self, row: torch.Tensor) -> float:
        """Over this rank's row; returns the loss of all ranks."""
        loss = self.backward(row)
        self.sum_replicated()
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        dist.all_reduce(loss)
        return float(loss)

    def sum_replicated(self) -> None:
        gradients = [one.grad for one in self.replicated if one.grad is not None]
        if gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, part in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def one_token(self, tokens: torch.Tensor) -> None:
        loss = self.backward(tokens)
        self.adam.zero_grad(set_to_none=True)
        dist.all_reduce(loss)

    def backward(self, row: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=row[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), row[:, 1:].flatten(), reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def carry_out(loop: Loop, order: BenchCommand, batches: Sequence[torch.Tensor]) -> BenchResult:
    match order.kind:
        case "empty":
            dist.all_reduce(torch.zeros(1))
        case "pass":
            loop.one_token(batches[0][:1, :2])
        case "train":
            started = perf_counter()
            losses = [
                loop.step(batches[number % len(batches)]) for number in range(order.first, order.first + order.steps)
            ]
            return BenchResult(seconds=perf_counter() - started, loss=losses[0])
        case "end":
            pass
    return BenchResult()


def lead(loop: Loop, batches: Sequence[torch.Tensor], endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.bind(endpoint)
        decode, going = msgspec.msgpack.Decoder(BenchCommand).decode, True
        while going:
            order = decode(socket.recv())
            dist.broadcast(torch.tensor([KINDS.index(order.kind), order.first, order.steps]), 0)
            socket.send(msgspec.msgpack.encode(carry_out(loop, order, batches)))
            going = order.kind != "end"


def follow(loop: Loop, batches: Sequence[torch.Tensor]) -> None:
    told, going = torch.zeros(3, dtype=torch.int64), True
    while going:
        dist.broadcast(told, 0)
        kind, first, steps = told.tolist()
        order = BenchCommand(kind=KINDS[kind], first=first, steps=steps)
        carry_out(loop, order, batches)
        going = order.kind != "end"


def own(batches: Tokens, rank: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.from_numpy(batch[rank]).long().to(device) for batch in batches]


def join() -> torch.device:
    """A CUDA device for each rank if there are any, else CPUs."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=IDLE)
        return torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=IDLE)
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain training loop that takes orders.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--training", choices=("lora", "full"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--endpoint", required=True)
    given = parser.parse_args()
    device = join()
    loop = Loop(given.model, given.training, getattr(torch, given.dtype), device)
    batches = own(load(given.batches), dist.get_rank(), device)
    if dist.get_rank() == 0:
        lead(loop, batches, given.endpoint)
    else:
        follow(loop, batches)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
