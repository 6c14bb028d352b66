"""`strata mirror --server`: TensorBoard reads the metrics that the clients of a training server got."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.cli.main import run
from strata.sdk.train import Datum, TrainingServer
from tests.shell.train_api.processes import serving
from tests.support.tracked import scalars

TOKENS = list(range(20))


def test_the_metrics_of_a_model_are_mirrored_each_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(tmp_path_factory.mktemp("t"))
    with serving(folder, Path("pretended"), pretended=True) as processes:
        words = ["mirror", "--once", "--server", str(folder / "strata.toml"), "--to", f"tensorboard:{folder / 'runs'}"]
        words += ["--folder", str(folder / "records")]
        losses: list[float] = []
        with TrainingServer(processes.url, processes.key) as server:
            model = server.create_model("tiny", rank=4)
            for step in range(4):
                done = model.forward_backward([Datum(TOKENS[:-1], TOKENS[1:])]).result()
                losses.append(done.metrics["loss:sum"])
                model.optim_step(learning_rate=1e-3).result()
                if step % 2:
                    assert run(words) == 0
            assert run(words) == 0
        found = scalars(folder / "runs", "loss:sum")
        assert [step for step, _ in found] == [0, 1, 2, 3]
        assert [value for _, value in found] == pytest.approx(losses, rel=1e-5)
