from __future__ import annotations

import argparse
import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from strata.fleet.core.hyper import HyperSchema
from strata.fleet.trainer import describe_argparse, describe_dataclass, describe_pydantic, handle_describe


class Kind(enum.Enum):
    ADAMW = "adamw"
    LION = "lion"


@dataclass
class Optimizer:
    name: Kind = Kind.ADAMW
    momentum: float | None = None


@dataclass
class Parameters:
    learning_rate: Annotated[float, "per step"] = field(metadata={"schema": {"exclusiveMinimum": 0}})
    epochs: int = 3
    hidden: list[int] = field(default_factory=list)
    betas: tuple[float, float] = (0.9, 0.99)
    recipe: Literal["by_host", "random"] = "by_host"
    optimizer: Optimizer = field(default_factory=Optimizer)
    tags: dict[str, str] = field(default_factory=dict)
    cache: Path = Path("cache")
    compile: bool = False
    made: int = field(init=False, default=0)


def wrong(schema: dict[str, Any], value: dict[str, Any]) -> set[str]:
    return {".".join(map(str, finding.path)) for finding in HyperSchema(schema).check(value)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--learning-rate", type=float, required=True, help="per step")
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--hidden", type=int, nargs="+")
    made.add_argument("--recipe", choices=["by_host", "random"], default="by_host")
    made.add_argument("--compile", action="store_true")
    made.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--tag", action="append")
    made.add_argument("--custom", type=lambda text: text.split(":"))
    made.add_argument("--cache", type=Path, default=Path("cache"))
    made.add_argument("--verbose", "-v", action="count", default=0)
    made.add_argument("--describe", action="store_true")
    made.add_argument("--version", action="version", version="1")
    return made


GOOD: dict[str, Any] = {"learning_rate": 0.1, "epochs": 3, "hidden": [8], "recipe": "random", "compile": True}


@pytest.mark.parametrize(
    "schema", [describe_argparse(parser()), describe_dataclass(Parameters)], ids=["argparse", "dataclass"]
)
def test_what_is_described_takes_what_the_trainer_takes_and_nothing_else(schema: dict[str, Any]) -> None:
    assert wrong(schema, GOOD) == set()
    assert wrong(schema, {}) == {""}
    assert wrong(schema, GOOD | {"learning_rat": 1}) == {"learning_rat"}
    assert wrong(schema, GOOD | {"epochs": 1.5, "hidden": ["x"], "recipe": "all", "compile": 1}) == {
        "epochs",
        "hidden.0",
        "recipe",
        "compile",
    }


def test_arguments_of_every_kind_are_described() -> None:
    properties = describe_argparse(parser())["properties"]
    assert set(properties) == {
        "learning_rate", "epochs", "hidden", "recipe", "compile", "amp", "tag", "custom", "cache", "verbose",
    }  # fmt: skip
    assert properties["learning_rate"] == {"type": "number", "description": "per step"}
    assert properties["cache"] == {"type": "string", "default": "cache"}
    assert properties["tag"] == {"type": "array", "items": {"type": "string"}}
    assert properties["custom"] == {}
    assert set(describe_argparse(parser(), skip=["cache"])["properties"]) == set(properties) - {"cache"}


def test_a_parser_with_sub_commands_is_refused() -> None:
    made = argparse.ArgumentParser()
    made.add_subparsers()
    with pytest.raises(TypeError, match="subcommand"):
        describe_argparse(made)


def test_fields_of_every_kind_are_described() -> None:
    schema = describe_dataclass(Parameters)
    assert schema["required"] == ["learning_rate"]
    assert schema["properties"]["learning_rate"] == {"type": "number", "exclusiveMinimum": 0}
    assert "made" not in schema["properties"]
    value = {"learning_rate": 0.1, "optimizer": {"nam": "lion", "momentum": "x"}, "betas": [1], "tags": {"a": 1}}
    assert wrong(schema, value) == {"optimizer.nam", "optimizer.momentum", "betas", "tags.a"}
    assert (
        wrong(schema, {"learning_rate": 1, "optimizer": {"name": "lion", "momentum": None}, "betas": [1, 2]}) == set()
    )


def test_a_dataclass_that_contains_itself_or_a_strange_type_is_refused() -> None:
    strange: type = dataclass(type("Strange", (), {"__annotations__": {"made": complex}}))
    with pytest.raises(TypeError, match="complex"):
        describe_dataclass(strange)
    knot = type("Knot", (), {})
    knot.__annotations__ = {"inner": knot}
    with pytest.raises(TypeError, match="contains itself"):
        describe_dataclass(dataclass(knot))


def test_a_pydantic_model_describes_itself() -> None:
    class Model:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return {
                "properties": {
                    "learning_rate": {"exclusiveMinimum": 0, "title": "Learning Rate", "type": "number"},
                    "optimizer": {"anyOf": [{"$ref": "#/$defs/Optimizer"}, {"type": "null"}], "default": None},
                },
                "$defs": {"Optimizer": {"properties": {"name": {"type": "string"}}, "type": "object"}},
                "required": ["learning_rate"],
                "title": "Model",
                "type": "object",
            }

    schema = describe_pydantic(Model)
    assert wrong(schema, {"learning_rate": 1, "optimizer": {"nam": "x"}}) == {"optimizer.nam"}


def test_describing_prints_the_schema_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    schema = describe_argparse(parser())
    handle_describe(schema, ["--epochs", "3"])
    with pytest.raises(SystemExit) as ended:
        handle_describe(schema, ["--describe"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == schema
