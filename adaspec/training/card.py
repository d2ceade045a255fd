"""The model card beside a drafter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def card(target: str, settings: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """The card as Markdown: what it is, how it was made, and how often it is right.

    Args:
        target: the model that it drafts for.
        settings: of the distillation, as they can be written to JSON.
        result: ``steps``, ``before``, ``after``, ``tokens`` and ``parameters`` of ``distil.Distilled``.
    """
    window = len(result["before"])
    rows = [("before training", result["before"])]
    rows += [(f"after, {kind}" if kind != "all" else "after", rates) for kind, rates in result["after"].items()]
    return f"""# A feature drafter for {target}

Reads the last hidden state of {target} and drafts its next tokens: one decoder layer of the target's own sizes, with
the target's embedding and the rows of its head for {settings["vocabulary"]} frequent tokens ({result["parameters"]:,}
parameters of its own). It only proposes: the text stays the target's.

## Acceptance

On the target's greedy answers to the held-out prompts of `{settings["prompts"]}`, never trained on: of the drafted
tokens at a position whose predecessors were all accepted, the share that is the target's own.

| | {" | ".join(str(position + 1) for position in range(window))} |
|---|{"---|" * window}
{_lines(rows)}

## How it was made

`adaspec train-drafter`: {result["tokens"]:,} tokens of text, the target's own greedy output (to templates, and to
user's turns that it made up itself{", and given text" if settings["texts"] else ""}). {_begun(settings)}
{result["steps"]} steps of AdamW on the cross-entropy from the target's laws, the last ones on drafts of several tokens.

```json
{json.dumps(settings, indent=2)}
```
"""


def _begun(settings: Mapping[str, Any]) -> str:
    if settings["begin"]:
        return f"It went on from an earlier drafter, `{settings['begin']}`."
    if settings["begin_tokens"] < 1:
        return "It began at random."
    return """It began in closed form: a ridge
regression from [embedding, last state] to the input of the target's last layer, and then that layer."""


def _lines(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    return "\n".join(f"| {name} | {' | '.join(f'{rate:.2f}' for rate in rates)} |" for name, rates in rows)
