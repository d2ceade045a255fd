"""GGUF to the files that ``transformers`` loads: config.json, safetensors, tokenizer. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaspec.decoding.gguf_file import GGUFFile, Tensor
from adaspec.decoding.gguf_tokenizer import special_ids, stop_ids, write_tokenizer

Progress = Callable[[str, float | None], None]
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES: dict[str, type[np.floating[Any]]] = {"F16": np.float16, "F32": np.float32}  # safetensors' names
LIMITS = {"F16": 65504.0, "F32": 3.4028234663852886e38}
EXACT = {"F32", "BF16"}  # types whose values float16 cannot hold


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of a dense decoder, and what its architecture adds to the plain llama layer."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool

    @classmethod
    def of(cls, file: GGUFFile) -> Dims:
        """Reads the sizes from the metadata.

        Raises:
            ValueError: another architecture, a variant of it (experts, scaled rope), or a size that is missing.
        """
        architecture = file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"holds a model of architecture {architecture!r}, convertible are: {known}")
        meta = _Meta(architecture, file.metadata)
        _refuse_variants(meta, file)
        heads, hidden = meta.number("attention.head_count"), meta.number("embedding_length")
        head_dim = meta.number("attention.key_length", hidden // max(heads, 1))
        if (rotated := meta.number("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"rotates {rotated} of {head_dim} dimensions of a head, which is not supported")
        if head_dim % 2:
            raise ValueError(f"has heads of {head_dim} dimensions, an even number is needed")
        if "token_embd.weight" not in file.tensors:
            raise ValueError("holds no tensor 'token_embd.weight'")
        if (layers := meta.number("block_count")) > len(file.tensors):
            raise ValueError(f"is broken: {layers} layers, but {len(file.tensors)} tensors")
        return cls(
            architecture,
            layers=layers,
            hidden=hidden,
            inner=meta.number("feed_forward_length"),
            heads=heads,
            kv_heads=meta.number("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab=file.tensors["token_embd.weight"].rows,
            context=meta.number("context_length"),
            rope_theta=meta.real("rope.freq_base", 10000.0),
            norm_eps=meta.real("attention.layer_norm_rms_epsilon"),
            tied="output.weight" not in file.tensors,
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to write: its new name, where it comes from, its shape, and the size of a head to be reordered."""

    name: str
    source: str
    shape: tuple[int, ...]
    rotated: int | None = None


def convert(source: Path, folder: Path, progress: Progress) -> Mapping[str, Any]:
    """Converts ``source`` into the existing, empty ``folder`` and returns the file's metadata.

    Raises:
        ValueError: whatever keeps the file from being converted, as the end of a sentence that starts with its name.
    """
    try:
        file, weights = _write_all_but_weights(source, folder)
    except (OSError, ValueError):
        raise
    except Exception as error:  # a header can be wrong in more ways than anyone foresees; tokenizers raises a bare one
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(f"is broken: {type(error).__name__}: {reason}") from error
    _write_safetensors(file, weights, folder / "model.safetensors", progress)
    return file.metadata


def _write_all_but_weights(source: Path, folder: Path) -> tuple[GGUFFile, tuple[Weight, ...]]:
    file = GGUFFile.read(source)
    dims = Dims.of(file)
    weights = tuple(plan_weights(dims))
    _check(file, weights)
    write_tokenizer(file.metadata, folder)
    _write_json(folder / "config.json", model_config(dims, file.metadata))
    _write_json(folder / "generation_config.json", _token_ids(file.metadata))
    return file, weights


def plan_weights(dims: Dims) -> Iterator[Weight]:
    """Yields every tensor of the model, in the order of the layers."""
    yield Weight("model.embed_tokens.weight", "token_embd.weight", (dims.vocab, dims.hidden))
    for layer in range(dims.layers):
        yield from _layer(dims, f"model.layers.{layer}.", f"blk.{layer}.")
    yield Weight("model.norm.weight", "output_norm.weight", (dims.hidden,))
    if not dims.tied:
        yield Weight("lm_head.weight", "output.weight", (dims.vocab, dims.hidden))


def _layer(dims: Dims, to: str, source: str) -> Iterator[Weight]:
    queries, keys = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    wide, narrow = (dims.inner, dims.hidden), (dims.hidden, dims.inner)
    yield Weight(f"{to}input_layernorm.weight", f"{source}attn_norm.weight", (dims.hidden,))
    for letter, rows in (("q", queries), ("k", keys), ("v", keys)):
        rotated = dims.head_dim if dims.architecture == "llama" and letter != "v" else None
        name, of = f"{to}self_attn.{letter}_proj", f"{source}attn_{letter}"
        yield Weight(f"{name}.weight", f"{of}.weight", (rows, dims.hidden), rotated)
        if dims.architecture == "qwen2":
            yield Weight(f"{name}.bias", f"{of}.bias", (rows,))
        if dims.architecture == "qwen3" and letter != "v":
            yield Weight(f"{to}self_attn.{letter}_norm.weight", f"{of}_norm.weight", (dims.head_dim,))
    yield Weight(f"{to}self_attn.o_proj.weight", f"{source}attn_output.weight", (dims.hidden, queries))
    yield Weight(f"{to}post_attention_layernorm.weight", f"{source}ffn_norm.weight", (dims.hidden,))
    for part, shape in (("gate", wide), ("up", wide), ("down", narrow)):
        yield Weight(f"{to}mlp.{part}_proj.weight", f"{source}ffn_{part}.weight", shape)


