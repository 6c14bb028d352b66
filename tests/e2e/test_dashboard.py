"""The dashboard in a real browser, against a running system: `strata up` with real jobs, a gang and a training server,
Chromium, Playwright and axe.

Every page of `PAGES` is opened at two widths and in two themes: no error in the console, no request to another origin,
no horizontal overflow, no serious finding of axe. Screenshots go to the folder in STRATA_SCREENSHOTS, or else to that
of the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Browser, BrowserContext, Page, expect

from strata.base.settings import process_environment
from strata.sdk.train import Datum, TrainingServer
from tests.e2e.browser import capture, chromium, follow_login_link, new_context, take_cookies, wait_until_drawn
from tests.e2e.machines import STRATA, Machine
from tests.shell.fleet_agent.waiting import eventually

pytestmark = pytest.mark.timeout(900)

HOSTILE: Final = "<img src=x onerror=document.title='owned'>"
PAGES: Final = {
    "overview": "/",
    "jobs": "/jobs",
    "jobs-none": "/jobs?q=nothing-is-called-so",
    "job-running": "/jobs/{long}",
    "job-failed": "/jobs/{broken}",
    "job-waiting": "/jobs/{huge}",
    "job-completed": "/jobs/{quick}?against={quick-2}",
    "job-hostile": "/jobs/{hostile}",
    "job-resumed": "/jobs/{kicked}",
    "search": "/search?q=quick",
    "hosts": "/hosts",
    "hosts-table": "/hosts?view=table",
    "host": "/hosts/{workbench}",
    "sweeps": "/sweeps",
    "sweep": "/sweeps/default/grid",
    "artifacts": "/artifacts",
    "events": "/events",
    "people": "/people",
    "gangs": "/gangs",
    "gang": "/gangs/{gang}",
    "training": "/training",
    "training-server": "/training/{tiny-server}",
    "rollouts": "/training/{tiny-server}/rollouts",
    "rollout": "/training/{tiny-server}/rollouts/{rollout}?by=sampler",
    "playground": "/training/{tiny-server}/playground",
    "artifact": "/artifacts/{model}",
    "login": "/login",
    "not-found": "/jobs/nothing",
}
"""By the name of the screenshot: what to open; names of jobs and hosts in braces become their ids."""
EMPTY_PAGES: Final = {
    "overview-empty": "/",
    "jobs-empty": "/jobs",
    "sweeps-empty": "/sweeps",
    "gangs-empty": "/gangs",
    "training-empty": "/training",
    "artifacts-empty": "/artifacts",
}
VISIBLE_S: Final = 1.0
"""From the hub's own time of an event until a page shows it."""
NOTE_WHEN_ARCHIVED: Final = """() => new MutationObserver((_, observer) => {
  if (!document.querySelector(".head").textContent.includes("archived")) return;
  window.archivedAt = Date.now();
  observer.disconnect();
}).observe(document.getElementById("content"), { childList: true, subtree: true, characterData: true })"""
MODEL_S: Final = 300.0
TOKENS: Final = list(range(3, 40))
OF_TENANT: Final = ("training-server", "rollouts", "rollout", "playground")
"""Pages that show a tenant its own work alone: they are opened as the one who trains."""

