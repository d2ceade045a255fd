"""Hugging Face's `generate` on SmolLM2-135M with prompt lookup and the target's own int8 copy as drafters.

    python examples/hf_generate.py            # fetches the model once, as `adaspec models get smollm2-135m` does

Prints the same text twice, tokens per second with and without, and which plans were played.
"""

import argparse
import time

import torch

from adaspec.adapters.hf import Speculation
from adaspec.decoding.model import load_module, load_tokenizer
from adaspec.decoding.store import resolve

PROMPT = (
    "Here is a note: 'The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books for "
    "three weeks. Late books cost ten pence a day.' Repeat the note word for word, twice."
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = resolve(arguments.model)
    tokenizer = load_tokenizer(folder)
    model = load_module(folder, precision="float32")
    speculation = Speculation(model, {"lookup": "lookup", "int8": load_module(folder, precision="int8")})
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(chat, return_tensors="pt")
    options = {"max_new_tokens": arguments.tokens, "do_sample": False}
    plain, usual = timed(model, inputs, options)
    print(f"without: {usual:.1f} tokens/s")
    for turn in range(3):
        ours, speed = timed(model, inputs, options | {"custom_generate": speculation})
        print(f"turn {turn}: {speed:.1f} tokens/s, same text: {torch.equal(ours, plain)}")
    for row in speculation.controller.table()[:6]:
        print(f"  {row.plan}: {row.rounds} rounds, {row.measured or 0:.1f} tokens/s in its rounds")
    print(tokenizer.decode(ours[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def timed(model, inputs, options):
    """The text and its new tokens per second, prompt included in the time."""
    began = time.perf_counter()
    texts = model.generate(**inputs, **options)
    return texts, (texts.shape[1] - inputs["input_ids"].shape[1]) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
