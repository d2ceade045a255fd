"""Runs of ``adaspec bench`` with tiny random models, and what they left."""

import json
from pathlib import Path

TINY = (
    "models=tiny",
    "policy=thompson",
    "plans.windows=[2,4]",
    "plans.max_depth=2",
    "plans.sweep_prompts=1",
    "plans.sweep_tokens=4",
    "workload.max_new_tokens=8",
    "workload.limit=2",
    "runner.threads=1",
    "repeats=1",
    "warmups=1",
)


def words(out: Path, *more: str) -> list[str]:
    """The words of a run into ``out``; later words take the place of earlier ones with the same key."""
    keys = {word.partition("=")[0] for word in more}
    return ["bench", *(word for word in TINY if word.partition("=")[0] not in keys), *more, f"hydra.run.dir={out}"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
