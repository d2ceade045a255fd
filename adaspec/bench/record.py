"""Records a trace: decodes prompts plainly, then asks every drafter what it would have proposed at every position.

python -m adaspec.bench.record OUT.npz --target smollm2-135m --drafter lookup --drafter int8 \
    --prompts chat=questions.jsonl#writing,roleplay --prompts code=humaneval.jsonl --raw code
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaspec.assemble import TARGET, Assembly, DrafterSpec, Setup, assemble
from adaspec.bench.traces import LONGEST, Curve, Proposals, Trace, runs
from adaspec.compare import Pinned
from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain
from adaspec.decoding.drafter import Drafter
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.sampling import Sampler, SamplingParams
from adaspec.theory import Edge

Text = tuple[list[int], list[int]]  # prompt, continuation
QUERY_LENS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 33)
TURNS = 5  # measurements of every query length
Mine = dict[str, list[list[list[int]]]]  # per walked drafter and text, its proposal at every position


def main() -> int:
    """Prints a line per prompt and the path at the end."""
    arguments = _parser().parse_args()
    setup = Setup(
        target=arguments.target,
        drafters=tuple(DrafterSpec.parse(text) for text in arguments.drafter),
        precision=arguments.precision,
        threads=arguments.threads,
        windows=(LONGEST,),
        inner_windows=(1,),
    )
    assembly = assemble(setup, lambda what, share: None)
    sampling = SamplingParams(temperature=arguments.temperature, seed=arguments.seed)
    kinds, texts = [], []
    try:
        for kind, prompt in _prompts(arguments):
            text = _decode(assembly, prompt, kind in arguments.raw, arguments, sampling)
            if text is not None:
                kinds.append(kind)
                texts.append(text)
                print(f"{len(texts):3d} {kind:<10} {len(text[0]):4d} + {len(text[1]):3d} tokens", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: the trace will hold {len(texts)} texts", file=sys.stderr)
    if not texts:
        raise SystemExit("no prompt was short enough, or there was none")
    trace = record(assembly.generator.chain, kinds, texts, sampling, arguments.note)
    trace.save(arguments.out)
    print(f"{arguments.out}: {len(texts)} texts, {trace.positions} positions")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.npz")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", action="append", required=True, metavar="[NAME=]SOURCE")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--prompts", action="append", required=True, metavar="KIND=FILE[#CATEGORY,...]")
    parser.add_argument("--raw", action="append", default=[], metavar="KIND", help="without the chat template")
    parser.add_argument("--limit", type=int, default=10, help="prompts per kind (default: %(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are passed over")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--note", default="", help="kept in the trace: machine, versions")
    return parser


def _prompts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(kind, prompt), the kinds in turn, so that an interrupted day still holds all of them."""
    groups = []
    for given in arguments.prompts:
        kind, _, source = given.partition("=")
        file, _, categories = source.partition("#")
        records = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        wanted = set(categories.split(",")) if categories else None
        kept = [_text(record) for record in records if wanted is None or record["category"] in wanted]
        groups.append([(kind, text) for text in sorted(kept, key=len)[: arguments.limit]])
    return [group[turn] for turn in range(arguments.limit) for group in groups if turn < len(group)]


def _text(record: Mapping[str, Any]) -> str:
    text: str = record.get("prompt") or record.get("question") or record["turns"][0]
    return text


def _decode(
    assembly: Assembly, prompt: str, raw: bool, arguments: argparse.Namespace, sampling: SamplingParams
) -> Text | None:
    """The target's own continuation by plain decoding; None for a prompt that is too long."""
    request = assembly.request(prompt, raw=raw, max_new_tokens=arguments.max_new_tokens, sampling=sampling)
    if len(request.prompt) > arguments.max_prompt_tokens:
        return None
    done = assembly.generator.generate([request], controller=Pinned(assembly.space.plain))
    return list(request.prompt), list(done.completions[0].tokens)


