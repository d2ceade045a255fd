"""The C files here, compiled: built once per machine with the user's C compiler, kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import platformdirs

SOURCES = tuple(Path(__file__).with_name(name) for name in ("forward.c", "text.c", "draft.c", "verify.c", "pack.c"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("lanes.h", "int4.h", "linear.h", "model.h", "text.h"))
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-fopenmp")
COMPILERS = ("cc", "gcc", "clang")
FLOAT32, FLOAT16, INT8, INT4 = range(4)


class Linear(Structure):
    """``struct linear``: weight [outputs, inputs], scale and bias [outputs] or none."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("kind", c_int32),
    )


class Layer(Structure):
    """``struct layer``."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "keys", "values")),
    )


class Decoder(Structure):
    """``struct model``."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("join", Linear),
        ("head", Linear),
        *((name, c_int64) for name in ("layer_count", "hidden", "heads", "kv_heads", "head_dim", "inner", "slots")),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("epsilon", c_float),
        ("scale", c_float),
    )


class Pass(Structure):
    """``struct pass``."""

    _fields_ = (
        ("rows", c_int64),
        ("outputs", c_int64),
        *((name, c_void_p) for name in ("sequence", "position", "wanted", "joined", "x", "logits", "taps", "scratch")),
        ("best", c_void_p),
        ("considered", c_int64),
        ("threads", c_int64),
    )


class Text(Structure):
    """``struct text``."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "lengths", "start", "fed", "limits", "ends", "embedding")),
        *((name, c_int64) for name in ("batch", "stride", "end_count", "embedded")),
    )


class Window(Structure):
    """``struct window``."""

    _fields_ = (
        *((name, c_void_p) for name in ("joined", "states", "token", "tokens", "counts", "lengths", "kept", "seconds")),
        ("width", c_int64),
        ("unsure", c_float),
    )


class Verdict(Structure):
    """``struct verdict``."""

    _fields_ = (
        *((name, c_void_p) for name in ("tokens", "counts", "accepted", "lengths", "kept", "fed")),
        ("width", c_int64),
        ("nothing_lost", c_int64),
    )


class CompileError(RuntimeError):
    """There is no usable compiler; the message says in one line why."""


@cache
def library() -> ctypes.CDLL:
    """The functions of the C files, compiled on first use (some seconds) and loaded from the cache after that.

    Raises:
        CompileError: no compiler, or one that fails.
    """
    try:
        loaded = ctypes.CDLL(str(build()))
    except OSError as error:  # a CC that compiles for another machine
        raise CompileError(f"what the C compiler makes cannot be loaded: {error}") from None
    loaded.forward.argtypes, loaded.forward.restype = (POINTER(Decoder), POINTER(Pass)), None
    loaded.products.argtypes, loaded.products.restype = (POINTER(Decoder), POINTER(Pass)), None
    drafting, verifying = (POINTER(Decoder), POINTER(Pass), POINTER(Text), POINTER(Window)), POINTER(Verdict)
    loaded.draft.argtypes, loaded.draft.restype = drafting, c_int64
    loaded.verify.argtypes, loaded.verify.restype = (*drafting[:3], verifying), c_double
    loaded.panel_width.argtypes, loaded.panel_width.restype = (), c_int64
    loaded.int4_pack.argtypes, loaded.int4_pack.restype = (c_void_p, c_int64, c_int64, c_void_p), None
    loaded.scratch_size.argtypes, loaded.scratch_size.restype = (POINTER(Decoder), c_int64, c_int64), c_int64
    return loaded


def can_compile() -> bool:
    """Whether ``library`` gives the functions here; compiles them the first time."""
    try:
        library()
    except CompileError:
        return False
    return True


def build() -> Path:
    """The shared library's file, compiled unless the cache has it.

    Raises:
        CompileError: no compiler, or one that fails.
    """
    command = _compiler()
    texts = (path.read_text() for path in (*SOURCES, *HEADERS))
    key = hashlib.sha256("\0".join((*texts, *FLAGS, *command, _processor())).encode()).hexdigest()[:16]
    folder = _cache_folder()
    built = folder / f"forward-{key}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            fresh = Path(work) / built.name
            _compile(command, fresh)
            os.replace(fresh, built)  # whole or not at all, whoever else builds it
    return built


def _cache_folder() -> Path:
    return Path(platformdirs.user_cache_dir("adaspec")) / "native"


def _compiler() -> tuple[str, ...]:
    """The compiler's program and the arguments it comes with: ``CC``, words as in a shell, or the first that is there.

    Raises:
        CompileError: there is none.
    """
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise CompileError(f"CC is no command ({os.environ['CC']}): {error}") from None
    names = named[:1] or COMPILERS
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        raise CompileError(f"no C compiler ({', '.join(names)}) on this machine")
    return program, *named[1:]


def _compile(compiler: Sequence[str], target: Path) -> None:
    command = [*compiler, *FLAGS, "-o", str(target), *map(str, SOURCES), "-lm"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        failed, told = result.returncode != 0, result.stderr.strip().splitlines()
    except OSError as error:
        failed, told = True, [error.strerror or str(error)]
    if failed or not target.exists():
        reason = next((line for line in told if "error" in line.lower()), told[0] if told else "no reason given")
        raise CompileError(f"{shlex.join(compiler)} cannot compile {SOURCES[0].name}: {reason}")


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines."""
    try:
        flags = next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    return platform.machine() + flags
