"""A drafter that reads its verifier's hidden states (EAGLE, EAGLE-3): a fraction of a pass for each token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from adaspec.decoding.attention import attention
from adaspec.decoding.batch import Batch, Draft, one_by_one
from adaspec.decoding.cache import KVCache, TokenBuffer
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.feature_net import FeatureNet
from adaspec.decoding.language_model import LanguageModel

CATCH_UP = 256  # positions in one pass while the drafter catches up
Layer = Callable[[Tensor], Tensor]


class FeatureReader(Drafter):
    """Drafts from its verifier's features, one pass of one layer per token; ``_step`` is such a pass.

    Entry j of its cache belongs to token j + 1 and the verifier's state at position j. Behind the verifier's own
    states it goes on from its own predicted ones; those entries are never counted in ``_lengths``, so the next draft
    writes over them with entries of true states.

    Args:
        name: its name in plans.
        vocab_size: the verifier's, V.
        layers: the verifier's layers that are read.
        token_map: [D] the verifier's token of each logit; None: one to one. Other tokens have probability 0.
    """

    def __init__(self, name: str, vocab_size: int, layers: tuple[int, ...], token_map: Tensor | None) -> None:
        super().__init__()
        self.name = name
        self.layers = layers
        self.acceptance: tuple[float, ...] = ()  # by position on held-out text, where its folder tells
        self._vocab_size, self._token_map = vocab_size, token_map
        self._verifier: LanguageModel | None = None
        self._lengths = torch.zeros(0, dtype=torch.long)  # [B] entries that come from the verifier's states

    @property
    def verifier(self) -> LanguageModel | None:
        """The model whose features it reads, once it is attached."""
        return self._verifier

    @abstractmethod
    def _step(self, tokens: Tensor, states: Tensor, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over tokens [B, q] and states [B, q, size] at ``slots`` [B, q].

        Returns:
            at ``last`` [B, 1] of them: the state to go on from [B, 1, size], and logits [B, 1, D].
        """

    def _fuse(self, features: Tensor) -> Tensor:
        """The verifier's features [B, q, width] as states that ``_step`` takes."""
        return features

    def attach(self, verifier: LanguageModel) -> None:
        """Reads this verifier from now on; several stages may have the same one.

        Raises:
            ValueError: it already reads another one, whose features it was trained for, or this one has none.
        """
        if self._verifier not in (None, verifier):
            assert self._verifier is not None
            raise ValueError(f"{self.name} drafts for {self._verifier.name}, it cannot draft for {verifier.name}")
        verifier.tap(self.layers)
        self._verifier = verifier

    def start(self, batch_size: int, capacity: int) -> None:
        self._lengths = torch.zeros(batch_size, dtype=torch.long)

    def rollback(self, lengths: Tensor) -> None:
        self._lengths = torch.minimum(self._lengths.to(lengths.device), (lengths - 1).clamp(min=0))

    @torch.inference_mode()
    def propose(self, batch: Batch, limits: Tensor, stop: float = 0.0) -> Draft:
        states: Tensor | None = None

        def step(first: Tensor, active: Tensor) -> Tensor:
            nonlocal states
            states, logits = self._read(batch, active) if states is None else self._go_on(batch.sequence, states, first)
            return self._spread(logits.float())

        return one_by_one(batch, limits, stop, self._able(batch, limits), step)

    @staticmethod
    def _able(batch: Batch, limits: Tensor) -> Tensor:
        """Rows [B] that can be drafted for: a single token has no position before it."""
        return (limits > 0) & (batch.committed > 1)

    def _read(self, batch: Batch, active: Tensor) -> tuple[Tensor, Tensor]:
        """The first step: all entries that are missing, as far as there are states of the verifier.

        A verifier that was idle catches up with the committed text, never with drafts: behind tokens that another
        drafter has put there the step is repeated from predicted states.
        """
        assert self._verifier is not None, "attach() comes first"
        sequence, known = batch.sequence, self._verifier.lengths
        self._verifier.catch_up(sequence, torch.where(active, batch.committed - 1, known))
        reach = torch.minimum(self._verifier.lengths, sequence.lengths - 1)  # [B] entries that can be true
        self._lengths = torch.minimum(self._lengths.to(reach.device), (reach - 1).clamp(min=0))
        stop = torch.where(active, reach, self._lengths)
        while int((stop - self._lengths).max()) > CATCH_UP:
            self._enter(sequence, (stop - self._lengths).clamp(max=CATCH_UP), catch_up=True)
        states, logits = self._enter(sequence, stop - self._lengths)
        gap = torch.where(active, sequence.lengths - 1 - reach, 0)  # [B] tokens of other drafters
        for step in range(1, int(gap.max()) + 1):
            later = self._go_on(sequence, states, reach + step)
            goes = (step <= gap)[:, None, None]
            states, logits = (torch.where(goes, new, old) for new, old in zip(later, (states, logits)))
        return states, logits

    def _enter(self, sequence: TokenBuffer, pending: Tensor, *, catch_up: bool = False) -> tuple[Tensor, Tensor]:
        """Feeds ``pending`` [B] entries; returns each row's last state [B, 1, size] and its logits."""
        assert self._verifier is not None
        query_len = int(pending.max())
        slots = self._lengths[:, None] + torch.arange(query_len, device=pending.device)  # [B, q]
        context = int(self._lengths.max())
        with self.clock.measure(self.name, query_len, len(pending), context, catch_up=catch_up):
            features = self._verifier.features(self.layers, self._lengths, query_len)
            tokens = sequence.slice(self._lengths + 1, query_len)
            result = self._step(tokens, self._fuse(features), slots, (pending - 1).clamp(min=0)[:, None])
        self._lengths = self._lengths + pending
        return result

    def _go_on(self, sequence: TokenBuffer, states: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """The step from the drafter's own states [B, 1, size] with the tokens at positions ``at`` [B]."""
        slots = (at - 1).clamp(min=0)[:, None]
        with self.clock.measure(self.name, 1, len(slots), int(slots.max())):
            return self._step(sequence.slice(at, 1), states, slots, torch.zeros_like(slots))

    def _spread(self, logits: Tensor) -> Tensor:
        """Logits [B, 1, D] over the verifier's tokens, [B, 1, V]: -inf where the head has none."""
        if self._token_map is not None:
            full = logits.new_full((*logits.shape[:2], self._vocab_size), -torch.inf)
            full[..., self._token_map] = logits
            return full
        missing = self._vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class FeatureDrafter(FeatureReader):
    """A feature drafter of any layout, in torch.

    Args:
        name: its name in plans.
        net: the layer.
        embed: token ids [B, q] -> embeddings [B, q, size].
        head: states [B, 1, size] -> logits [B, 1, D].
        vocab_size, layers, token_map: see ``FeatureReader``.
    """

    def __init__(
        self,
        name: str,
        net: FeatureNet,
        embed: Layer,
        head: Layer,
        vocab_size: int,
        layers: tuple[int, ...],
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__(name, vocab_size, layers, token_map)
        self.net = net
        self._embed, self._head = embed, head
        self._store = KVCache(0, 0)

    def start(self, batch_size: int, capacity: int) -> None:
        super().start(batch_size, capacity)
        if self._store.batch_size != batch_size or self._store.capacity < capacity:
            self._store = KVCache(batch_size, capacity)

    def _fuse(self, features: Tensor) -> Tensor:
        return self.net.fuse(features)

    def _step(self, tokens: Tensor, states: Tensor, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        filled = min(int(slots.max()) + 1, self._store.capacity + 1)
        self._store.begin(slots, filled)
        positions = slots.clamp(max=self._store.capacity - 1)
        mask = torch.arange(filled, device=slots.device) <= positions[:, None, :, None]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._store.write(0, key, value)
            return attention(query, keys, values, mask, query.shape[-1] ** -0.5)

        kept, top = (
            each.gather(1, last[..., None].expand(-1, 1, each.shape[2]))
            for each in self.net(self._embed(tokens), states, positions, attend)
        )
        return kept, self._head(top)
