"""`transformers` decoding the same weights: plain, assisted by a smaller model, and with prompt lookup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from adaspec.bench.methods import Answer, Stateless
from adaspec.decoding.generate import Request

HEURISTIC = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.4,
}


def load(source: Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """A model as `transformers` loads it, without anything of ours.

    Raises:
        ValueError: a dtype that torch does not have.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {dtype!r}; float32, bfloat16 and float16 are usual")
    hf_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(source, dtype=found).eval().to(device)


def generating(name: str, model: Any, stop_ids: tuple[int, ...] = (), **options: Any) -> Stateless:
    """``model.generate`` with its own defaults but for ``options``; stop tokens as given, else the model's own.

    With an ``assistant_model`` in the options, its ``schedule`` (constant with its number of tokens, or heuristic)
    is set before every request, so that methods may share it.
    """
    stops = {"eos_token_id": list(stop_ids), "pad_token_id": stop_ids[0]} if stop_ids else {}
    schedule = options.pop("schedule", None)

    def answer(request: Request, tag: str) -> Answer:
        if schedule is not None:
            options["assistant_model"].generation_config.update(**schedule)
        return _generate(model, request, stops | _sampling(request) | options)

    return Stateless(name, answer)


def constant(window: int) -> dict[str, Any]:
    """A schedule of always the same number of drafted tokens, none of them dropped for want of confidence."""
    return {
        "num_assistant_tokens": window,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def _sampling(request: Request) -> dict[str, Any]:
    own = request.sampling
    if own.temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p}


def _generate(model: Any, request: Request, options: dict[str, Any]) -> Answer:
    """One request; the target's passes are counted as they happen."""
    prompt = torch.tensor([request.prompt], device=model.device)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    torch.manual_seed(request.sampling.seed)
    hook = model.register_forward_hook(count)
    try:
        began = time.perf_counter()
        with torch.inference_mode():
            text = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens, **options
            )
        new = tuple(text[0, prompt.shape[1] :].tolist())
        return Answer(new, time.perf_counter() - began, None, passes)
    finally:
        hook.remove()
