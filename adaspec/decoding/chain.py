"""A chain of models over one batch: prefill, one round of any plan, and the outcome of that round."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from adaspec.decoding.batch import Batch, Draft, Verdict
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.clock import WallClock
from adaspec.decoding.drafter import Drafter, ModelDrafter, Stage
from adaspec.decoding.feature import FeatureReader
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.profiling import Profiler
from adaspec.decoding.sampling import Processor, Sampler, SamplingParams
from adaspec.decoding.shadow import Shadow, overhear
from adaspec.decoding.shield import Report, Shield
from adaspec.decoding.tally import EdgeTally
from adaspec.outcome import EdgeOutcome, Pass, RoundOutcome
from adaspec.plan import LACKING, Context, Plan


@dataclass(frozen=True, slots=True)
class Sequences:
    """The prompts of a batch as token ids, and per row how it is sampled and when it ends.

    Raises:
        ValueError: no prompt, an empty prompt, or a max_new_tokens below 1, each with its row.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    max_new_tokens: tuple[int, ...]
    stop_ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("there is no prompt")
        for row, (prompt, limit) in enumerate(zip(self.prompts, self.max_new_tokens)):
            if not prompt:
                raise ValueError(f"prompt {row} is empty: a model needs at least one token to continue")
            if limit < 1:
                raise ValueError(f"max_new_tokens is at least 1, got {limit}")

    @property
    def capacity(self) -> int:
        """Cache slots that the longest row needs."""
        return max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.max_new_tokens))


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probability of a committed token under the target, before penalties and temperature.

    ``top``: (token, log-probability) of the most likely tokens at its position, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """What a round committed: per row its new tokens, their scores if asked for, and whether the row ended."""

    tokens: list[list[int]]
    scores: list[list[Score]] | None
    finished: list[bool]
    outcome: RoundOutcome


Watch = Callable[[int, list[int]], int | None]
"""(row, new tokens) -> how many of them to keep if the row ends among them (a stop string), else None."""


