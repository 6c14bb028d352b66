"""`strata plan`: options, and the printed table of a device's memory, traffic and number of devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from strata.base.errors import Code, StrataError
from strata.cli.output import Format, output_option, print_data, print_error, write
from strata.cli.rows import Column, Rows

if TYPE_CHECKING:
    from strata.train.parallel import ParallelSettings
    from strata.train.plan.memory_plan import DevicePlan, MemoryRecipe, MeshShape

FILES: Final = (".toml", ".yaml", ".yml")


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--training", type=click.Choice(["lora", "full"]), help="What to train.  [default: lora]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of arithmetic.  [default: bfloat16]")
@click.option("--quantise", type=click.Choice(["nf4", "int8"]), help="Quantise the frozen base.  [default: not]")
@click.option("--rank", "lora_rank", type=click.IntRange(1), help="LoRA rank.  [default: 32]")
@click.option("--slots", type=click.IntRange(1), help="LoRA models on the device.  [default: 1]")
@click.option("--tokens", "row_tokens", type=click.IntRange(1), help="Of a packed row.  [default: 4096]")
@click.option("--cached-tokens", type=click.IntRange(0), help="Capacity of the KV cache.  [default: 32768]")
@click.option(
    "--checkpointing",
    type=click.IntRange(0),
    metavar="N",
    help="Compute activations of every N-th layer again; 0 is none.  [default: 0]",
)
@click.option("--offload", is_flag=True, default=None, help="Keep weights in the memory of the host.")
@click.option("--device-gb", type=click.FloatRange(0.1), default=80.0, show_default=True, help="Memory of one device.")
@click.option("--devices", type=click.IntRange(1), help="Plan for so many devices instead of the fewest that hold it.")
@click.option("--replicate", type=click.IntRange(1), help="Copies of the model on them.  [default: 1]")
@click.option("--context", type=click.IntRange(1), help="Devices that split each row.  [default: 1]")
@click.option("--tensor", type=click.IntRange(1), help="Devices that split each layer.  [default: 1]")
@click.option("--expert", type=click.IntRange(1), help="Devices that hold different experts.  [default: 1]")
@output_option
def plan(model: str, device_gb: float, devices: int | None, output: Format, **options: Any) -> None:
    """Plan the memory of each device for training MODEL.

    MODEL is a folder with a config.json, whose weights are not needed; or a recipe of 'strata train' or the settings
    file of 'strata serve', which say the rest too unless options do. Parts are counted from shapes, traced by running
    a row without content, or estimated. The last two lines are for the job in a manifest.
    """
    from strata.cli.extras import require

    if not math.isfinite(device_gb):
        raise click.BadParameter("a number of gigabytes", param_hint="--device-gb")
    if (options["replicate"] or 1) > 1 and devices is None:
        raise click.BadParameter("needs --devices", param_hint="--replicate")
    require("transformers", extra="train")
    import msgspec

    from strata.train.parallel import ParallelSettings
    from strata.train.plan.memory_plan import MOST_DEVICES, ONE_DEVICE, MemoryRecipe, plan_device, smallest_plan

    recipe, of_file = MemoryRecipe(), ONE_DEVICE
    if Path(model).suffix in FILES and Path(model).is_file():
        model, recipe, of_file = _read_file(Path(model))
        devices = devices or of_file.devices
    sizes = {name: options.pop(name) or getattr(of_file, name) for name in ("replicate", "context", "tensor", "expert")}
    mesh = _make_mesh(devices, ParallelSettings(**sizes, pipeline=of_file.pipeline))
    recipe = msgspec.structs.replace(recipe, **{name: value for name, value in options.items() if value is not None})
    if recipe.quantise:
        require("bitsandbytes", extra="quantised")
    # Before the import, which takes seconds.
    print_error(f"tracing a row of {recipe.row_tokens:,} tokens through {model}; a large model may take a minute")
    from strata.train.runner.model.memory_trace import trace_cost

    room = int(device_gb * 1e9)
    found: DevicePlan | None
    if devices is not None:
        cost = trace_cost(model, recipe, mesh)
        found = plan_device(cost, recipe, mesh)
    else:
        # As if experts were sharded too, which takes most.
        cost = trace_cost(model, recipe, msgspec.structs.replace(mesh, shard=2 * mesh.shard))
        found = smallest_plan(cost, recipe, room, mesh)
    most = msgspec.structs.replace(mesh, shard=mesh.shard * max(MOST_DEVICES // mesh.devices, 1))
    shown = found or plan_device(cost, recipe, most)
    _print_plan(shown, output)
    needed = f"each of {shown.mesh.devices} devices needs {shown.total / 1e9:.3g} GB and has {device_gb:g} GB"
    if found is None or found.total > room:
        hint = "try --checkpointing 1, fewer --tokens, LoRA, --quantise or --offload"
        raise StrataError(Code.EXHAUSTED, needed, hint=hint)
    print_error(needed)


def _make_mesh(devices: int | None, parallel: ParallelSettings) -> MeshShape:
    """Makes a mesh of so many devices, or of the fewest that such groups can be on."""
    from strata.train.plan.model_cost import mesh_shape

    devices = parallel.tensor * math.lcm(parallel.expert, parallel.context) if devices is None else devices
    if problem := parallel.problem(devices):
        raise StrataError(Code.INVALID, problem)
    return mesh_shape(parallel, devices)


def _read_file(file: Path) -> tuple[str, MemoryRecipe, MeshShape]:
    """The model, the recipe and the mesh of a recipe or of a server's settings."""
    from strata.cli.train import model_path
    from strata.sdk.recipes.recipe import is_recipe, read_recipe
    from strata.train.plan.memory_plan import MemoryRecipe
    from strata.train.plan.model_cost import memory_recipe, mesh_shape
    from strata.train.settings import load_settings

    if not is_recipe(file):
        settings = load_settings(file)
        if settings.ranks.mode == "auto" and (problem := settings.parallel.problem(settings.ranks.nproc)):
            raise StrataError(Code.INVALID, problem)
        return settings.model.path, memory_recipe(settings), mesh_shape(settings.parallel, settings.ranks.nproc)
    recipe = read_recipe(file)
    if not recipe.model.path:
        raise StrataError(Code.INVALID, f"{file} names no model.path", hint="give the model's folder instead")
    of_server = MemoryRecipe(dtype=recipe.server.dtype, quantise=recipe.server.quantise, lora_rank=recipe.model.rank)
    mesh = mesh_shape(recipe.parallel, recipe.server.ranks)
    return model_path(recipe.model.path, file.parent), of_server, mesh