TRAINER: Final = """
import os, signal, time
from strata.fleet.trainer import hyper, new_checkpoint, output_folder, progress, report, resume_from

kind = hyper()["kind"]
print("trains as", kind, hyper().get("words", ""), flush=True)
if kind == "broken":
    print("loading the data", flush=True)
    raise ValueError("Input X contains NaN.")
if kind == "kicked" and resume_from() is None:
    with new_checkpoint("one") as folder:
        (folder / "state").write_text("1")
    time.sleep(3)
    os.kill(os.getpid(), signal.SIGKILL)
steps = 20000 if kind == "long" else 20
for step in range(steps):
    gain = step * hyper().get("rate", 0.1)
    report(step=step, loss=2.0 / (1 + gain), accuracy=1 - 1 / (2 + gain))
    progress((step + 1) / steps, f"step {step}")
    print(f"step {step} loss {2.0 / (1 + step):.4f}", flush=True)
    time.sleep(0.25 if kind == "long" else 0.01)
(output_folder() / "model.txt").write_text("weights")
"""
GANG_TRAINER: Final = """
import sys, time
from pathlib import Path
import strata.coord.worker as strata

FOLDER = Path(sys.argv[1])
with strata.join() as worker:
    worker.dataset("corpus", samples=40, shard_size=2)
    step = 0
    for epoch in worker.epochs(1):
        for shard in worker.shards("corpus", epoch):
            shard.done()
            step += 1
            worker.step(step)
            time.sleep(0.1)
        if worker.rank == 1:
            (FOLDER / "late").write_text(worker.worker_id)
            while not (FOLDER / "gate").exists():
                step += 1
                worker.step(step)
                time.sleep(0.2)
        worker.barrier("end-of-data", timeout_s=900)
"""
"""Two workers; the second one lets the first one wait at a barrier, and says who it is."""
SERVER: Final = """
[server]
poll_s = 0.3

[model]
path = "model"
name = "tiny"
"""
TOGETHER: Final = """
project = "together"
[trainers.gang]
command = ["python", "gang.py", "{folder}"]
directory = "."

[trainers.server]
command = ["strata", "serve", "train.toml"]
directory = "."

[[jobs]]
name = "pair"
model = "small"
trainer = "gang"
workers = 2

[[jobs]]
name = "tiny-server"
kind = "server"
model = "tiny"
trainer = "server"
"""
MANIFEST: Final = f"""
[trainers.default]
command = ["python", "train.py"]
directory = "."

[[jobs]]
name = "quick"
model = "small"
hyper = {{ kind = "quick", rate = 0.1 }}

[[jobs]]
name = "quick-2"
model = "small"
hyper = {{ kind = "quick", rate = 0.4 }}

[[jobs]]
name = "broken"
model = "small"
max_attempts = 1
hyper = {{ kind = "broken" }}

[[jobs]]
name = "huge"
model = "large"
min_cores = 512
hyper = {{ kind = "long" }}

[[jobs]]
name = "hostile"
model = "small"
hyper = {{ kind = "quick", words = "{HOSTILE}", "{HOSTILE}" = "{HOSTILE}" }}

[[jobs]]
name = "kicked"
model = "small"
hyper = {{ kind = "kicked" }}

[[sweeps]]
name = "grid"
model = "small"
hyper = {{ kind = "quick" }}
grid = {{ rate = [0.2, 0.3, 0.8] }}

[[jobs]]
name = "long"
after = ["kicked", "hostile", "grid"]
model = "small"
hyper = {{ kind = "long" }}
"""


@dataclass
class Opened:
    """A page, and what went wrong in it."""

    page: Page
    origin: str
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("console", lambda line: self._note(f"console: {line.text}") if line.type == "error" else None)
        self.page.on("pageerror", lambda error: self._note(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self._note(f"dialog: {dialog.message}"))
        self.page.on("request", self._on_request)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.origin, "data:")):
            self._note(f"request to {request.url}")

    def _note(self, problem: str) -> None:
        self.problems.append(problem)


@dataclass
class Watched:
    machine: Machine
    ids: dict[str, str]
    browser: Browser
    screenshots: Path
    cookies: list[Any]
    """Of the operator, with a researcher's rights."""
    folder: Path
    tenant: list[Any] = field(default_factory=list)
    """The cookies of the one who trains."""

    def context(
        self, size: str = "desktop", scheme: str = "light", *, cookies: list[Any] | None = None
    ) -> BrowserContext:
        return new_context(self.browser, size, scheme, cookies=self.cookies if cookies is None else cookies)

    def open(self, context: BrowserContext) -> Opened:
        opened = Opened(context.new_page(), self.machine.url)
        opened.watch()
        return opened

    def path(self, template: str) -> str:
        for name, job_id in self.ids.items():
            template = template.replace(f"{{{name}}}", job_id)
        return self.machine.url + template

    def capture(self, opened: Opened, name: str) -> None:
        capture(opened.page, self.screenshots / f"{name}.png")


