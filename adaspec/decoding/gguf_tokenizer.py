"""The tokenizer of a GGUF file as the files that ``AutoTokenizer`` loads: byte-level BPE, as the model was trained.

A GGUF names its way of cutting text into words (``tokenizer.ggml.pre``) but does not hold it, so each supported name
is spelt out here after the original ``tokenizer.json``. (Transformers' own GGUF loading leaves out SmolLM2's single
digits and Qwen's NFC, so some texts get other tokens there than the model was trained on.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type
ADDED = {UNKNOWN, CONTROL, USER_DEFINED}  # never cut, and never the outcome of a merge
GPT2 = {"gpt-2", "gpt2", "mpt", "olmo"}
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"}
QWEN2 = {"qwen2", "deepseek-r1-qwen"}
LLAMA3 = {"llama3", "llama-v3", "llama-bpe"}
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDINGS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>"}
Value = TypeVar("Value")
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids of bos, eos, pad and unk, as far as the file names them."""
    found = {role: _token_id(metadata, key) for role, key in ROLES.items()}
    return {role: token for role, token in found.items() if token is not None}


def _token_id(metadata: Mapping[str, Any], key: str) -> int | None:
    name, size = f"tokenizer.ggml.{key}_token_id", len(metadata["tokenizer.ggml.tokens"])
    token = metadata.get(name)
    if token is not None and not (isinstance(token, int) and 0 <= token < size):
        raise ValueError(f"is broken: {name} = {token!r}, its vocabulary has {size} tokens")
    return token


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every token that ends a text: the file's eos, eot and eom, and the control tokens that end a turn or a text.

    A chat model ends a turn with one token and a document with another, and a GGUF names only one of them as eos.
    """
    named = [_token_id(metadata, key) for key in ("eos", "eot", "eom")]
    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"])
    ending = [index for index, (text, kind) in enumerate(kinds) if kind == CONTROL and text in ENDINGS]
    return list(dict.fromkeys([token for token in named if token is not None] + ending))


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and, when there is one, ``chat_template.jinja``.

    Raises:
        ValueError: another tokenizer than byte-level BPE, or a way of cutting words that is not known here.
    """
    text = build_tokenizer(metadata).to_str(pretty=True)  # its own save tells a full disk as a bare Exception
    (folder / "tokenizer.json").write_text(text, encoding="utf-8", newline="")
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {f"{role}_token": tokens[index] for role, index in special_ids(metadata).items()}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    architecture = metadata["general.architecture"]
    config["model_max_length"] = metadata[f"{architecture}.context_length"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The fast tokenizer; unused entries of the vocabulary are left out, as they are in the original files."""
    family, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "missing"))
    if family != "gpt2":
        raise ValueError(f"has a tokenizer of kind {family!r}, only 'gpt2' (byte-level BPE) can be converted")
    splitter = _splitter(pre)
    tokens, kinds = _listed(metadata, "tokens", str), _listed(metadata, "token_type", int)
    if len(tokens) != len(kinds):
        raise ValueError(f"is broken: {len(tokens)} tokens, but {len(kinds)} token types")
    vocab = {text: index for index, (text, kind) in enumerate(zip(tokens, kinds)) if kind != UNUSED}
    merges = [(left, right) for left, _, right in (text.partition(" ") for text in _listed(metadata, "merges", str))]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in LLAMA3))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    if pre in QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([_added(text, kind) for text, kind in zip(tokens, kinds) if kind in ADDED])
    tokenizer.post_processor = _post_processor(metadata, pre)
    return tokenizer


def _listed(metadata: Mapping[str, Any], key: str, kind: type[Value]) -> list[Value]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"is broken: tokenizer.ggml.{key} is no list of {kind.__name__}")
    return values


def _added(text: str, kind: int) -> AddedToken:
    return AddedToken(text, special=kind != USER_DEFINED, normalized=False)


def _splitter(pre: str) -> PreTokenizer:
    """How text is cut before BPE, by the file's name for it."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in GPT2:
        return words
    if pre in DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in QWEN2 | LLAMA3:
        pattern = Regex(PIECES.format(digits=r"\p{N}" if pre in QWEN2 else r"\p{N}{1,3}"))
        pieces = pre_tokenizers.Split(pattern, behavior="isolated")
        return pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ValueError(f"cuts words in a way not known here, tokenizer.ggml.pre = {pre!r}")


def _post_processor(metadata: Mapping[str, Any], pre: str) -> processors.PostProcessor:
    """Byte-level offsets, behind the bos token where the model wants one."""
    trim = processors.ByteLevel(trim_offsets=False)
    if not metadata.get("tokenizer.ggml.add_bos_token", pre in LLAMA3):
        return trim
    if (index := special_ids(metadata).get("bos")) is None:
        raise ValueError("is broken: it asks for a bos token but names none")
    bos = metadata["tokenizer.ggml.tokens"][index]
    special = [(bos, index)]
    template = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=special)
    return processors.Sequence([trim, template])
