"""Run folders as ``adaspec bench`` leaves them, made by real controllers that decode in a simulated world."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from adaspec.bench import simulators
from adaspec.bench.replay import Replay
from adaspec.bench.simulators import Regime
from adaspec.bench.worlds import World
from adaspec.controller import Controller
from adaspec.costs import CostModel
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Plan, PlanSpace
from adaspec.policy import EpsilonGreedy, Fixed, Policy, ThompsonSampling

KINDS = {"chat": simulators.GOOD, "code": simulators.CHAIN, "quoting": simulators.chances(*[0.85] * 9)}
TOKENS = 120  # of an answer
PREFILL = 0.03  # seconds


@dataclass
class Player:
    """A method: its controller, and rounds so far."""

    controller: Controller
    rounds: int = 0


def space() -> PlanSpace:
    return PlanSpace.grid("t", ["d", "l"], [2, 4, 6], middles=["m"], inner_windows=[2])


def methods(seed: int, policy: Policy | None = None) -> dict[str, Player]:
    policies: dict[str, Policy] = {
        "plain": Fixed(Plan(("t",))),
        "fixed-d4": Fixed(Plan.parse("t/d:4")),
        "thompson": policy or ThompsonSampling(),
    }
    return {name: Player(_controller(policy, seed)) for name, policy in policies.items()}


def exploring(seed: int, epsilon: float) -> dict[str, Player]:
    """The same with a policy that tries every plan."""
    return methods(seed, EpsilonGreedy(epsilon))


def _controller(policy: Policy, seed: int) -> Controller:
    return Controller(space(), policy, CostModel(space(), one_pass=["l"]), seed=seed)


def write_run(
    folder: Path,
    *,
    prompts: int = 6,
    repeats: int = 2,
    seed: int = 0,
    players: dict[str, Player] | None = None,
    config: dict[str, Any] | None = None,
    summary: bool = True,
    kinds: Sequence[str] = tuple(KINDS),
) -> Path:
    """Every method on the same worlds, interleaved prompt by prompt."""
    folder.mkdir(parents=True)
    players = players or methods(seed)
    rounds, answers = [], []
    for repeat in range(repeats):
        for prompt in range(prompts):
            kind = kinds[prompt % len(kinds)]
            world = simulators.world([Regime(TOKENS, KINDS[kind])], seed=1000 * seed + prompt)
            for name, player in players.items():
                where = {"method": name, "prompt": f"p{prompt}", "kind": kind, "repeat": repeat, "turn": 0}
                played = _answer(player, world, seed=17 * repeat + prompt)
                rounds += [where | record for record in played]
                answers.append(where | _prompt(played))
    _jsonl(folder / "rounds.jsonl", rounds)
    _jsonl(folder / "prompts.jsonl", answers)
    given = {"seed": seed, "policy": {"name": "thompson"}, **(config or {})}
    OmegaConf.save(OmegaConf.create(given), folder / "config.yaml")
    for name, player in players.items():
        (folder / f"controller-{name}.json").write_text(json.dumps(player.controller.state_dict()))
    if summary:
        machine = {"processor": "simulated", "threads": 1}
        (folder / "summary.json").write_text(json.dumps({"command": "adaspec bench", "machine": machine}))
    return folder


def _answer(player: Player, world: World, seed: int) -> list[dict[str, Any]]:
    replay, found = Replay(world, space(), seed), []
    while not replay.over:
        context = replay.context()
        pulls = player.controller.pulls
        decision = player.controller.choose(context)
        forecast = float(player.controller.costs.rates(context)[space().arm(decision.plan)])
        outcome = replay.round(decision.plan)
        player.controller.observe(decision, outcome)
        found.append(_round(decision, outcome, player.rounds, forecast) | {"pulled": player.controller.pulls > pulls})
        player.rounds += 1
    return found


def _round(decision: Decision, outcome: RoundOutcome, number: int, forecast: float) -> dict[str, Any]:
    return {
        "round": number,
        "plan": str(decision.plan),
        "propensity": decision.propensity,
        "batch_size": decision.context.batch_size,
        "seq_len": decision.context.seq_len,
        "tag": decision.context.tag or None,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "catch_up_seconds": outcome.catch_up_seconds,
        "forecast": forecast,
        "edges": [{key: value for key, value in asdict(edge).items() if key in EDGE} for edge in outcome.edges],
        "passes": [asdict(one) for one in outcome.passes],
    }


EDGE = ("verifier", "drafter", "reached", "offered", "accepted")


def _prompt(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens, seconds = (sum(one[name] for one in rounds) for name in ("tokens", "seconds"))
    return {
        "tokens": tokens,
        "seconds": PREFILL + seconds,
        "prefill_seconds": PREFILL,
        "tokens_per_second": tokens / (PREFILL + seconds),
        "rounds": len(rounds),
        "mean_accepted_length": tokens / len(rounds),
        "digest": "same",
    }


def _jsonl(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
