"""What `strata init` makes of folders of many shapes: the script, the options, and that Strata reads all of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest

from strata.fleet.core.jobspec import JobSpec, TrainerSpec
from strata.fleet.core.manifest import JobManifest, parse_manifest
from strata.sdk.init.findings import FolderFile, FolderFindings, FolderListing, find_work, script_command
from strata.sdk.init.scripts import MAX_LINE, MAX_PARAMETERS, has_long_line, read_script
from strata.sdk.init.written_files import manifest_text

GUARD: Final = 'if __name__ == "__main__":\n    main()\n'
_OPTION: Final = re.compile(r"^# (\[.*\]|[A-Za-z_]+ = .*)$", re.MULTILINE)

Files = Mapping[str, str | bytes]


def found_in(files: Files, *, name: str = "project", size: int = 0) -> FolderFindings:
    contents = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    listed = tuple(FolderFile(path, len(content), content, whole=True) for path, content in contents.items())
    return find_work(FolderListing(name, listed, size))


def read(text: str) -> JobManifest:
    return parse_manifest(text, "manifest.toml").resolve()


def uncommented(text: str) -> str:
    return _OPTION.sub(r"\1", text)


def written(files: Files, **more: Any) -> tuple[TrainerSpec, JobSpec]:
    manifest = read(manifest_text(found_in(files, **more)))
    [job] = manifest.jobs.values()
    return manifest.trainers["default"], job


DEEP: Final = "(" * 150 + ")" * 150
SHAPES: Final[dict[str, Files]] = {
    "only train.py": {"train.py": "print(1)\n"},
    "a guard": {"fit.py": GUARD},
    "several scripts": {"main.py": GUARD, "eval.py": GUARD, "tools/convert.py": GUARD},
    "a package with a main": {"net/__main__.py": "run()\n", "net/__init__.py": ""},
    "a script in src": {"src/train.py": GUARD, "setup.py": GUARD},
    "the only script that does something": {"fit.py": "fit()\n", "model.py": "def fit(): ...\n"},
    "requirements": {"train.py": GUARD, "requirements.txt": "torch\n"},
    "a project": {"train.py": GUARD, "pyproject.toml": '[project]\nname = "x"\ndependencies = ["a"]\n'},
    "a project with extras": {
        "train.py": GUARD,
        "pyproject.toml": '[project]\ndependencies = ["a"]\n[project.optional-dependencies]\ngpu = []\n"a b" = []\n'
        "[dependency-groups]\ntrain = []\n",
        ".python-version": "3.12\n",
    },
    "a lock": {"train.py": GUARD, "pyproject.toml": "[project]\n", "uv.lock": "version = 1\n"},
    "conda": {"train.py": GUARD, "environment.yml": "dependencies: [torch]\n"},
    "argparse": {"train.py": 'p.add_argument("--lr", type=float, default=3e-4)\np.add_argument("out")\n' + GUARD},
    "click": {"train.py": '@click.option("--fast/--slow", default=True)\ndef main(): ...\n' + GUARD},
    "hyper": {"train.py": 'from strata.fleet.trainer import hyper as h\nv = h()\nv.get("rate", 0.1)\nv["depth"]\n'},
    "cuda": {"train.py": 'import torch\nmodel.to("cuda:0")\n' + GUARD},
    "torchrun": {"train.py": "import torch.distributed as dist\n" + GUARD},
    "a package of several processes": {"net/__main__.py": "import torch.distributed\n"},
    "all of it": {
        "train.py": "from strata.fleet.trainer import hyper\nimport accelerate\nfrom net import Net\n"
        'hyper().get("lr", 0.5)\np.add_argument("--n", default=[1, -2])\n' + GUARD,
        "net.py": "def f(x): return x.cuda()\n",
        "requirements.txt": "accelerate\n",
        "a.ipynb": "{}",
        "chat.jsonl": '{"messages": []}\n',
    },
    "no Python": {"train.py": "print 1\n"},
    "a null byte": {"train.py": b"a = '\0'\n"},
    "no UTF-8": {"train.py": b"x = '\xff'\n"},
    "a codec that is none of texts": {"train.py": b"# -*- coding: zip -*-\nx\n"},
    "nested deeply": {"train.py": f"x = {DEEP}\n" + "-" * 100_000 + "1\n"},
    "nested deeply in short lines": {"train.py": f"x = {DEEP}\n" + "(\n" * 5_000 + "1" + ")" * 1_000},
    "a long dotted name": {
        "train.py": "import " + "a.\\\n" * 60_000 + "a\n",
        "pyproject.toml": "a." * 100_000 + "a = 1",
    },
    "comparisons in each other": {"train.py": ("f(a==" * 90 + "1" + ")" * 90 + "\n") * 100},
    "a number of many digits": {"train.py": f"p.add_argument('--n', default={'9' * 5000})\n" + GUARD},
    "numbers that JSON lacks": {
        "train.py": f"p.add_argument('--a', default=1e999)\np.add_argument('--b', default={2**60})\n"
        "p.add_argument('--c', default=1j)\np.add_argument('--d', default=b'x')\n" + GUARD
    },
    "texts with quotes": {"train.py": "p.add_argument('--s', default='\"\\'\\\\ = [x] # ☃')\n" + GUARD},
    "texts with line ends": {"train.py": "p.add_argument('--s', default='a\\n[hosts.x]')\n" + GUARD},
    "flags with line ends": {"train.py": "p.add_argument('--a\\n[hosts.x]', default=1, required=True)\n" + GUARD},
    "many flags": {"train.py": "".join(f"p.add_argument('--f{n}', default={n})\n" for n in range(500)) + GUARD},
    "a name with quotes": {"a\"b'\\.py": GUARD, 'c" = 1.py': GUARD, "requirements.txt": "x"},
    "a name that looks like an option": {"-c.py": GUARD},
    "a name with spaces": {"my trainer/train it.py": GUARD},
    "no TOML": {"train.py": GUARD, "pyproject.toml": "[[[", ".python-version": "../../x\n"},
    "TOML nested deeply": {"train.py": GUARD, "pyproject.toml": "x = " + "[" * 50_000, "uv.lock": ""},
    "a project whose tables are none": {
        "train.py": GUARD,
        "pyproject.toml": 'project = 1\n"dependency-groups" = 2\n',
        "uv.lock": "",
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_strata_reads_the_manifest_of_every_folder(shape: str) -> None:
    trainer, job = written(SHAPES[shape])
    assert trainer.command[0] == "python"
    assert (trainer.directory, job.name, job.model) == (".", "project", "project")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_option_behind_a_comment_is_one(shape: str) -> None:
    text = manifest_text(found_in(SHAPES[shape], size=1 << 30))
    manifest = read(uncommented(text))
    assert len(_OPTION.findall(text)) >= 10
    spec = next(iter(manifest.jobs.values()))
    assert (spec.seed, spec.max_attempts, spec.needs.min_ram_gib) == (1, 1, 4)
    assert manifest.trainers["default"].env
    assert manifest.trainers["default"].data
    assert manifest.trainers["default"].environment
    assert manifest.hosts == {}


@pytest.mark.parametrize("name", ["", "..", "☃", "a b\n[hosts.x]", "-" * 300, "x" * 300, "été-2026", 'a"b'])
def test_a_folder_of_any_name_makes_a_job_with_a_name(name: str) -> None:
    text = manifest_text(found_in(SHAPES["all of it"], name=name))
    assert read(text).hosts == {}
    assert len(read(uncommented(text)).jobs) == 3  # one worker for each host, and two points of the sweep


@pytest.mark.parametrize(
    ("paths", "taken"),
    [
        (["eval.py", "main.py", "train.py", "a/train.py"], "train.py"),
        (["eval.py", "main.py", "pretrain.py"], "main.py"),
        (["eval.py", "pretrain.py", "a/finetune.py"], "pretrain.py"),
        (["zeta.py", "deep/alpha.py", "beta.py"], "beta.py"),
        (["tests/train.py", "test_train.py", "setup.py", "conftest.py", "a/b/run.py"], "a/b/run.py"),
        (["net/__main__.py", "plot.py"], "net/__main__.py"),
    ],
)
def test_of_several_scripts_one_is_taken_by_a_rule_and_the_others_are_named(paths: list[str], taken: str) -> None:
    found = found_in(dict.fromkeys(reversed(paths), GUARD))
    assert found.script is not None
    assert found.script.path == taken
    assert taken not in found.other_scripts
    assert all(path in manifest_text(found) for path in found.other_scripts)


def test_a_train_py_that_only_defines_things_comes_after_the_script_that_calls_it() -> None:
    found = found_in({"train.py": "def train(): ...\n", "main.py": "import train\n" + GUARD})
    assert found.script is not None
    assert found.script.path == "main.py"


def test_a_package_is_started_by_its_name_and_a_name_with_a_dash_is_no_option() -> None:
    assert script_command("net/sub/__main__.py") == ("python", "-m", "net.sub")
    assert script_command("__main__.py") == ("python", "__main__.py")
    assert script_command("no-name/__main__.py") == ("python", "no-name/__main__.py")
    assert script_command("-c.py") == ("python", "./-c.py")


@pytest.mark.parametrize(
    ("shape", "file", "python"),
    [
        ("requirements", "requirements.txt", ""),
        ("a project", "pyproject.toml", ""),
        ("a lock", "uv.lock", ""),
        ("a project with extras", "pyproject.toml", "3.12"),
    ],
)
def test_the_packages_come_from_the_file_that_strata_run_takes(shape: str, file: str, python: str) -> None:
    found = found_in(SHAPES[shape])
    trainer, _ = written(SHAPES[shape])
    assert trainer.environment is not None
    assert (trainer.environment.file, trainer.environment.python) == (file, "")
    assert found.packages is not None
    assert found.packages.python == python


def test_names_of_extras_and_groups_are_offered_if_they_can_be_names() -> None:
    text = uncommented(manifest_text(found_in(SHAPES["a project with extras"])))
    environment = read(text).trainers["default"].environment
    assert environment is not None
    assert (environment.extras, environment.groups, environment.python) == (("gpu",), ("train",), "3.12")


@pytest.mark.parametrize("shape", ["only train.py", "conda", "no TOML"])
def test_a_folder_that_lists_no_packages_has_no_environment(shape: str) -> None:
    assert written(SHAPES[shape])[0].environment is None


def test_files_of_other_package_managers_are_reported() -> None:
    assert found_in(SHAPES["conda"]).notes == ("hosts install no packages from environment.yml",)


@pytest.mark.parametrize(
    ("line", "needs", "offered"),
    [
        ("model.cuda()", {"min_gpus": 1}, {"min_vram_gib": 16.0}),
        ('d = torch.device("cuda")', {"min_gpus": 1}, {}),
        ('d = "cuda" if torch.cuda.is_available() else "cpu"', {"prefer_cuda": True}, {"min_gpus": 1}),
        ('p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")', {}, {"min_gpus": 1}),
        ('if device.type == "cuda": pass', {}, {}),
        ("# model.cuda()", {}, {}),
    ],
)
def test_a_script_that_uses_cuda_gets_a_gpu(line: str, needs: dict[str, Any], offered: dict[str, Any]) -> None:
    files = {"train.py": f"{line}\n{GUARD}"}
    _, job = written(files)
    defaults = {"min_gpus": 0, "prefer_cuda": False}
    assert {name: getattr(job.needs, name) for name in defaults} == defaults | needs
    options = next(iter(read(uncommented(manifest_text(found_in(files)))).jobs.values())).needs
    assert {name: getattr(options, name) for name in offered} == offered


def test_modules_of_the_folder_that_the_script_imports_count_and_others_do_not() -> None:
    files = {
        "src/train.py": "from .net import layers\nimport helpers\n" + GUARD,
        "src/net/__init__.py": "",
        "src/net/layers.py": "from ..loop import a\nfrom ...... import nowhere\n",
        "src/loop.py": "import train\nx.cuda()\n",
        "helpers.py": 'p.add_argument("--batch", default=8)\n',
        "other.py": "import torch.distributed\n",
    }
    script = found_in(files).script
    assert script is not None
    assert (script.uses_cuda, script.uses_distributed) == (True, False)
    assert [each.name for each in script.parameters] == ["batch"]


def test_flags_and_names_of_hyper_are_offered_with_their_defaults() -> None:
    text = """
