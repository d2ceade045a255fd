"""Hugging Face's `generate` with speculation: same greedy texts, one row or four, own logits processor, streamer.

    python examples/hf_generate.py            # fetches SmolLM2-135M once, as `adaspec models get smollm2-135m` does
    python examples/hf_generate.py --model smollm2-135m --drafters lookup head --tokens 96
    python examples/hf_generate.py --model qwen2.5-coder-1.5b.gguf --drafters lookup qwen2.5-coder-0.5b.gguf

Drafters: lookup, int8 (the target's own weights), head (the feature drafter that comes with the default target), or a
smaller model of the same tokenizer. Ends with 1 when a text differs from that of `generate` alone.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, TextStreamer

from adaspec.adapters.hf import Speculation
from adaspec.decoding.feature_load import feature_folder
from adaspec.decoding.model import load_module, load_tokenizer
from adaspec.decoding.store import resolve

NOTE = (
    "The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books for three weeks. Late "
    "books cost ten pence a day."
)
PROMPTS = (
    f"Here is a note: '{NOTE}' Repeat the note word for word, twice.",
    "Write a Python function that tells whether a year is a leap year.",
    "Why is the sky blue?",
    "List the months of the year, one per line.",
)


class NoCommas(LogitsProcessor):
    """A processor of the user's own: texts without commas."""

    def __init__(self, tokenizer):
        self._banned = [index for token, index in tokenizer.get_vocab().items() if "," in token]

    def __call__(self, input_ids, scores):
        scores[:, self._banned] = -torch.inf
        return scores


class Pieces(TextStreamer):
    """Keeps what it is given instead of printing it."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True)
        self.text = ""

    def on_finalized_text(self, text, stream_end=False):
        self.text += text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", nargs="+", default=["lookup", "int8"])
    parser.add_argument("--dtype", default="float32", help="of target and drafting models (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    folder = resolve(arguments.model)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    drafters = {
        Path(name).name.removesuffix(".gguf"): drafter(name, arguments.model, dtype) for name in arguments.drafters
    }
    speculation = Speculation(model, drafters)

    options = {"max_new_tokens": arguments.tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    own = LogitsProcessorList([NoCommas(tokenizer)])
    one, four = chats(tokenizer, PROMPTS[:1]), chats(tokenizer, PROMPTS)
    results = [
        compare("one row", model, speculation, one, options, turns=3),
        compare("batch 4", model, speculation, four, options),
        compare("batch 4, own logits processor", model, speculation, four, options | {"logits_processor": own}),
        stream(model, speculation, tokenizer, one, options),
    ]
    for row in speculation.controller.table()[:6]:
        print(f"  {row.plan}: {row.rounds} rounds, {row.measured or 0:.1f} tokens/s in its rounds")
    return 0 if all(results) else 1


def drafter(name, target, dtype):
    """What `Speculation` takes: a kind by name, a model, or the folder of a feature drafter."""
    if name == "lookup":
        return name
    if name == "int8":
        return load_module(resolve(target), precision="int8")
    if name == "head":
        return feature_folder(name, target)
    return AutoModelForCausalLM.from_pretrained(resolve(name), dtype=dtype).eval()


def chats(tokenizer, prompts):
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)


def compare(name, model, speculation, inputs, options, turns=1):
    """Whether the texts with speculation are those of `generate` alone; prints new tokens per second of both."""
    plain, usual = timed(model, inputs, options)
    print(f"{name}: {usual:.1f} tokens/s without", end="", flush=True)
    same = True
    for _ in range(turns):
        ours, speed = timed(model, inputs, options | {"custom_generate": speculation})
        same = same and torch.equal(ours, plain)
        print(f", {speed:.1f} with", end="", flush=True)
    print(f"; same greedy texts: {same}")
    return same


def stream(model, speculation, tokenizer, inputs, options):
    """Whether a streamer is given the text of `generate`."""
    texts, streamer = model.generate(**inputs, **options), Pieces(tokenizer)
    speculation.generate(**inputs, **options, streamer=streamer)
    same = streamer.text == tokenizer.decode(texts[0, inputs["input_ids"].shape[1] :])
    print(f"streamer: same text: {same}\n{streamer.text}")
    return same


def timed(model, inputs, options):
    """The texts and their new tokens per second, prompts included in the time, ends of text in the tokens."""
    began = time.perf_counter()
    texts = model.generate(**inputs, **options)
    new = texts[:, inputs["input_ids"].shape[1] :]
    return texts, new.numel() / (time.perf_counter() - began)


if __name__ == "__main__":
    sys.exit(main())
