"""From the lines of prompts to the figures of a run, by Spec-Bench's protocol."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from adaspec.bench.speeds import Told, mean_speed, speed_ratios, speeds

Line = Mapping[str, Any]
PLAIN = "plain"
COLUMNS = {
    "tokens_per_second": "tokens/s",
    "mean_accepted_length": "tokens per round",
    "speedup": "speed-up",
    "speedup_spread": "lowest, highest",
    "texts_equal": "same text",
}


def figures(prompts: Sequence[Line], *, greedy: bool) -> dict[str, Any]:
    """Figures of every method, over all kinds and for each.

    Tokens/s of a question are those of all its turns, prompts included; a method's are their mean, and its speed-up
    is the ratio of means over the questions that plain decoding answered too. Both are means over repetitions; the
    spread is the lowest and the highest of these.
    """
    texts = {_turn(line): line["digest"] for line in prompts if line["method"] == PLAIN} if greedy else {}
    found = {}
    for method in dict.fromkeys(line["method"] for line in prompts):
        own = [line for line in prompts if line["method"] == method]
        kinds = dict.fromkeys(line["kind"] for line in own)
        of = {kind: _figures([line for line in own if line["kind"] == kind], prompts, texts) for kind in kinds}
        found[method] = {**_figures(own, prompts, texts), "kinds": of}
    return found


def _turn(line: Line) -> tuple[str, int, int]:
    return line["prompt"], line["repeat"], line["turn"]


def _figures(own: Sequence[Line], prompts: Sequence[Line], texts: Mapping[tuple[str, int, int], str]) -> dict[str, Any]:
    rates = speeds(map(_told, own))
    ratios = speed_ratios(rates, speeds(_told(line) for line in prompts if line["method"] == PLAIN))
    rounds = sum(line["rounds"] for line in own)
    same = [line["digest"] == texts[_turn(line)] for line in own if _turn(line) in texts]
    found = {
        "tokens_per_second": mean_speed(rates),
        "mean_accepted_length": sum(line["tokens"] for line in own) / rounds if rounds else None,
        "speedup": fmean(ratios) if ratios else None,
        "speedup_spread": [min(ratios), max(ratios)] if ratios else None,
        "texts_equal": all(same) if same else None,
        "texts_equal_share": fmean(same) if same else None,
        "prompts": len({line["prompt"] for line in own}),
        "repeats": len(rates),
    }
    waited = _latencies(own)
    return found | ({"latency_seconds": fmean(waited)} if waited else {})


def _told(line: Line) -> Told:
    return line["repeat"], line["prompt"], line["tokens"], line["seconds"]


def _latencies(own: Sequence[Line]) -> list[float]:
    """Seconds from arrival to the last token, were the requests of a stream answered one after the other."""
    found: list[float] = []
    free: dict[int, float] = defaultdict(float)
    for line in own:
        if line.get("arrival") is not None:
            free[line["repeat"]] = max(free[line["repeat"]], line["arrival"]) + line["seconds"]
            found.append(free[line["repeat"]] - line["arrival"])
    return found


def table(methods: Mapping[str, Mapping[str, Any]], first: str = "method") -> str:
    """A line per method, and where there are several kinds one per method and kind, as Markdown."""
    head = f"| {first} | " + " | ".join(COLUMNS.values()) + " |\n|---" + "|---:" * len(COLUMNS) + "|"
    rows = [_row(name, own) for name, own in methods.items()]
    for kind in dict.fromkeys(kind for own in methods.values() for kind in own.get("kinds", ())):
        of = {name: own["kinds"][kind] for name, own in methods.items() if kind in own["kinds"]}
        rows += [_row(f"{kind}: {name}", own) for name, own in of.items()] if len(methods) else []
    return "\n".join([head, *rows])


def _row(name: str, own: Mapping[str, Any]) -> str:
    return f"| {name} | " + " | ".join(_cell(own[key]) for key in COLUMNS) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
