"""Hugging Face causal language models over our own cache. Every quirk of `transformers` is kept in this file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from adaspec.decoding.attention import register as register_attention
from adaspec.decoding.cache import KVCache
from adaspec.decoding.gpu_attention import register as register_gpu_attention
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.packed import CPU_PRECISIONS, pack
from adaspec.decoding.weight_only import quantize

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the forward's argument: 5.24 on, before, state spaces
FULL_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
SLIDING_ATTENTION = ("sliding_attention", "chunked_attention")


class _ViewOfKVCache(Cache):  # type: ignore[misc]
    """What a module's attention layers see of a ``KVCache``. It says length 0: positions and masks come explicitly."""

    def __init__(self, store: KVCache) -> None:
        super().__init__(layers=[])
        self.store = store

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.store.write(layer_idx, key_states, value_states)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


class Model(LanguageModel):
    """A decoder-only Hugging Face model that can be rolled back: full attention over a static cache.

    Args:
        name: the model's name in plans.
        module: the causal LM, in evaluation mode.
        vocab_size: rows of logits to return; a longer head is cut (its padding), a shorter one filled with -inf.

    Attributes:
        runner: what computes its passes, and why not something faster.

    Raises:
        ValueError: the architecture keeps a state that cannot be rolled back; the reason is named.
    """

    def __init__(self, name: str, module: Any, vocab_size: int | None = None) -> None:
        reason = rollback_obstacle(module)
        if reason:
            raise ValueError(f"{name}: {reason}")
        self._config = module.config.get_text_config()
        super().__init__(name, vocab_size or self._config.vocab_size)
        self.module = module
        embeddings = module.get_input_embeddings()
        self._embeddings, self._device = embeddings.num_embeddings, torch.device(embeddings.weight.device)
        self.runner = "torch"
        self._cache_name = _cache_name(module)
        self._store: KVCache | None = None
        self._seen: dict[int, Tensor] = {}  # the states of the last pass, by layer

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def layers(self) -> nn.ModuleList:
        """The stack of decoder layers, wherever the architecture keeps it."""
        count = self._config.num_hidden_layers
        stacks = (each for each in self.module.base_model.modules() if isinstance(each, nn.ModuleList))
        return next(each for each in stacks if len(each) == count)

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins new sequences; the cache is kept when it fits.

        Raises:
            ValueError: ``capacity`` exceeds the model's positions or its sliding window.
        """
        limit = sequence_limit(self._config)
        if limit is not None and capacity > limit[0]:
            raise ValueError(f"{self.name}: the request may need {capacity} tokens, {limit[1]} is {limit[0]}")
        super().start(batch_size, capacity)
        if self._store is None or self._store.batch_size < batch_size or self._store.capacity < capacity:
            self._store = KVCache(batch_size, capacity)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        assert self._store is not None, "start() comes first"
        store = self._store
        filled = min(self._context + slots.shape[1], store.capacity + 1)
        store.begin(slots, filled)
        positions = slots.clamp(max=store.capacity - 1)  # what lies behind belongs nowhere, and has no embedding
        inputs = self._inputs(tokens, positions, store)
        if not rows.shape[1]:
            self.module.base_model(**inputs)
            return tokens.new_zeros((*rows.shape, self.vocab_size), dtype=torch.float32)
        first, stop = (0, slots.shape[1]) if rows.is_cuda else (int(rows.min()), int(rows.max()) + 1)
        kept = torch.arange(first, stop, device=rows.device)
        logits = self.module(**inputs, logits_to_keep=kept).logits.float()
        return fit(pick(logits, rows - first), self.vocab_size)

    def _inputs(self, tokens: Tensor, positions: Tensor, store: KVCache) -> dict[str, Any]:
        """What the module's forward takes for ``tokens`` at ``positions``, [B, q] both, over the filled cache."""
        return {
            "input_ids": tokens.clamp(max=self._embeddings - 1),
            "position_ids": positions,
            "attention_mask": self._mask(positions, store.filled),
            "use_cache": True,
            self._cache_name: _ViewOfKVCache(store),
        }

    def _watch(self, layers: tuple[int, ...]) -> None:
        self._check_layers(layers)
        stack = self.layers
        for layer in set(layers) - self._seen.keys():
            self._seen[layer] = torch.empty(0)
            if layer < len(stack):
                stack[layer].register_forward_pre_hook(partial(self._see_input, layer), with_kwargs=True)
            else:
                self.module.base_model.register_forward_hook(partial(self._see_last, layer))

    def _check_layers(self, layers: tuple[int, ...]) -> None:
        if not all(0 <= layer <= self.depth for layer in layers):
            raise ValueError(f"{self.name} has the layers 0 .. {self.depth} to draft from, got {layers}")

    def _states(self, layers: tuple[int, ...]) -> Tensor:
        return torch.cat([self._seen[layer] for layer in layers], -1)

    def _see_input(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen[layer] = args[0] if args else kwargs["hidden_states"]

    def _see_last(self, layer: int, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self._seen[layer] = output.last_hidden_state

    def _mask(self, positions: Tensor, filled: int) -> Tensor:
        """Which of the ``filled`` slots each position [B, q] sees, [B, 1, q, filled]; additive for eager attention."""
        seen = torch.arange(filled, device=positions.device) <= positions[:, None, :, None]
        if self.module.config._attn_implementation != "eager":
            return seen
        dtype = self.module.get_input_embeddings().weight.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


class PlainModel(LanguageModel):
    """Any causal LM with its own cache, for plain decoding of one sequence where rolling back is impossible.

    ``reason``: why it is, for what the module itself does not tell.
    """

    catch_up_chunk = 2**31 - 1  # a state-space model takes its prompt in one pass

    def __init__(self, name: str, module: Any, reason: str = "its cache is not ours") -> None:
        super().__init__(name, module.config.get_text_config().vocab_size)
        self.rollback_obstacle = rollback_obstacle(module) or reason
        self.runner = f"torch ({self.rollback_obstacle})"
        self.module = module
        self._cache_name = _cache_name(module)
        self._cache: Any = None

    def start(self, batch_size: int, capacity: int) -> None:
        """Begins one new sequence.

        Raises:
            ValueError: a batch.
        """
        if batch_size != 1:
            raise ValueError(f"{self.name} decodes one sequence at a time ({self.rollback_obstacle}), got {batch_size}")
        super().start(batch_size, capacity)
        self._cache = None

    def rollback(self, lengths: Tensor) -> None:
        if bool((lengths < self.lengths).any()):
            raise ValueError(f"{self.name} cannot be rolled back: {self.rollback_obstacle}")

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        outputs = self.module(input_ids=tokens, use_cache=True, **{self._cache_name: self._cache})
        self._cache = outputs[self._cache_name]
        return fit(pick(outputs.logits.float(), rows), self.vocab_size)


def pick(logits: Tensor, rows: Tensor) -> Tensor:
    """Rows [B, n] of logits [B, q, V]."""
    if rows.shape[0] == 1 and logits.shape[1] == rows.shape[1]:
        return logits
    return logits.gather(1, rows[..., None].expand(-1, -1, logits.shape[-1]))


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., V'] cut to ``vocab_size`` or filled up with -inf: heads of one tokenizer differ in padding."""
    missing = vocab_size - logits.shape[-1]
    return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _cache_name(module: Any) -> str:
    known = inspect.signature(module.forward).parameters
    for name in CACHE_NAMES:
        if name in known:
            return name
    raise ValueError(f"{type(module).__name__} takes none of the arguments {', '.join(CACHE_NAMES)}")


def rollback_obstacle(module: Any) -> str | None:
    """Why this model's cache cannot be rolled back to an earlier length, or None."""
    config = module.config.get_text_config()
    kind = type(module).__name__
    if module.config.is_encoder_decoder:
        return f"{kind} is an encoder-decoder model, adaspec decodes decoder-only models"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(FULL_ATTENTION))
    if getattr(module, "_is_stateful", False) or others:
        return f"{kind} keeps a recurrent state ({', '.join(others) or config.model_type}), which cannot be rolled back"
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return f"{kind} does not take explicit positions, which a cache with rows of different length needs"
    return None


def sequence_limit(config: Any, *, rollback: bool = True) -> tuple[int, str] | None:
    """The longest sequence a model can hold, and what limits it; None: nothing does.

    ``rollback``: the cache must be able to go back, which a sliding window shorter than the sequence prevents.
    """
    limits = []
    if getattr(config, "max_position_embeddings", None):
        limits.append((int(config.max_position_embeddings), "its number of positions"))
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if rollback and window and (types is None or set(types) & set(SLIDING_ATTENTION)):
        limits.append((int(window), "its sliding window (a longer sequence could not be rolled back)"))
    return min(limits, default=None)


def load_module(
    source: str | Path, *, precision: str = "fp16", device: str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """Loads a causal LM from safetensors, in evaluation mode.

    Args:
        source: a local folder or a hub name that `transformers` can load.
        device: "cpu", "cuda", "cuda:1", ...
        precision: on a CPU one of ``packed.PRECISIONS``; on a GPU "fp16", "bf16", "float32" or "int8" (weights only).
        trust_remote_code: run code that comes with the weights. Off: such a model is refused.

    A model that cannot be rolled back (and so only decodes plainly) keeps its stock layers.

    Raises:
        ValueError: an unknown precision, or a source that cannot be loaded: the reason is told in one line.
    """
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    on_cpu = torch.device(device).type == "cpu"
    dtype = check_precision(precision, device)
    with _told(f"cannot load the model {source}"):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        module, report = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            attn_implementation=register_attention() if on_cpu else "eager" if softcap else register_gpu_attention(),
            output_loading_info=True,
        )
    missing = sorted(map(str, (*report["missing_keys"], *report["mismatched_keys"])))
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} of the model's weights, {missing[0]} for one")
    loaded: nn.Module = module.eval().requires_grad_(False)
    if not on_cpu:
        loaded = loaded.to(device)
        if precision == "int8":
            quantize(loaded)
        return loaded
    return loaded if rollback_obstacle(module) else pack(loaded, precision)


