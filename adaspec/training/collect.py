"""A target's own output with its features, in shards. A shard is a function of seed and number, so any can be redone.

Rows of a batch decode side by side, one token each per pass. A row whose text has ended starts the next at once, and
prompts are fed through the same passes, so that no part of a pass is wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.model import Model, sequence_limit
from adaspec.decoding.sampling import Sampler, SamplingParams, Uniforms, sample
from adaspec.training.prompts import PromptSource

USER = "\x00"  # stands for the user's turn while a chat template is taken apart
LOOP = 12
INVENTED = SamplingParams(temperature=1.0, min_p=0.05)
Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How output is collected, greedily.

    ``rows`` decode at a time, ``passes`` make a shard, a text has at most ``length`` tokens. In a share ``invented``
    of them the model makes up the user's turn as well, drawn at temperature 1. A text that says the same ``LOOP``
    tokens a third time ends there: more of it teaches nothing.

    Raises:
        ValueError: a number out of range.
    """

    seed: int = 0
    rows: int = 63
    passes: int = 400
    length: int = 208
    invented: float = 0.35

    def __post_init__(self) -> None:
        if min(self.rows, self.passes) < 1:
            raise ValueError(f"rows and passes are at least 1, got {self.rows} and {self.passes}")
        if self.length < 8:
            raise ValueError(f"a text has room for at least 8 tokens, got {self.length}")


@dataclass(frozen=True, slots=True)
class Text:
    """One text: ``tokens`` [n], ``features`` [n, width] float16, ``learn`` [n]: which tokens are the target's own."""

    tokens: Tensor
    features: Tensor
    learn: Tensor


class Dialogue:
    """How a tokenizer frames a user's turn; without a chat template the turn is the text itself."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        before, after = "", ""
        if getattr(tokenizer, "chat_template", None):
            turn = [{"role": "user", "content": USER}]
            framed = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
            before, _, after = framed.partition(USER)
        self.chat = bool(after)
        self._before, self._after = before, after
        start = tokenizer(tokenizer.bos_token or "", add_special_tokens=False)["input_ids"]
        self.opening: list[int] = self._encode(before) or start or [min(self.stop_ids, default=0)]
        self.closing: list[int] = self._encode(after)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompt(self, text: str) -> list[int]:
        """The tokens of a whole user's turn."""
        if self.chat:
            return self._encode(self._before + text + self._after)
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@dataclass(slots=True)
class _Row:
    """A text in the making. ``given``: tokens still to be fed that the model does not choose."""

    given: list[int]
    inventing: bool = False
    learn: list[bool] = field(default_factory=list)
    answer: int = 0  # where the answer begins
    grams: Counter[tuple[int, ...]] = field(default_factory=Counter)


