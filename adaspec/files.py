"""Files that a user names: where one cannot be had, one line says which option named it, which it is, and why."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path, what: str, *, may_be_empty: bool = False) -> str:
    """The UTF-8 text of a file.

    Args:
        path: the file.
        what: what named it, an option such as ``--text``; the message begins with it.
        may_be_empty: a file of nothing but blanks is no mistake.

    Raises:
        ValueError: it cannot be read, is no UTF-8 text, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is no UTF-8 text (at byte {error.start})") from None
    if not (text.strip() or may_be_empty):
        raise ValueError(f"{what} {path} is empty")
    return text


def check_file(path: Path, what: str, *, replaced: bool = False) -> None:
    """Tells whether a file is, or can be made, at ``path``; ``what``: see ``read_text``.

    ``replaced``: it is written by putting another file in its place, which would do away with a device.

    Raises:
        ValueError: there is a folder, a device that would be replaced, or below what is a file nothing can be made.
    """
    if path.is_dir():
        raise ValueError(f"{what} {path} is a folder, not a file")
    if replaced and path.exists() and not path.is_file():
        raise ValueError(f"{what} {path} is a device or pipe, not a file")
    _check_above(path, what)


def check_folder(path: Path, what: str) -> None:
    """Tells whether a folder is, or can be made, at ``path``; ``what``: see ``read_text``.

    Raises:
        ValueError: there is a file, or what should be a folder above it is one.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{what} {path} is a file, not a folder")
    _check_above(path, what)


def _check_above(path: Path, what: str) -> None:
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        raise ValueError(f"{what} {path} cannot be made: {above.name} is a file, not a folder")
