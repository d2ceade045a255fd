"""The bridge between tokenizers: what it writes in the target's tokens, its own cache, and the law behind it."""

import pytest
import torch
from helpers import TableModel, count, joint_law, p_value, play, table_model, toy_batch, toy_chain
from torch import Tensor

from adaspec.decoding.bridge import BridgeDrafter
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.language_model import LanguageModel
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan

PLAN = Plan.parse("target/bridge:3")


class Pieces:
    """A tokenizer of given pieces: the longest that fits comes first."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def __call__(self, text, add_special_tokens):
        ids, at = [], 0
        while at < len(text):
            piece = max((each for each in self.pieces if text.startswith(each, at)), key=len)
            ids.append(self.pieces.index(piece))
            at += len(piece)
        return {"input_ids": ids}

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(self.pieces[index] for index in ids)


TARGET, OTHER = Pieces(*"abcd"), Pieces(*"dcba")
PAIRS = Pieces(*"abcd", "ab", "cd", "bc")


class Writes(LanguageModel):
    """Writes one text whatever it is shown, token by token of its own; counts the positions it is fed."""

    def __init__(self, text, tokenizer):
        super().__init__("writes", len(tokenizer.pieces))
        self.ids = torch.tensor(tokenizer(text, False)["input_ids"])
        self.fed = 0

    def _forward(self, tokens: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        self.fed += tokens.shape[1]
        at = slots.gather(1, rows.clamp(max=max(slots.shape[1] - 1, 0)))
        return torch.nn.functional.one_hot(self.ids[(at + 1).clamp(max=len(self.ids) - 1)], self.vocab_size).float()


def twin_of(model):
    """The same table over the other tokenizer's ids (reversed)."""
    return TableModel("bridge", model.table.flip(0, 1, 2).contiguous())


def proposal(model, own, target, prompt, limit, *, stop_ids=(), capacity=60):
    bridge = BridgeDrafter(model, own, target, capacity=capacity, stop_ids=stop_ids)
    batch = toy_batch(GREEDY, 1, 20, prompts=[target(prompt, False)["input_ids"]])
    bridge.start(1, 60)
    draft = bridge.propose(batch, torch.tensor([limit]))
    return "".join(target.pieces[index] for index in draft.tokens[0, : int(draft.counts[0])].tolist())


def test_a_twin_behind_another_tokenizer_is_always_right():
    chain = toy_chain()
    chain = toy_chain(bridge=BridgeDrafter(twin_of(chain.target), OTHER, TARGET, capacity=64))
    chain.start(Sequences(((1, 2), (0, 3, 1)), (GREEDY,) * 2, (20, 17), ((),) * 2))
    accepted = offered = 0
    while chain.running:
        edge = chain.round(PLAN).outcome.edges[0]
        accepted, offered = accepted + sum(edge.accepted), offered + sum(edge.offered)
    assert accepted == offered > 20


def test_its_text_is_tokenised_for_the_target():
    model = Writes("abcdabcdab", PAIRS)
    assert proposal(model, PAIRS, TARGET, "abcd", 3) == "abc"  # two tokens of its own are four of the target's
    model = Writes("abcdabcdab", TARGET)
    assert proposal(model, TARGET, PAIRS, "cdab", 4) == "abcd"  # and four of its own are two of the target's


def test_a_proposal_that_would_change_the_last_tokens_is_dropped():
    assert proposal(Writes("aab", TARGET), TARGET, PAIRS, "aa", 1) == ""  # the target writes "ab" as one token
    assert proposal(Writes("aaab", TARGET), TARGET, PAIRS, "aa", 2) == "ab"


def test_it_ends_at_its_own_stop_token_and_where_its_own_sequence_is_full():
    assert proposal(Writes("abcdabcd", TARGET), TARGET, OTHER, "ab", 4, stop_ids=[3]) == "c"
    assert proposal(Writes("abcdabcd", TARGET), TARGET, OTHER, "ab", 4, capacity=5) == "cda"
    assert proposal(Writes("abcdabcd", TARGET), TARGET, OTHER, "abcd", 4, capacity=3) == ""


def test_what_it_has_seen_is_not_fed_again():
    chain = toy_chain()
    model = twin_of(chain.target)
    fed = []
    forward = model._forward
    model._forward = lambda tokens, slots, rows: fed.append(tokens.shape[1]) or forward(tokens, slots, rows)
    chain = toy_chain(bridge=BridgeDrafter(model, OTHER, TARGET, capacity=64))
    chain.start(Sequences(((1, 2) * 10,), (GREEDY,), (20,), ((),)))
    rounds = 0
    while chain.running:
        chain.round(PLAN)
        rounds += 1
    assert sum(fed) <= 20 + 20 + 2 * rounds


def test_sampling_behind_it_has_the_targets_law():
    """5,000 rows; its proposal is a function of the text, thus a one-hot law."""
    params = SamplingParams(temperature=1.0, seed=50_000_000)
    target = toy_chain().target
    near = table_model("near", 4, like=target.table, noise=0.7)
    chain = toy_chain(bridge=BridgeDrafter(twin_of(near), OTHER, TARGET, capacity=64))
    tokens = play(chain, PLAN, toy_batch(params, 5_000, 5), 3)
    assert p_value(count(tokens, 3), joint_law(target.table.numpy(), 3, params)) > 1e-4


def test_a_model_without_rollback_is_no_bridge():
    target = table_model("target", 0)
    model = twin_of(target)
    model.rollback_obstacle = "it keeps a state"
    chain = Chain(target, {"bridge": BridgeDrafter(model, OTHER, TARGET, capacity=64)})
    with pytest.raises(ValueError, match="it keeps a state"):
        chain.prepare([PLAN])