class Collector:
    """Lets a target talk. ``model`` is tapped at its last layer.

    Args:
        model: the target.
        dialogue: its chat frame.
        recipe: how much at a time, and how it is sampled.
    """

    def __init__(self, model: Model, dialogue: Dialogue, recipe: Recipe) -> None:
        self._model, self._dialogue, self._recipe = model, dialogue, recipe
        self._inventing = Sampler([INVENTED], model.device)  # one entry stands for every row
        self.layers = (model.depth,)
        model.tap(self.layers)

    def check(self, held_out: Sequence[str], length: int) -> None:
        """Tells whether texts of the recipe, and ``answers`` of at most ``length`` tokens to prompts, fit the target.

        Raises:
            ValueError: one that would be longer than the target's positions or its sliding window.
        """
        limit = sequence_limit(self._model.module.config.get_text_config())
        longest = max((len(self._dialogue.prompt(prompt)) for prompt in held_out), default=0)
        for needed, what in (
            (self._recipe.length + 1, f"a text of {self._recipe.length} tokens"),
            (longest + length, f"a held-out prompt of {longest} tokens with an answer of {length}"),
        ):
            if limit is not None and needed > limit[0]:
                raise ValueError(f"{self._model.name} has no room for {what}: {limit[1]} is {limit[0]}")

    def shard(self, prompts: PromptSource, index: int, tell: Tell) -> list[Text]:
        """The texts of one shard; ``tell`` hears after every pass how many there were."""
        recipe, size = self._recipe, self._recipe.rows
        device = self._model.device
        seeds = [(recipe.seed * 1_000_003 + index) * 10_007 + row for row in range(size)]
        uniforms = Uniforms(torch.tensor(seeds, device=device))
        sequence = self._buffer(size, recipe.length + 1)
        self._model.start(size, sequence.capacity)
        rows = [self._begin(prompts) for _ in range(size)]
        texts: list[Text] = []
        everyone = torch.ones(size, dtype=torch.bool, device=device)
        logits: Tensor | None = None
        for step in range(recipe.passes):
            chosen = self._choose(logits, rows, uniforms)
            self._extend(sequence, rows, chosen)
            logits = self._model.logits(sequence, sequence.lengths - 1, 1, everyone)
            for at, row in enumerate(rows):
                if self._ended(sequence, at, row):
                    texts.append(self._text(sequence, at, row))
                    prompts.answered(self._dialogue.decode(sequence.row(at, row.answer)) if row.answer else "")
                    rows[at] = self._begin(prompts)
                    sequence.lengths[at] = self._model.lengths[at] = 0
            tell(step + 1)
        texts += [self._text(sequence, at, row) for at, row in enumerate(rows) if int(sequence.lengths[at]) > 1]
        return texts

    def _begin(self, prompts: PromptSource) -> _Row:
        if self._dialogue.chat and prompts.chance(self._recipe.invented):
            return _Row(list(self._dialogue.opening), inventing=True)
        given = self._dialogue.prompt(prompts.next())[: self._recipe.length // 2]
        return _Row(given, answer=len(given))

    def _choose(self, logits: Tensor | None, rows: list[_Row], uniforms: Uniforms) -> list[int]:
        """The model's next token of every row; for rows that are still given tokens it means nothing."""
        if logits is None:
            return [0] * len(rows)
        said = logits[:, 0].argmax(-1)
        own = torch.tensor([row.inventing and not row.given for row in rows], device=logits.device)
        numbers = uniforms.draw(1, own.long())[own, 0]
        said[own] = sample(self._inventing.law(logits[own])[:, 0], numbers)
        chosen: list[int] = said.tolist()
        return chosen

    def _extend(self, sequence: TokenBuffer, rows: list[_Row], chosen: list[int]) -> None:
        """Appends one token to every row, given or chosen."""
        for at, row in enumerate(rows):
            if row.inventing and not row.given and chosen[at] in self._dialogue.stop_ids:
                row.given, row.inventing = list(self._dialogue.closing), False  # which begins with the stop token
                row.answer = int(sequence.lengths[at]) + len(row.given)
            row.learn.append(not row.given)
            chosen[at] = row.given.pop(0) if row.given else chosen[at]
        tokens = torch.tensor(chosen, device=sequence.tokens.device)
        sequence.append(tokens[:, None], torch.ones_like(tokens))

    def _ended(self, sequence: TokenBuffer, at: int, row: _Row) -> bool:
        length = int(sequence.lengths[at])
        if length >= self._recipe.length or not row.learn[-1]:
            return length >= self._recipe.length
        gram = tuple(sequence.tokens[at, max(0, length - LOOP) : length].tolist())
        row.grams[gram] += 1
        return gram[-1] in self._dialogue.stop_ids or row.grams[gram] == 3

    def _text(self, sequence: TokenBuffer, at: int, row: _Row) -> Text:
        length = int(sequence.lengths[at])
        features = self._model.features(self.layers, torch.zeros_like(sequence.lengths), length)[at]
        return Text(sequence.tokens[at, :length].clone().cpu(), features.half().cpu(), torch.tensor(row.learn))

    def read(self, tokens: Sequence[int]) -> Iterator[Text]:
        """Given text in pieces of the recipe's length, on which every token is to be learned."""
        for start in range(0, len(tokens) - 1, self._recipe.length):
            piece = torch.tensor(tokens[start : start + self._recipe.length])
            sequence = self._buffer(1, len(piece))
            sequence.tokens[0, : len(piece)] = piece
            sequence.lengths += len(piece)
            self._model.start(1, len(piece))
            self._model.catch_up(sequence, sequence.lengths)
            features = self._model.features(self.layers, torch.zeros_like(sequence.lengths), len(piece))[0]
            yield Text(piece, features.half().cpu(), torch.ones(len(piece), dtype=torch.bool))

    def answers(self, prompts: Sequence[str], length: int) -> list[Text]:
        """The target's greedy answers to prompts, at most ``length`` tokens each, side by side."""
        given = [self._dialogue.prompt(prompt) for prompt in prompts]
        sequence = self._buffer(len(given), max(map(len, given)) + length)
        for at, tokens in enumerate(given):
            sequence.tokens[at, : len(tokens)] = torch.tensor(tokens)
        sequence.lengths = torch.tensor([len(tokens) for tokens in given], device=self._model.device)
        self._model.start(len(given), sequence.capacity)
        self._model.catch_up(sequence, sequence.lengths - 1)
        active = torch.ones_like(sequence.lengths, dtype=torch.bool)
        stops = torch.tensor(sorted(self._dialogue.stop_ids), dtype=torch.long, device=self._model.device)
        for _ in range(length):
            token = self._model.logits(sequence, sequence.lengths - 1, 1, active)[:, 0].argmax(-1)
            sequence.append(token[:, None], active.long())
            active = active & ~torch.isin(token, stops)
            if not bool(active.any()):
                break
        self._model.catch_up(sequence, sequence.lengths)
        ends = sequence.lengths.tolist()
        rows = [_Row([], learn=[at >= len(tokens) for at in range(end)]) for tokens, end in zip(given, ends)]
        return [self._text(sequence, at, row) for at, row in enumerate(rows)]

    def _buffer(self, rows: int, capacity: int) -> TokenBuffer:
        return TokenBuffer(rows, capacity, self._model.device)


def write_shard(path: Path, texts: Sequence[Text]) -> None:
    """Stores texts as safetensors; the file appears whole or not at all."""
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]).int(),
        "features": torch.cat([text.features for text in texts]).contiguous(),
        "learn": torch.cat([text.learn for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
    }
    partial = path.with_suffix(".part")
    save_file(tensors, partial)
    partial.replace(path)


def read_shard(path: Path) -> list[Text]:
    """The texts of a shard."""
    stored = load_file(path)
    lengths = stored["lengths"].tolist()
    parts = (torch.split(stored[name], lengths) for name in ("tokens", "features", "learn"))
    return [Text(tokens.long(), features, learn) for tokens, features, learn in zip(*parts)]
