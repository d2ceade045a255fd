"""From a folder to a model that decodes: which code computes its passes, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adaspec.decoding.graphs import GraphModel, cuda_capture
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.model import Model, check_precision, load_module, rollback_obstacle
from adaspec.decoding.native.decoder import obstacle
from adaspec.decoding.native.library import CompileError, library
from adaspec.decoding.native.model import NativeCopy, NativeModel
from adaspec.decoding.native.weights import KINDS
from adaspec.decoding.packed import PRECISIONS, pack

RUNNERS = ("auto", "native", "graphs", "torch")


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
    tell: Callable[[str, float | None], None] = lambda what, share: None,
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
    check_runner(runner, precision, device)
    check_precision(precision, device)
    if device != "cpu" or precision not in KINDS or runner == "torch":
        module = load_module(source, precision=precision, device=device, trust_remote_code=trust_remote_code)
        if device.startswith("cuda") and runner != "torch":
            return GraphModel(name, module, cuda_capture(device), vocab_size)
        return Model(name, module, vocab_size)
    module = load_module(source, precision="stock", trust_remote_code=trust_remote_code)
    reason = rollback_obstacle(module) or obstacle(module, precision)
    if reason is None:
        tell("compile the CPU kernels", None)
        try:
            library()
        except CompileError as error:
            reason = str(error)
    if reason is None:
        if isinstance(target, NativeModel):
            return NativeCopy(name, module, precision, target, vocab_size)
        return NativeModel(name, module, precision, vocab_size)
    if runner == "native" or precision not in PRECISIONS:
        raise ValueError(f"{name}: the native runner cannot compute it: {reason}")
    model = Model(name, module if rollback_obstacle(module) else pack(module, precision), vocab_size)
    model.runner = f"torch ({reason})"
    return model
