"""Models of the Hugging Face Hub: which files are pulled, what the cache holds, which files are pushed with which model
card, and the wording of the Hub's errors.

Everything goes through the Hub's own client library. It takes the address from `HF_ENDPOINT`, the token from `HF_TOKEN`
or `hf auth login`, and the cache's folder from `HF_HOME`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from strata.base.errors import Code, StrataError
from strata.train.peft.layers import ADAPTER, ADAPTER_CONFIG, TOKENIZER_FILES

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONFIG: Final = "config.json"
WEIGHTS: Final = "*.safetensors"
PULLED: Final = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt", "LICENSE*", "README.md")
"""What a server reads of a model, and nothing that is code or a second format of the weights."""
_CARD: Final = "README.md"
_WHO: Final = "HF_TOKEN or `hf auth login` says who you are"
_MODEL_FILES: Final = frozenset({CONFIG, "generation_config.json", "model.safetensors.index.json", _CARD})


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """The id on the Hub, or the path of the folder."""
    folder: Path
    size: int
    """Bytes on disk."""


class _BaseName(msgspec.Struct):
    base_model_name_or_path: str = ""


def pull(model_id: str, revision: str | None = None, folder: Path | None = None) -> Path:
    """Fetch a model into the cache of the Hub's client, or into a folder; returns where it is."""
    from huggingface_hub import snapshot_download

    with _hub_errors(model_id):
        fetched = snapshot_download(model_id, revision=revision, local_dir=folder, allow_patterns=list(PULLED))
    if not (Path(fetched) / CONFIG).is_file():
        raise StrataError(Code.INVALID, f"{model_id} has no {CONFIG}: it is no model of transformers")
    return Path(fetched)


def find_folder(model: str) -> Path | None:
    """The folder of a model: a local one, or that of an id in the cache. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(model).expanduser()
    if (folder / CONFIG).is_file():
        return folder
    try:
        config = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def list_cached() -> Sequence[StoredModel]:
    """The models in the cache, by their ids."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [(each.repo_id, each.size_on_disk) for each in repositories if each.repo_type == "model"]
    found = [(name, size, find_folder(name)) for name, size in sorted(models)]
    return [StoredModel(name=name, folder=folder, size=size) for name, size, folder in found if folder is not None]


def list_folder(folder: Path) -> Sequence[StoredModel]:
    """The model in a folder, or those in the folders in it."""
    candidates = [folder, *sorted(each for each in folder.iterdir() if each.is_dir())]
    return [
        StoredModel(name=str(each), folder=each, size=sum(file.stat().st_size for file in each.glob(WEIGHTS)))
        for each in candidates
        if (each / CONFIG).is_file()
    ]


def push(folder: Path, repository: str, *, private: bool, message: str, base: str = "") -> str:
    """Publish an adapter of PEFT or a full model, in one commit; returns its URL.

    Only the files of such a model are sent. `base` names the base model in the card that a folder without one gets.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files = publishable_files(folder)
    operations = [CommitOperationAdd(file.name, file) for file in files]
    if not (folder / _CARD).exists():
        card = _card(folder, base)
        operations.append(CommitOperationAdd(_CARD, card.encode()))
    api = HfApi()
    with _hub_errors(repository):
        return _commit(api, repository, operations, private=private, message=message)


def _commit(api: HfApi, repository: str, operations: Sequence[object], *, private: bool, message: str) -> str:
    created = api.create_repo(repository, private=private, exist_ok=True)
    commit = api.create_commit(created.repo_id, operations, commit_message=message)  # type: ignore[arg-type]
    return str(commit.commit_url)


def publishable_files(folder: Path) -> Sequence[Path]:
    """The files of an adapter, or of a full model; INVALID if the folder has neither."""
    if (folder / ADAPTER_CONFIG).is_file() and (folder / ADAPTER).is_file():
        names = {ADAPTER_CONFIG, ADAPTER, _CARD}
        weights: list[Path] = []
    elif (folder / CONFIG).is_file() and (weights := sorted(folder.glob(WEIGHTS))):
        names = set(_MODEL_FILES)
    else:
        raise StrataError(
            Code.INVALID,
            f"{folder} has neither a LoRA adapter nor a model",
            hint="strata weights export makes such a folder of a checkpoint",
        )
    named = sorted(folder / name for name in names | set(TOKENIZER_FILES))
    return [*(file for file in named if file.is_file()), *weights]


def _card(folder: Path, base: str) -> str:
    """Metadata by which the Hub shows what it is."""
    adapter = folder / ADAPTER_CONFIG
    if adapter.is_file():
        base = base or msgspec.json.decode(adapter.read_bytes(), type=_BaseName).base_model_name_or_path
    lines = ["library_name: peft" if adapter.is_file() else "library_name: transformers", "tags:", "- strata"]
    # A name that is no id of the Hub would be a dead link there.
    lines += [f"base_model: {base}"] if base.count("/") == 1 and not Path(base).is_absolute() else []
    what = "A LoRA adapter" if adapter.is_file() else "A model"
    return "\n".join(["---", *lines, "---", "", f"{what}, trained with Strata.", ""])


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Failures of the Hub and of the way to it as our one error."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise StrataError(Code.INVALID, f"{model!r} is not the id of a model: {error}") from None
    except errors.GatedRepoError:
        raise StrataError(
            Code.FORBIDDEN, f"{model} is for people who accepted its terms", hint="accept them on its page, then log in"
        ) from None
    except errors.RepositoryNotFoundError:
        raise StrataError(
            Code.NOT_FOUND,
            f"there is no model {model}, or it is not for you",
            hint=_WHO,
        ) from None
    except errors.RevisionNotFoundError:
        raise StrataError(Code.NOT_FOUND, f"{model} has no such revision") from None
    except errors.LocalEntryNotFoundError:
        raise StrataError(Code.UNAVAILABLE, f"{model} is not in the cache, and the Hub cannot be reached") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        code = {401: Code.UNAUTHENTICATED, 403: Code.FORBIDDEN}.get(status, Code.UNAVAILABLE)
        reason = " ".join(str(error.server_message or error).split())[:300]
        hint = _WHO if code is not Code.UNAVAILABLE else None
        raise StrataError(code, f"the Hub replied with status {status}: {reason}", hint=hint) from None
    except ValueError as error:
        # Of the client library, for a file whose name leads out of the folder.
        reason = " ".join(str(error).split())[:300]
        raise StrataError(Code.INVALID, f"{model} cannot be fetched: {reason}") from None
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        reason = " ".join(str(error).split())[:300]
        raise StrataError(Code.UNAVAILABLE, f"the Hub cannot be reached: {reason}") from None
