"""Kept rollouts and the playground, of a server without a hub and through one; with a real tokenizer."""

from __future__ import annotations

import asyncio
import html
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from strata.sdk.train import Datum, TrainingServer
from strata.train.grammar import CALL_START
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


QUESTION = "What is <b>1 + 1</b>?"
TRANSCRIPTS = (
    (1.0, (f'{CALL_START}{{"name": "add"}}', "the tool says 2", "It is 2.")),
    (0.0, ("<script>document.title = 'owned'</script>",)),
    (0.5, ("3",)),
)
"""Reward, and the answers to the question with what was given between them."""


def learn_transcripts(processes: Processes) -> str:
    tokenizer = train_tokenizer(400)
    data = []
    for reward, turns in TRANSCRIPTS:
        tokens, sampled = list(tokenizer(QUESTION)["input_ids"]), [0.0] * len(tokenizer(QUESTION)["input_ids"])
        for number, text in enumerate(turns):
            added = tokenizer(text)["input_ids"]
            tokens += added
            sampled += [float(number % 2 == 0)] * len(added)
        learned = sampled[1:]
        data.append(
            Datum(
                tokens[:-1],
                tokens[1:],
                weights=learned,
                advantages=[(reward - 0.5) * each for each in learned],
                logprobs=[-1.0 * each for each in learned],
                more={"reward": [reward]},
            )
        )
    with TrainingServer(processes.url, processes.key) as server:
        model = server.create_model("tiny", rank=4, user_metadata={"keep_rollouts": "true"})
        model.forward_backward(data, "importance_sampling").result()
        return model.model_id


