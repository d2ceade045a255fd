"""What a controller has learned, between runs and between replicas: files that are always whole.

Needs ``filelock``, and ``fsspec`` where the place is a URL: ``pip install 'adaspec[state]'``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from adaspec.controller import Controller
from adaspec.files import check_file

logger = logging.getLogger("adaspec.state")
_HEADER = ("format", "version", "target")
_LOCK_SECONDS = 5.0  # a writer waits for another; longer, and it is told as an OSError


class Store(Protocol):
    """Keeps one state, at ``place``."""

    @property
    def place(self) -> str: ...

    def load(self) -> dict[str, Any] | None:
        """The last state that was saved whole; None where there is none."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces it."""

    def set_aside(self) -> str:
        """Renames what is there, so that it is neither used nor lost; returns its new place."""

    def claim(self) -> None:
        """Makes this its one writer until ``release`` or the end of the process, see ``StateFile``."""

    def release(self) -> None:
        """Lets others claim it."""


class _Place(Protocol):
    """Bytes at one place."""

    def read(self) -> bytes | None: ...
    def replace(self, content: bytes) -> None: ...
    def rename(self, suffix: str) -> str: ...


class StateFile:
    """One state in one file, which is replaced as a whole: whoever reads sees the old state or the new one.

    That holds when the writer is killed at any moment, and (locally) when the machine loses power. A local file is
    locked against other writers (``NAME.lock``). A file that holds no JSON object is set aside, never overwritten.

    Args:
        place: a path, or a URL that fsspec understands (``s3://bucket/state.json``).

    Raises:
        ValueError: the place is a folder, or a URL of a kind whose package is not installed.
        OSError: the place cannot be read or written.
    """

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        if "://" not in self.place:
            check_file(Path(place), "the state")
        self._bytes: _Place = _Remote(self.place) if "://" in self.place else _Local(Path(place))
        self._seen = False  # whether what is there is known to be a state

    def read(self) -> dict[str, Any] | None:
        """The state, or None where there is nothing; what is there stays there, whatever it is.

        Raises:
            ValueError: it is no JSON object.
        """
        content = self._bytes.read()
        if content is None:
            return None
        try:
            state = json.loads(content, parse_constant=_refuse)
        except (ValueError, RecursionError):  # of UTF-8 or of JSON, or nested without end
            state = None
        if not isinstance(state, dict):
            raise ValueError(f"{self.place} holds no state")
        return state

    def load(self) -> dict[str, Any] | None:
        self._seen = True
        try:
            return self.read()
        except ValueError:
            self.set_aside()
            return None

    def save(self, state: Mapping[str, Any]) -> None:
        if not self._seen:
            self.load()
        self._bytes.replace(json.dumps(state, allow_nan=False).encode())

    def claim(self) -> None:
        """Makes this the one writer of a local file until ``release`` or the end of the process, however it ends.

        Raises:
            ValueError: another one has claimed it, or it is a device.
            OSError: nothing can be written there.
        """
        if isinstance(self._bytes, _Local):
            self._bytes.claim()

    def release(self) -> None:
        """Lets others claim it."""
        if isinstance(self._bytes, _Local):
            self._bytes.owner.release()

    def set_aside(self) -> str:
        aside = self._bytes.rename(f".corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}")
        logger.warning("%s holds no state that can be used and was set aside as %s", self.place, aside)
        return aside


