"""A feature drafter in C drafts what the torch one does, and a window in one call what single steps would."""

import pytest
import torch
from feature_toys import VOCAB, native_head, seeing_chain, toy_head
from test_feature_load import REDUCED, SIZE, eagle_1, eagle_3, numbers, same_numbers_again, write
from tiny_models import tiny

from adaspec.decoding import feature_load
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.confidence import confidence, largest_entropy, sure_enough
from adaspec.decoding.feature import FeatureDrafter, FeatureReader
from adaspec.decoding.feature_load import load_feature_drafter
from adaspec.decoding.model import Model
from adaspec.decoding.native.head import NativeFeatureDrafter
from adaspec.decoding.native.library import CompileError
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan

# Of the largest logit, after up to four steps; over fifty heads of such numbers 1e-5, 0.011 and 0.39 were the most.
TOLERANCE = {"float32": 2e-5, "fp16": 2e-2, "int8": 0.6}
PROMPTS = ((5, 6, 7, 11, 3, 9, 4), (8, 9, 4), (20, 3, 20, 3))
BEGUN = {"layers.0.input_layernorm.weight": 1 + numbers(SIZE), "norm.weight": 1 + numbers(SIZE)}
OFFSETS = {"d2t": torch.tensor([token - index for index, token in enumerate(REDUCED)])}


@pytest.fixture(params=["whole head", "reduced head"])
def folder(tmp_path, request):
    same_numbers_again()
    extra = OFFSETS if request.param == "reduced head" else {}
    return write(tmp_path / "head", eagle_1(bias=True, qkv_bias=True) | BEGUN | extra, rope_theta=50000.0)


def drafter(folder, module, **options):
    """A drafter behind prompts of different length, and their batch."""
    target = Model("target", module)
    head = load_feature_drafter("head", folder, target, **options)
    chain = Chain(target, {"head": head}, capacity=64)
    chain.prepare([Plan.parse("target/head:6")])
    chain.start(Sequences(PROMPTS, (GREEDY,) * 3, (20,) * 3, ((),) * 3))
    return head, chain


def seen(head):
    """The logits that a drafter spreads over the vocabulary, as they come."""
    logits, spread = [], head._spread
    head._spread = lambda reduced: logits.append(spread(reduced)) or logits[-1]
    return logits


@pytest.mark.parametrize("precision", TOLERANCE)
def test_logits_are_those_of_torch(folder, precision):
    """Along the same tokens: the torch drafter's."""
    torch_head, torch_chain = drafter(folder, tiny("llama"), precision="stock")
    native, chain = drafter(folder, tiny("llama"), precision=precision)
    assert isinstance(torch_head, FeatureDrafter)
    assert isinstance(native, NativeFeatureDrafter)
    wanted, found = seen(torch_head), seen(native)
    tokens = torch_head.propose(torch_chain._batch, torch.tensor([4, 4, 4])).tokens
    batch = chain._batch
    chosen = iter(tokens.unbind(1))
    batch.sampler.choose = lambda logits, sequence, first, active: (next(chosen), None)
    FeatureReader.propose(native, batch, torch.tensor([4, 4, 4]))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.isinf(), other.isinf())
        real = ~other.isinf()
        assert (one - other)[real].abs().max() < TOLERANCE[precision] * other[real].abs().max()