def log_in(machine: Machine, browser: Browser, key: str = "") -> list[Any]:
    """With a key, or with the link that the command line prints; the cookies of the session."""
    if not key:
        return follow_login_link(browser, machine.says("dashboard").strip())
    context = browser.new_context()
    page = context.new_page()
    page.goto(machine.url)
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    return take_cookies(context, page)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = process_environment().get("STRATA_SCREENSHOTS", "")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, browser: Browser, screenshots: Path) -> Iterator[Watched]:
    """A machine with jobs that have ended, one that runs, one that no host may take, a gang that one of its workers
    holds up, and a training server that has trained."""
    folder = tmp_path_factory.mktemp("dashboard")
    machine = Machine(folder / "home", "workbench")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{machine.environ['PATH']}"
    # Gang, server and jobs at the same time, also on a machine with two cores.
    own = {"STRATA_AGENT_SLOTS": "4", "STRATA_AGENT_GRACE_S": "5", "OMP_NUM_THREADS": "1"}
    machine.environ = {**machine.environ, "PATH": programs, **own}
    together = folder / "together"
    together.mkdir()
    # It imports torch, which takes as long as all the rest of the start.
    making = subprocess.Popen([STRATA, "models", "tiny", str(together / "model")], env=machine.environ)
    try:
        machine.up()
        started = Watched(machine, {}, browser, screenshots, log_in(machine, browser), together)
        look_at(started, EMPTY_PAGES, "desktop", "light")
        start_gang_and_server(started, making)
        project = folder / "project"
        project.mkdir()
        (project / "train.py").write_text(TRAINER, encoding="utf-8")
        (project / "manifest.toml").write_text(MANIFEST, encoding="utf-8")
        machine.says("apply", "--no-describe", str(project / "manifest.toml"))
        machine.says("wait", "quick", "quick-2", "hostile", "kicked", "broken", status=100)
        started.ids = {row["job"]: row["id"] for row in machine.knows("list")}
        started.ids |= {row["host"]: row["id"] for row in machine.knows("workers")}
        started.ids["model"] = machine.knows("show", "quick")["artifact"]
        eventually(lambda: machine.knows("show", "long")["status"] == "running")
        train(started)
        eventually((started.folder / "late").exists, 120.0)
        started.ids["gang"] = read(started, "/v1/gangs")["gangs"][0]["job_id"]
        eventually(lambda: read(started, f"/v1/gang/{started.ids['gang']}")["barriers"])
        yield started
        # Its supervisor would go on with the long job otherwise.
        assert machine.down() == 0
    finally:
        making.kill()
        making.wait()
        machine.close()


def start_gang_and_server(watched: Watched, making: subprocess.Popen[bytes]) -> None:
    """`making` makes the base model."""
    machine, folder = watched.machine, watched.folder
    (folder / "gang.py").write_text(GANG_TRAINER, encoding="utf-8")
    (folder / "train.toml").write_text(SERVER, encoding="utf-8")
    (folder / "manifest.toml").write_text(TOGETHER.format(folder=folder), encoding="utf-8")
    assert making.wait(MODEL_S) == 0
    machine.says("apply", "--no-describe", str(folder / "manifest.toml"))


def train(watched: Watched) -> None:
    """Two models of one tenant, who then has something to look at."""
    machine = watched.machine
    eventually(lambda: machine.knows("show", "tiny-server")["serving"] == "serving", 240.0)
    key = machine.knows("keys", "create", "rita", "--role", "researcher", "--owner")["secret"]
    with TrainingServer(machine.url, key) as server:
        for rate in (1e-3, 1e-2):
            model = server.create_model("tiny", rank=4)
            for step in range(12):
                model.report(reward=step * rate)
                model.forward_backward([Datum(TOKENS[:-1], TOKENS[1:])])
                model.optim_step(learning_rate=rate).result()
            model.save("kept").result()
        keep_rollouts(watched, server, key)
    watched.tenant = log_in(machine, watched.browser, key)


