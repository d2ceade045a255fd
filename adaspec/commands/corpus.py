"""``adaspec index-corpus``: what follows what in text files, to back the lookup drafter."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from adaspec.commands.consoles import consoles
from adaspec.files import check_file
from adaspec.options import add_store


def add(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser(
        "index-corpus",
        help="count what follows what in text files, to back the lookup drafter (--corpus)",
        description="Writes the most frequent next token of every n-gram of text files, for the tokenizer of a target.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the index to write")
    add_store(parser)
    parser.add_argument("--max-ngram", type=int, default=4, metavar="N", help="longest context (default: %(default)s)")
    parser.add_argument(
        "--min-count", type=int, default=2, metavar="N", help="least occurrences of what is kept (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from adaspec.decoding.corpus import CorpusIndex, identity, read_tokens
    from adaspec.decoding.model import load_tokenizer
    from adaspec.decoding.store import resolve
    from adaspec.terminal import progress

    for option, value in (("--max-ngram", arguments.max_ngram), ("--min-count", arguments.min_count)):
        if value < 1:
            raise ValueError(f"{option} is at least 1, got {value}")
    for path in arguments.files:
        if not path.is_file():
            raise ValueError(f"the corpus {path} is no file")
        if arguments.output.exists() and path.samefile(arguments.output):
            raise ValueError(f"the index would overwrite the corpus {path}; name another --output")
    check_file(arguments.output, "--output", replaced=True)
    if not arguments.output.absolute().parent.is_dir():
        raise ValueError(f"there is no folder for the index {arguments.output}")
    text, notes = consoles(False)
    with progress(notes) as tell:
        trust = arguments.trust_remote_code
        source = resolve(
            arguments.target, offline=arguments.offline, progress=tell, cache_dir=arguments.cache_dir, code=trust
        )
        tokenizer = load_tokenizer(source, trust_remote_code=trust)
        tokens = read_tokens(arguments.files, tokenizer, tell)
        index = CorpusIndex.build(tokens, range(1, arguments.max_ngram + 1), arguments.min_count, tell)
        tell(f"write {arguments.output.name}", None)
        made_for = {"identity": identity(tokenizer), "name": arguments.target}
        index.save(arguments.output, {"tokenizer": made_for, "corpus_tokens": len(tokens)})
    text.print(f"{arguments.output}: {len(index)} n-grams of {len(tokens)} tokens", soft_wrap=True)
    return 0
