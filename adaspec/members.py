"""From specifications to drafters: loads what the drafters of a setup are made of."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adaspec.decoding.bridge import BridgeDrafter
from adaspec.decoding.corpus import CorpusIndex, is_index, read_tokens
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.feature_load import feature_folder, load_feature_drafter
from adaspec.decoding.hybrid import HybridDrafter
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.load import load_model, load_plain
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.model import (
    Model,
    PlainModel,
    check_same_tokenizer,
    load_tokenizer,
    sequence_limit,
    stop_token_ids,
    tokenizer_overlap,
)
from adaspec.decoding.store import resolve
from adaspec.faults import words
from adaspec.setup import DrafterSpec, Setup

Progress = Callable[[str, float | None], None]
Member = LanguageModel | Drafter


class Loader:
    """Loads what a setup names, in its precision and on its device.

    Args:
        setup: where the names and options come from.
        tell: is told what is being loaded.
    """

    def __init__(self, setup: Setup, tell: Progress) -> None:
        self._setup, self._tell = setup, tell

    def resolve(self, name: str) -> Path:
        """The folder of a model, fetched and converted if need be."""
        own = self._setup
        return resolve(
            name, offline=own.offline, progress=self._tell, cache_dir=own.cache_dir, code=own.trust_remote_code
        )

    def plain_model(self, name: str, source: Path) -> Model | PlainModel:
        """A model for plain decoding, whether it can be rolled back or not, computed by what suits it."""
        setup = self._setup
        self._tell(f"load {source.name} ({setup.precision})", None)
        return load_plain(
            name,
            source,
            capacity=setup.cache_length,
            precision=setup.precision,
            device=setup.device,
            runner=setup.runner,
            trust_remote_code=setup.trust_remote_code,
            tell=self._tell,
        )

    def model(
        self,
        name: str,
        source: Path,
        *,
        precision: str | None = None,
        vocab_size: int | None = None,
        target: LanguageModel | None = None,
    ) -> Model:
        """A model that can be rolled back, computed by what suits it; ``target``: of the same weights."""
        setup, wanted = self._setup, precision or self._setup.precision
        self._tell(f"load {source.name} ({wanted})", None)
        return load_model(
            name,
            source,
            precision=wanted,
            device=setup.device,
            runner=setup.runner,
            trust_remote_code=setup.trust_remote_code,
            vocab_size=vocab_size,
            target=target,
            tell=self._tell,
        )

    def tokenizer(self, source: Path) -> Any:
        """The tokenizer in a folder."""
        return load_tokenizer(source, trust_remote_code=self._setup.trust_remote_code)

    def members(self, sources: Mapping[DrafterSpec, Path], target: LanguageModel, tokenizer: Any) -> dict[str, Member]:
        """The drafters by name; ``sources``: their folders, the target's own for what is no model of its own.

        Raises:
            ValueError: a drafter that does not fit the target, in one line.
            OSError: a source that cannot be read.
        """
        members: dict[str, Member] = {}
        for spec, source in sources.items():  # parts stand before their hybrids
            members[spec.name] = self._member(spec, source, target, tokenizer, members)
        return members

    def _member(
        self, spec: DrafterSpec, source: Path, target: LanguageModel, tokenizer: Any, others: Mapping[str, Member]
    ) -> Member:
        if spec.kind == "lookup":
            return self._lookup(spec, target, tokenizer)
        if spec.kind == "hybrid":
            return HybridDrafter({name: others[name] for name in spec.parts})
        if spec.kind == "bridge":
            return self._bridge(spec, source, tokenizer)
        if spec.kind == "feature":
            assert isinstance(target, Model)  # plain decoding has no drafter
            source = feature_folder(spec.source, self._setup.target)
            return load_feature_drafter(spec.name, source, target, runner=self._setup.runner)
        if spec.kind == "python":
            return _own(spec, tokenizer)
        if spec.kind == "precision":
            return self.model(spec.name, source, precision=spec.precision, vocab_size=target.vocab_size, target=target)
        check_same_tokenizer(tokenizer, self.tokenizer(source), self._setup.target, spec.source)
        return self.model(spec.name, source, precision=spec.precision, vocab_size=target.vocab_size)

    def _lookup(self, spec: DrafterSpec, target: LanguageModel, tokenizer: Any) -> LookupDrafter:
        low, high = spec.ngrams
        path, corpus = self._setup.corpus, None
        if path is not None and is_index(path):
            corpus = CorpusIndex.load(path, tokenizer, target.vocab_size)
        elif path is not None:
            corpus = CorpusIndex.build(read_tokens([path], tokenizer, self._tell), tell=self._tell)
        return LookupDrafter(spec.name, min_ngram=low, max_ngram=high, corpus=corpus)

    def _bridge(self, spec: DrafterSpec, source: Path, tokenizer: Any) -> BridgeDrafter:
        own = self.tokenizer(source)
        self._tell(f"bridge to {spec.name}: {tokenizer_overlap(tokenizer, own)}", None)
        model = self.model(spec.name, source)
        limit = sequence_limit(model.module.config.get_text_config())
        capacity = min(2 * self._setup.cache_length, limit[0] if limit else 2 * self._setup.cache_length)
        ends = stop_token_ids(model.module, own)
        return BridgeDrafter(model, own, tokenizer, capacity=capacity, stop_ids=ends)


def _own(spec: DrafterSpec, tokenizer: Any) -> Drafter:
    """A drafter class of the user's own code, called with its name in plans and the target's tokenizer.

    The module is looked for as ``python -m`` would: in the current folder too.
    """
    module, _, name = spec.source.removeprefix("python:").rpartition(".")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        drafter = getattr(importlib.import_module(module), name)(spec.name, tokenizer)
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"the drafter {spec.source} cannot be made: {words(error)}") from None
    finally:
        sys.path.remove(folder)
    if not isinstance(drafter, Drafter):
        raise ValueError(f"{spec.source} makes no Drafter but a {type(drafter).__name__}")
    return drafter