def keep_rollouts(watched: Watched, server: TrainingServer, key: str) -> None:
    """A model that learns from its own samples, of the weights that drew them and of earlier ones."""
    model = server.create_model("tiny", rank=4, user_metadata={"keep_rollouts": "true"})
    drawn = model.sampler().result().sample(TOKENS, 3, max_tokens=40).result()
    for number, sample in enumerate(drawn):
        tokens, before = [*TOKENS, *sample.tokens], [0.0] * (len(TOKENS) - 1)
        advantages, logprobs = [number - 0.5] * len(sample.tokens), list(sample.logprobs)
        datum = Datum(
            tokens[:-1], tokens[1:], advantages=[*before, *advantages], logprobs=[*before, *logprobs],
            more={"reward": [float(number)]},
        )  # fmt: skip
        model.forward_backward([datum], "importance_sampling").result()
        if number:
            model.optim_step(learning_rate=1e-2).result()
    path = f"{watched.machine.url}/api/v1/rollouts?model={model.model_id}"
    kept: list[dict[str, Any]] = []

    def all_are_kept() -> bool:
        kept[:] = httpx.get(path, headers={"X-API-Key": key}, timeout=180).raise_for_status().json()["rollouts"]
        return len(kept) == len(drawn)

    eventually(all_are_kept)
    assert [each["source"] for each in kept] == ["stale", "same_weights", "same_weights"], "the newest first"
    assert all(each["gap_max"] < 1e-4 for each in kept[1:]), kept
    watched.ids["rollout"] = kept[0]["rollout_id"]


def read(watched: Watched, path: str) -> Any:
    """A reply of the public API to the one who has logged in."""
    cookies = {cookie["name"]: cookie["value"] for cookie in watched.cookies}
    return httpx.get(watched.machine.url + path, cookies=cookies, timeout=30).raise_for_status().json()


def look_at(watched: Watched, pages: dict[str, str], size: str, scheme: str) -> None:
    """Open each page, keep what it looks like, and check what can be checked without eyes."""
    contexts = {
        of_tenant: watched.context(size, scheme, cookies=watched.tenant if of_tenant else watched.cookies)
        for of_tenant in (False, True)
    }
    # Of what axe checks, only the contrast differs between the themes.
    rules = {"resultTypes": ["violations"], **({"runOnly": ["color-contrast"]} if scheme == "dark" else {})}
    found: dict[str, Any] = {}
    for name, template in pages.items():
        context = contexts[name in OF_TENANT]
        opened = watched.open(context)
        page = opened.page
        if name == "login":
            context.clear_cookies()
        page.goto(watched.path(template), wait_until="load")
        if name == "login":
            context.add_cookies(watched.cookies)
        wait_until_drawn(page)
        watched.capture(opened, f"{name}-{size}-{scheme}")
        if problems := find_problems(opened, rules):
            found[name] = [each for each in problems if name != "not-found" or "404" not in each]
        page.close()
    for context in contexts.values():
        context.close()
    assert {name: problems for name, problems in found.items() if problems} == {}


def find_problems(opened: Opened, rules: dict[str, Any]) -> list[str]:
    page, problems = opened.page, list(opened.problems)
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if wide > 0:
        problems.append(f"{wide} px wider than the screen")
    if page.evaluate("(top => top ? top.scrollHeight - top.clientHeight : 0)(document.querySelector('.top'))") > 0:
        problems.append("the bar at the top is cut off")
    if page.title() == "owned":
        problems.append("a script of a name was run")
    if page.locator("img").count():
        problems.append("a name became an element")
    violations = Axe().run(page, options=rules).response["violations"]
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    return problems + [f"axe {each['id']}: {each['nodes'][0]['html'][:200]}" for each in serious]


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ("desktop", "light"),
        ("phone", "dark"),
        ("desktop", "dark"),
        ("phone", "light"),
    ],
)
def test_every_page_is_clean_at_every_size_and_in_every_theme(watched: Watched, size: str, scheme: str) -> None:
    look_at(watched, PAGES, size, scheme)


def test_why_a_job_waits_is_answered_in_two_clicks(watched: Watched) -> None:
    context = watched.context()
    page = watched.open(context).page
    page.goto(watched.machine.url)
    page.get_by_role("link", name="Waiting jobs").click()
    page.get_by_role("link", name="huge", exact=True).click()
    section = page.get_by_role("region", name="Why it waits").first
    expect(section).to_contain_text("512")
    context.close()


