"""Kept rollouts and the playground, of a server without a hub and through one; with a real tokenizer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from strata.sdk.train import Datum, TrainingServer
from strata.train.runner.model.tiny import train_tokenizer
from strata.web.pages.rollouts import gap_level, logprob_level
from tests.shell.fleet_http.running import Running
from tests.shell.fleet_http.test_servers import row, serve
from tests.shell.train_api.processes import Processes, serving
from tests.shell.web.browsing import HTML, SAME_ORIGIN, log_in
from tests.shell.web.test_training import folder

__all__ = ["folder"]

PROMPT = [40, 41, 42]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def server_with_tokenizer(folder: Path, lines: str = "", api: str = "strata.train.api") -> Iterator[Processes]:
    tokenizer = train_tokenizer(400)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder / "model"))
    with serving(folder, folder / "model", server=lines, pretended=True, api=api) as processes:
        yield processes


def learn(processes: Processes, *, keep: bool) -> str:
    """A model that learned from one answer; with a checkpoint to sample from."""
    with TrainingServer(processes.url, processes.key) as server:
        model = server.create_model("tiny", rank=4, user_metadata={"keep_rollouts": "true"} if keep else None)
        (drawn,) = model.sampler().result().sample(PROMPT, max_tokens=4).result()
        tokens, before = [*PROMPT, *drawn.tokens], [0.0] * (len(PROMPT) - 1)
        datum = Datum(
            tokens[:-1],
            tokens[1:],
            advantages=[*before, *[0.5] * 4],
            logprobs=[*before, *drawn.logprobs],
            more={"reward": [2.5]},
        )
        model.forward_backward([datum], "ppo").result()
        model.save("kept").result()
        return model.model_id


def kept(http: httpx.Client) -> list[dict[str, object]]:
    """When there is one: nothing waits for the recorder."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        found: list[dict[str, object]] = http.get("/api/v1/rollouts").json()["rollouts"]
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("no rollout was kept")


