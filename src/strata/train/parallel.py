"""Settings of the mesh, section `parallel` (replicate, shard, tensor, context, expert, pipeline), and the checks of
what has to divide ranks, layers and heads.

What works together at all is in `combinations`; here is what has to divide what.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

EXPERT_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call the number of their experts."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class ParallelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The mesh of the ranks: the product of its sizes is their number."""

    replicate: Count = 1
    """Copies of the model, each sharded over its own ranks. Gradients are summed over all of them."""
    shard: Count | None = None
    """Ranks that hold one copy of the model together; as many as there are for each copy unless set."""
    tensor: Count = 1
    """Ranks that compute the same rows together, each with its part of every layer."""
    context: Count = 1
    """Ranks that compute the same rows together, each with its slice of every row. They hold a copy of the model
    together too, `shard` times `context` of them."""
    expert: Count = 1
    """Ranks, of those that hold a copy of the model, that hold different experts and compute them for each other."""
    pipeline: Count = 1
    """Stages: each has some of the layers, and passes every row on to the next. The others of these sizes are those of
    one stage. A stage has the activations of at most so many rows at once (the schedule 1F1B)."""

    def problem(self, ranks: int) -> str:
        """Says why so many ranks cannot form this mesh; empty if they can."""
        if self.expert > 1 and self.expert % self.tensor:
            return f"parallel.expert {self.expert} is no multiple of parallel.tensor {self.tensor}"
        names = ("pipeline", "replicate", "context", "tensor")
        sizes = {name: size for name in names if (size := getattr(self, name)) > 1}
        product = self.pipeline * self.replicate * self.context * self.tensor
        if ranks % product:
            named = " times ".join(f"parallel.{name} {size}" for name, size in sizes.items())
            is_product = f" is {product}, which" if len(sizes) > 1 else ""
            return f"{named}{is_product} does not divide the number of ranks, {ranks}"
        if self.shard is not None and product * self.shard != ranks:
            named = " times ".join(f"parallel.{name} {size}" for name, size in [*sizes.items(), ("shard", self.shard)])
            return f"{named} is {product * self.shard}, and there are {ranks} ranks"
        if (holders := self.shards(ranks) * self.tensor) % self.expert:
            return f"parallel.expert {self.expert} does not divide the ranks that hold one copy of the model, {holders}"
        return ""

    def shape_problem(self, config: Mapping[str, Any]) -> str:
        """Says why the sizes of a model with this configuration (config.json) do not divide over the mesh, or ""."""
        text = config.get("text_config") or config
        for size, name, fields in (
            (self.tensor, "tensor", ("num_attention_heads", "num_key_value_heads", "intermediate_size")),
            (self.expert, "expert", EXPERT_COUNTS),
        ):
            for field in fields:
                count = config.get(field)
                if isinstance(count, int) and count % size:
                    return f"parallel.{name} is {size}, which does not divide the {field} of the model, {count}"
        layers = config.get("num_hidden_layers")
        if isinstance(layers, int) and layers < self.pipeline:
            return (
                f"parallel.pipeline is {self.pipeline}, which is more than the num_hidden_layers of the model, {layers}"
            )
        heads, groups = text.get("num_attention_heads"), self.context * self.tensor
        if self.context > 1 and isinstance(heads, int) and heads % groups:
            times = f", times parallel.tensor {self.tensor} is {groups}" if self.tensor > 1 else ""
            named = f"parallel.context is {self.context}{times}"
            return f"{named}, which does not divide the num_attention_heads of the model, {heads}"
        return ""

    @property
    def features(self) -> dict[str, int]:
        """The ways in which the mesh splits or copies the model, by the names of their settings."""
        names = ("replicate", "tensor", "context", "expert", "pipeline")
        return {f"parallel.{name}": size for name in names if (size := getattr(self, name)) > 1}

    @property
    def may_replicate(self) -> bool:
        """Says whether a small frozen base may be on every rank in full instead of on the mesh."""
        return self.tensor == self.expert == self.pipeline == 1

    def stage_ranks(self, ranks: int) -> int:
        """Returns how many of the ranks each stage has: adjacent ones."""
        return ranks // self.pipeline

    def stage_layers(self, stage: int, layers: int) -> range:
        """Returns the layers, of so many, that this stage has."""
        return range(stage * layers // self.pipeline, (stage + 1) * layers // self.pipeline)

    def shards(self, ranks: int) -> int:
        """Returns how many of the ranks hold one copy of the model together, or of a rank's part of it in a tensor
        group, or of a stage of it."""
        return self.stage_ranks(ranks) // (self.replicate * self.tensor)

    def data_ranks(self, ranks: int) -> int:
        """Returns how many of the ranks, or groups of them, compute rows of their own."""
        return self.stage_ranks(ranks) // self.row_ranks

    @property
    def row_ranks(self) -> int:
        """Returns how many adjacent ranks of a stage compute the same rows together."""
        return self.context * self.tensor