@pytest.mark.parametrize("stop", [0.0, 0.15, 0.4])
@pytest.mark.parametrize("limits", [(5, 5, 5), (1, 6, 3), (0, 4, 2), (0, 0, 0)])
def test_a_window_in_one_call_is_that_of_single_steps(folder, stop, limits):
    """Ragged limits, stop tokens and early ends; and the same again after rounds that were rejected or not."""
    once, chain = drafter(folder, tiny("llama"))
    singly, other = drafter(folder, tiny("llama"))
    drafts = []
    for turn in range(3):
        ends = torch.full((3, 2), -1)
        ends[1, 0] = drafts[0].tokens[1, 1] if turn and drafts[0].tokens.shape[1] > 1 else -1
        for batch in (chain._batch, other._batch):
            batch.stop_ids = ends
        found = once.propose(chain._batch, torch.tensor(limits), stop)
        wanted = FeatureReader.propose(singly, other._batch, torch.tensor(limits), stop)
        assert found.counts.tolist() == wanted.counts.tolist()
        assert found.law is None
        for row, count in enumerate(wanted.counts.tolist()):
            assert found.tokens[row, :count].tolist() == wanted.tokens[row, :count].tolist()
            assert chain._batch.sequence.row(row) == other._batch.sequence.row(row)
        assert [each.query_len for each in chain._clock.drain()[0] if each.model == "head"][1:] == [1] * max(
            0, int(found.counts.max()) - 1
        )
        drafts.append(found)
        for each in (chain, other):
            each._batch.sequence.truncate(each._batch.sequence.lengths - found.counts + found.counts.clamp(max=turn))
            each._batch.committed = each._batch.sequence.lengths


def test_an_early_end_is_met_at_the_confidence_that_python_tells():
    logits = torch.randn(200, 48, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 4, 200)[:, None]
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    for stop in (0.0, 0.1, 0.3, 0.7, 1.0):
        clear = (confidence(logits) - stop).abs() > 1e-5
        assert torch.equal((entropy <= largest_entropy(stop))[clear], sure_enough(logits, stop)[clear])


def test_many_threads_draft_the_same():
    before = torch.get_num_threads()
    texts = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            chain = seeing_chain(head=native_head(precision="fp16"))
            chain.start(Sequences(((1, 2), (0, 3, 1)), (GREEDY,) * 2, (20, 20), ((), ())))
            texts.append([chain.round(Plan.parse("target/head:4")).outcome.edges[0].accepted for _ in range(3)])
    finally:
        torch.set_num_threads(before)
    assert texts[0] == texts[1]


def test_a_penalty_is_heeded():
    """A window in one call would repeat what the penalty forbids."""
    params = SamplingParams(repetition_penalty=50.0)
    drafts = []
    for head in (toy_head(heads=1), native_head()):
        chain = seeing_chain(head=head)
        chain.prepare([Plan.parse("target/head:3")])
        chain.start(Sequences(((1, 2),), (params,), (20,), ((),)))
        drafts.append(head.propose(chain._batch, torch.tensor([VOCAB])).tokens.tolist())
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (eagle_1(), {}),
        (eagle_3(), {}),
        (eagle_1() | BEGUN, {"runner": "torch"}),
        (eagle_1() | BEGUN, {"precision": "stock"}),
    ],
    ids=["eagle-1", "eagle-3", "torch asked for", "stock asked for"],
)
def test_what_is_not_for_it_is_left_to_torch(tmp_path, tensors, options):
    target = Model("target", tiny("llama", num_hidden_layers=6))
    assert isinstance(load_feature_drafter("head", write(tmp_path, tensors), target, **options), FeatureDrafter)


def test_without_a_compiler_torch_drafts(folder, monkeypatch):
    def fails():
        raise CompileError("none")

    monkeypatch.setattr(feature_load, "library", fails)
    assert isinstance(load_feature_drafter("head", folder, Model("target", tiny("llama"))), FeatureDrafter)


@pytest.mark.parametrize("make", [toy_head, native_head], ids=["torch", "C"])
def test_its_step_is_timed_at_the_start(make):
    chain = seeing_chain(head=make())
    assert chain.profile({"head": [1]}) == []  # nothing to read yet
    chain.prepare([Plan.parse("target/head:3")])
    (timed,) = chain.profile({"head": [1]}, batch_size=2)
    assert (timed.model, timed.query_len, timed.batch_size) == ("head", 1, 2)
    assert timed.seconds > 0.0
