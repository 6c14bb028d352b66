"""Trains a classifier of scikit-learn on a data set that ships with it. One job is one model in one mode.

Mode `oracle` sees the data whole. Mode `realistic` sees what a sensor network would send: some values are missing.
Trees take that as it is; a neural network does not, unless it is told how to fill the gaps (`impute`).

    python train.py gbt oracle --max_iter 50        by hand
    python train.py --describe                      the parameters as JSON Schema

Under a Strata agent all of that comes from the job, and the results go to its output.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC

from strata.fleet.trainer import (
    assigned,
    describe_argparse,
    handle_describe,
    hyper,
    new_checkpoint,
    output_folder,
    progress,
    report,
    resume_from,
)

MODELS = ("gbt", "mlp", "forest", "logistic", "neighbours", "bayes", "svm")
MODES = ("oracle", "realistic")
MISSING = 0.1
"""The share of values that a realistic sensor loses."""


@dataclass(frozen=True)
class Split:
    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS, nargs="?")
    parser.add_argument("mode", choices=MODES, nargs="?")
    parser.add_argument("--learning_rate", type=float, default=0.1, help="of gbt and mlp")
    parser.add_argument("--max_iter", type=int, default=60, help="boosting rounds or epochs")
    parser.add_argument("--max_depth", type=int, default=4, help="of a tree")
    parser.add_argument("--hidden", type=int, default=32, help="width of the mlp's hidden layer")
    parser.add_argument("--neighbours", type=int, default=7)
    parser.add_argument("--impute", choices=["none", "mean", "median"], default="none", help="how to fill gaps")
    parser.add_argument("--checkpoint_every", type=int, default=10, help="epochs of the mlp")
    return parser


def load(mode: str, impute: str, seed: int) -> Split:
    x, y = load_breast_cancer(return_X_y=True)
    if mode == "realistic":
        x = np.where(np.random.default_rng(seed).random(x.shape) < MISSING, np.nan, x)
    if impute != "none":
        x = SimpleImputer(strategy=impute).fit_transform(x)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.3, random_state=seed, stratify=y)
    centre, spread = np.nanmean(train_x, axis=0), np.nanstd(train_x, axis=0)
    return Split((train_x - centre) / spread, train_y, (test_x - centre) / spread, test_y)


def boost(data: Split, given: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """Grow the trees one by one, so that every round can be watched."""
    model = HistGradientBoostingClassifier(
        learning_rate=given["learning_rate"],
        max_depth=given["max_depth"],
        max_iter=1,
        warm_start=True,
        random_state=given["seed"],
        early_stopping=False,
    )
    for step in range(1, given["max_iter"] + 1):
        model.set_params(max_iter=step)
        model.fit(data.x, data.y)
        report(step=step, loss=log_loss(data.test_y, model.predict_proba(data.test_x)))
        progress(step / given["max_iter"])
    trees = {f"tree_{n:04}": grown[0].nodes for n, grown in enumerate(model._predictors)}
    return model, trees | {"baseline": np.asarray(model._baseline_prediction)}


def learn(data: Split, given: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """One epoch after the other, with checkpoints. The order of an epoch follows from its number, so that a run which
    goes on somewhere else sees what it would have seen here."""
    model = MLPClassifier(
        hidden_layer_sizes=(given["hidden"],),
        solver="sgd",
        momentum=0.0,
        nesterovs_momentum=False,
        learning_rate_init=given["learning_rate"],
        batch_size=32,
        shuffle=False,
        random_state=given["seed"],
    )
    first = start_or_resume(model, data)
    for epoch in range(first, given["max_iter"] + 1):
        order = np.random.default_rng([given["seed"], epoch]).permutation(len(data.y))
        model.partial_fit(data.x[order], data.y[order], classes=np.unique(data.y))
        report(step=epoch, loss=log_loss(data.test_y, model.predict_proba(data.test_x)))
        progress(epoch / given["max_iter"])
        if epoch % given["checkpoint_every"] == 0 and epoch < given["max_iter"]:
            with new_checkpoint(f"epoch-{epoch:06}") as folder:
                np.savez(folder / "weights.npz", epoch=epoch, **weights(model))
    return model, weights(model)


def start_or_resume(model: MLPClassifier, data: Split) -> int:
    """The epoch to begin with."""
    found = resume_from()
    if found is None:
        return 1
    # A first pass over one row makes the arrays, which are then overwritten.
    model.partial_fit(data.x[:1], data.y[:1], classes=np.unique(data.y))
    with np.load(found / "weights.npz", allow_pickle=False) as saved:
        for name, array in weights(model).items():
            array[...] = saved[name]
        epoch = int(saved["epoch"])
    print(f"going on after epoch {epoch}", file=sys.stderr, flush=True)
    return epoch + 1


def weights(model: MLPClassifier) -> dict[str, np.ndarray]:
    layers = zip(model.coefs_, model.intercepts_, strict=True)
    return {f"{kind}_{n}": array for n, pair in enumerate(layers) for kind, array in zip("wb", pair, strict=True)}


def fit(name: str, data: Split, given: dict[str, Any]) -> tuple[Any, dict[str, np.ndarray]]:
    """The models that have nothing to watch."""
    seed = given["seed"]
    models = {
        "forest": lambda: RandomForestClassifier(given["max_iter"], max_depth=given["max_depth"], random_state=seed),
        "logistic": lambda: LogisticRegression(max_iter=1000),
        "neighbours": lambda: KNeighborsClassifier(given["neighbours"]),
        "bayes": GaussianNB,
        "svm": lambda: SVC(probability=True, random_state=seed),
    }
    model = models[name]().fit(data.x, data.y)
    return model, {"test_probability": model.predict_proba(data.test_x)[:, 1]}


def main() -> None:
    parser = arguments()
    handle_describe(describe_argparse(parser, skip=("model", "mode")))
    job = assigned()
    parser.set_defaults(model=job.model or "gbt", mode=job.mode or "oracle", **hyper())
    options = vars(parser.parse_args()) | {"seed": job.seed}
    name, mode = options["model"], options["mode"]
    data = load(mode, options["impute"], job.seed)
    train = {"gbt": boost, "mlp": learn}.get(name) or (lambda data, given: fit(name, data, given))
    model, arrays = train(data, options)
    chance = model.predict_proba(data.test_x)[:, 1]
    metrics = {
        "accuracy": float(accuracy_score(data.test_y, chance > 0.5)),
        "auc": float(roc_auc_score(data.test_y, chance)),
        "loss": float(log_loss(data.test_y, chance)),
    }
    report(**{f"test_{metric}": value for metric, value in metrics.items()})
    write(output_folder(), arrays, {"model": name, "mode": mode, "metrics": metrics, "hyper": options})
    print(f"{name}-{mode}: " + "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))


def write(folder: Path, arrays: dict[str, np.ndarray], card: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "model.npz", **arrays)
    (folder / "card.json").write_text(json.dumps(card, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
