"""Ways in which data becomes code: none of them is in the source, and none is taken when the servers' modules run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import pytest

Tries = Callable[[int], None]
AREA: Final = "code"
SOURCE: Final = Path(__file__).parents[2] / "src" / "strata"
SHELLS: Final = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn")
_IMPORTS: Final = """
import importlib, pkgutil, sys
taken = []
def hook(event, arguments):
    if event in ("pickle.find_class", "os.system", "subprocess.Popen"):
        taken.append((event, str(arguments[:1])[:200]))
sys.addaudithook(hook)
import strata
left = []
for module in pkgutil.walk_packages(strata.__path__, "strata."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        left.append(f"{module.name}: {error}")
own = [each for each in taken if "strata" in each[1]]
print(len(sys.modules), own, left)
sys.exit(1 if own else 0)
"""


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    files = [file for file in sorted(SOURCE.rglob("*.py")) if "pb" not in file.parts]
    return [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]


@cache
def calls() -> list[tuple[Path, ast.Call, str]]:
    return [
        (file, node, ast.unparse(node.func))
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


@cache
def imported() -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [(file, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.append((file, node.module))
    return found


@pytest.mark.parametrize(
    "module", ["pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"]
)
@pytest.mark.attack(AREA, "a module that makes objects of bytes")
def test_nothing_that_unpickles_is_imported(module: str) -> None:
    assert [str(file) for file, name in imported() if name.split(".")[0] == module] == []


@pytest.mark.attack(AREA, "yaml")
def test_yaml_is_read_in_recipes_alone_and_makes_no_objects() -> None:
    read = [file.relative_to(file.parents[2]) for file, name in imported() if name.split(".")[0] in ("yaml", "ruamel")]
    assert [str(each) for each in read] == ["sdk/recipes/recipe.py"]
    assert {called for _, _, called in calls() if called.startswith("yaml.")} == {"yaml.safe_load"}


@pytest.mark.parametrize("name", ["eval", "exec", "compile", "__import__", "execfile"])
@pytest.mark.attack(AREA, "a text that is run")
def test_no_text_is_run(name: str) -> None:
    assert [f"{file}:{call.lineno}" for file, call, called in calls() if called == name] == []


@pytest.mark.attack(AREA, "shell=True and its relatives")
def test_no_shell_is_started() -> None:
    for file, call, called in calls():
        keywords = {each.arg: each.value for each in call.keywords}
        shell = keywords.get("shell")
        assert shell is None or (isinstance(shell, ast.Constant) and shell.value is False), f"{file}:{call.lineno}"
        assert called not in SHELLS, f"{file}:{call.lineno}"
        assert not called.endswith("create_subprocess_shell"), f"{file}:{call.lineno}"


@pytest.mark.attack(AREA, "torch.load, numpy with allow_pickle")
def test_no_tensor_is_unpickled() -> None:
    for file, call, called in calls():
        keywords = {each.arg: each.value for each in call.keywords}
        assert called not in ("torch.load", "np.load", "numpy.load", "pd.read_pickle"), f"{file}:{call.lineno}"
        pickled = keywords.get("allow_pickle")
        assert pickled is None or ast.unparse(pickled) == "False", f"{file}:{call.lineno}"


@pytest.mark.attack(AREA, "trust_remote_code, and models from elsewhere")
def test_code_that_a_model_brings_is_never_run_and_nothing_is_fetched(tries: Tries) -> None:
    for file, call, called in calls():
        keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
        if called.endswith((".from_pretrained", ".from_config")):
            assert keywords.get("trust_remote_code") == "False", f"{file}:{call.lineno}"
            tries(1)
        if called.endswith(".from_pretrained"):
            assert keywords.get("local_files_only") == "True", f"{file}:{call.lineno}"


@pytest.mark.attack(AREA, "an archive that unpacks itself")
def test_no_archive_is_extracted_by_its_own_words() -> None:
    named = ("extractall", "unpack_archive")
    for file, call, called in calls():
        last = called.rpartition(".")[2]
        keywords = {each.arg: ast.unparse(each.value) for each in call.keywords}
        guarded = keywords.get("filter") in ("'data'", '"data"')
        assert last not in named or guarded, f"{file}:{call.lineno}"


@pytest.mark.attack(AREA, "the modules of every server, imported under an audit hook")
def test_importing_everything_unpickles_nothing_and_starts_nothing_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
