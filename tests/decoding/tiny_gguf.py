"""Tiny models with random weights, and the GGUF files that hold them, written with the gguf package."""

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from transformers import AutoConfig, AutoModelForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
PRE = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16


def vocabulary():
    """All bytes in their printable form, three merges, the special tokens and an unused entry."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(rest))]
    tokens = [*letters, "th", "the", "Ġthe", *SPECIAL, "[PAD]"]
    kinds = [1] * (len(letters) + 3) + [3, 3, 3, 4, 5]
    return tokens, kinds, ["t h", "th e", "Ġ the"]


def random_model(architecture, tied=True):
    torch.manual_seed(0)
    config = {
        "vocab_size": len(vocabulary()[0]),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


def gguf_name(name):
    if name in TOP:
        return TOP[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, part = name.split(".", 3)
    stem, _, kind = part.rpartition(".")
    return f"blk.{layer}.{PARTS[stem]}.{kind}"


def permuted(name, array):
    """What llama.cpp does to the q and k projections of a llama, in its own words."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return array
    return array.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, model, kind=Kind.F32, skip="", extra=None, pre=None):
    architecture = model.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, kinds, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or PRE[architecture])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, value in model.state_dict().items():
        if name == skip or (name == "lm_head.weight" and model.config.tie_word_embeddings):
            continue
        array = value.numpy()
        array = permuted(name, array) if architecture == "llama" else array
        chosen = kind if array.ndim > 1 else Kind.F32
        writer.add_tensor(gguf_name(name), quantize(array, chosen), raw_dtype=chosen)
    for name in extra or []:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
