"""The pictures of the documents, from real runs: `make pictures`, or `python -m scripts.pictures [PART …]`.

`screens` starts `strata demo` and captures pages of its dashboard in Chromium, in two widths and two themes, with
docs/images/screens.json beside them. `recording` kills two of three workers that share a dataset, and writes what the
terminal showed as an animation. The diagrams in the same folder are written by hand.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
from playwright.sync_api import Browser

from scripts.recording import record
from tests.e2e.browser import SCHEMES, SIZES, capture, chromium, follow_login_link, new_context
from tests.e2e.demo_process import LINK, Demo
from tests.e2e.machines import Person
from tests.e2e.screens import IMAGES, RECORD, SCREENS, Screen, describe, open_screen, picture_name, read_ids

PARTS: Final = ("screens", "recording")
CURVE_S: Final = 45.0
"""How long the demo's longest job goes on before its curve is shown."""
LAST: Final = {
    "desktop": {"overview": "#running", "job": "#metrics", "sweep": "#over", "waiting-job": "#why"},
    "phone": {"overview": "#running", "job": "#metrics", "sweep": "#parallel", "waiting-job": "#why"},
}
"""The heading of the last part of a page that a picture shows."""
SCALE: Final = {"desktop": 1, "phone": 2}
"""A phone has more pixels than its pages count."""


def take_pictures(browser: Browser, link: str) -> dict[str, Screen]:
    cookies = follow_login_link(browser, link)
    url = link.partition("/login")[0]
    found = {}
    for size in SIZES:
        for scheme in SCHEMES:
            context = new_context(browser, size, scheme, cookies=cookies, scale=SCALE[size])
            ids = read_ids(context, url)
            for name, path in SCREENS.items():
                page = context.new_page()
                open_screen(page, url, path, ids)
                capture(page, IMAGES / picture_name(name, size, scheme), last=f"section:has({LAST[size][name]})")
                found[name] = describe(page, url, path, ids)
                page.close()
            context.close()
    return found


def write_screens() -> None:
    with tempfile.TemporaryDirectory(prefix="d") as folder, chromium() as browser:
        demo = Demo(Person(Path(folder) / "home"), Path(folder))
        try:
            link = demo.until_it_prints(LINK)[0]
            # The link ends within two minutes.
            time.sleep(CURVE_S)
            found = take_pictures(browser, link)
        finally:
            demo.close()
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures of the documents.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parts = parser.parse_args().parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    IMAGES.mkdir(exist_ok=True)
    if "screens" in parts:
        write_screens()
    if "recording" in parts:
        (IMAGES / "recording.svg").write_text(record(), encoding="utf-8")
    for picture in sorted(IMAGES.iterdir()):
        print(f"{picture.stat().st_size // 1024:5} KiB  {picture.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