def csrf(html: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', html)
    assert found is not None, html[:500]
    return found[1]


def test_kept_rollouts_are_shown_token_by_token_to_their_owner_alone(folder: Path) -> None:
    with server_with_tokenizer(folder, api="strata.cli.serve.api_process") as processes, ExitStack() as stack:
        operator = {"X-Operator-Token": (processes.data / "operator.token").read_text().strip()}
        with processes.private() as private:
            made = private.post("/v1/keys", headers=operator, json={"name": "bob", "role": "researcher"})
        learn(processes, keep=False)
        model = learn(processes, keep=True)
        api = stack.enter_context(
            httpx.Client(base_url=processes.url, headers={"X-API-Key": processes.key}, timeout=60)
        )
        (summary,) = kept(api)
        assert (summary["model_id"], summary["reward"], summary["advantage"]) == (model, 2.5, 0.5)
        assert (summary["source"], summary["prompt_tokens"], summary["answer_tokens"]) == ("same_weights", 3, 4)
        reply = api.get(f"/api/v1/rollouts/{summary['rollout_id']}").json()
        tokens = reply["tokens"]
        assert [each["token"] for each in tokens[:3]] == PROMPT
        assert [each["sampler"] for each in tokens] == [None] * 3 + [-1.0] * 4
        assert all(each["gap"] == pytest.approx(abs(each["trainer"] + 1.0)) for each in tokens[3:])
        assert all(isinstance(each["text"], str) for each in tokens)

        bob = {"X-API-Key": made.json()["secret"]}
        assert httpx.get(f"{processes.url}/api/v1/rollouts", headers=bob).json() == {"rollouts": [], "total": 0}
        for path in (f"rollouts/{summary['rollout_id']}", f"rollouts?model={model}"):
            assert httpx.get(f"{processes.url}/api/v1/{path}", headers=bob).status_code == 404, path

        browser = stack.enter_context(httpx.Client(base_url=processes.url, headers=HTML, timeout=60))
        assert browser.post("/login", data={"key": processes.key}, headers=SAME_ORIGIN).status_code == 303
        assert 'href="/rollouts"' in browser.get("/").text
        listed = browser.get("/rollouts").text
        (path,) = set(re.findall(r'href="(/rollouts/[^"?]+)"', listed))
        for by in ("gap", "sampler", "trainer"):
            shown = browser.get(f"{path}?by={by}")
            assert shown.status_code == 200, shown.text
            assert shown.text.count('class="tok level-') == 7 + 5, "each token, and the legend"
        assert browser.get(f"{path}?by=nothing").status_code == 400

        checkpoint = check_playground(browser, processes)
        other = stack.enter_context(httpx.Client(base_url=processes.url, headers=HTML, timeout=60))
        assert other.post("/login", data={"key": bob["X-API-Key"]}, headers=SAME_ORIGIN).status_code == 303
        page = other.get("/playground").text
        fields = {"csrf": csrf(page), "model": checkpoint, "prompt": "a", "temperature": "1", "max_tokens": "5"}
        answered = other.post("/playground", data=fields, headers=SAME_ORIGIN).text
        assert (checkpoint in page, "no checkpoint" in answered) == (False, True), "it is alone its owner's"


def check_playground(browser: httpx.Client, processes: Processes) -> str:
    """The checkpoint that answered."""
    page = browser.get("/playground").text
    checkpoint = re.findall(r'<option value="(tinker://[^"]+/weights/kept)"', page)[0]
    fields = {"csrf": csrf(page), "model": checkpoint, "prompt": "a <b> c", "temperature": "1", "max_tokens": "5"}
    for form in ("chat", "text"):
        answered = browser.post("/playground", data={**fields, "form": form}, headers=SAME_ORIGIN)
        assert answered.status_code == 200, answered.text
        assert answered.text.count('title="log probability -1"') == 5
        assert "a &lt;b&gt; c</textarea>" in answered.text, "the prompt stays, escaped"
        assert f'value="{checkpoint}" selected' in answered.text
    for wrong, words in (
        ({"temperature": "hot"}, "Temperature: a number from 0 to 2"),
        ({"max_tokens": "100000"}, "Max tokens: a number from 1 to 1024"),
        ({"prompt": ""}, "Type a prompt"),
        ({"model": "tinker://nobody/weights/kept"}, "no checkpoint"),
    ):
        refused = browser.post("/playground", data={**fields, **wrong}, headers=SAME_ORIGIN)
        assert (refused.status_code, words in refused.text) == (200, True), (wrong, refused.text[-3000:])
    assert browser.post("/playground", data={**fields, "csrf": "0" * 64}, headers=SAME_ORIGIN).status_code == 403
    tenants = httpx.get(f"{processes.url}/api/v1/activity", headers={"X-API-Key": processes.key}).json()
    assert "sample" in {each["kind"] for each in tenants["operations"]}, "as operations of the tenant"
    return str(checkpoint)


async def test_rollouts_and_playground_are_there_through_a_hub(site: Running, folder: Path) -> None:
    job = await serve(site, path=folder / "data" / "run" / "api")
    key = site.hub.context.front_key(job, (await row(site, job)).epoch)
    with ExitStack() as stack:
        starting = server_with_tokenizer(folder, f'front_key = "{key}"')
        await asyncio.to_thread(stack.enter_context, starting)
        anna, vera = await log_in(site, "researcher", "anna"), await log_in(site, "viewer")
        assert "No rollout is kept" in await anna.shows(f"/training/{job}/rollouts")
        assert (await anna.get(f"/training/{job}/rollouts/session:train:0:1:0")).status_code == 404
        page = await anna.shows(f"/training/{job}/playground")
        assert '<option value="tiny" selected>tiny (base)' in page
        fields = {"model": "tiny", "prompt": "hello", "temperature": "1", "max_tokens": "3", "form": "text"}
        reply = await anna.post(f"/training/{job}/playground", **fields)
        assert (reply.status_code, reply.text.count('title="log probability -1"')) == (200, 3), reply.text[-3000:]
        missing = await anna.post(f"/training/{job}/playground", **{**fields, "model": "tinker://a/weights/b"})
        assert "no checkpoint" in missing.text, re.findall(r'role="alert">([^<]*)', missing.text)
        for path in ("playground", "rollouts"):
            assert (await vera.get(f"/training/{job}/{path}")).status_code == 403, path


def test_colours_have_five_levels() -> None:
    assert [gap_level(gap) for gap in (0.0, 1e-4, 5e-3, 0.05, 3.0)] == [0, 1, 2, 3, 4]
    assert [logprob_level(value) for value in (-0.01, -0.5, -2.0, -3.0, -9.0)] == [0, 1, 2, 3, 4]
