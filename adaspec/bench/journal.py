"""The folder of a run: what was measured, line by line, so that a run that was interrupted goes on where it ended."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Line = dict[str, Any]
Unit = tuple[str, str, int]  # method, prompt, repeat: what is done as a whole or not at all
MAY_GROW = ("repeats", "methods", "policies", "record")  # when a run goes on


class Journal:
    """Rounds and prompts of a run. A unit is written as a whole; half of one, from a crash, is dropped on opening.

    Args:
        folder: of the run; it is made.

    Raises:
        OSError: a folder that cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.prompts = _lines(folder / "prompts.jsonl")
        self.done = {unit(line) for line in self.prompts}
        self.rounds = [line for line in _lines(folder / "rounds.jsonl") if unit(line) in self.done]  # as found
        self.steps = Counter(line["method"] for line in self.rounds)  # so far
        self._rewrite("prompts.jsonl", self.prompts)
        self._rewrite("rounds.jsonl", self.rounds)

    def add(self, prompts: Sequence[Line], rounds: Sequence[Line], state: Mapping[str, Any] | None) -> None:
        """Writes what one unit brought: all of it, or nothing.

        Raises:
            OSError: a full disk, and the like.
        """
        paths = [self.folder / "rounds.jsonl", self.folder / "prompts.jsonl"]
        sizes = [path.stat().st_size for path in paths]
        try:
            for path, lines in zip(paths, (rounds, prompts)):
                _append(path, lines)
        except BaseException:  # Ctrl-C as well
            for path, size in zip(paths, sizes):
                os.truncate(path, size)
            raise
        method = prompts[0]["method"]
        self.prompts += prompts
        self.done.add(unit(prompts[0]))
        self.steps[method] += len(rounds)
        if state is not None:
            self.write(f"controller-{method}.json", state)

    def write(self, name: str, value: Any) -> None:
        """Writes a JSON file, all of it or nothing.

        Raises:
            OSError: a full disk, and the like.
        """
        part = self.folder / f".{name}.part"
        try:
            part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
            part.replace(self.folder / name)
        finally:
            part.unlink(missing_ok=True)

    def read(self, name: str) -> Any:
        """A JSON file of the folder, None when it is not there."""
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _rewrite(self, name: str, lines: Sequence[Line]) -> None:
        path = self.folder / name
        text = _text(lines)
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
            part = path.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)


def unit(line: Mapping[str, Any]) -> Unit:
    """What a line belongs to."""
    return str(line["method"]), str(line["prompt"]), int(line["repeat"])


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> None:
    """Tells whether a run may go on with another configuration: all that was measured must still be part of it.

    Raises:
        ValueError: the first key that differs, with both values.
    """
    for key in dict.fromkeys([*before, *now]):
        name, own, other = f"{prefix}{key}", before.get(key), now.get(key)
        if name in MAY_GROW or own == other:
            continue
        if isinstance(own, Mapping) and isinstance(other, Mapping):
            check_same(own, other, f"{name}.")
        else:
            raise ValueError(f"the run was begun with {name}={own} and cannot go on with {name}={other}")


def machine(device: str) -> Line:
    """What a figure depends on besides the code: processor, memory, versions, threads. No names of hosts or people."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": memory and round(memory / 2**30, 1),
        "system": platform.system(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("adaspec", "torch", "transformers")},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _lines(path: Path) -> list[Line]:
    """The lines of a JSONL file up to the first that is broken, as a crash may leave the last one."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            one = json.loads(line)
            unit(one)
        except (ValueError, LookupError, TypeError):
            break
        found.append(one)
    return found


def _text(lines: Sequence[Line]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _append(path: Path, lines: Sequence[Line]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_text(lines))
