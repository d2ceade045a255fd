"""Hugging Face ``generate`` with this project's decoding, and the generation config that the user already has.

    speculation = Speculation(model, drafters=["lookup", small])
    model.generate(**inputs, max_new_tokens=100, custom_generate=speculation)

or, for one call, ``model.generate(**inputs, custom_generate=generate, drafters=["lookup", small])``. transformers does
not hand a ``streamer`` or a ``tokenizer`` on to a custom method; ``speculation.generate(**inputs, ...)`` does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from adaspec.adapters.hf_requests import HistoryProcessor, Scores, Watcher, check, eos_ids, prompts_of
from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.decoding.attention import NAME as OWN_ATTENTION
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.feature import FeatureReader
from adaspec.decoding.feature_load import is_feature_drafter, load_feature_drafter
from adaspec.decoding.hybrid import HybridDrafter
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.model import Model, sequence_limit
from adaspec.decoding.sampling import SamplingParams
from adaspec.plan import Plan, PlanSpace

TARGET = "target"
_ATTENTION = ("eager", "sdpa", OWN_ATTENTION)  # implementations that take a mask of positions


class Speculation:
    """A model with its drafters and what was learned about them; the ``custom_generate`` of many calls.

    A drafter is ``"lookup"`` (n-grams of the text itself), a causal LM of the same tokenizer, the folder of a feature
    drafter made for the target (``adaspec train-drafter``, EAGLE), or a ``Drafter`` of this project; models may also
    verify in the middle of a chain. One call at a time: the caches are shared.

    Args:
        model: the target, decoder-only, whose cache can be rolled back.
        drafters: a list, or a dict by name in plans.
        controller: over plans of these names; by default one over every chain that the next arguments span.
        windows: outermost windows to choose from.
        inner_windows: windows beneath a middle model.
        max_depth: models in the longest chain.
        profile: time the passes now, so that the first round already knows what they cost.

    Raises:
        ValueError: a model that cannot be rolled back or takes no such mask, a drafter of no known kind, or plans of
            other names.
    """

    def __init__(
        self,
        model: Any,
        drafters: Sequence[Any] | Mapping[str, Any] = ("lookup",),
        *,
        controller: Controller | None = None,
        windows: Sequence[int] = (2, 4, 8),
        inner_windows: Sequence[int] = (2, 4),
        max_depth: int = 3,
        profile: bool = True,
    ) -> None:
        self.model = model
        target = _language_model(TARGET, model)
        members = _members(drafters, target)
        limit = sequence_limit(model.config.get_text_config())
        self.chain = Chain(
            target, members, capacity=limit[0] if limit else 2**31 - 1, capacity_reason=limit[1] if limit else ""
        )
        self.controller = controller or _controller(members, windows, inner_windows, max_depth)
        self.chain.prepare(self.controller.space)
        if profile:
            self.controller.profile(self.chain.profile(self.controller.space.shapes()))

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        stop_strings: str | Sequence[str] | None = None,
        stopping_criteria: Sequence[Any] = (),
        **options: Any,
    ) -> Any:
        """``model.generate`` with this speculation; also streamers and stop strings arrive.

        Raises:
            ValueError: stop strings without their tokenizer, or what ``check`` refuses.
        """
        config = copy.deepcopy(generation_config or self.model.generation_config)
        stop = stop_strings or config.stop_strings
        config.stop_strings = None
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop:
            if tokenizer is None:
                raise ValueError("stop strings need the tokenizer: generate(..., tokenizer=tokenizer)")
            criteria.append(StopStringCriteria(tokenizer, stop))
        method = partial(self, streamer=streamer)
        return self.model.generate(
            inputs,
            generation_config=config,
            stopping_criteria=criteria,
            streamer=streamer,
            custom_generate=method,
            **options,
        )

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding method that ``model.generate`` calls."""
        if model is not self.model:
            raise ValueError("this speculation was made for another model")
        batch = input_ids.shape[0]
        check(generation_config, logits_processor, input_ids, model_kwargs, streamer)
        prompts = prompts_of(input_ids, model_kwargs.get("attention_mask"))
        processor = HistoryProcessor(logits_processor, input_ids, [len(prompt) for prompt in prompts])
        watcher = Watcher(stopping_criteria, input_ids)
        sampled = bool(generation_config.do_sample)
        seeds = torch.randint(2**63 - 1, (batch,)).tolist() if sampled else [0] * batch  # torch.manual_seed governs
        sequences = Sequences(
            prompts,
            tuple(SamplingParams(temperature=float(sampled), seed=seed) for seed in seeds),
            (generation_config.max_length - input_ids.shape[1],) * batch,
            (eos_ids(generation_config),) * batch,
        )
        scores = Scores(generation_config, batch)
        self.chain.start(
            sequences, watch=watcher if watcher.criteria else None, processor=processor if processor or scores else None
        )
        rows = self._rounds(batch, processor, scores, streamer)
        texts = _padded(input_ids, rows, generation_config)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=texts, scores=scores.scores(), logits=scores.logits())
        return texts

    def _rounds(self, batch: int, processor: HistoryProcessor, scores: Scores, streamer: Any) -> list[list[int]]:
        """New tokens of every row."""
        rows: list[list[int]] = [[] for _ in range(batch)]
        while self.chain.running:
            decision = self.controller.choose(self.chain.context())
            result = self.chain.round(decision.plan)
            self.controller.observe(decision, result.outcome)
            if scores:
                scores.add(*processor.latest, [len(tokens) for tokens in result.tokens])
            for row, tokens in zip(rows, result.tokens):
                row += tokens
            if streamer is not None:
                for token in result.tokens[0]:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        return rows


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: GenerationConfig,
    drafters: Sequence[Any] | Mapping[str, Any] = ("lookup",),
    controller: Controller | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """``custom_generate`` for one call: ``model.generate(**inputs, custom_generate=generate, drafters=[...])``.

    Caches are built anew and what is learned is lost with the call, but for a ``controller`` of the caller's.
    """
    speculation = Speculation(model, drafters, controller=controller, profile=False)
    return speculation(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer=streamer,
        **model_kwargs,
    )


