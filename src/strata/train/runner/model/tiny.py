"""Makes small random models with a tokenizer and a chat template: families, default sizes (2 layers, 64 hidden, 512
tokens), and the text that trains the tokenizer.

Nothing is downloaded: the weights are drawn from a seed and the tokenizer is trained on a text that is in this file.
The same arguments give the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from strata.base.errors import Code, StrataError

Family = Literal["llama", "qwen3", "qwen3_moe"]

BYTES: Final = 256
END: Final = "<|endoftext|>"
PAD: Final = "<|pad|>"
SPECIAL: Final = (END, PAD, "<|im_start|>", "<|im_end|>")
SMALLEST_VOCABULARY: Final = BYTES + len(SPECIAL)
HEAD: Final = 32
"""Dimensions of an attention head: the fewest that serving engines take."""

CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: Final = (
    "A model learns what it is shown, and nothing else.",
    "The first step is the hardest one; the second is only the next.",
    "What was written down can be read again, and what was only said is gone.",
    "One, two, three, four, five, six, seven, eight, nine, ten.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "The question is not whether it fails, but what is left when it does.",
    "Who asks twice gets the same answer twice.",
    "A small thing that works is worth more than a large thing that will.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9, sums: 1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8, 8 + 8 = 16.",
)


class TinyModel(msgspec.Struct, frozen=True, kw_only=True):
    family: Family = "llama"
    layers: int = 2
    hidden: int = 64
    vocabulary: int = 512
    seed: int = 0
    context: int = 2048
    experts: int = 4
    """Experts of a mixture: how many, of which two are used for each token."""

    def __post_init__(self) -> None:
        if self.hidden < HEAD or self.hidden % HEAD:
            raise StrataError(Code.INVALID, f"hidden must be a multiple of {HEAD}, not {self.hidden}")
        if self.vocabulary < SMALLEST_VOCABULARY:
            raise StrataError(Code.INVALID, f"vocab must be at least {SMALLEST_VOCABULARY}: every byte is a token")
        if min(self.layers, self.context, self.experts) < 1:
            raise StrataError(Code.INVALID, "layers, context and experts must be at least 1")


def make(folder: Path, tiny: TinyModel) -> int:
    """Write the model and its tokenizer into `folder`; returns the number of parameters."""
    if folder.exists() and any(folder.iterdir()):
        raise StrataError(Code.CONFLICT, f"{folder} is not empty")
    tokenizer = train_tokenizer(tiny.vocabulary)
    # The seed is global to the process: restore it, because other code may depend on it.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            _config(tiny), dtype=torch.float32, trust_remote_code=False
        )
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return sum(parameter.numel() for parameter in model.parameters())


def train_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most so many tokens: there is a token for every byte, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    names = {"eos_token": END, "bos_token": END, "pad_token": PAD, "chat_template": CHAT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)  # type: ignore[no-untyped-call]


def _config(tiny: TinyModel) -> PreTrainedConfig:
    heads = tiny.hidden // HEAD
    shape: dict[str, Any] = {
        "vocab_size": tiny.vocabulary,
        "hidden_size": tiny.hidden,
        "intermediate_size": 2 * tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 2, 1),
        "head_dim": HEAD,
        "max_position_embeddings": tiny.context,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    match tiny.family:
        case "llama":
            return LlamaConfig(**shape)
        case "qwen3":
            return Qwen3Config(**shape)
        case "qwen3_moe":
            used = min(2, tiny.experts)
            return Qwen3MoeConfig(
                **shape, num_experts=tiny.experts, num_experts_per_tok=used, moe_intermediate_size=tiny.hidden
            )
