"""`strata plan`: options, and the printed table of a device's memory, traffic and number of devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from strata.base.errors import Code, StrataError
from strata.cli.output import Format, output_option, print_data, print_error, write
from strata.cli.rows import Column, Rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strata.train.parallel import ParallelSettings
    from strata.train.plan.defaults import ResolvedSettings
    from strata.train.plan.memory_plan import DevicePlan, MemoryRecipe, MeshShape
    from strata.train.settings import ServerSettings

FILES: Final = (".toml", ".yaml", ".yml")
PLANNED_GB: Final = 80.0
"""Memory of a device that nobody has yet."""


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--training", type=click.Choice(["lora", "full"]), help="What to train.  [default: lora]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of arithmetic.  [default: by device]")
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
@click.option(
    "--device-gb",
    type=click.FloatRange(0.1),
    help="Plan for CUDA devices with so much memory.  [default: this machine's; 80 for a MODEL without any here]",
)
@click.option("--devices", type=click.IntRange(1), help="Plan for so many devices instead of the fewest that hold it.")
@click.option("--replicate", type=click.IntRange(1), help="Copies of the model on them.  [default: 1]")
@click.option("--context", type=click.IntRange(1), help="Devices that split each row.  [default: 1]")
@click.option("--tensor", type=click.IntRange(1), help="Devices that split each layer.  [default: 1]")
@click.option("--expert", type=click.IntRange(1), help="Devices that hold different experts.  [default: 1]")
@output_option
def plan(model: str, device_gb: float | None, devices: int | None, output: Format, **options: Any) -> None:
    """Plan the memory of each device for training MODEL.

    MODEL is a folder with a config.json, whose weights are not needed; or a recipe of 'strata train' or the settings
    file of 'strata serve', which say the rest too unless options do. Parts are counted from shapes, traced by running
    a row without content, or estimated. What nothing says follows from the devices, as in 'strata serve'. The last two
    lines are for the job in a manifest.
    """
    from strata.cli.extras import require

    if device_gb is not None and not math.isfinite(device_gb):
        raise click.BadParameter("a number of gigabytes", param_hint="--device-gb")
    if (options["replicate"] or 1) > 1 and devices is None:
        raise click.BadParameter("needs --devices", param_hint="--replicate")
    require("transformers", extra="train")
    import msgspec

    from strata.train.parallel import ParallelSettings
    from strata.train.plan.memory_plan import MOST_DEVICES, plan_device, smallest_plan

    planned = _read(model, device_gb, devices, options)
    model, recipe, of_file, devices, room = planned.model, planned.recipe, planned.mesh, planned.devices, planned.room
    sizes = {name: options.pop(name) or getattr(of_file, name) for name in ("replicate", "context", "tensor", "expert")}
    mesh = _make_mesh(devices, ParallelSettings(**sizes, pipeline=of_file.pipeline))
    recipe = msgspec.structs.replace(recipe, **{name: value for name, value in options.items() if value is not None})
    if recipe.quantise:
        require("bitsandbytes", extra="quantised")
    # Before the import, which takes seconds.
    print_error(f"tracing a row of {recipe.row_tokens:,} tokens through {model}; a large model may take a minute")
    from strata.train.runner.model.memory_trace import trace_cost

    found: DevicePlan | None
    if devices is not None:
        cost = trace_cost(model, recipe, mesh)
        found = plan_device(cost, recipe, mesh)
    else:
        # As if experts were sharded too, which takes most.
        cost = trace_cost(model, recipe, msgspec.structs.replace(mesh, shard=2 * mesh.shard))
        # On one device the base is not sharded, whatever share of it that takes.
        alone = plan_device(cost, msgspec.structs.replace(recipe, replicated_bytes=room), mesh)
        fits_alone = mesh.devices == 1 and not recipe.full and alone.total <= room
        found = alone if fits_alone else smallest_plan(cost, recipe, room, mesh)
    most = msgspec.structs.replace(mesh, shard=mesh.shard * max(MOST_DEVICES // mesh.devices, 1))
    shown = found or plan_device(cost, recipe, most)
    _print_plan(shown, planned.resolution, output)
    needed = f"each of {shown.mesh.devices} devices needs {shown.total / 1e9:.3g} GB and has {room / 1e9:.3g} GB"
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


class _Planned(NamedTuple):
    model: str
    recipe: MemoryRecipe
    mesh: MeshShape
    devices: int | None
    """None: the fewest that hold it."""
    room: int
    """Bytes of each device."""
    resolution: ResolvedSettings


def _read(model: str, device_gb: float | None, devices: int | None, options: Mapping[str, Any]) -> _Planned:
    """Reads what is planned: a server's settings, a recipe, or a model with the defaults of a plan."""
    import msgspec

    from strata.base.settings import process_environment
    from strata.train.plan.defaults import resolve_settings
    from strata.train.plan.devices import planned_machine, read_machine, repeated
    from strata.train.plan.memory_plan import ONE_DEVICE, MemoryRecipe
    from strata.train.plan.model_cost import memory_recipe, mesh_shape
    from strata.train.plan.model_files import find_model_files

    file = Path(model) if Path(model).suffix in FILES and Path(model).is_file() else None
    settings, lora_rank = _read_settings(file, model)
    # What the choices depend on; the recipe gets all options.
    said = {name: options[name] for name in ("training", "dtype", "quantise", "offload") if options[name] is not None}
    nproc = devices or settings.ranks.nproc
    settings = msgspec.structs.replace(
        settings,
        model=msgspec.structs.replace(settings.model, **said),
        ranks=msgspec.structs.replace(settings.ranks, nproc=nproc),
    )
    machine, files = read_machine(process_environment()), find_model_files(settings.model.path)
    # A model alone may need several devices: its choices are those for two of them.
    count = nproc or (2 if file is None else 1)
    if device_gb is not None or (file is None and not machine.devices):
        # A plan is of the ranks.
        settings = msgspec.structs.replace(settings, inference=msgspec.structs.replace(settings.inference, engine=""))
        machine = planned_machine(count, int((device_gb or PLANNED_GB) * 1e9), machine.cores)
    elif machine.devices and (file is None or devices is not None):
        machine = msgspec.structs.replace(machine, devices=repeated(machine.devices, count))
    resolution = resolve_settings(settings, machine, files)
    values = resolution.settings.by_device
    if file is not None and settings.ranks.mode == "auto" and (problem := settings.parallel.problem(values.nproc)):
        raise StrataError(Code.INVALID, problem)
    recipe = memory_recipe(resolution.settings, resolution.device)
    # How long rows become is measured when ranks start: unless it is set, those of a plan are shorter.
    recipe = msgspec.structs.replace(recipe, row_tokens=settings.by_device.max_tokens_per_row)
    if file is None or lora_rank is not None:
        recipe = MemoryRecipe(
            dtype=recipe.dtype,
            quantise=recipe.quantise,
            lora_rank=lora_rank or MemoryRecipe().lora_rank,
            replicated_bytes=recipe.replicated_bytes,
            device=recipe.device,
        )
    mesh = ONE_DEVICE if file is None else mesh_shape(settings.parallel, values.nproc)
    room = resolution.rank_bytes or int(PLANNED_GB * 1e9)
    return _Planned(
        settings.model.path, recipe, mesh, devices if file is None else devices or mesh.devices, room, resolution
    )