def _print_plan(shown: DevicePlan, output: Format) -> None:
    from strata.cli.fleet.client import format_bytes

    # A card is taken as a whole, and a manifest counts in GiB.
    manifest = {"min_gpus": shown.mesh.devices, "min_vram_gib": math.ceil(shown.total / 2**30)}
    if output.for_programs:
        import msgspec

        print_data({"name": "plan", **msgspec.to_builtins(shown), "total": shown.total, "manifest": manifest}, output)
        return
    mesh = shown.mesh
    sizes = {name: getattr(mesh, name) for name in ("replicate", "shard", "context", "tensor")}
    if mesh.context == 1:
        del sizes["context"]
    shape = f"{' x '.join(map(str, sizes.values()))} devices ({' x '.join(sizes)})"
    experts = f", experts over {mesh.expert} of each {mesh.shards}" if mesh.expert > 1 else ""
    print_error(f"at the {shown.moment}, on {shape}{experts}:")
    with Rows(output, (Column("part"), Column("size", number=True), Column("source"))) as rows:
        for part in shown.parts:
            rows.add({"part": part.name, "size": format_bytes(part.bytes), "source": part.source})
        rows.add({"part": "total", "size": format_bytes(shown.total), "source": ""})
    columns = (
        Column("collective"),
        Column("over"),
        Column("per"),
        Column("calls", number=True),
        Column("size", number=True),
    )
    if shown.collectives:
        with Rows(output, columns) as rows:
            for cost in shown.collectives:
                size = format_bytes(cost.bytes)
                rows.add(
                    {"collective": cost.name, "over": cost.over, "per": cost.per, "calls": cost.calls, "size": size}
                )
    for name, value in manifest.items():
        write(f"{name} = {value}")