def record(
    chain: Chain, kinds: Sequence[str], texts: Sequence[Text], sampling: SamplingParams, note: str = ""
) -> Trace:
    """What every drafter would have done on the target's texts.

    A model needs one pass per text: its k-th proposal after k accepted ones stands on the target's own tokens.
    Anything else is asked at every position, with the target's passes in between if it reads the target's features.
    """
    members = {name: member for name, member in chain.members.items() if name != TARGET}
    models = {name: member for name, member in members.items() if isinstance(member, LanguageModel)}
    walked = {name: member for name, member in members.items() if isinstance(member, Drafter)}
    curves = {name: _curve(chain.members[name], chain.capacity) for name in (TARGET, *models)}
    proposals: Mine = {}
    for name, drafter in walked.items():
        proposals[name], seconds = _walk(drafter, chain.target, texts)
        curves[name] = Curve(np.array([1]), np.array([0]), np.array([[seconds]]))
    if sampling.temperature > 0.0:
        pairs = _sampled({TARGET: chain.target, **models}, proposals, texts, sampling)
    else:
        pairs = _greedy(models, proposals, texts)
    prompts, lengths = (np.array([len(text[side]) for text in texts]) for side in (0, 1))
    lookups = tuple(name for name in walked if not _reads_features(walked[name]))
    return Trace(TARGET, tuple(kinds), prompts, lengths, pairs, curves, lookups, note)


def _greedy(models: Mapping[str, LanguageModel], proposals: Mine, texts: Sequence[Text]) -> dict[Edge, Proposals]:
    lengths = np.array([len(text[1]) for text in texts])
    own = {TARGET: np.concatenate([text[1] for text in texts])}
    for name, model in models.items():
        own[name] = np.concatenate([_laws(model, text, None).argmax(-1).numpy() for text in texts])
    pairs: dict[Edge, Proposals] = {}
    for verifier, tokens in own.items():
        for drafter in models:
            if drafter != verifier:
                accepted = runs(own[drafter] == tokens, lengths)
                pairs[verifier, drafter] = Proposals(np.full(len(tokens), LONGEST), accepted)
        for drafter, given in proposals.items():
            pairs[verifier, drafter] = _matched(given, np.split(tokens, np.cumsum(lengths)[:-1]))
    return pairs


def _matched(given: list[list[list[int]]], tokens: list[Any]) -> Proposals:
    """Counts how far each proposal agrees with the tokens of a verifier."""
    offered, accepted = [], []
    for text, own in zip(given, tokens):
        for position, proposal in enumerate(text):
            same = [guess == token for guess, token in zip(proposal, own[position:])]
            offered.append(len(proposal))
            accepted.append(same.index(False) if False in same else len(same))
    return Proposals(np.array(offered), np.array(accepted))


def _sampled(
    models: Mapping[str, LanguageModel], proposals: Mine, texts: Sequence[Text], sampling: SamplingParams
) -> dict[Edge, Proposals]:
    """The chance that the next token is accepted: the overlap of two laws, or the verifier's law at a fixed token."""
    found: dict[Edge, list[float]] = {}
    offered = {name: [len(proposal) for text in given for proposal in text] for name, given in proposals.items()}
    for index, text in enumerate(texts):
        laws = {name: _laws(model, text, sampling) for name, model in models.items()}
        for verifier, law in laws.items():
            for drafter in laws:
                if drafter not in (verifier, TARGET):
                    overlap = torch.minimum(law, laws[drafter]).sum(-1)
                    found.setdefault((verifier, drafter), []).extend(overlap.tolist())
            for drafter, given in proposals.items():
                chances = [float(row[p[0]]) if p else 0.0 for row, p in zip(law, given[index])]
                found.setdefault((verifier, drafter), []).extend(chances)
    whole = {edge: np.array(offered.get(edge[1], [LONGEST] * len(chances))) for edge, chances in found.items()}
    return {edge: Proposals(whole[edge], chance=np.clip(chances, 0.0, 1.0)) for edge, chances in found.items()}


