"""Tiny Hugging Face models with random weights: two layers, hidden size 32, a vocabulary of 48."""

import copy

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB = 48
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_FIELDS = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 8},
    "gemma": _LLAMA | {"head_dim": 8},
    "mistral": _LLAMA | {"sliding_window": None},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "gpt_neox": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    },
}
ARCHITECTURES = tuple(_FIELDS)


def tiny(kind, *, seed=0, **fields):
    """A causal LM in evaluation mode; its head is its own, as a tied one makes a random model repeat a token."""
    torch.manual_seed(seed)
    common = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False}
    config = CONFIG_MAPPING[kind](**(common | _FIELDS.get(kind, {}) | fields))
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def noisy(module, amount, seed):
    """A copy that often agrees with ``module``: every weight is moved by ``amount`` of its tensor's deviation."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        spread = parameter.std() if parameter.numel() > 1 else 0.0
        parameter += amount * spread * torch.randn(parameter.shape, generator=generator)
    return other


def greedy_loop(module, prompt, count, stop_ids=()):
    """The reference: a full forward per token, no cache."""
    text = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            text.append(int(module(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        if text[-1] in stop_ids:
            break
    return text[len(prompt) :]