def check_precision(precision: str, device: str) -> torch.dtype:
    """The type that weights are loaded in for a precision on a device.

    Raises:
        ValueError: a precision that the device does not have.
    """
    on_gpu = {"fp16": torch.float16, "bf16": torch.bfloat16, "float32": torch.float32, "int8": torch.bfloat16}
    known = dict.fromkeys(CPU_PRECISIONS, torch.float32) if device == "cpu" else on_gpu
    if precision not in known:
        raise ValueError(f"precision on {device} is one of {', '.join(known)}, got {precision!r}")
    return known[precision]


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns whatever the libraries raise over a foreign file into one line that names it."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{what}: {str(error) or type(error).__name__}") from error


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model folder or hub name.

    Raises:
        ValueError: it cannot be loaded; the reason is told in one line.
    """
    with _told(f"cannot load the tokenizer of {source}"):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)


def check_same_tokenizer(
    target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase, target_name: str, drafter_name: str
) -> None:
    """Drafting by token ids needs one vocabulary; entries that only one side has (added, unused) are let pass.

    Raises:
        ValueError: an id means different tokens; both names and the overlap are told.
    """
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    shared = sum(theirs.get(token) == index for token, index in ours.items())
    clash = any(theirs.get(token, index) != index for token, index in ours.items())
    if clash or shared < 0.99 * min(len(ours), len(theirs)):
        raise ValueError(
            f"{drafter_name} cannot draft for {target_name}: different tokenizers "
            f"({tokenizer_overlap(target, drafter)}); bridge:{drafter_name} drafts through its text"
        )


def tokenizer_overlap(target: PreTrainedTokenizerBase, drafter: PreTrainedTokenizerBase) -> str:
    """How many ids mean the same token on both sides, in words."""
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    shared, larger = sum(theirs.get(token) == index for token, index in ours.items()), max(len(ours), len(theirs))
    return f"{shared} of {larger} tokens agree, {100 * shared / larger:.1f} %"


def stop_token_ids(module: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a text: of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for holder in (getattr(module, "generation_config", None), module.config.get_text_config(), tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))
