"""The pages of docs/reference, made from the declarations of the code. `make reference` writes them.

A page shows what the code declares and no sentence of its own but its first lines: a missing or wrong text is corrected
where it is declared.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

import click
import msgspec
from msgspec import inspect as types
from prometheus_client import CollectorRegistry

from strata.base import schema
from strata.base.errors import Code
from strata.base.support import say_experimental
from strata.cli.exit_codes import EXIT_CODE_OF
from strata.cli.main import COMMANDS, strata
from strata.coord import operator as gang
from strata.coord import settings as coordinator
from strata.coord.metrics import CoordinatorMetrics
from strata.coord.server.grpc_handler import STATUS_OF as GRPC_STATUS_OF
from strata.coord.worker import settings as worker
from strata.coord.worker import stores
from strata.coord.worker.reasons import Reason
from strata.database.event_kinds import PREDICATES
from strata.fleet.agent import metrics as agent_metrics
from strata.fleet.agent import settings as agent
from strata.fleet.core.job import Cause
from strata.fleet.http.routes import ROUTES as HUB_ROUTES
from strata.fleet.hub_metrics import HubMetrics
from strata.http.errors import STATUS_OF
from strata.http.metrics import process_registry
from strata.http.route import OWNED, Route
from strata.hub import settings as hub
from strata.sdk import fleet as client
from strata.sdk.trackers import mirror
from strata.train.api.context import ApiMetrics
from strata.train.api.routes import ROUTES as TRAIN_ROUTES
from strata.train.orchestrator.metrics import OrchestratorMetrics
from strata.train.settings import ServerSettings
from strata.web.routes import PAGES
from tests.rules import language, test_layout

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "reference"
SKILL: Final = ROOT / "skills" / "strata" / "reference.md"
SKILL_SECTIONS: Final = ("Run and follow jobs", "Results and data")
"""The commands of which a program that acts for people is told."""
MARK: Final = "<!-- made by `make reference`; do not edit -->"

SETTINGS: Final[Mapping[str, tuple[tuple[str, type[msgspec.Struct]], ...]]] = {
    "Hub": ((hub.SECTION, hub.HubSettings),),
    "Agent": ((agent.SECTION, agent.AgentSettings),),
    "Coordinator": ((coordinator.SECTION, coordinator.CoordinatorSettings),),
    "Workers": ((worker.SECTION, worker.WorkerSettings), (stores.SECTION, stores.S3Settings)),
    "Training server": tuple((each.name, each.type) for each in msgspec.structs.fields(ServerSettings)),
    "Commands": (
        (client.SECTION, client.ClientSettings),
        (gang.SECTION, gang.OperatorSettings),
        (mirror.SECTION, mirror.MirrorSettings),
    ),
}
"""The settings of each program: the sections that it reads."""

_OPENINGS: Final = {
    ".py": re.compile(r'"""(.*?)(?:\n\n|""")', re.DOTALL),
    ".js": re.compile(r"((?://.*\n)+)"),
    ".html": re.compile(r"\{# (.*?) #\}", re.DOTALL),
    ".css": re.compile(r"/\* (.*?) \*/", re.DOTALL),
}
"""How a file says what it has, by its suffix."""


def settings_page() -> str:
    """Every setting with its type, its default and its docstring."""
    parts = [
        "Every setting of every program. [Settings](../settings.md) says where a value may come from: `lease_s` in "
        "`[coordinator]` is the variable `STRATA_COORDINATOR_LEASE_S`."
    ]
    for program, sections in SETTINGS.items():
        parts.append(f"## {program}")
        for section, kind in sections:
            parts += _settings_table(section, schema.describe(kind))
    return _page("Settings", parts)


def _settings_table(section: str, group: schema.Group) -> Iterator[str]:
    rows, inner = [], []
    texts = _attribute_texts(group.kind)
    for name, member in group.members.items():
        text = texts.get(member.attribute, "")
        if isinstance(member, schema.Group):
            default = "none" if member.optional else ""
            rows.append(
                (f"`{name}`", f"section [`[{section}.{name}]`](#{_anchor(f'{section}.{name}')})", default, text)
            )
            inner.append((f"{section}.{name}", member))
            continue
        text = say_experimental(text, f"{section}.{name}")
        rows.append((f"`{name}`", _type_text(types.type_info(member.type)), _default_text(member), text))
        structs = [each for each in schema.walk_types(member.bare) if isinstance(each, types.StructType)]
        inner += [(f"{section}.{name}", schema.describe(each.cls)) for each in structs]
    yield f"### `[{section}]` {{#{_anchor(section)}}}"
    if own := _docstring(group.kind):
        yield own
    yield _table(("setting", "type", "default", "meaning"), rows)
    for name, members in inner:
        yield from _settings_table(name, members)


def _type_text(kind: types.Type) -> str:  # noqa: C901, PLR0911 - a closed match
    """A type in the words of a person who writes a settings file."""
    match kind:
        case types.Metadata(type=inner):
            return _type_text(inner)
        case types.BoolType():
            return "`true` or `false`"
        case types.IntType(ge=low, le=high, gt=above) | types.FloatType(ge=low, le=high, gt=above):
            bounds = [f"≥ {low:g}"] if low is not None else [f"> {above:g}"] if above is not None else []
            bounds += [f"≤ {high:g}"] if high is not None else []
            return " ".join(["integer" if isinstance(kind, types.IntType) else "number", ", ".join(bounds)]).strip()
        case types.StrType():
            return "text"
        case types.LiteralType(values=values):
            return ", ".join(f"`{value}`" if value else '`""`' for value in values)
        case types.EnumType(cls=enum):
            return ", ".join(f"`{member.value}`" for member in enum)
        case types.CustomType(cls=custom):
            return custom.__name__.lower()
        case types.VarTupleType(item_type=item) | types.ListType(item_type=item):
            return f"list of {_type_text(item)}"
        case types.DictType(value_type=value):
            return f"table of {_type_text(value)}"
        case types.UnionType(types=members):
            return " or ".join(_type_text(each) for each in members if not isinstance(each, types.NoneType))
        case types.StructType():
            return "table"
    raise TypeError(f"a setting has a type that the reference cannot name: {kind}")


def _default_text(leaf: schema.Leaf) -> str:
    value = schema.default_value(leaf)
    if value is msgspec.NODEFAULT:
        return "required"
    if value is None or value in ("", (), {}):
        return "-"
    if isinstance(value, Enum):
        value = value.value
    return f"`{msgspec.json.encode(value, enc_hook=str).decode()}`".replace('`"', "`").replace('"`', "`")


def _attribute_texts(kind: type) -> dict[str, str]:
    """The docstrings under the attributes of a class."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for node, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            texts[node.target.id] = " ".join(ast.literal_eval(following.value).split())
    return texts


def routes_page() -> str:
    """Every HTTP route: who may call it, whose thing it changes, and the first line of its handler."""
    parts = [
        "Bodies and replies are in the OpenAPI documents: `GET /v1/openapi.json` of the hub and `GET /openapi.json` "
        "of a training server. A route is open to a role and to those above it: viewer, researcher, operator, admin. "
        "Where a route changes something of an owner, only that owner and operators may call it:",
        "\n".join(f"- **{name}**: {text}" for name, text in OWNED.items()),
    ]
    pages = [route for module in PAGES for route in module.ROUTES]
    for server, routes in {"Hub": HUB_ROUTES, "Training server": TRAIN_ROUTES, "Dashboard": pages}.items():
        rows = [_route_row(route) for route in sorted(routes, key=lambda each: (each.path, each.method))]
        parts += [f"## {server}", _table(("route", "for", "owner", "what it does"), rows)]
    return _page("HTTP routes", parts)


def _route_row(route: Route) -> tuple[str, ...]:
    owner = route.owner if route.owner in OWNED else ""
    return f"`{route.method} {route.path}`", str(route.access), owner, route.summary


def commands_page() -> str:
    """Every command with its help and its options."""
    parts = ["`strata COMMAND --help` prints the same. [The command line](../commands.md) has what all commands share."]
    context = click.Context(strata, info_name="strata")
    for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
        parts.append(f"## {section}")
        for name, entry in COMMANDS.items():
            command = strata.get_command(context, name)
            if entry.section == section and command is not None:
                parts += _command_parts(command, f"strata {name}", context)
    return _page("Commands", parts)


def skill_page() -> str:
    """The commands for jobs and results in a line each, and the routes of the hub as its OpenAPI document has them."""
    context = click.Context(strata, info_name="strata")
    parts = []
    for section in SKILL_SECTIONS:
        names = [name for name, entry in COMMANDS.items() if entry.section == section]
        found = [(name, strata.get_command(context, name)) for name in names]
        rows = [row for name, command in found if command for row in _command_rows(command, f"strata {name}", context)]
        parts += [f"## {section}", _table(("command", "what it does"), rows)]
    routes = [_route_row(route) for route in sorted(HUB_ROUTES, key=lambda each: (each.path, each.method))]
    short = [(path, access, summary) for path, access, _, summary in routes]
    parts += ["## Routes of the hub", "`GET /v1/openapi.json` has bodies and replies."]
    parts.append(_table(("route", "for", "what it does"), short))
    return _page("Commands and routes", parts)


def _command_rows(command: click.Command, name: str, parent: click.Context) -> Iterator[tuple[str, str]]:
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    if not isinstance(command, click.Group):
        yield f"`{' '.join([name, *command.collect_usage_pieces(context)])}`", command.get_short_help_str(limit=200)
        return
    for inner in command.list_commands(context):
        found = command.get_command(context, inner)
        if found is not None and not found.hidden:
            yield from _command_rows(found, f"{name} {inner}", context)


def _command_parts(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    yield f"### `{' '.join([name, *command.collect_usage_pieces(context)])}` {{#{_anchor(name)}}}"
    yield " ".join(inspect.cleandoc(command.help or command.short_help or "").partition("\f")[0].split())
    rows = []
    for option in command.get_params(context):
        if isinstance(option, click.Option) and not option.hidden and "--help" not in option.opts:
            record = option.get_help_record(context)
            if record is not None:
                rows.append((f"`{record[0]}`", record[1]))
    if rows:
        yield _table(("option", "meaning"), rows)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None and not found.hidden:
                yield from _command_parts(found, f"{name} {inner}", context)


def metrics_page() -> str:
    """Every series of Prometheus, as the registries of the processes hold it."""
    parts = [
        "[Metrics and traces](../metrics.md) says where each process serves these, and what holds for all of them. The "
        "first two series of the training server are of the API server that replies, the others of its orchestrator."
    ]
    agent_registry = process_registry(agent_metrics.PREFIX)
    agent_registry.register(agent_metrics.AgentCollector(agent_metrics.AgentCounts()))
    processes = {
        "Hub": [HubMetrics()._registry],
        "Coordinator": [CoordinatorMetrics()._registry],
        "Agent": [agent_registry],
        "Training server": [ApiMetrics(0)._registry, OrchestratorMetrics()._registry],
    }
    for process, registries in processes.items():
        rows = [row for registry in registries for row in _metric_rows(registry)]
        parts += [f"## {process}", _table(("metric", "type", "labels", "meaning"), rows)]
    return _page("Metrics", parts)


def _metric_rows(registry: CollectorRegistry) -> Iterator[tuple[str, ...]]:
    for collector in registry._collector_to_names:
        for metric in collector.collect():
            labels = getattr(collector, "_labelnames", ()) or getattr(metric, "_labelnames", ())
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            if not name.startswith("process_"):
                shown = ", ".join(f"`{label}`" for label in labels)
                yield f"`{name}`", metric.type, shown, metric.documentation


def events_page() -> str:
    """Every event of the fleet with its sentence, and every event of the logs with its modules and fields."""
    fleet = [(f"`{kind}`", f"… {predicate}") for kind, predicate in PREDICATES.items()]
    found: dict[str, tuple[set[str], set[str], set[str]]] = {}
    for module, tree in language.sources():
        for call in filter(lambda each: language.is_event(each.event), language.log_calls(module, tree)):
            modules, levels, names = found.setdefault(call.event, (set(), set(), set()))
            modules.add(module.removeprefix("strata."))
            levels.add("error" if call.level == "exception" else call.level)
            names.update(call.fields)
    lines = [
        (f"`{event}`", ", ".join(sorted(levels)), _code(modules), _code(names))
        for event, (modules, levels, names) in sorted(found.items())
    ]
    parts = [
        "## Events of a fleet",
        "`strata events`, the dashboard and webhooks have them ([who did what](../fleet-sharing.md#who-did-what)).",
        _table(("kind", "what happened to its subject"), fleet),
        "## Log events",
        "Lines of logs have an event, which is stable, and fields. Alerts and runbooks may quote it.",
        _table(("event", "level", "module", "fields"), lines),
    ]
    return _page("Events", parts)


def errors_page() -> str:
    """Every code of an error with what the caller can do, and its form at each edge."""
    codes = [
        (f"`{code}`", text, str(STATUS_OF[code]), f"`{GRPC_STATUS_OF[code].name}`", str(EXIT_CODE_OF[code]))
        for code, text in zip(Code, _member_texts(Code).values(), strict=True)
    ]
    texts = _member_texts(Reason)
    reasons = [(f"`{reason.name}`", f"`{reason}`", texts[reason.name]) for reason in Reason]
    causes = _member_texts(Cause)
    parts = [
        "An error has a code, a sentence, and often a hint: what to do. The codes are the same at every edge.",
        _table(("code", "what it means, and what to do", "HTTP", "gRPC", "exit status"), codes),
        "A training server replies 422 for `conflict` and `precondition`, which its clients would retry as 409. "
        "[The command line](../commands.md) has the exit statuses of `strata wait` and of jobs.",
        "## Workers of a gang",
        "`strata.coord.worker.reason_of(error)` says why a call was refused; over gRPC it is in `strata-reason`.",
        _table(("reason", "over gRPC", "what it means, and what to do"), reasons),
        "## Attempts of jobs",
        "Why an attempt ended, as `strata show` prints it. [Find out why](../how-to/find-out-why.md) has what to do.",
        _table(("cause", "what it means"), [(f"`{cause}`", causes.get(cause.name, "")) for cause in Cause]),
    ]
    return _page("Errors", parts)


def _member_texts(kind: type[Enum]) -> dict[str, str]:
    """The docstrings under the members of an enumeration."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    return {
        node.targets[0].id: " ".join(ast.literal_eval(following.value).split())
        for node, following in zip(body.body, body.body[1:], strict=False)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }


def modules_page() -> str:
    """Every module with the first paragraph of its docstring, in the order of the layout in ARCHITECTURE.md."""
    names = [name for row in test_layout.rows(test_layout.layout()) for name in row.names]
    folders: dict[Path, list[tuple[str, str]]] = {}
    for path in sorted(test_layout.SOURCE.rglob("*.*")):
        if path.suffix in _OPENINGS and "pb" not in path.parts and (text := _opening(path)):
            row = "" if path.name == "__init__.py" else f"`{path.name}`"
            folders.setdefault(path.parent.relative_to(test_layout.SOURCE), []).append((row, text))

    def place(folder: Path) -> list[int]:
        prefixes = [folder, *folder.parents][-2::-1]
        return [names.index(str(prefix)) if str(prefix) in names else len(names) for prefix in prefixes]

    parts = [
        "Which module has what, in the order of [the layout](../architecture.md#layout). The worker in C++ is in "
        "`examples/cpp-worker`, and its protocol in `proto/strata/v1`."
    ]
    for folder in sorted(folders, key=lambda each: (place(each), each)):
        rows = [row for row in folders[folder] if row[0]]
        parts += [f"## `{Path('strata') / folder}`", *(text for name, text in folders[folder] if not name)]
        parts += [_table(("module", "what it has"), rows)] if rows else []
    return _page("Modules", parts)


def _opening(path: Path) -> str:
    """The first paragraph of a module's docstring, or the comment with which a script, a style or a template begins."""
    found = _OPENINGS[path.suffix].match(path.read_text(encoding="utf-8"))
    return " ".join(re.sub(r"^//", "", found[1], flags=re.MULTILINE).split()) if found else ""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _docstring(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split()) if "__doc__" in vars(kind) else ""


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def _page(title: str, parts: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", MARK, *filter(None, parts)]) + "\n"


def pages() -> dict[str, str]:
    made = (settings_page, routes_page, commands_page, metrics_page, events_page, errors_page, modules_page)
    return {f"{make.__name__.removesuffix('_page')}.md": make() for make in made}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    SKILL.write_text(skill_page(), encoding="utf-8")
    sys.stdout.write(f"wrote {len(pages())} pages below docs/reference, and skills/strata/reference.md\n")
