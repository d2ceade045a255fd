"""What a Hugging Face generation asks for, in this project's terms; what cannot be honoured is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from adaspec.decoding.cache import TokenBuffer

_REFUSED = {  # settings, and the values that leave them off
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "cache_implementation": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
_STATEFUL = (  # processors that keep something between calls, or whose rows belong together
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
)
_BY_ROW = ("PrefixConstrainedLogitsProcessor",)  # calls the user's function for rows by number
_CACHES = ("cache", "past_key_values", "cache_params")
_PREPARED = (*_CACHES, "attention_mask", "position_ids", "cache_position", "logits_to_keep", "use_cache")


def check(
    config: GenerationConfig,
    processors: Sequence[Any],
    input_ids: Tensor,
    model_kwargs: Mapping[str, Any],
    streamer: Any,
) -> None:
    """Refuses what speculation here cannot do.

    Raises:
        ValueError: a setting, processor or argument that cannot be honoured, by its name.
    """
    for name, off in _REFUSED.items():
        value = getattr(config, name, None)
        if value not in off:
            raise ValueError(f"adaspec cannot honour {name}={value!r}")
    batch = input_ids.shape[0]
    for processor in processors:
        name = type(processor).__name__
        if name in _STATEFUL or (name in _BY_ROW and batch > 1):
            raise ValueError(f"adaspec cannot honour {name}" + (f" for a batch of {batch}" if name in _BY_ROW else ""))
    if streamer is not None and batch > 1:
        raise ValueError(f"a streamer follows one row, and the batch has {batch}")
    for name, value in model_kwargs.items():
        if name not in _PREPARED and value is not None:
            raise ValueError(f"adaspec cannot honour the argument {name}: it passes on tokens only")
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(f"adaspec cannot go on from a {name} that already holds tokens")
    _check_positions(input_ids, model_kwargs)


def _check_positions(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> None:
    given, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if given is None:
        return
    kept = torch.ones_like(input_ids) if mask is None else mask.long()
    expected = (kept.cumsum(-1) - 1).clamp(min=0)
    if given.shape != expected.shape or bool(((given != expected) & (kept > 0)).any()):
        raise ValueError("adaspec cannot honour position_ids that do not count the unmasked tokens")


def prompts_of(input_ids: Tensor, mask: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """The unmasked tokens of left-padded rows [B, P].

    Raises:
        ValueError: a mask with holes, or padding on the right.
    """
    if mask is None:
        return tuple(map(tuple, input_ids.tolist()))
    kept = mask.bool()
    if bool((kept[:, :-1] & ~kept[:, 1:]).any()) or not bool(kept[:, -1].all()):
        raise ValueError("the attention_mask has holes or padding on the right: pad prompts on the left")
    return tuple(tuple(row[flags].tolist()) for row, flags in zip(input_ids, kept))


def eos_ids(config: GenerationConfig) -> tuple[int, ...]:
    """Tokens that end a row."""
    tensor = getattr(config, "_eos_token_tensor", None)
    return () if tensor is None else tuple(tensor.reshape(-1).tolist())


class HistoryProcessor:
    """Hugging Face logits processors, applied at every position with the drafted prefix in the history.

    A processor sees what it sees in ``generate``: left-padded texts of all rows, [B, length], and one row of scores
    each. It is called once per position and length of text, and of what it returns only the rows of that length count.
    """

    def __init__(self, processors: Sequence[Any], input_ids: Tensor, prompt_lengths: Sequence[int]) -> None:
        self._processors = list(processors)
        self._prompt = input_ids  # [B, P]
        self._pads = input_ids.shape[1] - torch.tensor(prompt_lengths, device=input_ids.device)  # [B]
        self.latest = (torch.zeros(0), torch.zeros(0))  # logits before and after, [B, n, V]; the last call of a round
        # is the target's verification

    def __bool__(self) -> bool:
        return bool(self._processors)

    def __call__(self, logits: Tensor, sequence: TokenBuffer, first: Tensor) -> Tensor:
        scores = logits.clone()
        if self._processors:
            lengths = self._pads + first + 1  # [B]
            for length in sorted(set(lengths.tolist())):
                rows = lengths == length
                texts = self._texts(sequence, length + logits.shape[1] - 1)
                for step in range(logits.shape[1]):
                    scores[rows, step] = self._process(texts[:, : length + step], logits[:, step].clone())[rows]
        self.latest = (logits, scores)
        return scores

    def _process(self, texts: Tensor, scores: Tensor) -> Tensor:
        for processor in self._processors:
            scores = processor(texts, scores)
        return scores

    def _texts(self, sequence: TokenBuffer, length: int) -> Tensor:
        """Padded prompts and sequences, [B, length]; rows that are shorter end in anything."""
        steps = torch.arange(length, device=self._prompt.device).expand(len(self._prompt), -1)
        slots = steps - self._pads[:, None]
        tokens = sequence.tokens.gather(1, slots.clamp(0, sequence.capacity))
        padding = self._prompt.gather(1, steps.clamp(max=self._prompt.shape[1] - 1))
        return torch.where(slots < 0, padding, tokens)


class Watcher:
    """Hugging Face stopping criteria, asked after every token of every row, one row at a time.

    Length and end-of-text tokens are the chain's own matter and left out.
    """

    def __init__(self, criteria: Sequence[Any], input_ids: Tensor) -> None:
        self.criteria = [one for one in criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)]
        self._texts = [row[None] for row in input_ids]  # [1, P + new] each

    def __call__(self, row: int, tokens: list[int]) -> int | None:
        """How many of the new tokens to keep when the row ends among them."""
        for count, token in enumerate(tokens, 1):
            text = self._texts[row]
            self._texts[row] = torch.cat((text, text.new_tensor([[token]])), 1)
            if any(bool(one(self._texts[row], None).all()) for one in self.criteria):
                return count
        return None


class Scores:
    """Scores and logits of the committed tokens, where the caller wants them; zeros behind the end of a row."""

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        wanted = bool(config.return_dict_in_generate)
        self._wants = (wanted and bool(config.output_logits), wanted and bool(config.output_scores))
        self._rows: tuple[list[list[Tensor]], ...] = tuple([[] for _ in range(batch)] for _ in self._wants)

    def __bool__(self) -> bool:
        return any(self._wants)

    def add(self, logits: Tensor, scores: Tensor, counts: Sequence[int]) -> None:
        """Takes the first ``counts[b]`` positions of each row, [B, n, V]."""
        for wants, rows, values in zip(self._wants, self._rows, (logits, scores)):
            for row, own, count in zip(rows, values, counts):
                if wants:
                    row += own[:count].clone()

    def logits(self) -> tuple[Tensor, ...] | None:
        """One [B, V] per new token, before processing."""
        return self._steps(0)

    def scores(self) -> tuple[Tensor, ...] | None:
        """One [B, V] per new token, processed."""
        return self._steps(1)

    def _steps(self, which: int) -> tuple[Tensor, ...] | None:
        if not self._wants[which]:
            return None
        rows = self._rows[which]
        blank = torch.zeros_like(next(row[0] for row in rows if row))
        longest = max(map(len, rows))
        return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(longest))
