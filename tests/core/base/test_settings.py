from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import Code, StrataError
from strata.base.settings import SECTIONS, Secret, load, no_color


class Mode(enum.StrEnum):
    FAST = "fast"
    SAFE = "safe"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    limit: int = 1


class Store(msgspec.Struct, frozen=True):
    database: str = "local.db"
    pool_size: Annotated[int, msgspec.Meta(ge=1)] = 4


class Tls(msgspec.Struct, frozen=True):
    cert: Path
    min_version: str = "1.3"


class Window(msgspec.Struct, frozen=True):
    low: int = 0
    high: int = 10

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")


class Server(msgspec.Struct, frozen=True):
    name: str = "hub"
    port: int = 80
    ratio: float = 0.5
    debug: bool = False
    mode: Mode = Mode.SAFE
    level: Literal["low", "high"] = "low"
    root: Path = Path("/srv")
    tags: list[str] = msgspec.field(default_factory=list)
    ports: tuple[int, ...] = ()
    labels: dict[str, int] = msgspec.field(default_factory=dict)
    note: str | None = None
    retries: int | None = 3
    token: Secret | None = None
    rules: list[Rule] = msgspec.field(default_factory=list)
    store: Store = Store(pool_size=8)
    tls: Tls | None = None
    window: Window = Window()


def loaded(
    text: str = "",
    *,
    tmp_path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Server:
    file = None
    if tmp_path is not None:
        file = tmp_path / "strata.toml"
        file.write_text(text)
    return load(Server, section="hub", file=file, environ=environ or {}, flags=flags or {})


def problems(text: str, tmp_path: Path, environ: Mapping[str, str] | None = None, **flags: Any) -> list[str]:
    with pytest.raises(StrataError) as caught:
        loaded(text, tmp_path=tmp_path, environ=environ, flags=flags)
    assert caught.value.code is Code.INVALID
    assert list(caught.value.detail["problems"]) == caught.value.message.split("\n")
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.message.split("\n")]


def test_without_any_source_the_defaults_hold() -> None:
    assert loaded() == Server()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = "[hub]\nport = 1\nname = 'file'\nratio = 0.1\n[hub.store]\ndatabase = 'file.db'"
    environ = {"STRATA_HUB_PORT": "2", "STRATA_HUB_NAME": "env", "STRATA_HUB_STORE_DATABASE": "env.db"}
    flags = {"port": 3, "store.database": "flag.db", "debug": None}
    server = loaded(file, tmp_path=tmp_path, environ=environ, flags=flags)
    assert (server.port, server.name, server.ratio, server.debug) == (3, "env", 0.1, False)
    assert server.store == Store("flag.db", pool_size=8)


def test_an_optional_group_exists_as_soon_as_something_is_written_about_it(tmp_path: Path) -> None:
    assert loaded().tls is None
    assert loaded(environ={"STRATA_HUB_TLS_CERT": "c.pem"}).tls == Tls(Path("c.pem"))
    (line,) = problems("[hub.tls]\n", tmp_path)
    assert line == (
        "hub.tls.cert: required but not set (set it in [hub] of strata.toml, as STRATA_HUB_TLS_CERT or as a flag)"
    )


def test_all_problems_are_reported_together_with_their_places(tmp_path: Path) -> None:
    file = """
[hub]
prot = 1
name = 5
debug = "yes"
store.databse = "x"
[hub.window]
low = 11
[hub.wat]
[agent]
anything = true
"""
    environ = {"STRATA_HUB_RATOI": "1", "STRATA_HUB_RETRIES": "many", "STRATA_OTHER_X": "1", "STRATA_HUBX": "1"}
    assert problems(file, tmp_path, environ, mode="slow", zzz=1, **{"store.pool_size": 0}) == [
        'strata.toml:3: hub.prot: unknown key (did you mean "port"?)',
        'strata.toml:6: hub.store.databse: unknown key (did you mean "database"?)',
        "strata.toml:9: hub.wat: unknown key (known: name, port, ratio, debug, mode, level, root, tags, ports, labels,"
        " note, retries, …)",
        'env STRATA_HUB_RATOI: unknown variable (did you mean "STRATA_HUB_RATIO"?)',
        "flag zzz: unknown setting (known: name, port, ratio, debug, mode, level, root, tags, ports, labels,"
        " note, retries, …)",
        "strata.toml:4: hub.name: expected string, found 5",
        'strata.toml:5: hub.debug: expected boolean, found "yes"',
        'flag mode: hub.mode: expected one of "fast", "safe", found "slow"',
        'env STRATA_HUB_RETRIES: hub.retries: expected integer or nothing, found "many"',
        "flag store.pool_size: hub.store.pool_size: expected integer >= 1, found 0",
        "strata.toml:7: hub.window: low (11) is above high (10)",
    ]