class Chain:
    """The target and everything that may draft for it, by name; plays any plan of these names.

    Args:
        target: its ``name`` is the first model of every plan.
        drafters: models (which may also stand in the middle of a chain) and other drafters, by their name in plans.
        capacity: cache length in tokens, prompt and new tokens together.
        capacity_reason: what the capacity comes from, for the error of a longer request.

    Raises:
        ValueError: vocabularies of different size, or a drafter with the target's name.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: Mapping[str, LanguageModel | Drafter],
        *,
        capacity: int = 4096,
        capacity_reason: str = "",
        clock: WallClock | None = None,
    ) -> None:
        if target.name in drafters:
            raise ValueError(f"a drafter has the target's name {target.name!r}")
        self.target = target
        self.capacity = capacity
        self._capacity_reason = f" ({capacity_reason})" if capacity_reason else ""
        self.members: dict[str, LanguageModel | Drafter] = {target.name: target, **drafters}
        self._clock = clock or WallClock()
        for name, member in self.members.items():
            member.clock = self._clock
            if isinstance(member, LanguageModel) and member.vocab_size != target.vocab_size:
                raise ValueError(f"{name} has {member.vocab_size} tokens, {target.name} has {target.vocab_size}")
        self._drafting = [(name, each) for name, each in drafters.items() if isinstance(each, LanguageModel)]
        self._stages: dict[Plan, list[Stage]] = {}
        self._shadows: dict[str, Shadow] = {}
        self._shield: Shield | None = None

    def shield(self, report: Report) -> None:
        """From now on a drafter that fails costs its draft, not the round; ``report`` is told. See ``Shield``."""
        self._shield = Shield(report, self.target.vocab_size)
        plans, self._stages = list(self._stages), {}
        self.prepare(plans)

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Builds the stages of ``plans``, so that a round allocates nothing.

        Raises:
            ValueError: a plan names an unknown model, another target, or a drafter that cannot verify.
        """
        missing = [plan for plan in plans if plan not in self._stages]
        for plan in missing:
            self._stages[plan] = self._build(plan)
        if missing:
            self._shadows = self._build_shadows()

    def _build(self, plan: Plan) -> list[Stage]:
        for name in plan.models:
            if name not in self.members:
                raise ValueError(f"plan {plan} names {name!r}; known are {', '.join(self.members)}")
        if plan.target != self.target.name:
            raise ValueError(f"plan {plan} has the target {plan.target!r}, this chain has {self.target.name!r}")
        if not plan.windows:
            return []
        last = self.members[plan.models[-1]]
        inner: Drafter = ModelDrafter(last) if isinstance(last, LanguageModel) else last
        for model in inner.models:
            self._refuse_stateful(model)
        stages: list[Stage] = []
        for name, below, window in reversed(list(zip(plan.models, plan.models[1:], plan.windows))):
            verifier = self.members[name]
            if not isinstance(verifier, LanguageModel):
                raise ValueError(f"plan {plan}: {name!r} can only draft, not verify")
            if verifier in inner.models:
                raise ValueError(f"plan {plan}: {name!r} would verify its own drafts in {plan.models[-1]!r}")
            self._refuse_stateful(verifier)
            shielded = self._shield.wrap(below, inner) if self._shield else inner
            inner = Stage(verifier, shielded, window, 0.0 if stages else plan.stop)
            stages.insert(0, inner)
        return stages

    def _build_shadows(self) -> dict[str, Shadow]:
        """A shadow for each lookup drafter right beneath the target in a prepared plan, of its longest window there.

        Keyed by the edge's name of the drafter: stopping early it is scored apart.
        """
        longest: dict[tuple[str, str, float], int] = {}
        for plan in self._stages:
            if plan.depth == 2:
                _, drafter, window = next(plan.edges())
                key = drafter, plan.models[1], plan.stop
                longest[key] = max(window, longest.get(key, 0))
        shadows = {}
        for (drafter, name, stop), window in longest.items():
            member = self.members[name]
            if isinstance(member, LookupDrafter):
                shadows[drafter] = Shadow(member, window, stop)
        return shadows

    @staticmethod
    def _refuse_stateful(model: LanguageModel) -> None:
        if model.rollback_obstacle:
            raise ValueError(f"{model.name} can only decode plainly: {model.rollback_obstacle}")

    def check(self, sequences: Sequences) -> None:
        """Tells whether a batch fits.

        Raises:
            ValueError: a row needs more tokens than the cache holds; both numbers are named.
        """
        if sequences.capacity > self.capacity:
            needs = [len(prompt) + limit for prompt, limit in zip(sequences.prompts, sequences.max_new_tokens)]
            row = needs.index(sequences.capacity)
            raise ValueError(
                f"prompt and new tokens need {sequences.capacity} tokens (prompt {row} has "
                f"{len(sequences.prompts[row])}), the cache holds {self.capacity}{self._capacity_reason}"
            )

    def start(
        self,
        sequences: Sequences,
        *,
        watch: Watch | None = None,
        logprobs: int | None = None,
        processor: Processor | None = None,
    ) -> None:
        """Takes in a batch and feeds the target all but the last token of each prompt.

        ``logprobs``: how many of the most likely tokens are told with the score of each; None: no scores.
        ``processor``: what happens to the logits of every model, in place of the penalties.

        Raises:
            ValueError: see ``check``.
        """
        self.check(sequences)
        device, size = self.target.device, len(sequences.prompts)
        buffer = TokenBuffer(size, sequences.capacity, device)
        for row, prompt in enumerate(sequences.prompts):
            buffer.tokens[row, : len(prompt)] = torch.tensor(prompt)
        buffer.lengths = torch.tensor([len(prompt) for prompt in sequences.prompts], device=device)
        width = max(map(len, sequences.stop_ids))
        stop_ids = [[*ids, *[-1] * (width - len(ids))] for ids in sequences.stop_ids]
        stops = torch.tensor(stop_ids, dtype=torch.long, device=device).view(size, width)
        self._left = list(sequences.max_new_tokens)  # tokens still to come per row, 0 once it has ended
        self._watch, self._logprobs = watch, logprobs
        self.begin(Batch(buffer, Sampler(sequences.sampling, device, processor), stops, buffer.lengths))

    def begin(self, batch: Batch) -> None:
        """Starts every member on ``batch`` and feeds the target all but the last token of each row."""
        self._batch = batch
        self._began = self._ends = batch.sequence.lengths.tolist()  # tokens of each row before and behind the round
        for shadow in self._shadows.values():
            shadow.skip()
        for stages in self._stages.values():
            for stage in stages:
                stage.forget()  # of a round that broke off
        for name, member in self.members.items():
            if self._shield and member is not self.target:
                self._shield.start(name, member, batch.sequence.batch_size, batch.sequence.capacity)
            else:
                member.start(batch.sequence.batch_size, batch.sequence.capacity)
        self.target.catch_up(batch.sequence, batch.sequence.lengths - 1)
        self._clock.drain()

    def context(self, tag: str = "") -> Context:
        """Running rows, their mean length, and what idle models lack of it."""
        running = self._running_rows
        rows, total = max(running, 1), self._held(self._ends)
        lacking = [(name, (total - self._held(model.lengths.tolist())) // rows - 1) for name, model in self._drafting]
        return Context(running, total // rows, tag, tuple(one for one in lacking if one[1] >= LACKING))

    def _held(self, lengths: Sequence[int]) -> int:
        """The sum of ``lengths`` [B] over running rows."""
        return sum(length for length, left in zip(lengths, self._left) if left)

    @property
    def _running_rows(self) -> int:
        return sum(left > 0 for left in self._left)

    @property
    def running(self) -> bool:
        return any(self._left)

    def round(self, plan: Plan) -> Round:
        """Plays one round: every running row commits 1 .. windows[0] + 1 tokens."""
        self.prepare([plan])
        began = self._clock.now()
        rows = self._running_rows
        self._settle(plan)
        verdict = self.emit(plan, self._left)
        tokens, finished = self._commit(verdict)
        scores = None if self._logprobs is None else _scores(verdict, [len(kept) for kept in tokens], self._logprobs)
        scored = self._score(plan)
        seconds = self._clock.now() - began
        passes, catch_up = self._clock.drain()
        drained = [
            stage.drain(verifier, drafter) for stage, (verifier, drafter, _) in zip(self._stages[plan], plan.edges())
        ]
        edges = (*(own for own, *_ in drained), *(part for _, *parts in drained for part in parts))
        outcome = RoundOutcome(sum(map(len, tokens)), seconds, rows, catch_up, edges, passes, scored)
        return Round(tokens, scores, finished, outcome)

    def _settle(self, plan: Plan) -> None:
        """Judges the lookups that are about to read on; one that plays beneath the target begins anew behind it."""
        for drafter, shadow in self._shadows.items():
            name = drafter.partition("?")[0]
            if name in plan.models:
                self._attempt(name, shadow, partial(shadow.settle, self._batch, self._ends))

    def _score(self, plan: Plan) -> tuple[EdgeOutcome, ...]:
        """How drafters that did not play beneath the target would have done there."""
        edges = list(plan.edges())
        ended, outcomes = [not left for left in self._left], []
        follow = (self._batch, self._began, self._ends, ended)
        for drafter, shadow in self._shadows.items():
            if edges and drafter == edges[0][1]:
                shadow.skip()
            else:
                self._attempt(drafter.partition("?")[0], shadow, partial(shadow.follow, *follow))
            outcomes.append(shadow.drain(self.target.name, drafter))
        for stage, (_, drafter, window) in list(zip(self._stages[plan], edges))[1:]:
            if drafter not in self._shadows:
                tally = EdgeTally(window)
                overhear(self._batch, stage.proposals(), tally)
                outcomes.append(tally.drain(self.target.name, drafter))
        return tuple(outcome for outcome in outcomes if outcome and outcome.verifications)

    def _attempt(self, name: str, shadow: Shadow, action: Callable[[], None]) -> None:
        """Scores a drafter, which begins anew when it fails."""

        def judge() -> bool:
            action()
            return True

        if not (self._shield.attempt(name, judge) if self._shield else judge()):
            shadow.skip()

    def emit(self, plan: Plan, limits: Sequence[int]) -> Verdict:
        """The device's part of a round of a prepared plan: appends 1 .. ``limits`` [B] tokens per row, 0 where 0."""
        self._batch.committed = self._batch.sequence.lengths
        stages = self._stages[plan]
        if stages:
            return stages[0].verify(self._batch, limits)
        start = self._batch.committed
        return self.target.verify(self._batch, Draft.none(start), start, torch.tensor(limits, device=start.device))

    def _commit(self, verdict: Verdict) -> tuple[list[list[int]], list[bool]]:
        """Trims the emitted tokens to what the rows keep, and ends the rows that are done."""
        kept, left = [], []
        counts: list[int] = verdict.counts.tolist()
        self._began, self._ends = self._ends, [end + count for end, count in zip(self._ends, counts)]
        told = zip(verdict.tokens.tolist(), counts, self._batch.stops, self._left)
        for row, (tokens, count, stops, budget) in enumerate(told):
            tokens = tokens[:count]
            self._batch.note(row, self._began[row], tokens)
            ended = count > 0 and (tokens[-1] in stops or count >= budget)
            keep = self._watch(row, tokens) if self._watch and tokens else None
            kept.append(tokens[:keep])
            left.append(0 if ended or keep is not None else budget - count)
        self._left = left
        return kept, [budget == 0 for budget in left]

    def prepare_passes(self, shapes: Mapping[str, Collection[int]], batch_sizes: Collection[int] = (1,)) -> None:
        """Makes the passes of ``PlanSpace.shapes`` ready, see ``LanguageModel.prepare``; ends the running batch.

        Beneath the target a model that had all its drafts accepted is fed one token more.
        """
        lengths: dict[LanguageModel, set[int]] = {}
        for name, query_lens in shapes.items():
            model = self._model(name)
            if model is not None:
                known = lengths.setdefault(model, set())
                known |= {*query_lens} if model is self.target else {*query_lens, max(query_lens) + 1}
        for model, known in lengths.items():
            model.prepare(known, batch_sizes, self.capacity)

    def _model(self, name: str) -> LanguageModel | None:
        """The model that passes of this name are run by: a drafter that runs models stands for the last of them."""
        member = self.members[name]
        model = next(reversed(member.models), None) if isinstance(member, Drafter) else member
        return None if model is None or model.rollback_obstacle else model

    def profile(self, shapes: Mapping[str, Iterable[int]], *, batch_size: int = 1, repeats: int = 3) -> list[Pass]:
        """Times the passes of the given models and query lengths on a short made-up text; the median of ``repeats``.

        A drafter that reads a model's features is timed as it drafts. Ends the batch that is being decoded.
        """
        profiler, measured = Profiler(self._clock, self.capacity, batch_size, repeats), []
        for name, lengths in shapes.items():
            member = self.members[name]
            if isinstance(member, FeatureReader) and member.verifier is not None:
                measured.append(profiler.step(member, member.verifier))
                continue
            model = self._model(name)
            if model is not None:
                passes = [profiler.forward(model, length) for length in sorted(lengths)]
                measured += [replace(each, model=name) for each in passes]
        return measured


def _scores(verdict: Verdict, counts: Sequence[int], top: int) -> list[list[Score]]:
    """Of the first ``counts[b]`` emitted tokens of each row, with the ``top`` most likely ones at their positions."""
    laws = torch.log_softmax(verdict.logits().float(), -1)  # [B, m + 1, V]
    own = laws.gather(-1, verdict.tokens[..., None]).squeeze(-1)
    values, tokens = laws.topk(min(top, laws.shape[-1]), -1)  # [B, m + 1, top]
    return [
        [Score(value, tuple(zip(ids, best))) for value, ids, best in zip(*row)][:count]
        for *row, count in zip(own.tolist(), tokens.tolist(), values.tolist(), counts)
    ]
