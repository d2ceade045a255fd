"""Whether a third model pays: the best chain of three against the best pair, with the theorem's forecast beside.

adaspec bench experiment=chains_smollm2
adaspec bench experiment=chains_qwen_coder workload.read.path=humaneval.jsonl models.target=T.gguf models.draft=D.gguf

A sweep over a few prompts finds the best chains of every depth; these and plain decoding then take turns on all
prompts. A cost model sees every round, and what it forecasts for each chain from its parts alone, the acceptance of
its pairs and the seconds of its models' passes, stands beside what was measured.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from adaspec.assemble import Assembly
from adaspec.bench.common import bars
from adaspec.bench.journal import machine
from adaspec.bench.lineup import asking, assembled, best_plan, fitting, questions, setup
from adaspec.bench.methods import Answer, fixed
from adaspec.costs import CostModel
from adaspec.decoding.generate import Request
from adaspec.plan import Context, Plan

KEPT = 2  # plans of each depth that are measured


def chains(config: DictConfig, out: Path) -> dict[str, Any]:
    """Measures plain decoding and the best chains of each depth.

    Returns:
        Per plan tokens/s of decoding, its speed-up (the median of the prompts' ratios to plain decoding) in all and by
        kind, whether its texts equal plain decoding's (None when sampled), and the forecast of both; the best plan of
        each depth; and ``gain``: the best chain of three over the best pair, measured and forecast.

    Raises:
        ValueError: models or options that do not fit together, or no chain of three to choose from.
    """
    own = setup(config, out)
    with bars("load", 1) as advance:

        def tell(what: str) -> None:
            advance(what, 0)

        assembly = assembled(config, own, tell)
        ask = asking(config, assembly)
        asked = fitting(config, ask, questions(config))
        depths = {depth: [plan for plan in assembly.space if plan.depth == depth] for depth in (2, 3)}
        if not all(depths.values()):
            given = ", ".join(spec.name for spec in own.drafters)
            raise ValueError(
                "a chain of three needs two drafters, a model among them, and plans.max_depth=3; the drafters are "
                f"{given}, the depth {config.plans.max_depth}"
            )
        plans = [assembly.space.plain]
        for own_depth in depths.values():
            plans += list(best_plan(config, ask, asked, tell, own_depth))[:KEPT]
    requests = [(question.kind, ask.request(question.turns[0])) for question in asked]
    answers, model = _play(assembly, plans, requests)
    found = _figures(answers, [kind for kind, _ in requests], model, greedy=config.sampling.temperature == 0.0)
    best = {
        depth: max((plan for plan in plans if plan.depth == depth), key=lambda plan: found[plan]["speedup"])
        for depth in depths
    }
    _show(found)
    gain = {key: found[best[3]][key] / found[best[2]][key] for key in ("speedup", "forecast_speedup")}
    return {
        "machine": machine(own.device),
        "runners": assembly.runners,
        "plans": {str(plan): figures for plan, figures in found.items()},
        "best": {str(depth): str(plan) for depth, plan in best.items()},
        "gain": {"measured": gain["speedup"], "forecast": gain["forecast_speedup"]},
    }


def _play(
    assembly: Assembly, plans: list[Plan], requests: Sequence[tuple[str, Request]]
) -> tuple[dict[Plan, list[Answer]], CostModel]:
    """All prompts by all plans, which take turns in going first; and a cost model that saw it."""
    model = CostModel(assembly.space, one_pass=assembly.one_pass, acceptance=assembly.acceptance)
    model.profile(assembly.profile)
    methods = {plan: fixed(assembly, plan) for plan in plans}
    found: dict[Plan, list[Answer]] = defaultdict(list)
    with bars("chains", len(requests) * len(plans)) as advance:
        for number, (kind, request) in enumerate(requests):
            first = number % len(plans)
            for plan in plans[first:] + plans[:first]:
                advance(f"{kind}: {plan}", 0)
                answer = methods[plan].answer(request)
                found[plan].append(answer)
                for one in answer.rounds:
                    model.observe(one.decision, one.outcome)
                advance("chains", 1)
    return {plan: found[plan] for plan in plans}, model


def _figures(
    answers: Mapping[Plan, Sequence[Answer]], kinds: Sequence[str], model: CostModel, *, greedy: bool
) -> dict[Plan, dict[str, Any]]:
    plain = next(plan for plan in answers if plan.depth == 1)
    lengths = [one.outcome.passes[0].seq_len for one in answers[plain][-1].rounds if one.outcome.passes]
    tokens, seconds = model.forecast(Context(1, round(statistics.fmean(lengths)) if lengths else 1))
    forecasts = dict(zip(model.space, tokens / seconds))
    found = {}
    for plan, own in answers.items():
        ratios = [_rate(mine) / _rate(theirs) for mine, theirs in zip(own, answers[plain], strict=True)]
        by_kind = {kind: [ratio for ratio, each in zip(ratios, kinds) if each == kind] for kind in dict.fromkeys(kinds)}
        same = all(mine.tokens == theirs.tokens for mine, theirs in zip(own, answers[plain], strict=True))
        found[plan] = {
            "tokens_per_second": statistics.median(map(_rate, own)),
            "speedup": statistics.median(ratios),
            "kinds": {kind: statistics.median(each) for kind, each in by_kind.items()},
            "texts_equal": same if greedy else None,
            "forecast_tokens_per_second": float(forecasts[plan]),
            "forecast_speedup": float(forecasts[plan] / forecasts[plain]),
        }
    return found


def _rate(answer: Answer) -> float:
    """Tokens/s of decoding, without the prompt."""
    return len(answer.tokens) / (answer.seconds - (answer.prefill_seconds or 0.0))


def _show(found: Mapping[Plan, Mapping[str, Any]]) -> None:
    print(f"{'plan':<32} {'tokens/s':>9} {'speed-up':>9} {'forecast':>9}")
    for plan, own in found.items():
        print(f"{plan!s:<32} {own['tokens_per_second']:9.1f} {own['speedup']:9.2f} {own['forecast_speedup']:9.2f}")
