"""The loop: batches in a fixed order, a state on disk from which it goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaspec.decoding.feature import Layer
from adaspec.decoding.feature_net import FeatureNet
from adaspec.training.collect import Text
from adaspec.training.unroll import Head, acceptance, accepted_length, curve, loss

Tell = Callable[[str, float | None], None]
SAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast it learns.

    A step sees texts with at least ``batch_tokens`` tokens to be learned. From ``unroll_from`` of the steps on, drafts
    are ``unroll`` tokens deep. Every ``evaluate_every`` steps drafts of ``window`` tokens on held-out text are judged;
    after ``patience`` judgements without a better one it ends.

    Raises:
        ValueError: a number out of range.
    """

    epochs: int = 2
    batch_tokens: int = 160
    rate: float = 3e-4
    warmup: int = 50
    unroll: int = 3
    unroll_from: float = 0.6
    evaluate_every: int = 200
    patience: int = 5
    window: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_tokens", "unroll", "evaluate_every", "patience", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, got {getattr(self, name)}")
        if not 0 < self.rate < 1:
            raise ValueError(f"the learning rate lies in (0, 1), got {self.rate}")


class Trainer:
    """Trains ``net`` in place; at the end it holds the weights that were best on held-out text.

    Args:
        net: where it begins.
        embed: the target's embedding.
        head: the reduced head.
        texts: to learn from.
        held_out: to be judged by.
        schedule: how.
        path: the state on disk; it goes on from there when the file exists.

    Raises:
        ValueError: nothing to learn from, or a state that another schedule has left.
    """

    def __init__(
        self,
        net: FeatureNet,
        embed: Layer,
        head: Head,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        schedule: Schedule,
        path: Path,
    ) -> None:
        self.net, self._embed, self._head, self._held_out = net, embed, head, held_out
        self.schedule, self._path = schedule, path
        texts = [text for text in texts if bool(text.learn[2:].any())]
        if not texts:
            raise ValueError("there is no text to learn from")
        self._batches = _batches(texts, schedule)
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.step = 0
        self.history: list[tuple[int, list[float]]] = []  # (step, acceptance by position on held-out text)
        self._best = _copy(net)
        if path.exists():
            self._load()

    @property
    def steps(self) -> int:
        return len(self._batches)

    @property
    def finished(self) -> bool:
        scores = [accepted_length(rates) for _, rates in self.history]
        waited = len(scores) - 1 - scores.index(max(scores)) if scores else 0
        return self.step >= self.steps or waited >= self.schedule.patience

    def run(self, tell: Tell, *, until: int | None = None) -> None:
        """Trains to the end, or to step ``until``; whenever it is interrupted, what is on disk can go on."""
        if not self.history:
            self._judge()
        began, first, saved = time.monotonic(), self.step, time.monotonic()
        while not self.finished and self.step != until:
            self._learn()
            if self.step % self.schedule.evaluate_every == 0 or self.step == self.steps:
                self._judge()
                self.save()
            elif time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
            left = (time.monotonic() - began) / (self.step - first) * (self.steps - self.step)
            tell(self._told(left), self.step / self.steps)
        self.save()
        if self.finished:
            self.net.load_state_dict(self._best)

    def _told(self, left: float) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.history[-1][1])
        return f"train: at most {math.ceil(left / 60)} min left, held-out acceptance {rates}"

    def _learn(self) -> None:
        schedule, done = self.schedule, self.step / self.steps
        steps = schedule.unroll if done >= schedule.unroll_from else 1
        pace = schedule.rate * min((self.step + 1) / schedule.warmup, 0.55 + 0.45 * math.cos(math.pi * done))
        for group in self._optimizer.param_groups:
            group["lr"] = pace
        batch = self._batches[self.step]
        count = sum(int(text.learn[2:].sum()) for text in batch)
        self._optimizer.zero_grad(set_to_none=True)
        for text in batch:
            share = loss(self.net, self._embed, self._head, self._here(text), steps) / count
            torch.autograd.backward(share)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1

    def _judge(self) -> None:
        rates = curve(self.judged(self._held_out))
        scores = [accepted_length(known) for _, known in self.history]
        self.history.append((self.step, rates))
        if accepted_length(rates) > max(scores, default=-1.0):
            self._best = _copy(self.net)

    def judged(self, texts: Sequence[Text]) -> Tensor:
        """Drafts on ``texts``, reached and accepted by position, [2, window]."""
        window = self.schedule.window
        counts = [acceptance(self.net, self._embed, self._head, self._here(text), window) for text in texts]
        return torch.stack(counts).sum(0)

    def _here(self, text: Text) -> Text:
        device = self._head.rows.device
        return Text(text.tokens.to(device), text.features.to(device), text.learn.to(device))

    def save(self) -> None:
        """Writes everything that the next step depends on; the file appears whole or not at all."""
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self._best.items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
        about = {"step": self.step, "history": self.history, "schedule": dataclasses.asdict(self.schedule)}
        partial = self._path.with_suffix(".part")
        save_file({name: each.contiguous() for name, each in tensors.items()}, partial, {"about": json.dumps(about)})
        partial.replace(self._path)

    def _load(self) -> None:
        with safe_open(self._path, framework="pt") as stored:
            about = json.loads(stored.metadata()["about"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
        if about["schedule"] != dataclasses.asdict(self.schedule):
            raise ValueError(f"{self._path} was left by another schedule: {about['schedule']}")
        self.step, self.history = about["step"], [(step, rates) for step, rates in about["history"]]
        self.net.load_state_dict(_under("net.", tensors))
        self._best = _under("best.", tensors)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("adam.", tensors).items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        whole = self._optimizer.state_dict()
        self._optimizer.load_state_dict(whole | {"state": state})


def _batches(texts: Sequence[Text], schedule: Schedule) -> list[list[Text]]:
    """The texts of every step; every epoch has its own order."""
    batches: list[list[Text]] = []
    for epoch in range(schedule.epochs):
        generator = torch.Generator().manual_seed(schedule.seed * 1009 + epoch)
        batch, count = [], 0
        for index in torch.randperm(len(texts), generator=generator).tolist():
            batch.append(texts[index])
            count += int(texts[index].learn[2:].sum())
            if count >= schedule.batch_tokens:
                batches.append(batch)
                batch, count = [], 0
        if batch:
            batches.append(batch)
    return batches


def _copy(net: FeatureNet) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