@pytest.mark.parametrize(
    ("name", "text", "attribute", "value"),
    [
        ("PORT", "8080", "port", 8080),
        ("RATIO", "1e-3", "ratio", 0.001),
        ("RATIO", "2", "ratio", 2.0),
        ("DEBUG", "yes", "debug", True),
        ("DEBUG", "1", "debug", True),
        ("DEBUG", "OFF", "debug", False),
        ("MODE", "fast", "mode", Mode.FAST),
        ("LEVEL", "high", "level", "high"),
        ("ROOT", "/data", "root", Path("/data")),
        ("NAME", "", "name", ""),
        ("NAME", "5", "name", "5"),
        ("NOTE", "", "note", None),
        ("NOTE", "null", "note", "null"),
        ("RETRIES", "", "retries", None),
        ("RETRIES", "7", "retries", 7),
        ("TAGS", "a, b,c", "tags", ["a", "b", "c"]),
        ("TAGS", '["a,b", "c"]', "tags", ["a,b", "c"]),
        ("TAGS", "", "tags", []),
        ("PORTS", "1,2", "ports", (1, 2)),
        ("PORTS", "[1, 2]", "ports", (1, 2)),
        ("LABELS", "{ a = 1 }", "labels", {"a": 1}),
        ("TOKEN", "hunter2", "token", Secret("hunter2")),
        ("RULES", '[{ name = "r" }]', "rules", [Rule("r")]),
        ("STORE_POOL_SIZE", "2", "store", Store(pool_size=2)),
    ],
)
def test_text_becomes_the_type_of_the_field(name: str, text: str, attribute: str, value: Any) -> None:
    assert getattr(loaded(environ={f"STRATA_HUB_{name}": text}), attribute) == value
    leaf = name.lower().replace("store_", "store.")
    assert getattr(loaded(flags={leaf: text}), attribute) == value


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("PORT", "8080x", 'expected integer, found "8080x"'),
        ("PORT", "", 'expected integer, found ""'),
        ("DEBUG", "maybe", 'expected boolean, found "maybe"'),
        ("LEVEL", "mid", 'expected one of "high", "low", found "mid"'),
        ("PORTS", "1,x", 'expected integer, found "x"'),
        ("PORTS", "[1, ", 'expected an array or an inline table as TOML writes it, found "[1, "'),
        ("LABELS", "a", 'expected an array or an inline table as TOML writes it, found "a"'),
        ("TAGS", "[1]\nname = 'x'", "expected an array or an inline table as TOML writes it, found"),
        ("ROOT", "", 'expected path, found ""'),
        ("PORT", "line\nbreak", r'expected integer, found "line\nbreak"'),
        ("NAME", "x" * 500, ""),
    ],
)
def test_text_that_does_not_fit_names_the_variable(tmp_path: Path, name: str, text: str, reason: str) -> None:
    if not reason:
        assert loaded(environ={f"STRATA_HUB_{name}": text}).name == text
        return
    (line,) = problems("", tmp_path, {f"STRATA_HUB_{name}": text})
    assert line.startswith(f"env STRATA_HUB_{name}: hub.{name.lower()}: {reason}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hub = 3", "strata.toml:1: hub: expected a table, found 3"),
        ("[hub]\nstore = 'x'", 'strata.toml:2: hub.store: expected a table, found "x"'),
        ("[hub]\nport = true", "strata.toml:2: hub.port: expected integer, found true"),
        ("[hub]\nports = [1,\n2,\n'x']", 'strata.toml:4: hub.ports: expected integer, found "x"'),
        (
            "[[hub.rules]]\nname='a'\n[[hub.rules]]\nname='b'\nlimit='c'",
            'strata.toml:5: hub.rules: expected integer, found "c"',
        ),
        ("[[hub.rules]]\nname='a'\nlimt=1", 'strata.toml:1: hub.rules: object contains unknown field "limt"'),
        ("[[hub.rules]]\nlimit=1", 'strata.toml:1: hub.rules: object missing required field "name"'),
        ('[hub]\n"a\\nb" = 1', 'strata.toml:2: hub."a\\nb": unknown key'),
        ("[hub]\nroot = 1", "strata.toml:2: hub.root: expected path, found 1"),
        ("[hub]\ntoken = 5", 'strata.toml:2: hub.token: expected string or { file = "path" }, found ***'),
        ("[hub]\ntoken = { fle = 'hunter2' }", "strata.toml:2: hub.token: expected string or"),
        ("[hub]\ntoken = ''", "strata.toml:2: hub.token: a secret cannot be empty"),
        ("[hub\n", "strata.toml:1:5: not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_line(tmp_path: Path, text: str, line: str) -> None:
    (found,) = problems(text, tmp_path)
    assert found.startswith(line)
    assert "hunter2" not in found


@pytest.mark.proves("Never again: an unknown section of a settings file was ignored")
def test_a_section_that_no_program_has_is_refused_and_those_of_others_are_not(tmp_path: Path) -> None:
    assert problems("[hub]\n[hubs]\nport = 1\n", tmp_path)[0] == (
        'strata.toml:2: hubs: unknown section (did you mean "hub"?)'
    )
    assert "unknown section (known: hub, agent, " in problems('port = 1\n"a b" = 2\n[hub]\n', tmp_path)[1]
    shared = "".join(f"[{name}]\n" for name in SECTIONS)
    assert problems(f"{shared}[limit]\n", tmp_path) == [
        f'strata.toml:{len(SECTIONS) + 1}: limit: unknown section (did you mean "limits"?)'
    ]


def test_a_file_that_cannot_be_read_is_reported_with_the_other_problems(tmp_path: Path) -> None:
    with pytest.raises(StrataError) as caught:
        load(Server, section="hub", file=tmp_path / "no.toml", environ={"STRATA_HUB_X": "1"}, flags={})
    first, second = caught.value.message.split("\n")
    assert first == f"{tmp_path}/no.toml: cannot read the settings file: No such file or directory"
    assert second.startswith("env STRATA_HUB_X: unknown variable")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b"[hub]\nname = '\xff'")
    with pytest.raises(StrataError, match="not UTF-8 text"):
        load(Server, section="hub", file=tmp_path / "s.toml", environ={}, flags={})


