"""From a folder to a model that decodes: which code computes its passes, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaspec.decoding.graphs import GraphModel, cuda_capture
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.model import (
    Model,
    PlainModel,
    check_precision,
    load_module,
    rollback_obstacle,
    sequence_limit,
)
from adaspec.decoding.native.decoder import obstacle
from adaspec.decoding.native.library import CompileError, library
from adaspec.decoding.native.model import NativeCopy, NativeModel
from adaspec.decoding.native.weights import KINDS
from adaspec.decoding.packed import PRECISIONS, pack

RUNNERS = ("auto", "native", "graphs", "torch")
Tell = Callable[[str, float | None], None]


def _quiet(what: str, share: float | None) -> None:
    """Tells nobody."""


def check_runner(runner: str, precision: str, device: str) -> None:
    """Tells whether a runner can be asked for.

    Raises:
        ValueError: an unknown one, or one that cannot compute this precision anywhere.
    """
    if runner not in RUNNERS:
        raise ValueError(f"the runner is one of {', '.join(RUNNERS)}, got {runner!r}")
    if runner == "native" and (device != "cpu" or precision not in KINDS):
        raise ValueError(f"the native runner computes {', '.join(KINDS)} on the cpu, not {precision} on {device}")
    if runner == "graphs" and not device.startswith("cuda"):
        raise ValueError(f"the graphs runner needs a CUDA device, not {device}")
    if runner == "torch" and precision not in PRECISIONS and device == "cpu":
        raise ValueError(f"the torch runner computes {', '.join(PRECISIONS)} on the cpu, not {precision}")


def load_model(
    name: str,
    source: str | Path,
    *,
    precision: str = "fp16",
    device: str = "cpu",
    runner: str = "auto",
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    target: LanguageModel | None = None,
    tell: Tell = _quiet,
) -> Model:
    """Loads a causal LM that can be rolled back.

    Args:
        name: its name in plans.
        source: a local folder or a hub name.
        precision: of the weights, as for ``load_module``.
        device: "cpu", "cuda", ...
        runner: "native" computes passes in C on a CPU, "graphs" replays CUDA graphs on a GPU, "torch" is eager, with
            packed layers on a CPU; "auto" takes the first that can, and ``Model.runner`` tells which it is and why.
        trust_remote_code: run code that comes with the weights.
        vocab_size: as for ``Model``.
        target: the model of the same weights that it will draft for; its cache is shared where both are native.
        tell: is told of the compilation, which takes seconds, once per machine.

    Raises:
        ValueError: a source that cannot be loaded or rolled back, or the native runner where it cannot compute.
    """
    how = _How(precision, device, runner)
    return _computed(name, how.load(source, trust_remote_code), how, vocab_size, target, tell)


def load_plain(
    name: str,
    source: str | Path,
    *,
    capacity: int,
    precision: str = "fp16",
    device: str = "cpu",
    runner: str = "auto",
    trust_remote_code: bool = False,
    tell: Tell = _quiet,
) -> Model | PlainModel:
    """Loads any causal LM, to decode plainly: as ``load_model`` does, or as it comes where it cannot be rolled back.

    ``capacity``: tokens of a sequence (a sliding window that is shorter cannot be rolled back either); the other
    arguments are those of ``load_model``.

    Raises:
        ValueError: a source that cannot be loaded, or a runner asked for that cannot compute it.
    """
    how = _How(precision, device, runner)
    module = how.load(source, trust_remote_code)
    reason = _stays(module, capacity)
    if reason is None:
        return _computed(name, module, how, None, None, tell)
    if how.needed in ("native", "graphs"):
        raise ValueError(f"{name}: the {how.needed} runner cannot compute it: {reason}")
    return PlainModel(name, how.torch_layers(module), reason)


@dataclass(frozen=True, slots=True)
class _How:
    """A precision, a device and a runner that go together.

    Raises:
        ValueError: they do not.
    """

    precision: str
    device: str
    runner: str

    def __post_init__(self) -> None:
        check_runner(self.runner, self.precision, self.device)
        check_precision(self.precision, self.device)

    @property
    def maybe_native(self) -> bool:
        """Whether C may compute it, so that the weights are wanted as they are."""
        return self.device == "cpu" and self.precision in KINDS and self.runner != "torch"

    @property
    def needed(self) -> str:
        """The runner asked for, or the only one of the precision."""
        return "native" if self.device == "cpu" and self.precision not in PRECISIONS else self.runner

    def load(self, source: str | Path, trust_remote_code: bool) -> Any:
        """The module; on torch's own layers where C may compute it."""
        wanted = "stock" if self.maybe_native else self.precision
        return load_module(source, precision=wanted, device=self.device, trust_remote_code=trust_remote_code)

    def torch_layers(self, module: Any) -> Any:
        """A module of ``load`` as torch computes it."""
        return pack(module, self.precision) if self.maybe_native and not rollback_obstacle(module) else module


def _stays(module: Any, capacity: int) -> str | None:
    """Why a sequence of up to ``capacity`` tokens cannot be rolled back, or None."""
    if reason := rollback_obstacle(module):
        return reason
    config = module.config.get_text_config()
    limit, positions = sequence_limit(config), sequence_limit(config, rollback=False)
    longest = capacity if positions is None else min(capacity, positions[0])
    return None if limit is None or limit[0] >= longest else f"{limit[1]} is {limit[0]}"


def _computed(
    name: str, module: Any, how: _How, vocab_size: int | None, target: LanguageModel | None, tell: Tell
) -> Model:
    """A loaded module with what computes it, see ``load_model``."""
    if not how.maybe_native:
        if how.device.startswith("cuda") and how.runner != "torch":
            return GraphModel(name, module, cuda_capture(how.device), vocab_size)
        return Model(name, module, vocab_size)
    reason = rollback_obstacle(module) or obstacle(module, how.precision)
    if reason is None:
        tell("compile the CPU kernels", None)
        try:
            library()
        except CompileError as error:
            reason = str(error)
    if reason is None:
        if isinstance(target, NativeModel):
            return NativeCopy(name, module, how.precision, target, vocab_size)
        return NativeModel(name, module, how.precision, vocab_size)
    if how.needed == "native":
        raise ValueError(f"{name}: the native runner cannot compute it: {reason}")
    model = Model(name, how.torch_layers(module), vocab_size)
    model.runner = f"torch ({reason})"
    return model
