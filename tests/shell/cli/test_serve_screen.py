"""What `strata serve status` makes of the state of a training server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from rich.console import Console

from strata.cli.exit_codes import ExitCode
from strata.cli.gang.format import took
from strata.cli.layout import render
from strata.cli.main import run
from strata.cli.serve.commands import ready_sentences
from strata.cli.serve.screen import screen
from strata.train.core.commands import Timing
from strata.train.core.replay_differences import ReplayDifferences
from strata.train.settings import load_settings
from strata.train.status.reports import (
    DeviceTurnStatus,
    EngineStatus,
    GapStatus,
    HighGapStatus,
    RanksStatus,
    RecoveryStatus,
    RunningStatus,
    ServerStatus,
    SnapshotStatus,
    StoppedStatus,
    TenantStatus,
    Timeline,
)

NOW_S: Final = 1_700_000_000.0
LONG: Final = "key:a-tenant-with-a-name-that-somebody-thought-would-say-everything"


def ended(number: int, **more: Any) -> Timeline:
    given: dict[str, Any] = {
        "future_id": f"session:train:0:{number}", "tenant": LONG, "model_id": "m", "kind": "forward_backward",
        "tokens": 8_192, "outcome": "finished", "accepted_at_s": NOW_S - 9, "ready_at_s": NOW_S - 9,
        "dispatched_at_s": NOW_S - 7, "sent_at_s": NOW_S - 6.9, "begun_at_s": NOW_S - 6, "answered_at_s": NOW_S - 2,
        "ended_at_s": NOW_S - 2, "spent": Timing(4.0, 1.25, 2.5),
    }  # fmt: skip
    return Timeline(**(given | more))


FULL: Final = ServerStatus(
    now_s=NOW_S,
    leading_since_s=NOW_S - 90_000,
    generation=12,
    base_model="Qwen/Qwen3-8B",
    arch="qwen3",
    training="lora",
    parameters=8_190_000_000,
    ranks=RanksStatus(state="busy", reason="with dispatch 123456", size=64, group="0123456789abcdef"),
    models=8,
    slots=8,
    samplers=64,
    sampler_places=64,
    waiting=100,
    max_waiting=100,
    samples_waiting=1024,
    samples_running=256,
    running=[
        RunningStatus(number=1, kind="forward_backward", tenants=[LONG, "key:b"], tokens=65_536, since_s=NOW_S - 4),
        RunningStatus(number=2, kind="optim_step", tenants=[LONG], tokens=0, since_s=None),
    ],
    dispatched=123_456,
    trained_tokens_per_s=123_456.7,
    sampled_tokens_per_s=12_345.6,
    snapshot=SnapshotStatus(number=123_000, behind=450, at_s=NOW_S - 180, size=17 << 30, held_s=0.0123),
    recoveries=3,
    recovery_s=17.4,
    tenants=[TenantStatus(tenant=f"{LONG}-{place}", waiting=9, tokens=65_536, eta_s=12.0) for place in range(12)],
    recent=[ended(number) for number in range(20)],
)


def changed(**more: Any) -> ServerStatus:
    return msgspec.structs.replace(FULL, **more)


def text(status: ServerStatus, columns: int = 80, rows: int | None = 23, *, wide: bool = False) -> list[str]:
    console = Console(width=columns, color_system=None, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(render(screen(status, wide=wide, rows=rows), columns))
    return [each.rstrip() for each in captured.get().splitlines()]


def test_a_busy_server_fits_a_terminal_of_24_lines_and_80_columns() -> None:
    lines = text(FULL)
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    for words in ("64 ranks busy", "100 of 100 operations wait", "8 of 8 models", "recovered 3 times", "3m old"):
        assert words in shown
    assert "… and 6 more" in shown
    # Every sentence in a line of its own: none was folded.
    assert [each.split()[0] for each in lines[1:8]] == [
        "running", "queue", "speed", "places", "ranks", "snapshot", "journal"
    ]  # fmt: skip


def test_an_operation_shows_where_its_time_went() -> None:
    (row,) = [each for each in text(changed(recent=[ended(1)])) if "forward_backward  " in each]
    assert row.split()[-5:] == ["2.9s", "100ms", "1.2s", "2.5s", "250ms"]
    (row,) = [each for each in text(changed(recent=[ended(1, outcome="failed")])) if "failed" in each]
    assert row.endswith("failed")


def test_a_wide_screen_leaves_nothing_out() -> None:
    lines = text(FULL, 400, None, wide=True)
    assert sum("session:train:0:" in each for each in lines) == 20
    assert sum("~12s" in each for each in lines) == 12


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (RanksStatus(state="starting", reason="the ranks are starting"), "! the ranks are starting"),
        (RanksStatus(state="catching up", reason="they do again", size=2), "! they do again"),
        (RanksStatus(state="unhealthy", reason="rank 0 did not answer", size=2), "! rank 0 did not answer"),
        (RanksStatus(state="ready", reason="", size=3, answered=[0, 2]), "! no answer from rank 1"),
    ],
)
def test_what_needs_attention_stands_in_the_second_line(ranks: RanksStatus, words: str) -> None:
    assert text(changed(ranks=ranks))[1] == words


def test_engines_are_counted_and_one_that_is_not_ready_stands_out() -> None:
    ready = EngineStatus(name="engine-0", state="ready", reason="", starts=1)
    assert not any("engine" in each for each in text(FULL))
    lines = text(changed(engines=[ready, msgspec.structs.replace(ready, name="engine-1", starts=3)]))
    assert "engines    2 of 2 ready, restarted 2 times" in lines
    dead = EngineStatus(name="engine-1", state="restarting", reason="RuntimeError: out of memory " + "x" * 200)
    lines = text(changed(engines=[ready, dead]))
    assert lines[1].startswith("! engine-1 is restarting: RuntimeError: out of memory xxx")
    assert max(map(len, lines)) <= 80
    assert "engines    1 of 2 ready" in lines


def test_who_has_shared_devices_is_a_line_and_ranks_that_sleep_for_it_are_no_alert() -> None:
    turn = DeviceTurnStatus(side="engines", since_s=NOW_S - 12, leaving=False)
    sleeping = RanksStatus(state="asleep", reason="engines have their devices", size=2)
    waiting = EngineStatus(name="engine-0", state="waiting", reason="ranks have its devices")
    lines = text(changed(device_turn=turn, ranks=sleeping, engines=[waiting]))
    assert "devices    engines have them for 12s" in lines
    assert not any(each.startswith("!") for each in lines)
    turn = DeviceTurnStatus(side="ranks", since_s=None, leaving=True)
    assert "devices    ranks have them, engines are next" in text(changed(device_turn=turn))
    assert any(each.startswith("!") for each in text(changed(ranks=sleeping)))


def test_a_gap_above_the_alarm_stands_before_everything_else() -> None:
    gaps = [
        HighGapStatus(
            model_id=f"session_01m7jyxyamw0ayx0ajdgmx4wjd.c23f502f532d:train:{number}",
            tenant=LONG,
            gap=GapStatus(mean=mean, max=9.0, tokens=100, seq_id=7, at_s=NOW_S, high=True),
        )
        for number, mean in enumerate((0.06, 0.1234))
    ]
    shown = changed(gap_alarm_nats=0.05, high_gaps=gaps)
    lines = text(shown)
    assert lines[1] == "! sampler and trainer differ by 0.123 nats per token (alarm above 0.05); 1 more"
    assert lines[2] == f"  model {gaps[1].model_id}"
    assert max(map(len, lines)) <= 80


def test_nothing_is_called_running_while_there_are_no_ranks() -> None:
    ranks = RanksStatus(state="starting", reason="the ranks are starting")
    assert "nothing; 2 to be replayed when ranks are attached" in text(changed(ranks=ranks))[2]


def test_a_server_that_has_done_nothing_is_told_in_whole_sentences() -> None:
    quiet = changed(running=[], tenants=[], recent=[], snapshot=None, recoveries=0, recovery_s=None, dispatched=1)
    shown = "\n".join(text(quiet))
    assert "running    nothing" in shown
    assert "none yet" in shown
    assert "1 dispatch," in shown


def test_a_replay_that_differs_and_a_model_that_it_stopped_are_shown_with_the_command() -> None:
    differences = ReplayDifferences(9, 2, 0.064, 0.12, 0.047, above=95, stops_at=95)
    recovery = RecoveryStatus(
        lost_at_s=NOW_S - 60, seconds=17.4, reason="gone", restored=90, replayed=11, differences=differences
    )
    assert not [each for each in text(changed(recovered=[recovery])) if each.startswith("!")]
    stopped = StoppedStatus(
        model_id="session-1:train:0",
        tenant="key:a",
        since_s=NOW_S - 40,
        dispatch=95,
        differences=differences,
        reason="the replay differs",
    )
    lines = text(changed(recovered=[recovery], stopped=[stopped, stopped], stopped_models=2))
    assert "! a model is stopped: the replay of dispatch 95 differs; 1 more" in lines
    assert "  strata serve resolve session-1:train:0 --accept, or --roll-back" in lines
    (replay,) = [each for each in lines if each.startswith("replay")]
    assert "log probabilities by 0.047 nats" in replay
    exact = msgspec.structs.replace(recovery, differences=ReplayDifferences(compared=11))
    assert not [each for each in text(changed(recovered=[exact])) if each.startswith("replay")]


def test_a_stopped_model_is_resolved_in_one_of_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "resolve", "session-1:train:0"]) == ExitCode.USAGE
    assert "choose --accept or --roll-back" in capsys.readouterr().err


def test_times_have_the_unit_that_suits_them() -> None:
    assert [took(each) for each in (0.0004, 0.035, 0.9996, 12.3, 300)] == ["0.4ms", "35ms", "1.0s", "12s", "5m"]


def test_a_file_of_settings_is_still_run_without_naming_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.toml"
    file.write_text("[server]\nport = -1\n")
    assert run(["serve", str(file)]) == ExitCode.USAGE
    assert "port" in capsys.readouterr().err
    assert run(["serve", str(tmp_path / "missing.toml")]) == ExitCode.USAGE
    assert "missing.toml" in capsys.readouterr().err
    assert run(["serve", "status", str(file), "--watch", "-o", "json"]) == ExitCode.USAGE


def test_a_server_says_that_it_loads_its_model_before_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.toml"
    file.write_text(f'[server]\nport = 0\ndata = "{tmp_path}/d"\n[model]\npath = "{tmp_path}/m"\nname = "tiny"\n')
    assert run(["serve", str(file)]) != ExitCode.OK
    first, second, third, *_ = capsys.readouterr().err.splitlines()
    assert first == "strata serve: loading the model tiny on 1 rank; Ctrl-C stops it"
    assert second.startswith("strata serve: ranks.nproc = 1, ranks.threads = 1, model.dtype = float32, ")
    assert second.endswith("(on CPUs: nvidia-smi shows no CUDA device)")
    assert "there is no model" in third


def test_a_server_that_is_ready_names_its_address_its_key_and_its_dashboard(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    text = f'[server]\ndata = "{tmp_path}/d"\n[model]\npath = "m"\nname = "tiny"\n[ranks]\nnproc = 2\n'
    file.write_text(text)
    alone = load_settings(file, environ={})
    assert ready_sentences(alone, "http://127.0.0.1:5555") == [
        "http://127.0.0.1:5555 is ready: model tiny, 2 ranks",
        f"clients use the key in {tmp_path}/d/api.key",
        "dashboard on http://127.0.0.1:5555/; to log in: the same key",
    ]
    private = load_settings(file, environ={"STRATA_SERVER_LISTEN": "unix"})
    assert len(ready_sentences(private, "unix:/d/run/api")) == 2
    behind_a_hub = load_settings(file, environ={"STRATA_SERVER_FRONT_KEY": "f" * 64})
    assert len(ready_sentences(behind_a_hub, "unix:/d/run/api")) == 1
    shared = load_settings(file, environ={"STRATA_SERVER_IDENTITY_DATABASE": "postgresql://hub/strata"})
    assert "clients use a key of the hub" in ready_sentences(shared, "http://127.0.0.1:5555")
