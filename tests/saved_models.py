"""Tiny random models saved as folders; the maker is the bench's own."""

import json
from pathlib import Path

from adaspec.bench.tiny import SIZES, save_model

__all__ = ["SIZES", "other_tokenizer", "save_model"]


def other_tokenizer(folder: Path) -> str:
    """A model whose tokenizer has two words the other way round."""
    other = save_model(folder, words=270)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[:2]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(other)