class Replica:
    """The state of one of several replicas that share a folder: each writes a file of its own, ``NAME.json``.

    A replica that starts anew inherits the merged states of the others, once; a restarted one takes up its own. (What
    was inherited is part of a replica's own state from then on, so do not merge replicas into each other again and
    again: evidence would count several times.)

    Args:
        folder: a path or fsspec URL.
        name: of this replica, unique in the folder and the same after a restart.

    Raises:
        ValueError: a name that is no plain file name.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        if not name or name.startswith(".") or set(name) & set("/\\:"):
            raise ValueError(f"a replica's name is a plain file name, got {name!r}")
        self._folder = str(folder).rstrip("/")
        self.own = StateFile(f"{self._folder}/{name}.json")

    @property
    def place(self) -> str:
        return self.own.place

    def load(self) -> dict[str, Any] | None:
        own = self.own.load()
        return merged(self._folder) if own is None else own

    def save(self, state: Mapping[str, Any]) -> None:
        self.own.save(state)

    def set_aside(self) -> str:
        return self.own.set_aside()

    def claim(self) -> None:
        self.own.claim()

    def release(self) -> None:
        self.own.release()


def open_store(place: str | Path, replica: str = "") -> Store:
    """A file, or the place of one replica in a folder that several share."""
    return Replica(place, replica) if replica else StateFile(place)


def merged(folder: str | Path) -> dict[str, Any] | None:
    """The merged states of all replicas in a folder or fsspec URL; None where there are none.

    Raises:
        ValueError: states that do not belong together (``Controller.merge``).
    """
    text = str(folder).rstrip("/")
    if "://" in text:
        fs, path = _filesystem(text)
        names = fs.glob(f"{path}/*.json")
        places = [f"{text}/{name.rsplit('/', 1)[-1]}" for name in names]
    else:
        places = [str(path) for path in Path(text).glob("*.json")]
    found = {place: StateFile(place).load() for place in sorted(places)}
    states = {place: state for place, state in found.items() if state is not None}
    return merge(states) if states else None


def merge(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``Controller.merge`` of states by their places.

    Raises:
        ValueError: one that is damaged or does not belong to the first, told with its place.
    """
    known = list(states.values())
    for place, state in states.items():
        try:
            Controller.merge([known[0], state])
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return Controller.merge(known)


def restore(controller: Controller, store: Store) -> bool:
    """Loads what a store holds into a controller; whether there was anything that could be used.

    A state that is broken inside is set aside, and the controller stays as it was.

    Raises:
        ValueError: a state of something else, of another version or of another target: no damage but a mistake.
    """
    state = store.load()
    if state is None:
        return False
    own = controller.state_dict()
    try:
        controller.load_state_dict(state)
    except ValueError as error:
        if any(state.get(key) != own[key] for key in _HEADER):
            raise ValueError(f"{store.place}: {error}") from None
        logger.warning("%s is damaged: %s", store.place, error)
        store.set_aside()
        return False
    return True


def take_up(controller: Controller, store: Store) -> bool:
    """``restore`` from a store that only this process writes from then on; where that fails it is free again.

    Raises:
        ValueError: as ``restore``, or another process has claimed the store.
        OSError: nothing can be written there.
    """
    store.claim()
    try:
        return restore(controller, store)
    except BaseException:
        store.release()
        raise


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


class _Local:
    """A file on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.lock", timeout=_LOCK_SECONDS)
        self.owner = FileLock(f"{path}.owner.lock", thread_local=False)

    def claim(self) -> None:
        check_file(self._path, "the state", replaced=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.owner.lock_file, "ab"):  # where this fails, the lock would be waited for and never be had
            pass
        try:
            self.owner.acquire(blocking=False)
        except TimeoutError:
            raise ValueError(f"{self._path} is the state of another process; give each its own file") from None

    def read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, content: bytes) -> None:
        check_file(self._path, "the state", replaced=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f".{self._path.name}.new")  # the lock leaves it one writer; a killed one's is reused
        with self._lock:
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
            _sync(self._path.parent)

    def rename(self, suffix: str) -> str:
        check_file(self._path, "the state", replaced=True)
        with self._lock:
            return str(self._path.rename(f"{self._path}{suffix}"))


def _sync(folder: Path) -> None:
    """Makes a rename last through a loss of power, where folders can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class _Remote:
    """A file behind an fsspec URL: written beside its place, then moved there."""

    def __init__(self, url: str) -> None:
        self._fs, self._path = _filesystem(url)

    def read(self) -> bytes | None:
        try:
            content: bytes = self._fs.cat_file(self._path)
        except FileNotFoundError:
            return None
        return content

    def replace(self, content: bytes) -> None:
        new = f"{self._path}.new"
        self._fs.makedirs(self._fs._parent(self._path), exist_ok=True)
        self._fs.pipe_file(new, content)
        self._fs.mv(new, self._path)

    def rename(self, suffix: str) -> str:
        self._fs.mv(self._path, self._path + suffix)
        return self._path + suffix


def _filesystem(url: str) -> tuple[Any, str]:
    fsspec = import_module("fsspec")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # each kind of URL has a package of its own
        raise ValueError(f"{url} cannot be reached: {error}") from None
    return fs, path