from strata.fleet import trainer
from strata.fleet.trainer import hyper
settings = hyper()
settings.get("rate", 0.1); settings["depth"]; hyper().get("layers", (64, 32)); trainer.hyper()["plain"]
other.get("no", 1); settings.get(key, 2); settings.get("not a key!", 3)
parser.add_argument("-b", "--batch-size", type=int, default=-8)
parser.add_argument("--mixed", action="store_true")
parser.add_argument("--data", required=True)
parser.add_argument("corpus")
parser.add_argument("--rest", default=compute())
parser.add_argument("--version", action="version")
parser.add_argument("--local-rank", type=int, default=0)
"""
    script = read_script("train.py", text.encode())
    assert {each.name: each.value for each in script.parameters} == {
        "rate": 0.1,
        "depth": None,
        "layers": [64, 32],
        "plain": None,
        "batch_size": -8,
        "mixed": False,
        "data": None,
        "corpus": None,
        "rest": None,
    }
    assert [each.flag for each in script.parameters if each.required] == ["--data", "corpus"]
    written_text = manifest_text(found_in({"train.py": text + GUARD}))
    assert "requires arguments: add them to its command (--data, corpus)" in written_text
    assert "Parameters without a default: depth, plain, rest." in written_text
    job = next(iter(read(uncommented(written_text)).jobs.values()))
    assert job.hyper == {"rate": 0.1, "layers": [64, 32], "batch_size": -8, "mixed": False}


def test_flags_of_a_script_that_reads_no_hyper_come_with_a_word_about_it() -> None:
    assert "parser.set_defaults(**hyper())" in manifest_text(found_in(SHAPES["argparse"]))
    assert "parser.set_defaults" not in manifest_text(found_in(SHAPES["hyper"]))


def test_the_points_of_the_offered_sweep_are_other_jobs_than_the_first() -> None:
    manifest = read(uncommented(manifest_text(found_in(SHAPES["hyper"]))))
    assert [job.hyper for job in manifest.jobs.values()] == [{"rate": 0.1}, {"rate": 0.05}, {"rate": 0.2}]


def test_a_script_of_several_processes_is_offered_as_a_gang() -> None:
    manifest = read(uncommented(manifest_text(found_in(SHAPES["torchrun"]))))
    [job] = manifest.jobs.values()
    assert job.gang is not None
    assert job.gang.workers_per_host == 2
    [alone] = read(uncommented(manifest_text(found_in(SHAPES["a package of several processes"])))).jobs.values()
    assert alone.gang is None


def test_of_many_flags_some_are_kept() -> None:
    script = found_in(SHAPES["many flags"]).script
    assert script is not None
    assert len(script.parameters) == MAX_PARAMETERS


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ("no Python", "it is not Python as this version reads it"),
        ("a null byte", "it is not Python as this version reads it"),
        ("nested deeply", "it has a line of more than 2000 bytes"),
        ("a long dotted name", "it has a line of more than 2000 bytes"),
    ],
)
def test_a_script_that_cannot_be_read_is_taken_with_a_word_about_it(shape: str, problem: str) -> None:
    found = found_in(SHAPES[shape])
    assert found.script is not None
    assert found.script.problem == problem
    assert f"# train.py was not looked into: {problem}." in manifest_text(found)


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_line_is_measured_with_what_it_continues(end: bytes) -> None:
    assert not has_long_line((b"a" * MAX_LINE + end) * 3)
    assert has_long_line(b"a" * MAX_LINE + b"\\" + end + b"a")


def test_a_script_of_which_only_a_part_was_read_has_no_facts() -> None:
    assert read_script("train.py", b"x.cuda()", whole=False).problem == "it is too large to be read"


@pytest.mark.parametrize(
    ("text", "kind", "columns"),
    [
        ('{"messages": []}\n', "sft", ("messages",)),
        ('{"prompt": "a", "completion": "b", "id": 1}\n\n', "sft", ("prompt", "completion")),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "dpo", ("chosen", "rejected")),
        ('{"prompt": "a", "answer": "b"}\n', "grpo", ("prompt", "answer")),
        ('{"text": "a"}\n', "sft", ("text",)),
        ('[{"messages": []}, {"messages": []}]', "sft", ("messages",)),
    ],
)
def test_rows_are_recognised_by_their_columns(text: str, kind: str, columns: tuple[str, ...]) -> None:
    [rows] = found_in({"rows.jsonl": text}).rows
    assert (rows.kind, rows.columns) == (kind, columns)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"null\n",
        b"[]",
        b"[1]",
        b'{"messages": 3}\n',
        b'{"prompt": "a"}\n',
        b'{"messages": []}\n[1]\n',
        b'{"text": "a"}\n{"other": 1}\n',
        b'{"messages": []\n',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"text": ' + b"9" * 10_000 + b"}\n",
        b"\xff\xfe\x00",
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
def test_other_files_are_no_rows(name: str, content: bytes) -> None:
    assert found_in({name: content}).rows == ()


def test_of_a_file_that_was_read_in_part_the_last_line_does_not_count() -> None:
    content = b'{"text": "a"}\n{"text": "b'
    listing = FolderListing("x", (FolderFile("a.jsonl", 1 << 40, content, whole=False),))
    assert [rows.path for rows in find_work(listing).rows] == ["a.jsonl"]


def test_rows_to_evaluate_with_are_not_trained_on() -> None:
    chat, pairs = '{"messages": []}\n', '{"chosen": "a", "rejected": "b"}\n'
    found = found_in({"a.jsonl": pairs, "chat.jsonl": chat, "chat_test.jsonl": chat, "data/train-1.jsonl": chat})
    assert [rows.path for rows in found.rows] == ["data/train-1.jsonl", "chat.jsonl", "a.jsonl"]
    assert found.held_out == "chat_test.jsonl"
    alone = found_in({"test.jsonl": chat})
    assert ([rows.path for rows in alone.rows], alone.held_out) == (["test.jsonl"], "")


def test_models_and_adapters_are_recognised_by_their_settings() -> None:
    found = found_in(
        {
            "web/config.json": '{"port": 1}',
            "base/config.json": '{"model_type": "llama"}',
            "old/adapter_config.json": '{"peft_type": "LORA"}',
        }
    )
    assert (found.model, found.adapter) == ("base", "old")
    assert found_in({"config.json": '{"model_type": "llama"}'}).model == "."
    assert found_in({"config.json": "[" * 100_000}).model == ""
