"""A failure is told by type and place, never in its own words, which may hold a prompt or a secret."""

import errno
import json
import logging
import sys

import pytest

from adaspec.faults import log_failure, told, words
from adaspec.telemetry import JsonLines, Lines

SECRET = "sk-hidden-token"


class Sly(Exception):
    """Has a secret wherever an exception can hold one."""

    def __str__(self) -> str:
        return f"{SECRET}\nand more" * 50


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as found:
        found.add_note(SECRET)
        return found


def test_type_and_places_are_told() -> None:
    found = caught(Sly(SECRET))
    assert told(found) == f"Sly at test_faults.py:{found.__traceback__.tb_lineno} in caught"
    assert told(Sly(SECRET)) == "Sly"  # was never raised

    def outer() -> None:
        caught_again = caught
        raise caught_again(Sly())

    with pytest.raises(Sly) as deep:
        outer()
    assert told(deep.value, 2).count(" in ") == 2
    assert told(deep.value, 9).count(" in ") == 3
    assert "from test_faults.py" in told(deep.value, 9)


def test_the_system_says_what_failed_in_its_own_words() -> None:
    assert told(OSError(errno.ENOSPC, SECRET, SECRET)) == "OSError (No space left on device)"
    assert told(OSError(SECRET)) == "OSError"


def test_words_are_one_line_of_bounded_length() -> None:
    assert words(Sly()).startswith(f"{SECRET} and more")
    assert len(words(Sly())) == 200
    assert words(ValueError()) == "ValueError"


def test_words_are_logged_at_debug_level_only(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("adaspec.test")
    with caplog.at_level(logging.INFO, logger.name):
        log_failure(logger, "it failed", caught(Sly()))
    assert "it failed: Sly at test_faults.py" in caplog.text
    assert SECRET not in caplog.text
    with caplog.at_level(logging.DEBUG, logger.name):
        log_failure(logger, "it failed", caught(Sly()))
    assert SECRET in caplog.text


@pytest.mark.parametrize("formatter", [Lines("%(message)s"), JsonLines()])
def test_a_foreign_log_record_keeps_its_words_to_itself(formatter: logging.Formatter) -> None:
    """Such as the one of uvicorn for an application that raised."""
    try:
        raise ValueError(SECRET) from Sly()
    except ValueError:
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    text = formatter.format(record)
    assert SECRET not in text
    assert "ValueError at test_faults.py:" in (json.loads(text)["exception"] if text.startswith("{") else text)