def _language_model(name: str, module: Any, vocab_size: int | None = None) -> Model:
    kind = getattr(module.config, "_attn_implementation", "eager")
    if kind not in _ATTENTION:
        raise ValueError(f"{name} uses the attention {kind!r}; rows of different length need one of {_ATTENTION}")
    return Model(name, module, vocab_size)


def _members(drafters: Sequence[Any] | Mapping[str, Any], target: Model) -> dict[str, LanguageModel | Drafter]:
    if isinstance(drafters, Mapping):
        named = list(drafters.items())
    else:
        several = sum(hasattr(drafter, "forward") for drafter in drafters) > 1
        numbers = iter(range(1, len(drafters) + 1))
        named = [(_name(drafter, numbers, several), drafter) for drafter in drafters]
    if len({name for name, _ in named} | {TARGET}) <= len(named):
        raise ValueError(f"drafters need different names (not {TARGET!r}), got {', '.join(name for name, _ in named)}")
    return {name: _member(name, drafter, target) for name, drafter in named}


def _name(drafter: Any, numbers: Any, several: bool) -> str:
    """``draft``, or ``draft1``, ``draft2`` where there are several models; what has a name keeps it."""
    if isinstance(drafter, str | Path):
        return Path(drafter).name
    if hasattr(drafter, "forward"):
        return f"draft{next(numbers)}" if several else "draft"
    return str(getattr(drafter, "name", "drafter"))


def _member(name: str, drafter: Any, target: Model) -> LanguageModel | Drafter:
    if isinstance(drafter, LanguageModel | Drafter):
        return drafter
    if drafter == "lookup":
        return LookupDrafter(name)
    if hasattr(drafter, "forward") and hasattr(drafter, "config"):
        return _language_model(name, drafter, target.vocab_size)
    if isinstance(drafter, str | Path) and is_feature_drafter(drafter):
        return load_feature_drafter(name, Path(drafter), target)
    kinds = "'lookup', a causal LM, the folder of a feature drafter or a Drafter"
    raise ValueError(f"a drafter is {kinds}, got {drafter!r} for {name!r}")


def _controller(
    members: Mapping[str, LanguageModel | Drafter],
    windows: Sequence[int],
    inner_windows: Sequence[int],
    max_depth: int,
) -> Controller:
    middles = [name for name, member in members.items() if isinstance(member, LanguageModel)]
    lookups = [name for name, member in members.items() if isinstance(member, LookupDrafter)]
    space = PlanSpace.grid(
        TARGET, list(members), windows, middles=middles, inner_windows=inner_windows, max_depth=max_depth
    )
    space = PlanSpace(plan for plan in space if _playable(plan, members))
    return Controller(space, costs=CostModel(space, one_pass=lookups))


def _playable(plan: Plan, members: Mapping[str, LanguageModel | Drafter]) -> bool:
    """A feature drafter reads the target, so nothing may stand between them; nor does a model verify its own drafts."""
    middles, last = plan.models[1:-1], members.get(plan.models[-1])
    if not middles or not isinstance(last, Drafter):
        return True
    parts = tuple(last.parts.values()) if isinstance(last, HybridDrafter) else (last,)
    reads = any(isinstance(part, FeatureReader) for part in parts)
    return not reads and all(members[name] not in last.models for name in middles)


def _padded(input_ids: Tensor, rows: Sequence[Sequence[int]], config: GenerationConfig) -> Tensor:
    """Prompts and new tokens, padded on the right; [B, P + longest]."""
    pad = getattr(config, "_pad_token_tensor", None)
    longest = max(map(len, rows))
    filled = [[*row, *[0 if pad is None else int(pad)] * (longest - len(row))] for row in rows]
    return torch.cat((input_ids, torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)), 1)
