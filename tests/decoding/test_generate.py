"""The loop of choosing, playing and learning, on toy models and letters for tokens."""

import itertools

import numpy as np
import pytest
import torch
from helpers import PROMPT, toy_chain

from adaspec.decoding.generate import Generator, Recorder, Request
from adaspec.decoding.sampling import SamplingParams
from adaspec.outcome import Decision
from adaspec.plan import Plan

PLANS = [Plan.parse(text) for text in ("target", "target/a:3", "target/a/b:4,2", "target/c:1")]
TABLE = toy_chain().target.table


class Letters:
    """Token i is a letter."""

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join("wxyz"[token] for token in token_ids)


class Script:
    """Plays given plans in turn, and writes down what it sees."""

    def __init__(self, plans=PLANS):
        self.plans, self.ids = itertools.cycle(plans), itertools.count()
        self.contexts, self.chosen, self.observed = [], [], []

    def choose(self, context):
        self.contexts.append(context)
        self.chosen.append(Decision(next(self.plans), context, 1.0, next(self.ids)))
        return self.chosen[-1]

    def observe(self, decision, outcome):
        self.observed.append((decision, outcome))


def request(seed=0, **options):
    return Request(PROMPT, sampling=SamplingParams(temperature=1.0, seed=seed), **options)


def generator(stop_ids=(), plans=PLANS):
    return Generator(toy_chain(), Script(plans), Letters(), stop_ids)


def text_of(tokens):
    return Letters().decode(tokens, skip_special_tokens=True)


def test_streamed_pieces_join_to_the_final_text():
    requests = [
        request(1, max_new_tokens=20),
        request(2, max_new_tokens=7),
        request(3, max_new_tokens=15, stop=("zz",)),
    ]
    pieces = [""] * 3
    for step in generator().stream(requests):
        pieces = [before + piece for before, piece in zip(pieces, step.pieces, strict=True)]
    done = generator().generate(requests)
    assert [completion.text for completion in done.completions] == pieces
    assert pieces[0] == text_of(done.completions[0].tokens)
    assert len(pieces[1]) == 7


def test_the_controller_sees_every_outcome_once_with_its_own_ticket():
    made = generator()
    done = made.generate([request(1, max_new_tokens=12), request(2, max_new_tokens=9)], tag="chat")
    script = made.controller
    assert [decision for decision, _ in script.observed] == script.chosen
    assert script.observed == list(done.steps)
    assert len({decision.id for decision in script.chosen}) == len(script.chosen)
    assert all(context.tag == "chat" for context in script.contexts)
    assert script.contexts[0].batch_size == 2
    assert sum(outcome.tokens for _, outcome in script.observed) == done.tokens == 21


def test_a_controller_given_for_one_call_stands_in():
    made, other = generator(), Script([Plan.parse("target/a:2")])
    made.generate([request(max_new_tokens=5)], controller=other)
    assert made.controller.chosen == []
    assert len(other.observed) == len(other.chosen) > 0


def test_log_probabilities_are_those_of_the_targets_raw_logits():
    """Temperature, top-k and penalty change what is drawn, not what is reported; to 1e-5."""
    sampling = SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3, seed=4)
    requests = [Request(PROMPT, 12, sampling), Request((0, 3, 1), 6, sampling), Request(PROMPT, 12, sampling, ("zy",))]
    done = generator(stop_ids=(0,)).generate(requests, logprobs=0)
    for asked, completion in zip(requests, done.completions, strict=True):
        text = list(asked.prompt)
        want = []
        for token in completion.tokens:
            want.append(float(torch.log_softmax(TABLE[text[-2], text[-1]], -1)[token]))
            text.append(token)
        np.testing.assert_allclose(completion.logprobs, want, atol=1e-5)


def test_no_log_probabilities_unless_asked():
    assert generator().generate([request(max_new_tokens=3)]).completions[0].logprobs is None


def test_the_reason_of_the_end_is_told():
    free = generator().generate([request(5, max_new_tokens=10)]).completions[0]
    assert (free.finish_reason, len(free.tokens)) == ("length", 10)
    stop = free.tokens[4]
    ended = generator(stop_ids=(stop,)).generate([request(5, max_new_tokens=10)]).completions[0]
    assert ended.finish_reason == "stop"
    assert ended.tokens[-1] == stop
    assert stop not in ended.tokens[:-1]


def test_a_stop_token_or_string_at_the_very_last_token_is_a_stop():
    plans = [Plan(("target",))]
    tokens = generator(plans=plans).generate([request(5, max_new_tokens=10)]).completions[0].tokens
    at = next(at for at in range(10) if tokens[at] not in tokens[:at] and at > 0)
    limit = request(5, max_new_tokens=at + 1)
    assert generator((tokens[at],), plans).generate([limit]).completions[0].finish_reason == "stop"
    letter = request(5, max_new_tokens=at + 1, stop=(text_of(tokens[at : at + 1]),))
    assert generator((), plans).generate([letter]).completions[0].finish_reason == "stop"


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_stop_string_trims_text_tokens_and_counters(plan):
    free = generator(plans=[plan]).generate([request(6, max_new_tokens=20)]).completions[0]
    stop = free.text[7:9]
    at = free.text.index(stop)
    done = generator(plans=[plan]).generate([request(6, max_new_tokens=20, stop=(stop, "never"))])
    (completion,) = done.completions
    assert completion.text == free.text[:at]
    assert completion.tokens == free.tokens[: at + 2]  # the tokens that complete the stop string stay
    assert completion.finish_reason == "stop"
    assert done.tokens == sum(outcome.tokens for _, outcome in done.steps) == at + 2


def test_no_piece_holds_what_a_stop_string_removes():
    stop = generator().generate([request(7, max_new_tokens=20)]).completions[0].text[9:12]
    joined = ""
    for step in generator().stream([request(7, max_new_tokens=20, stop=(stop,))]):
        joined += step.pieces[0]
        assert stop not in joined
        assert (
            not step.finished[0]
            or joined == generator().generate([request(7, max_new_tokens=20, stop=(stop,))]).completions[0].text
        )


def test_totals_are_sums_over_rounds():
    done = generator().generate([request(8, max_new_tokens=12), request(9, max_new_tokens=4)])
    assert done.decode_seconds == pytest.approx(sum(outcome.seconds for _, outcome in done.steps))
    assert done.seconds == done.prefill_seconds + done.decode_seconds
    assert done.mean_accepted_length == pytest.approx(16 / sum(outcome.rows for _, outcome in done.steps))
    assert done.tokens_per_second == pytest.approx(16 / done.decode_seconds)


def test_a_recorder_that_saw_nothing_gives_empty_completions():
    done = Recorder([request()], ()).result()
    assert (done.completions[0].text, done.tokens, done.tokens_per_second, done.mean_accepted_length) == ("", 0, 0, 0)
