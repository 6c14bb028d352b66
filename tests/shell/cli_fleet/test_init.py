"""What `strata init` writes is applied to a hub, and its job runs."""

from __future__ import annotations

from pathlib import Path

from tests.shell.cli_fleet.driving import HostByHand, Person

TRAIN = """\
from strata.fleet.trainer import describe_dataclass, handle_describe, hyper, report
from settings import Settings
handle_describe(describe_dataclass(Settings))
rate = hyper().get("rate", 0.1)
report(step=1, loss=rate)
"""
SETTINGS = """\
from dataclasses import dataclass

@dataclass
class Settings:
    rate: float = 0.1
"""


def test_a_written_manifest_is_applied_as_it_is_and_with_its_options(
    person: Person, host: HostByHand, tmp_path: Path
) -> None:
    folder = tmp_path / "line"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "settings.py").write_text(SETTINGS)
    manifest = folder / "manifest.toml"
    done = person.says("init", str(folder))
    assert (done.status, done.err) == (0, "")
    dry = person.says("apply", str(manifest), "--dry-run")
    assert (dry.status, dry.out.splitlines()[0]) == (0, "+1 new  ~1 trainer")
    applied = person.says("apply", str(manifest))
    assert (applied.status, applied.out) == (0, "+1 new  ~1 trainer\n")
    lease = host.completes()
    assert lease.trainer is not None
    assert (lease.spec.name, lease.trainer.command) == ("line", ("python", "train.py"))
    text = manifest.read_text()
    for option in ("[[sweeps]]", 'name = "line-rate"', 'model = "line"', "grid = { rate"):
        assert f"# {option}" in text
        text = text.replace(f"# {option}", option)
    manifest.write_text(text)
    swept = person.says("apply", str(manifest))
    assert (swept.status, swept.out.partition("  ")[0]) == (0, "+2 new"), swept.err
