"""`python remote_client.py URL`: the `tinker` SDK as it is published, on a machine that has nothing of the server's.

Prints the text that the tokenizer of a model, and of a sampler, make of their own tokens, and the path of a checkpoint.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import tinker


def main(url: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model="tiny", rank=4)
    tokenizer = training.get_tokenizer()
    tokens = tokenizer.encode("Who asks twice gets the same answer twice.")
    path = training.save_state("one").result().path
    sampling = service.create_sampling_client(base_model="tiny")
    text = sampling.get_tokenizer().decode(tokens)
    print(
        json.dumps(
            {"text": text, "tokens": len(tokens), "path": path, "id": training.get_info().model_data.tokenizer_id}
        )
    )
    # With tinker 0.38 this wait may never end (docs/limits.md); the session ends all the same.
    with suppress(TimeoutError):
        service.close("success").result(timeout=10)


if __name__ == "__main__":
    main(sys.argv[1])