def test_which_worker_holds_the_gang_up_is_answered_in_two_clicks(watched: Watched) -> None:
    context = watched.context()
    page = watched.open(context).page
    page.goto(watched.machine.url)
    page.get_by_role("link", name="Gangs", exact=True).click()
    page.get_by_role("link", name=watched.ids["gang"], exact=True).click()
    late = (watched.folder / "late").read_text()
    expect(page.locator("#held-up")).to_contain_text(f"1 of 2 arrived, waiting for {late} since")
    context.close()


def test_what_a_kill_has_cost_is_answered_in_one_click(watched: Watched) -> None:
    context = watched.context()
    page = watched.open(context).page
    page.goto(watched.machine.url)
    page.get_by_role("link", name="kicked", exact=True).click()
    cost = page.get_by_role("region", name="Interruptions")
    expect(cost.get_by_role("row")).to_have_count(2)
    expect(cost).to_contain_text("in attempt 1")
    expect(page.get_by_role("region", name="Where the time went")).to_contain_text("useful")
    context.close()


def test_which_run_was_best_is_answered_in_two_clicks(watched: Watched) -> None:
    context = watched.context()
    page = watched.open(context).page
    page.goto(watched.machine.url)
    page.get_by_role("link", name="Sweeps", exact=True).click()
    page.get_by_role("link", name="grid", exact=True).click()
    best = page.get_by_role("region", name="Best so far").locator(".best")
    expect(best.get_by_role("definition")).to_have_text(["0.8"])
    expect(page.locator("#trials tr[data-best]")).to_contain_text("0.8")
    context.close()


def test_trials_are_filtered_with_the_keyboard_and_the_table_follows(watched: Watched) -> None:
    context = watched.context()
    opened = watched.open(context)
    page = opened.page
    page.goto(watched.path("/sweeps/default/grid"))
    rows = page.locator("#trials tbody tr:visible")
    expect(rows).to_have_count(3)
    handle = page.get_by_role("slider", name="rate, upper end of the filter")
    handle.press("Home")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("0.2")
    expect(page.locator("#trials-shown")).to_have_text("1 of 3 match the filter")
    handle.press("Escape")
    expect(rows).to_have_count(3)
    assert opened.problems == []
    context.close()


def test_rollouts_are_filtered_and_leafed_through_with_the_keyboard(watched: Watched) -> None:
    context = watched.context(cookies=watched.tenant)
    opened = watched.open(context)
    page = opened.page
    page.goto(watched.path("/training/{tiny-server}/rollouts?sort=highest"))
    answers = page.locator("tbody tr:not(.group)")
    expect(answers).to_have_count(3)
    expect(page.locator("tr.group")).to_contain_text("reward 1 ± 0.816")
    least = page.get_by_label("Reward from")
    least.fill("1")
    least.press("Enter")
    expect(answers).to_have_count(2)
    answers.first.get_by_role("link").first.click()
    position = page.get_by_role("navigation", name="Rollouts of the list")
    expect(position).to_contain_text("1 of 2")
    page.keyboard.press("j")
    expect(position).to_contain_text("2 of 2")
    page.keyboard.press("k")
    expect(position).to_contain_text("1 of 2")
    page.get_by_role("searchbox").press("j")
    page.get_by_role("link", name="Rollouts", exact=True).click()
    expect(answers).to_have_count(2)
    assert opened.problems == []
    context.close()


def test_an_event_is_visible_within_a_second_and_a_dialog_asks_before_an_action(watched: Watched) -> None:
    context = watched.context()
    delays_s = [archive_and_look(watched, context, name) for name in ("quick-2", "quick")]
    print(f"the event was visible after {delays_s} s")
    # Once in two: on a busy machine a browser may have no processor for a moment.
    assert min(delays_s) <= VISIBLE_S
    context.close()


