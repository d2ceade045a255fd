"""Feature drafters on disk: the layouts that EAGLE-1, EAGLE-2 and EAGLE-3 are published in, and ours.

A folder holds ``config.json`` (a Llama configuration of one layer) and the weights, as safetensors or as the original
``pytorch_model.bin``, read without running code. What the network looks like is told by the names and shapes of the
tensors: ``fc``, one decoder layer (``layers.0`` or ``midlayer``), and where there are any ``norm``, ``lm_head``,
``embed_tokens`` and ``d2t``, whose entry j plus j is the verifier's token of logit j. Ours is the narrow layout with
both norms and ``d2t``.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from adaspec.decoding.feature import FeatureDrafter, FeatureReader, Layer
from adaspec.decoding.feature_net import FeatureNet, FeatureShape
from adaspec.decoding.model import Model
from adaspec.decoding.native.head import NativeFeatureDrafter, NativeHead, obstacle
from adaspec.decoding.native.library import CompileError, library
from adaspec.decoding.packed import pack

PICKLE = "pytorch_model.bin"
HEAD = "head"  # the drafter that comes with the project
HEADS = Path(__file__).parents[1] / "heads"  # by the target's name
OWN_LAYER = ("layers.0.", "midlayer.")
PARTS = ("self_attn.", "mlp.")  # of the published names; the network knows the layers by their last names
NATIVE_PRECISION, PACKED_PRECISION = "int8", "fp16"  # of a drafter's weights on a CPU, unless told otherwise
IGNORED = ("t2d", "rotary_emb.inv_freq")
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


@dataclass(frozen=True, slots=True)
class FeatureWeights:
    """A feature drafter as stored. ``head`` [D, size] and ``embedding`` [V, size]: None, the verifier's own.

    ``layers``: the verifier's layers to read, () where the folder leaves that to the reader. ``token_map`` [D].
    ``acceptance``: by position on held-out text, where known.
    """

    net: FeatureNet
    layers: tuple[int, ...]
    token_map: Tensor | None
    head: Tensor | None
    embedding: Tensor | None
    acceptance: tuple[float, ...] = ()


def is_feature_drafter(source: Path | str) -> bool:
    """Whether a source is ``head`` or a folder with a feature drafter, told by the tensor that joins features."""
    folder = Path(source)
    if source == HEAD or not (folder / "config.json").is_file():
        return source == HEAD
    try:
        return any(name.removeprefix("model.") == "fc.weight" for name in _names(folder))
    except ValueError:
        return False


def feature_folder(source: str, target: str) -> Path:
    """The folder that ``source`` names for the model ``target``; ``head``: the drafter that comes with the project.

    Raises:
        ValueError: none comes with the project for this target.
    """
    if source != HEAD:
        return Path(source)
    if Path(target).name != target or not (HEADS / target / "config.json").is_file():
        raise ValueError(f"no drafter comes with the project for {target}; adaspec train-drafter makes one")
    return HEADS / target


def read_feature_drafter(folder: Path) -> FeatureWeights:
    """Reads a folder in any of the layouts.

    Raises:
        ValueError: a file that is missing or broken, or a tensor that no known layout has or that it lacks.
    """
    tensors, config = _tensors(folder), _config(folder)
    tensors = {_own_name(name): tensor for name, tensor in tensors.items() if not name.endswith(IGNORED)}
    extras = {name: tensors.pop(name, None) for name in ("d2t", "lm_head.weight", "embed_tokens.weight")}
    try:
        net = FeatureNet(_shape(config, tensors)).eval().requires_grad_(False)
        net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder} holds no feature drafter of a known layout: {reason}") from None
    offsets = extras["d2t"]
    token_map = None if offsets is None else torch.arange(len(offsets)) + offsets.long()
    head, embedding = extras["lm_head.weight"], extras["embed_tokens.weight"]
    return FeatureWeights(net, _layers(config), token_map, head, embedding, _acceptance(config))


def load_feature_drafter(
    name: str, source: Path, target: Model, *, precision: str | None = None, runner: str = "auto"
) -> FeatureReader:
    """A drafter for ``target`` from a folder.

    Args:
        name: its name in plans.
        source: the folder.
        target: the model whose features it was trained on; embedding and head are the target's where it has none.
        precision: of the drafter's weights on a CPU; None takes what is best for what computes them. On a GPU they
            are kept like the target's.
        runner: as for ``load_model``; "native" is taken for the layouts that it knows, torch for all others.

    Raises:
        ValueError: no feature drafter, or one for another model: widths or vocabularies do not fit.
    """
    stored = read_feature_drafter(source)
    layers = stored.layers or _default_layers(stored.net.shape, target.depth)
    _check(name, stored, layers, target)
    native, packed = precision or NATIVE_PRECISION, precision or PACKED_PRECISION
    if target.device.type == "cpu" and runner != "torch" and obstacle(stored.net.shape, native) is None:
        with suppress(CompileError):
            library()
            return _told(stored, _native(name, stored, layers, target, native))
    table = target.module.get_input_embeddings()
    embed: Layer = table if stored.embedding is None else _embedding(stored.embedding.to(table.weight))
    head, token_map = _head(stored, target), stored.token_map
    net: nn.Module = stored.net
    if target.device.type == "cpu":
        net = pack(net, packed)
        head = pack(head, packed) if isinstance(head, nn.Linear) else head
    else:
        net, head = net.to(table.weight), head.to(table.weight)
        token_map = None if token_map is None else token_map.to(target.device)
    assert isinstance(net, FeatureNet)
    return _told(stored, FeatureDrafter(name, net, embed, head, target.vocab_size, layers, token_map))


def _told(stored: FeatureWeights, drafter: FeatureReader) -> FeatureReader:
    drafter.acceptance = stored.acceptance
    return drafter


def _native(name: str, stored: FeatureWeights, layers: tuple[int, ...], target: Model, precision: str) -> FeatureReader:
    table = target.module.get_input_embeddings().weight
    tokens = torch.arange(target.vocab_size) if stored.token_map is None else stored.token_map
    rows = head_rows(target.module, tokens) if stored.head is None else stored.head
    embedding = table if stored.embedding is None else stored.embedding
    head = NativeHead(stored.net, embedding, rows, tokens[: len(rows)], precision)
    return NativeFeatureDrafter(name, head, target.vocab_size, layers, stored.token_map)


def save_feature_drafter(
    folder: Path,
    net: FeatureNet,
    token_map: Tensor,
    head: Tensor | None,
    about: str,
    acceptance: Sequence[float] = (),
) -> None:
    """Writes a narrow drafter, its numbers as float16.

    Args:
        folder: exists.
        net: the layer.
        token_map: [D], see ``FeatureDrafter``.
        head: rows of the verifier's head [D, size] when they cannot be taken from its embedding.
        about: the target it was trained for.
        acceptance: by position on held-out text; a controller begins with it. Positions of which nothing is known,
            or where none was accepted, end it.
    """
    tensors = {_published_name(name): tensor.detach().half().cpu() for name, tensor in net.named_parameters()}
    tensors["d2t"] = token_map.cpu() - torch.arange(len(token_map))
    if head is not None:
        tensors["lm_head.weight"] = head.detach().half().cpu()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["AdaspecFeatureDrafter"],
        "model_type": "llama",
        "target": about,
        "num_hidden_layers": 1,
        "draft_vocab_size": len(token_map),
        "acceptance": [round(rate, 3) for rate in takewhile(lambda rate: 0.0 < rate < 1.0, acceptance)],
        **{name: value for name, value in net.shape.llama.to_dict().items() if name in FIELDS},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def head_rows(module: Any, token_map: Tensor) -> Tensor:
    """Rows [D, size] of a model's head.

    Raises:
        ValueError: a head that is packed for inference and not tied to the embedding.
    """
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None and module.config.get_text_config().tie_word_embeddings:
        weight = table.weight
    if weight is None:
        raise ValueError("a reduced head needs rows of the target's own, which are packed; store them with the drafter")
    rows: Tensor = weight.detach()[token_map.to(weight.device)]
    return rows


def _head(stored: FeatureWeights, target: Model) -> nn.Module:
    if stored.head is not None:
        return _linear(stored.head)
    if stored.token_map is not None:
        return _linear(head_rows(target.module, stored.token_map))
    own: nn.Module = target.module.get_output_embeddings()
    return own


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _embedding(weight: Tensor) -> Layer:
    return lambda tokens: nn.functional.embedding(tokens, weight)


def _check(name: str, stored: FeatureWeights, layers: tuple[int, ...], target: Model) -> None:
    size = target.module.get_input_embeddings().weight.shape[1]
    shape = stored.net.shape
    if shape.feature_width != size * len(layers):
        raise ValueError(
            f"{name} reads {shape.feature_width} features, {target.name} gives {size} in each of {len(layers)} layers"
        )
    if stored.embedding is None and shape.hidden_size != size:
        raise ValueError(f"{name} has a hidden size of {shape.hidden_size}, {target.name} of {size}")
    highest = -1 if stored.token_map is None else int(stored.token_map.max())
    rows = 0 if stored.head is None or stored.token_map is not None else len(stored.head)
    if max(highest, rows - 1) >= target.vocab_size:
        raise ValueError(f"{name} drafts token {max(highest, rows - 1)}, {target.name} has {target.vocab_size} tokens")


def _default_layers(shape: FeatureShape, depth: int) -> tuple[int, ...]:
    """EAGLE reads the last state; EAGLE-3 what enters the third, the middle and the third layer from the end."""
    return (2, depth // 2, depth - 3) if shape.wide else (depth,)


def _layers(config: dict[str, Any]) -> tuple[int, ...]:
    found = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(int(layer) for layer in found or ())


def _acceptance(config: dict[str, Any]) -> tuple[float, ...]:
    """Of our own folders; what is no list of shares tells nothing."""
    told = config.get("acceptance")
    found = tuple(told) if isinstance(told, list) else ()
    return found if all(isinstance(rate, float) and 0.0 < rate < 1.0 for rate in found) else ()


def _own_name(name: str) -> str:
    for prefix in ("model.", *OWN_LAYER, *PARTS):
        name = name.removeprefix(prefix)
    return name


def _published_name(name: str) -> str:
    part = name.split(".")[0]
    if part in ("fc", "norm"):
        return name
    home = {"q": "self_attn.", "k": "self_attn.", "v": "self_attn.", "o": "self_attn."}.get(part.removesuffix("_proj"))
    return OWN_LAYER[0] + (home or ("mlp." if part.endswith("_proj") else "")) + name


def _shape(config: dict[str, Any], tensors: dict[str, Tensor]) -> FeatureShape:
    llama = LlamaConfig(**{field: config[field] for field in FIELDS if config.get(field) is not None})
    size = llama.hidden_size
    wide = tensors["q_proj.weight"].shape[1] == 2 * size
    return FeatureShape(
        llama,
        feature_width=tensors["fc.weight"].shape[1] - (0 if wide else size),
        wide=wide,
        input_norm="input_layernorm.weight" in tensors,
        output_norm="norm.weight" in tensors,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        fc_bias="fc.bias" in tensors,
        qkv_bias="q_proj.bias" in tensors,
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if config.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"{config['num_hidden_layers']} layers, a feature drafter has one")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} describes no feature drafter: {error}") from None
    return config


def _names(folder: Path) -> list[str]:
    """The names of the tensors in a folder; those of safetensors without reading them."""
    files = sorted(folder.glob("[!.]*.safetensors"))
    if not files:
        return list(_tensors(folder)) if (folder / PICKLE).is_file() else []
    try:
        names: list[str] = []
        for path in files:
            with safe_open(path, framework="pt") as stored:
                names += stored.keys()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} holds no readable weights: {error}") from None
    return names


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = {}
        for path in sorted(folder.glob("[!.]*.safetensors")):
            found |= load_file(path)
        if not found and not (folder / PICKLE).is_file():
            raise ValueError(f"{folder} holds no readable weights: neither safetensors nor {PICKLE}")
        if not found:
            found = torch.load(folder / PICKLE, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{folder} holds no readable weights: {reason}") from None
    return found
