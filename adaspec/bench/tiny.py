"""Tiny random models saved as folders, with byte-level tokenizers of their own: for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

TEXT = "the quick brown fox jumps over the lazy dog and runs along the river bank again and again " * 4
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save_model(folder: Path, *, words: int = 300, config: PreTrainedConfig | None = None, seed: int = 0) -> Path:
    """A tiny model (a Llama by default) with a byte-level BPE tokenizer of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES)).eval().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
