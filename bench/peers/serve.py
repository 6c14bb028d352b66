"""TuFT's server on a machine without a GPU. Imports nothing of Strata: it runs in an environment that has TuFT alone.

Its backend `hf` is plain PyTorch, but asks Ray for a GPU and CUDA for its peak of memory. Ray is told of a GPU that
does not exist, and the question for the peak does nothing.
"""

from __future__ import annotations

import ray  # type: ignore[import-not-found]
from tuft.cli import main  # type: ignore[import-not-found]


def answer_without_cuda() -> None:
    """In each process that Ray starts."""
    import torch

    torch.cuda.reset_peak_memory_stats = lambda *_: None


if __name__ == "__main__":
    hook = {"worker_process_setup_hook": answer_without_cuda}
    ray.init(
        num_cpus=2,
        num_gpus=1,
        include_dashboard=False,
        runtime_env=hook,
        logging_level="error",
        # The name of the machine has an address that this namespace does not have.
        _node_ip_address="127.0.0.1",
    )
    main()
