"""`python peft_loss.py MODEL ADAPTER ROWS [nf4]`: the loss per token of the answers, by transformers and PEFT.

With `nf4` bitsandbytes quantises the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer, BitsAndBytesConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM


def main(folder: str, adapter: str, rows: str, quantise: str = "") -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {}
    if quantise:
        config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True, bnb_4bit_quant_type=quantise, bnb_4bit_compute_dtype=torch.float32
        )
        options = {"quantization_config": config, "device_map": "cpu", "dtype": torch.float32}
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, **options), adapter).eval()
    total, count = 0.0, 0
    for line in Path(rows).read_text(encoding="utf-8").splitlines():
        user, assistant = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        before = tokenizer.encode(prompt, add_special_tokens=False)
        after = tokenizer.encode(f"{assistant['content']}<|im_end|>\n", add_special_tokens=False)
        tokens = torch.tensor([before + after])
        labels = torch.tensor([[-100] * len(before) + after])
        with torch.no_grad():
            # transformers' own loss: the mean over the labels.
            total += float(model(input_ids=tokens, labels=labels).loss) * len(after)
        count += len(after)
    print(total / count)


if __name__ == "__main__":
    main(*sys.argv[1:])