def kept(http: httpx.Client, count: int = 1, **query: str) -> list[dict[str, object]]:
    """When they are there: nothing waits for the recorder."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        found: list[dict[str, object]] = http.get("/api/v1/rollouts", params=query).json()["rollouts"]
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {count} rollouts were kept")


def csrf(page: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page)
    assert found is not None, page[:500]
    return found[1]


def test_kept_rollouts_are_shown_token_by_token_to_their_owner_alone(folder: Path) -> None:
    with server_with_tokenizer(folder, api="strata.cli.serve.api_process") as processes, ExitStack() as stack:
        operator = {"X-Operator-Token": (processes.data / "operator.token").read_text().strip()}
        with processes.private() as private:
            made = private.post("/v1/keys", headers=operator, json={"name": "bob", "role": "researcher"})
        learn(processes, keep=False)
        model = learn(processes, keep=True)
        api = stack.enter_context(
            httpx.Client(base_url=processes.url, headers={"X-API-Key": processes.key}, timeout=180)
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
        nothing = {"rollouts": [], "total": 0, "kept": 0, "groups": []}
        for path in ("rollouts", f"rollouts?prompt={summary['prompt_id']}"):
            assert httpx.get(f"{processes.url}/api/v1/{path}", headers=bob).json() == nothing, path
        one = f"rollouts/{summary['rollout_id']}"
        for path in (one, f"{one}?prompt={summary['prompt_id']}", f"rollouts?model={model}"):
            assert httpx.get(f"{processes.url}/api/v1/{path}", headers=bob).status_code == 404, path

        browser = stack.enter_context(httpx.Client(base_url=processes.url, headers=HTML, timeout=180))
        assert browser.post("/login", data={"key": processes.key}, headers=SAME_ORIGIN).status_code == 303
        assert 'href="/rollouts"' in browser.get("/").text
        listed = browser.get("/rollouts").text
        (path,) = set(re.findall(r'href="(/rollouts/[^"?]+)"', listed))
        for by in ("gap", "sampler", "trainer"):
            shown = browser.get(f"{path}?by={by}")
            assert shown.status_code == 200, shown.text
            assert shown.text.count('class="tok level-') == 7 + 5, "each token, and the legend"
        versions = {each["version"] for each in tokens[3:]}
        assert (len(versions), {each["version"] for each in tokens[:3]}) == (1, {None}), "one save drew the answer"
        shown = browser.get(f"{path}?by=version")
        assert shown.text.count('class="tok band-0') == 4 + 1, "each sampled token, and the legend"
        assert browser.get(f"{path}?by=nothing").status_code == 400

        check_transcripts(api, browser, learn_transcripts(processes))
        checkpoint = check_playground(browser, processes)
        other = stack.enter_context(httpx.Client(base_url=processes.url, headers=HTML, timeout=180))
        assert other.post("/login", data={"key": bob["X-API-Key"]}, headers=SAME_ORIGIN).status_code == 303
        page = other.get("/playground").text
        fields = {"csrf": csrf(page), "model": checkpoint, "prompt": "a", "temperature": "1", "max_tokens": "5"}
        answered = other.post("/playground", data=fields, headers=SAME_ORIGIN).text
        assert (checkpoint in page, "no checkpoint" in answered) == (False, True), "it is alone its owner's"


def check_transcripts(api: httpx.Client, browser: httpx.Client, model: str) -> None:
    listed = kept(api, 3, model=model)
    assert [each["reward"] for each in listed] == [0.5, 0.0, 1.0], "the newest first"
    assert {each["prompt_text"] for each in listed} == {QUESTION}
    assert [each["answer_text"] for each in listed] == ["".join(turns) for _, turns in reversed(TRANSCRIPTS)]
    found = api.get("/api/v1/rollouts", params={"model": model, "reward_min": "0.6"}).json()
    (group,), (best,) = found["groups"], found["rollouts"]
    assert (group["reward_mean"], group["reward_spread"]) == (0.5, pytest.approx(statistics.pstdev([0.0, 0.5, 1.0])))
    assert (found["total"], found["kept"], best["reward"]) == (1, 4, 1.0)
    reply = api.get(f"/api/v1/rollouts/{best['rollout_id']}").json()
    assert [(each["kind"], each["calls_tool"]) for each in reply["turns"]] == [
        ("prompt", False), ("answer", True), ("given", False), ("answer", False),
    ]  # fmt: skip
    given = reply["turns"][2]
    between = reply["tokens"][given["begin"] : given["end"]]
    assert "".join(each["text"] for each in between) == "the tool says 2"
    assert {(each["sampler"], each["gap"]) for each in between} == {(None, None)}, "nobody sampled them"
    gaps = [each["gap"] for each in reply["tokens"] if each["gap"] is not None]
    assert (best["answer_tokens"], best["gap_max"]) == (len(gaps), pytest.approx(max(gaps)))

    query = f"model={model}&sort=lowest"
    for view in ("prompts", "all"):
        page = browser.get(f"/rollouts?{query}&view={view}").text
        assert "What is &lt;b&gt;1 + 1&lt;/b&gt;?" in page
        assert "&lt;script&gt;document" in page
        assert "<script>document" not in page
    assert "0.5</strong> ± 0.408" in browser.get(f"/rollouts?{query}").text
    assert "No rollout matches" in browser.get(f"/rollouts?{query}&least=7").text
    assert "is not a number" in browser.get(f"/rollouts?{query}&least=half").text
    check_neighbours(browser, f"/rollouts?{query}&signal=true")


def check_neighbours(browser: httpx.Client, path: str) -> None:
    """From the first of a list to its last, and back to the list."""
    page = browser.get(path).text
    opened = re.findall(r'href="(/rollouts/[^"]+)"', page)[0]
    for place in (1, 2, 3):
        page = browser.get(html.unescape(opened)).text
        assert f"{place} of 3" in page
        assert ('rel="prev"' in page, 'rel="next"' in page) == (place > 1, place < 3)
        following = re.findall(r'rel="next" href="([^"]+)"', page)
        opened = following[0] if following else ""
    names = re.findall(r"<h3>([^<]+) <span", page)
    assert names == ["Prompt", "Answer with a call of a tool", "Result of the tool", "Answer"]
    back = {unquote(html.unescape(each)) for each in re.findall(r'href="(/rollouts[?][^"]+)"', page)}
    assert path in back, "the way back keeps the filter"


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