def archive_and_look(watched: Watched, context: BrowserContext, name: str) -> float:
    """Archive a job in one tab; how long after the hub's own time of the event another tab shows it."""
    opened, other = watched.open(context), watched.open(context)
    opened.page.goto(watched.path(f"/jobs/{{{name}}}"))
    expect(opened.page.locator("#connection[data-state=live]")).to_be_visible()
    opened.page.evaluate(NOTE_WHEN_ARCHIVED)
    other.page.goto(watched.path(f"/jobs/{{{name}}}"))
    other.page.get_by_role("button", name="Archive").click()
    dialog = other.page.get_by_role("dialog")
    expect(dialog).to_contain_text("out of lists")
    watched.capture(other, "dialog-desktop-light")
    dialog.get_by_role("button", name="Back").click()
    expect(dialog).to_have_count(0)
    other.page.get_by_role("button", name="Archive").click()
    other.page.get_by_role("dialog").get_by_role("button", name="Archive").click()
    expect(opened.page.locator(".head")).to_contain_text("archived")
    events = read(watched, f"/v1/events?before=newest&subject={watched.ids[name]}")["events"]
    (archived_s,) = [each["at_s"] for each in events if each["kind"] == "job.archived"]
    assert (opened.problems, other.problems) == ([], [])
    seen_s = opened.page.evaluate("window.archivedAt") / 1000
    opened.page.close()
    other.page.close()
    return float(seen_s - archived_s)


def test_a_log_is_followed_searched_and_led_to_its_error(watched: Watched) -> None:
    context = watched.context()
    opened = watched.open(context)
    page = opened.page
    page.goto(watched.path("/jobs/{long}"))
    log = page.locator(".log pre")
    lines = log.locator(".line").count()
    expect(log.locator(".line").nth(lines + 4)).to_be_attached()
    step = " ".join(log.locator(".line").nth(lines - 1).inner_text().split()[:2])
    page.get_by_role("searchbox", name="Find in the log").fill(f"{step} ")
    expect(log.locator("mark.current")).to_have_text(f"{step} ")
    page.goto(watched.path("/jobs/{broken}"))
    page.get_by_role("button", name="Next error").click()
    expect(log.locator(".error-line").first).to_be_in_viewport()
    expect(log.locator(".error-line").last).to_have_text("ValueError: Input X contains NaN.")
    assert opened.problems == []
    context.close()


def test_the_keyboard_reaches_the_search_and_what_it_finds(watched: Watched) -> None:
    context = watched.context()
    page = watched.open(context).page
    page.goto(watched.machine.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("quick")
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="quick", exact=True)).to_be_visible()
    context.close()


def test_pages_are_readable_and_actions_work_without_scripts(watched: Watched) -> None:
    context = watched.browser.new_context(java_script_enabled=False)
    context.add_cookies(watched.cookies)
    page = context.new_page()
    attempts = len(watched.machine.knows("show", "broken")["attempts"])
    page.goto(watched.path("/jobs/{broken}"))
    expect(page.locator(".log pre")).to_contain_text("Input X contains NaN.")
    page.get_by_role("button", name="Run again").click()
    expect(page.get_by_role("heading", name="Run broken again?")).to_be_visible()
    page.get_by_role("button", name="Run again").click()
    expect(page.get_by_role("heading", name="broken")).to_be_visible()
    eventually(lambda: len(watched.machine.knows("show", "broken")["attempts"]) == attempts + 1)
    context.close()


def test_a_checkpoint_is_tried_in_the_playground_without_scripts(watched: Watched) -> None:
    context = watched.browser.new_context(java_script_enabled=False)
    context.set_default_timeout(60_000)
    context.add_cookies(watched.tenant)
    page = context.new_page()
    page.goto(watched.path("/training/{tiny-server}"))
    page.get_by_role("link", name="Playground").click()
    checkpoint = page.locator("select[name=model] option[value$='/weights/kept']").first.get_attribute("value")
    page.locator("select[name=model]").select_option(checkpoint)
    page.locator("textarea[name=prompt]").fill("The quick brown fox")
    page.locator("select[name=form]").select_option("text")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_role("button", name="Sample").click()
    expect(page.get_by_role("heading", name="Answer")).to_be_visible()
    tokens = page.locator(".tokens .tok")
    assert 1 <= tokens.count() <= 12
    assert all("log probability" in (each.get_attribute("title") or "") for each in tokens.all())
    assert page.locator("select[name=model]").input_value() == checkpoint
    page.screenshot(path=watched.screenshots / "playground-answer.png", full_page=True)
    context.close()
