"""The tree keeps each rule of tests/rules/banned.py, and each rule can fail."""

from __future__ import annotations

from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

from tests.rules import banned
from tests.rules.banned import Rule, Source

ROOT: Final = Path(__file__).parents[2]

CORE: Final = "src/strata/coord/core/state.py"
SHELL: Final = "src/strata/coord/server/service.py"

PLANTS: Final[tuple[tuple[Rule, str, str], ...]] = (
    (banned.unpickling, SHELL, "import pickle"),
    (banned.unpickling, SHELL, "from dill import loads"),
    (banned.unpickling, "tests/core/test_x.py", "def f():\n    import shelve"),
    (banned.unpickling, SHELL, "__import__('marshal')"),
    (banned.unpickling, SHELL, "import importlib\nimportlib.import_module('cloudpickle.fast')"),
    (banned.unpickling, SHELL, "import torch\ntorch.load(path)"),
    (banned.unpickling, SHELL, "import torch as t\nt.load(path, weights_only=False)"),
    (banned.unpickling, SHELL, "from torch import load\nload(path)"),
    (banned.unpickling, SHELL, "import numpy\nnumpy.load(path, allow_pickle=True)"),
    (banned.core_imports, CORE, "import time"),
    (banned.core_imports, CORE, "from asyncio import Lock"),
    (banned.core_imports, CORE, "import strata.base.clock"),
    (banned.core_imports, CORE, "from strata.base import loop"),
    (banned.core_imports, CORE, "from strata.coord import wire"),
    (banned.core_imports, CORE, "from strata.fleet.core import job"),
    (banned.core_imports, "src/strata/train/core/deep/pack.py", "from . import sibling"),
    (banned.core_imports, "src/strata/train/core/decide.py", "from strata.train.status import views"),
    (banned.core_imports, "src/strata/train/status/views.py", "from strata.train.wire import replies"),
    (banned.core_calls, CORE, "now = time.monotonic()"),
    (banned.core_calls, CORE, "import datetime\ndatetime.datetime.now()"),
    (banned.core_calls, CORE, "from datetime import datetime as d\nd.utcnow()"),
    (banned.core_calls, CORE, "from random import random as chance\nchance()"),
    (banned.core_calls, CORE, "import uuid\nuuid.uuid4()"),
    (banned.core_calls, CORE, "print('here')"),
    (banned.core_calls, CORE, "def f():\n    return open('x')"),
    (banned.environment, SHELL, "import os\nos.environ['X']"),
    (banned.environment, SHELL, "from os import getenv"),
    (banned.environment, SHELL, "import os as system\nsystem.getenv('X')"),
    (banned.catch_all, SHELL, "try:\n    f()\nexcept Exception:\n    pass"),
    (banned.catch_all, SHELL, "try:\n    f()\nexcept:\n    pass"),
    (banned.catch_all, SHELL, "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (banned.catch_all, SHELL, "from contextlib import suppress\nwith suppress(Exception):\n    f()"),
    (banned.base_imports, "src/strata/base/log.py", "import structlog"),
    (banned.base_imports, "src/strata/base/log.py", "import strata.journal.port"),
    (banned.cli_top_level, "src/strata/cli/jobs.py", "import asyncio"),
    (banned.cli_top_level, "src/strata/cli/mcp/command.py", "import anyio"),
    (banned.cli_top_level, "src/strata/cli/jobs.py", "from strata.fleet import client"),
    (banned.cli_top_level, "src/strata/cli/jobs.py", "if fast:\n    import rich"),
)

HARMLESS: Final[tuple[tuple[Rule, str, str], ...]] = (
    (banned.unpickling, SHELL, "import torch\ntorch.load(path, weights_only=True)"),
    (banned.core_imports, CORE, "from collections.abc import Sequence\nfrom strata.base.errors import Code"),
    (banned.core_imports, CORE, "import strata.coord.core.shards\nfrom strata.base import ids"),
    (banned.core_imports, SHELL, "import time"),
    (banned.core_calls, CORE, "def overdue(now): return lease.reopen(now.today)"),
    (banned.environment, "src/strata/base/settings.py", "import os\nos.environ"),
    (banned.catch_all, SHELL, "try:\n    f()\nexcept BaseException:\n    undo()\n    raise"),
    (banned.catch_all, SHELL, "try:\n    f()\nexcept ValueError:\n    pass"),
    (banned.base_imports, "src/strata/base/log.py", "import json\nimport msgspec"),
    (banned.cli_top_level, "src/strata/cli/jobs.py", "import click\ndef jobs():\n    import asyncio"),
    (banned.cli_top_level, "src/strata/cli/jobs.py", "if TYPE_CHECKING:\n    import strata.fleet.client.hub_client"),
)

RULES: Final = tuple(dict.fromkeys(rule for rule, _, _ in PLANTS))


@cache
def sources() -> list[Source]:
    """Read and parsed once for all rules."""
    files = [file for folder in ("src", "tests", "bench") for file in sorted((ROOT / folder).rglob("*.py"))]
    return [
        Source(PurePosixPath(file.relative_to(ROOT).as_posix()), file.read_text(encoding="utf-8")) for file in files
    ]


def source(path: str, text: str) -> Source:
    return Source(PurePosixPath(path), text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert [violation for one in sources() for violation in rule(one)] == []


@pytest.mark.parametrize(("rule", "path", "text"), PLANTS)
def test_a_planted_violation_is_found(rule: Rule, path: str, text: str) -> None:
    assert len(rule(source(path, text))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), HARMLESS)
def test_code_that_only_resembles_a_violation_passes(rule: Rule, path: str, text: str) -> None:
    assert rule(source(path, text)) == []


def test_the_rules_read_the_whole_tree() -> None:
    paths = {str(one.path) for one in sources()}
    assert {"src/strata/base/errors.py", "src/strata/cli/main.py", "tests/rules/banned.py"} <= paths


def test_unfinished_work_is_named_in_the_document_of_limits() -> None:
    document = ROOT / "docs" / "limits.md"
    limits = document.read_text(encoding="utf-8") if document.exists() else ""
    assert [violation for one in sources() for violation in banned.unfinished(one, limits)] == []


def test_the_document_of_limits_can_be_read_before_a_decision() -> None:
    limits = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    assert len(limits.split()) <= 1_500, "an exception of one feature stands where the feature is described"
    bullets = [line for line in limits.splitlines() if line.startswith("- ")]
    assert [line for line in bullets if len(line.split()) > 41] == []


def test_a_note_of_unfinished_work_is_found_unless_the_document_has_its_words() -> None:
    note = source(SHELL, "x = 1  # TODO: barriers across cells\n")
    assert len(banned.unfinished(note, "")) == 1
    assert len(banned.unfinished(source(SHELL, "x = 1  # FIXME\n"), "anything")) == 1
    assert banned.unfinished(note, "- barriers across cells: not yet") == []
    assert banned.unfinished(source(SHELL, "x = 'TODO: not a comment'\n"), "") == []


def test_every_file_that_may_catch_everything_still_exists() -> None:
    assert [path for path in banned.MAY_CATCH_ALL if not (ROOT / path).exists()] == []
