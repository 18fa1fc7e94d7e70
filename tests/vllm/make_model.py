"""Makes a language model small enough for any machine: `make_model.py FOLDER`, with the vLLM environment's Python.

A Qwen3 of 2 layers, hidden 64, vocabulary 2,048, seeded random weights: it answers nonsense, at the speed of the server
around it. The tokenizer is a byte-level BPE trained on the standard library's own sources, which are always at hand;
its chat template is ChatML. Nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 2048
CONTEXT = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    sources = [str(path) for path in sorted(Path(os.__file__).parent.glob("[a-d]*.py"))]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train(
        sources,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    assert bpe.get_vocab_size() == VOCABULARY  # a shorter one would leave ids that cannot be decoded
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",  # noqa: S106 - a token of the text, not a secret
        pad_token="<|endoftext|>",  # noqa: S106 - likewise
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    words = tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
            bos_token_id=None,
        )
    ).to(torch.bfloat16)
    model.save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    main()
