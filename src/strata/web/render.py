"""Jinja2 environment and filters: formats of durations, ages, sizes, numbers; CSS classes of statuses
(`STATUS_CLASSES`), and advice texts (`ADVICE`).
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from strata.base.errors import Code

CSRF_MARK: Final = secrets.token_hex(16)
"""Stands for the CSRF token in content that many sessions share; each reply gets its own in this place."""

_RAISED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)(?::|$)")
_LONG_ID: Final = re.compile(r"\b[a-z]+1_[0-9a-f]{64}\b")
_MAX_VALUE: Final = 120
"""Characters of a detail of an event."""
MISSING: Final = "\N{EN DASH}"
"""Stands for what is not known."""
STATUS_CLASSES: Final[Mapping[str, str]] = {
    "completed": "good", "online": "good", "active": "good", "serving": "good", "ok": "good", "committed": "good",
    "running": "working", "claimed": "working", "training": "working", "loading": "working", "initialising": "working",
    "checkpointing": "working", "recovering": "working",
    "pending": "waiting", "asleep": "waiting", "paused": "waiting", "draining": "waiting", "idle": "waiting",
    "suspect": "suspect", "quarantined": "suspect", "slow": "suspect",
    "failed": "bad", "offline": "bad", "error": "bad", "lost": "bad", "revoked": "bad", "retried": "bad",
    "cancelled": "ended", "left": "ended", "archived": "ended", "expired": "ended", "pruned": "ended", "used": "ended",
    "preempted": "ended", "returned": "ended",
}  # fmt: skip
"""How a state looks: colour and shape by class; `templates/macros.html` has the shapes."""


def make_environment(globals_: Mapping[str, Any]) -> Environment:
    environment = Environment(
        loader=PackageLoader("strata.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals |= {"csrf": CSRF_MARK, "status_class": status_class, **globals_}
    environment.filters |= {
        "age": age,
        "bare_age": bare_age,
        "duration": duration,
        "size": size,
        "number": number,
        "percent": percent,
        "short": short,
        "details": details,
        "cause": cause,
        "error_line": error_line,
        "sentence": sentence,
        "url_with": url_with,
    }
    return environment


def status_class(word: str) -> str:
    return STATUS_CLASSES.get(word, "waiting")


def duration(seconds: float | None) -> str:
    """Two units at most: `41 s`, `3 min 20 s`, `5 h 2 min`, `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 0.05:
        return "0 s"
    if seconds < 1:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit_s, unit, next_s, following in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // next_s
            return f"{whole // unit_s} {unit}" + (f" {rest} {following}" if rest else "")
    return f"{whole} s"


def age(at_s: float | None, now_s: float) -> Markup:
    """Returns when, as seen from now; the moment itself on hover. The browser keeps it up to date."""
    return _time(at_s, now_s, lambda ago_s: f"{duration(ago_s)} ago" if ago_s >= 0 else f"in {duration(-ago_s)}", "ago")


def bare_age(at_s: float | None, now_s: float) -> Markup:
    """Returns how long since, without `ago`."""
    return _time(at_s, now_s, lambda ago_s: duration(max(0.0, ago_s)), "since")


def _time(at_s: float | None, now_s: float, words: Callable[[float], str], kind: str) -> Markup:
    if not at_s:
        return escape(MISSING)
    moment = datetime.fromtimestamp(at_s, UTC)
    shown = moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    machine = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    text = words(now_s - at_s)
    return Markup('<time datetime="{}" title="{}" data-age="{}">{}</time>').format(machine, shown, kind, text)


def size(count: float | None) -> str:
    if count is None:
        return MISSING
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def number(value: float | None) -> str:
    """Four digits that matter; thousands with a thin space."""
    if value is None:
        return MISSING
    if isinstance(value, int) or (abs(value) >= 1000 and float(value).is_integer()):
        return f"{int(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:.4g}"


def percent(fraction: float | None) -> str:
    return MISSING if fraction is None or not math.isfinite(fraction) else f"{fraction * 100:.0f} %"


def short(id_: str) -> str:
    """An id as the command line shows it: what comes after its kind, cut to eight characters."""
    return id_.rpartition("_")[2][:8] if "_" in id_ else id_[:12]


def cause(word: str) -> str:
    """Says why an attempt ended, in words."""
    return "out of memory" if word == "oom" else word.replace("_", " ")


def details(body: Mapping[str, Any], host_names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Name and value of each detail of an event that says something: hosts by name, ids shortened, long values cut."""
    said = {name: value for name, value in body.items() if value not in ("", None, [], {}, 0, False)}
    if isinstance(host := said.get("host"), str):
        said["host"] = host_names.get(host, host)
    return [(name, _shown(name, value)) for name, value in said.items()]


def _shown(name: str, value: object) -> str:
    if name.endswith("_at_s") and isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    text = _LONG_ID.sub(lambda found: short(found[0]), text)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}…"


def error_line(text: str) -> str:
    """Returns what was raised last of an error with a traceback; else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if _RAISED.match(line)]
    return (raised or lines[:1] or [""])[-1]


def sentence(text: str) -> str:
    """Makes a sentence: what the API says begins small, to stand after a colon."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?", ":")) else ".") if text else ""


def url_with(query: Iterable[tuple[str, str]], **changes: object) -> str:
    """The query of a URL with these parameters changed; one that is None or empty is left out."""
    pairs = [(name, value) for name, value in query if name not in changes]
    for name, value in changes.items():
        values = value if isinstance(value, list | tuple) else [value]
        pairs += [(name, str(each)) for each in values if each not in (None, "", False)]
    return f"?{urlencode(pairs)}"


ADVICE: Final[Mapping[Code, str]] = {
    Code.NOT_FOUND: "Check the address, or search for it on the overview.",
    Code.FORBIDDEN: "Ask somebody with that role, or log in with another key.",
    Code.UNAVAILABLE: "Reload the page in a moment. If it stays, look at the server's log.",
    Code.EXHAUSTED: "Wait a moment, then reload the page.",
    Code.INVALID: "Go back, and change what was entered.",
}
"""What to do about an error that carries no hint of its own."""
