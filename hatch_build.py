"""A hook of hatchling: puts the text of the documents into the wheel, where the dashboard shows them
(`strata.web.documents`). An editable install has them in the clone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INCLUDED: Final = ("ARCHITECTURE.md", "CHANGELOG.md", "README.md")
"""Pages of the documents include these."""


class DocumentsHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return
        root = Path(self.root)
        for page in [*(root / name for name in INCLUDED), *sorted((root / "docs").rglob("*.md"))]:
            build_data["force_include"][str(page)] = f"strata/documents/{page.relative_to(root).as_posix()}"
