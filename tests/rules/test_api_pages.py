"""The pages of scripts/api_pages.py: nothing public is missing or without a sentence, and no link leads nowhere."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from scripts.api_pages import MODULES, PAGES
from strata.hub.routes import ROUTES as HUB_ROUTES
from strata.train.api.routes import ROUTES as TRAINING_ROUTES


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_there_and_says_what_it_is(module: str) -> None:
    found = importlib.import_module(module)
    page = PAGES["reference/python.md"]()
    assert [name for name in found.__all__ if f"\n### {name}\n" not in page] == []
    functions = [name for name in found.__all__ if not inspect.isclass(getattr(found, name))]
    assert [name for name in functions if not inspect.getdoc(getattr(found, name))] == []


@pytest.mark.parametrize(
    ("name", "routes"), [("reference/http-hub.md", HUB_ROUTES), ("reference/http-training.md", TRAINING_ROUTES)]
)
def test_every_route_is_there_and_every_link_has_its_message(name: str, routes: tuple[object, ...]) -> None:
    page = PAGES[name]()
    assert page.count("\n### `") == len(routes)
    messages = {heading.lower() for heading in re.findall(r"(?m)^### (\w+)$", page)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) - messages == set()
    assert "anything" not in re.findall(r"(?m)^Reply: (.*)$", page)
