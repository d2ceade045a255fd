"""How a failure is told: by its type and where it happened. What it says may hold a prompt or a secret.

Whatever is logged, served or kept holds ``told``. ``words`` are for whoever began the program, at its terminal, and for
the log at debug level.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from traceback import walk_tb

_LONGEST = 200
PLACES = 8  # of the code, in a log


def told(error: BaseException, places: int = 1) -> str:
    """``RuntimeError at drafter.py:42 in propose``: in one line, without a word of the error's own.

    Of an ``OSError`` the system's words for its number are told as well. ``places``: at most so many, innermost first.
    """
    number = error.errno if isinstance(error, OSError) else None
    system = f" ({os.strerror(number)})" if number is not None else ""
    frames = list(walk_tb(error.__traceback__))[::-1][:places]
    where = [f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}" for frame, line in frames]
    return f"{type(error).__name__}{system}" + (f" at {', from '.join(where)}" if where else "")


def words(error: BaseException) -> str:
    """What an error says, as one line of bounded length; its type where it says nothing."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """``what`` failed: logged as an error with its places, and what it says at debug level."""
    logger.error("%s: %s", what, told(error, PLACES))
    logger.debug("%s: %s", what, words(error))