def _read_settings(file: Path | None, model: str) -> tuple[ServerSettings, int | None]:
    """The settings of a server; of a recipe also the rank of its adapter."""
    from strata.cli.train import model_path
    from strata.sdk.recipes.recipe import is_recipe, read_recipe
    from strata.train.parallel import ParallelSettings
    from strata.train.settings import (
        LimitSettings,
        ModelSettings,
        RankSettings,
        ServerSection,
        ServerSettings,
        load_settings,
    )

    if file is not None and not is_recipe(file):
        return load_settings(file), None
    described, ranks, parallel, lora_rank = ModelSettings(path=model), RankSettings(), ParallelSettings(), None
    if file is not None:
        recipe = read_recipe(file)
        if not recipe.model.path:
            raise StrataError(Code.INVALID, f"{file} names no model.path", hint="give the model's folder instead")
        own, path = recipe.server, model_path(recipe.model.path, file.parent)
        described = ModelSettings(path=path, dtype=own.dtype, quantise=own.quantise)
        ranks, parallel, lora_rank = RankSettings(nproc=own.ranks), recipe.parallel, recipe.model.rank
    server, limits = ServerSection(), LimitSettings()
    settings = ServerSettings(server=server, model=described, ranks=ranks, limits=limits, parallel=parallel)
    return settings, lora_rank


def _print_plan(shown: DevicePlan, resolution: ResolvedSettings, output: Format) -> None:
    from strata.cli.fleet.client import format_bytes

    # A card is taken as a whole, and a manifest counts in GiB.
    manifest = {"min_gpus": shown.mesh.devices, "min_vram_gib": math.ceil(shown.total / 2**30)}
    if output.for_programs:
        import msgspec

        plan = {"name": "plan", **msgspec.to_builtins(shown), "total": shown.total, "manifest": manifest}
        print_data({**plan, "settings": msgspec.to_builtins(resolution.choices)}, output)
        return
    for sentence in resolution.sentences():
        print_error(sentence)
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
