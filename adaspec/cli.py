"""The command line: reads the words, runs the command, turns a foreseeable failure into one line."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from importlib.metadata import version

from adaspec.commands import bench, corpus, demo, export, generate, models, report, serve, simulate, train

COMMANDS = (generate, demo, serve, train, corpus, models, simulate, bench, report, export)  # in the order of --help
EXTRAS = {
    "bench": ("hydra", "omegaconf", "matplotlib", "wandb", "jinja2", "markupsafe"),
    "serve": ("fastapi", "uvicorn", "starlette", "prometheus_client", "opentelemetry"),
}  # what else than "decoding" a missing module belongs to


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. A foreseeable failure is one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the text
    try:
        parser = _parser()
        arguments, rest = parser.parse_known_args(argv)
        if rest and not hasattr(arguments, "overrides"):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        arguments.rest = rest
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (ValueError, OSError, MemoryError) as error:
        print(f"adaspec: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except ModuleNotFoundError as error:
        extra = next((extra for extra, names in EXTRAS.items() if error.name in names), "decoding")
        print(f"adaspec: {error.name} is not installed; try: pip install 'adaspec[{extra}]'", file=sys.stderr)
        return 1
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):  # while a compiled module was imported
            return _interrupted()
        if type(error).__name__ != "SafetensorError":  # what safetensors makes of a full disk; it may not be installed
            raise
        print(f"adaspec: {_one_line(error)}", file=sys.stderr)
        return 1


def _interrupted() -> int:
    print("adaspec: interrupted", file=sys.stderr)
    return 130


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"  # without the system's number
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adaspec", description="Speculative decoding that chooses drafter, chain depth and windows as it runs."
    )
    parser.add_argument("--version", action="version", version=f"adaspec {version('adaspec')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
