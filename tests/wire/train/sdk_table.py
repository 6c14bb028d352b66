"""The fields of every request of the `tinker` SDK, with their defaults, as the server and its contract test read them.

`python -m tests.wire.train.sdk_table` writes the table from the SDK that is installed; with `--check` it compares.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, get_args

import tinker.types
from pydantic import BaseModel
from tinker._models import StrictBase
from tinker.proto import tinker_public_pb2 as sdk_pb

from strata.train.wire import sdk_fields

FILE: Final = Path(sdk_fields.__file__).with_suffix(".json")


def table() -> dict[str, Any]:
    """Request models are those that the SDK checks strictly. One that is left out by a field has no `default`."""
    for module in pkgutil.walk_packages(tinker.types.__path__, "tinker.types."):
        if not module.name.endswith("_test"):
            importlib.import_module(module.name)
    models = {model.__name__: _fields(model) for model in sorted(_requests(), key=lambda each: each.__name__)}
    return {"sdk": version("tinker"), "models": models, "messages": dict(sorted(_messages(sdk_pb.DESCRIPTOR)))}


def _requests() -> set[type[BaseModel]]:
    """With what stands inside of them."""
    found: set[type[BaseModel]] = set()
    waiting: list[Any] = [StrictBase]
    while waiting:
        each = waiting.pop()
        waiting += get_args(each)
        if isinstance(each, type) and issubclass(each, BaseModel) and each not in found:
            found.add(each)
            waiting += [*each.__subclasses__(), *(field.annotation for field in each.model_fields.values())]
    return found - {StrictBase}


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        value = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        fields[field.serialization_alias or name] = {} if field.is_required() else {"default": value}
    return fields


def _messages(file: Any) -> Iterator[tuple[str, dict[str, int]]]:
    """The messages of protobuf, without the entries of maps."""
    for name, message in file.message_types_by_name.items():
        yield name, {field.name: field.number for field in message.fields}


def written(found: dict[str, Any]) -> str:
    """As JSON, a model on each line, so that a change of the SDK shows as a change of its line."""
    parts = {name: json.dumps(value) for name, value in found.items() if name == "sdk"}
    for group in ("models", "messages"):
        lines = [f"    {json.dumps(name)}: {json.dumps(fields)}" for name, fields in found[group].items()]
        parts[group] = "{\n" + ",\n".join(lines) + "\n  }"
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def main() -> None:
    text = written(table())
    if "--check" not in sys.argv:
        FILE.write_text(text, encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text:
        sys.exit(
            f"{FILE.name} is not what tinker {version('tinker')} says: python -m tests.wire.train.sdk_table writes it"
        )


if __name__ == "__main__":
    main()