def rotary_order(rows: int, head_dim: int) -> NDArray[np.intp]:
    """The file's row for each row of a q or k projection of a llama.

    GGUF stores a llama for rotation of neighbours (dimensions 2 j and 2 j + 1), transformers rotates halves (j and
    j + head_dim / 2). The rows are quantised one by one, so they can be put in order before they are dequantised.
    """
    pairs = np.arange(rows, dtype=np.intp).reshape(-1, head_dim // 2, 2)  # [heads, head_dim / 2, 2]
    return pairs.swapaxes(1, 2).reshape(-1)


def model_config(dims: Dims, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What ``config.json`` holds."""
    config = {
        "architectures": [ARCHITECTURES[dims.architecture]],
        "model_type": dims.architecture,
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.inner,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": dims.context,
        "rms_norm_eps": dims.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": dims.rope_theta},
        "tie_word_embeddings": dims.tied,
        "dtype": "float32",  # the type to compute in; see _dtype for the one on disk
    }
    return config | _token_ids(metadata)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids: dict[str, Any] = {f"{role}_token_id": index for role, index in special_ids(metadata).items() if role != "unk"}
    if stops := stop_ids(metadata):
        ids["eos_token_id"] = stops
    return ids


@dataclass(frozen=True, slots=True)
class _Meta:
    """The metadata of one architecture, with an error that names the missing key."""

    architecture: str
    metadata: Mapping[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"has {self.architecture}.{key} = {value!r}, a positive number is needed")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, float) or not 0 < value <= LIMITS["F32"]:
            raise ValueError(f"has {self.architecture}.{key} = {value!r}, a positive number is needed")
        return float(str(np.float32(value)))  # 9.999999747378752e-06 was meant to be 1e-05


def _refuse_variants(meta: _Meta, file: GGUFFile) -> None:
    name = meta.architecture
    if meta.metadata.get(f"{name}.expert_count"):
        raise ValueError(f"holds a {name} with experts, only dense models can be converted")
    scaling = meta.metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ValueError(f"holds a {name} with scaled rope, which is not supported")


def _check(file: GGUFFile, weights: tuple[Weight, ...]) -> None:
    """Every planned tensor is there with its shape, and no other."""
    for weight in weights:
        tensor = file.tensors.get(weight.source)
        if tensor is None:
            raise ValueError(f"holds no tensor {weight.source!r}")
        if tensor.shape != weight.shape:
            shapes = f"{list(tensor.shape)} instead of {list(weight.shape)}"
            raise ValueError(f"holds tensor {weight.source!r} with shape {shapes}")
    if others := sorted(file.tensors.keys() - {weight.source for weight in weights}):
        raise ValueError(f"holds a tensor that its architecture does not have: {others[0]!r}")


def _dtype(tensor: Tensor) -> str:
    """The type on disk: float16 for quantised matrices, float32 for the rest.

    A quantised value is a float16 scale times a small integer. Rounding it to float16 moves it by at most 2^-11 of
    itself: 1/250 (Q4) to 1/16 (Q8) of the step that the quantisation already took. That halves the folder, and a
    float16 kernel then computes with exactly what the float32 model holds. Vectors (norms, biases) stay float32: they
    were not quantised, Qwen's biases reach hundreds, and they take no space. What the file stores as F32 or BF16 is
    not rounded.
    """
    return "F32" if len(tensor.shape) == 1 or tensor.kind in EXACT else "F16"


def _write_safetensors(file: GGUFFile, weights: tuple[Weight, ...], path: Path, progress: Progress) -> None:
    """Streams the weights into one file, a block of rows at a time, so that memory does not grow with the model."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        tensor = file.tensors[weight.source]
        start, end = end, end + tensor.size * DTYPES[_dtype(tensor)](0).itemsize
        header[weight.name] = {"dtype": _dtype(tensor), "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    done = 0
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            for block in _blocks(file, weight):
                done += stream.write(block.data)
                progress("convert", done / end)


def _blocks(file: GGUFFile, weight: Weight) -> Iterator[NDArray[Any]]:
    """Yields a weight's rows in the type they are stored in."""
    tensor = file.tensors[weight.source]
    dtype = _dtype(tensor)
    order = rotary_order(tensor.rows, weight.rotated) if weight.rotated else None
    try:
        for rows in file.rows(tensor, order):
            if not (rows.max() <= LIMITS[dtype] and rows.min() >= -LIMITS[dtype]):  # NaN fails as well
                raise ValueError(f"holds values that {dtype} cannot hold in tensor {weight.source!r}")
            yield np.ascontiguousarray(rows.astype(DTYPES[dtype], copy=False))
    except NotImplementedError:
        raise ValueError(f"holds tensor {weight.source!r} of type {tensor.kind}, which cannot be read") from None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