def test_a_secret_can_stay_in_its_own_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hunter2\n")
    token.chmod(0o600)
    by_file = loaded(f"[hub]\ntoken = {{ file = '{token}' }}", tmp_path=tmp_path)
    by_variable = loaded(environ={"STRATA_HUB_TOKEN_FILE": str(token)})
    assert by_file.token == by_variable.token == Secret("hunter2")
    assert "hunter2" not in repr(by_file)
    token.chmod(0o644)
    (line,) = problems("", tmp_path, {"STRATA_HUB_TOKEN_FILE": str(token)})
    assert line.startswith("env STRATA_HUB_TOKEN_FILE: hub.token: the secret file token can be read by group or others")


def test_a_secret_given_twice_in_the_environment_is_refused(tmp_path: Path) -> None:
    (line,) = problems("", tmp_path, {"STRATA_HUB_TOKEN": "a", "STRATA_HUB_TOKEN_FILE": "/nowhere"})[:1]
    assert line == "env STRATA_HUB_TOKEN_FILE: STRATA_HUB_TOKEN is set too; only one of them can be meant"


@pytest.mark.parametrize("text", ["[ 'hunter2'", "['hunter2', 5]", "{ a = 'hunter2' }"])
def test_secrets_in_a_list_are_not_shown_in_a_message(text: str) -> None:
    class Many(msgspec.Struct, frozen=True):
        tokens: list[Secret]

    with pytest.raises(StrataError) as caught:
        load(Many, section="x", file=None, environ={}, flags={"tokens": text, "nothing": "hunter2"})
    assert "hunter2" not in str(caught.value) + repr(caught.value.detail)


def test_flags_may_be_given_as_values_of_the_fields_type() -> None:
    server = loaded(flags={"mode": Mode.FAST, "root": Path("/x"), "token": Secret("t"), "ports": (1, 2), "debug": True})
    assert (server.mode, server.root, server.token, server.ports) == (Mode.FAST, Path("/x"), Secret("t"), (1, 2))
    assert server.debug is True