def _laws(model: LanguageModel, text: Text, sampling: SamplingParams | None) -> Tensor:
    """Logits (or laws, when sampled) of a model at every position of a continuation; [positions, V]."""
    prompt, new = text
    buffer = _buffer([*prompt, *new])
    model.start(1, buffer.capacity)
    first, active = torch.tensor([len(prompt) - 1]), torch.ones(1, dtype=torch.bool)
    model.catch_up(buffer, first)
    buffer.truncate(buffer.lengths - 1)  # nothing is asked behind the last token
    logits = model.logits(buffer, first, len(new), active)
    model.clock.drain()
    if sampling is None:
        return logits[0]
    sampler = Sampler([sampling])
    return sampler.law(sampler.penalise(logits, buffer, first))[0]


def _buffer(tokens: list[int]) -> TokenBuffer:
    buffer = TokenBuffer(1, len(tokens) + LONGEST)
    buffer.append(torch.tensor([tokens]), torch.tensor([len(tokens)]))
    return buffer


def _reads_features(drafter: Drafter) -> bool:
    return type(drafter).attach is not Drafter.attach


def _walk(drafter: Drafter, target: LanguageModel, texts: Sequence[Text]) -> tuple[list[list[list[int]]], float]:
    """The proposals at every position of every text, and the median seconds of one pass of the drafter."""
    fed = target if _reads_features(drafter) else None
    found, spent = [], []
    for prompt, new in texts:
        buffer = _buffer([*prompt, *new])
        buffer.truncate(torch.tensor([len(prompt)]))
        drafter.start(1, buffer.capacity)
        if fed:
            fed.start(1, buffer.capacity)
            fed.catch_up(buffer, buffer.lengths - 1)
        mine = []
        for token in new:
            began = time.perf_counter()
            mine.append(_ask(drafter, buffer))
            spent.append((time.perf_counter() - began) / (max(len(mine[-1]), 1) if fed else 1))
            buffer.append(torch.tensor([[token]]), torch.tensor([1]))
            if fed:
                fed.logits(buffer, buffer.lengths - 2, 1, torch.ones(1, dtype=torch.bool))
                fed.rollback(buffer.lengths - 1)
        found.append(mine)
    target.clock.drain()
    return found, statistics.median(spent)


def _ask(drafter: Drafter, buffer: TokenBuffer) -> list[int]:
    """One proposal, after which drafter and buffer are as they were."""
    start = buffer.lengths
    batch = Batch(buffer, Sampler([SamplingParams()]), torch.full((1, 1), -1), start)
    draft = drafter.propose(batch, torch.tensor([LONGEST]))
    buffer.truncate(start)
    drafter.rollback(start - 1)
    tokens: list[int] = draft.tokens[0, : int(draft.counts[0])].tolist()
    return tokens


def _curve(model: object, capacity: int) -> Curve:
    """Seconds of passes of several lengths, with few and with many cached tokens.

    The least of several turns through all of them: what a pass takes on a machine that does nothing else.
    """
    assert isinstance(model, LanguageModel)
    longest = capacity - max(QUERY_LENS)
    contexts = sorted({min(length, max(longest, 1)) for length in (32, 512)})
    seconds = [_least(model, context) for context in contexts]
    return Curve(np.array(QUERY_LENS), np.array(contexts), np.array(seconds).T)


def _least(model: LanguageModel, context: int) -> list[float]:
    """Seconds per query length with ``context`` cached tokens."""
    buffer = _buffer([token % model.vocab_size for token in range(context + max(QUERY_LENS))])
    start, active = torch.tensor([context]), torch.ones(1, dtype=torch.bool)
    model.start(1, buffer.capacity)
    model.catch_up(buffer, start)
    model.clock.drain()
    for query_len in QUERY_LENS * TURNS:
        buffer.truncate(start + query_len)
        model.rollback(start)
        model.logits(buffer, start, query_len, active)
    spent = [one.seconds for one in model.clock.drain()[0]]
    return [min(spent[index :: len(QUERY_LENS)]) for index in range(len(QUERY_LENS))]


if __name__ == "__main__":
    raise SystemExit(main())