def test_a_required_setting_names_every_way_to_set_it() -> None:
    class Needs(msgspec.Struct, frozen=True):
        password: Secret

    with pytest.raises(StrataError) as caught:
        load(Needs, section="db", file=None, environ={}, flags={})
    assert caught.value.message == "db.password: required but not set (set it as STRATA_DB_PASSWORD or as a flag)"


def test_renamed_fields_are_known_by_their_new_names(tmp_path: Path) -> None:
    class Renamed(msgspec.Struct, frozen=True, rename="kebab"):
        pool_size: int = 1

    file = tmp_path / "s.toml"
    file.write_text("[x]\npool-size = 2")
    assert load(Renamed, section="x", file=file, environ={}, flags={}).pool_size == 2
    assert load(Renamed, section="x", file=file, environ={"STRATA_X_POOL_SIZE": "3"}, flags={}).pool_size == 3


class Ab(msgspec.Struct, frozen=True):
    c: int = 0


class A(msgspec.Struct, frozen=True):
    b_c: int = 0


class Colliding(msgspec.Struct, frozen=True):
    a: A = A()
    a_b: Ab = Ab()


class CollidingSecret(msgspec.Struct, frozen=True):
    token: Secret | None = None
    token_file: str = ""


class Lenient(msgspec.Struct, frozen=True):
    x: int = 0


class HoldsLenient(msgspec.Struct, frozen=True):
    many: list[Lenient] = msgspec.field(default_factory=list)


class HoldsUnknown(msgspec.Struct, frozen=True):
    thing: complex = 1j


class Endless(msgspec.Struct, frozen=True):
    inner: Endless | None = None


@pytest.mark.parametrize(
    ("kind", "section", "reason"),
    [
        (Colliding, "hub", "a.b_c and a_b.c would both be the environment variable STRATA_HUB_A_B_C"),
        (CollidingSecret, "hub", "STRATA_HUB_TOKEN_FILE"),
        (HoldsLenient, "hub", "Lenient, used in the setting many, must forbid unknown fields"),
        (HoldsUnknown, "hub", "a type that settings do not know"),
        (Endless, "hub", "contain themselves"),
        (Store, "two_words", "one lower-case word"),
    ],
)
def test_a_schema_that_could_not_be_checked_is_refused(kind: type[msgspec.Struct], section: str, reason: str) -> None:
    with pytest.raises(StrataError, match=reason) as caught:
        load(kind, section=section, file=None, environ={}, flags={})
    assert caught.value.code is Code.INTERNAL


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "port": st.tuples(*[st.none() | st.integers(0, 99)] * 3),
            "store.pool_size": st.tuples(*[st.none() | st.integers(1, 99)] * 3),
            "window.high": st.tuples(*[st.none() | st.integers(0, 99)] * 3),
        },
    )
)
def test_the_strongest_source_wins_for_each_setting_alone(
    tmp_path_factory: pytest.TempPathFactory, sources: dict[str, tuple[int | None, int | None, int | None]]
) -> None:
    written = "[hub]\n" + "".join(f"{name} = {file}\n" for name, (file, _, _) in sources.items() if file is not None)
    path = tmp_path_factory.mktemp("settings") / "s.toml"
    path.write_text(written)
    environ = {
        f"STRATA_HUB_{name.replace('.', '_').upper()}": str(env)
        for name, (_, env, _) in sources.items()
        if env is not None
    }
    flags = {name: flag for name, (_, _, flag) in sources.items()}
    server = load(Server, section="hub", file=path, environ=environ, flags=flags)
    found = {"port": server.port, "store.pool_size": server.store.pool_size, "window.high": server.window.high}
    for name, (file, env, flag) in sources.items():
        strongest = next((value for value in (flag, env, file) if value is not None), None)
        if strongest is not None:
            assert found[name] == strongest


def test_the_process_environment_is_read_when_none_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_HUB_PORT", "99")
    assert load(Server, section="hub", file=None, flags={}).port == 99


def test_no_color_is_set_by_anything_but_the_empty_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [no_color({}), no_color({"NO_COLOR": ""}), no_color({"NO_COLOR": "0"})] == [False, False, True]
    monkeypatch.setenv("NO_COLOR", "1")
    assert no_color()
