"""Passes of fixed shape: the same text, nothing prepared later, no look at the device inside a captured function."""

import pytest
import torch
from tiny_models import greedy_loop, noisy, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.gpu_attention import NAME, attention, register
from adaspec.decoding.graphs import CudaCapture, GraphModel, Rehearsal, Shape
from adaspec.decoding.model import Model
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan, PlanSpace

PROMPTS = ((3, 4, 5, 6, 7), (9, 8), (3, 3, 4, 9, 10, 11, 12))
PLANS = ("target", "target/draft:1", "target/draft:4", "target/mid/draft:4,2", "target/mid:3")
SPACE = PlanSpace(map(Plan.parse, PLANS))
NEW, CAPACITY = 20, 40
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select")


class NoReads(TorchDispatchMode):
    """Refuses what waits for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        assert name not in READS, f"{name} reads from the device"
        return function(*args, **(kwargs or {}))


class Watched(Rehearsal):
    """Runs every function under ``NoReads``, and counts the captures."""

    captures = 0

    def __call__(self, run):
        def watched():
            with NoReads():
                return run()

        self.captures += 1
        return super().__call__(watched)


def modules():
    target = tiny("llama")
    target.set_attn_implementation(register())
    return {"target": target, "mid": noisy(target, 0.2, 1), "draft": noisy(target, 0.4, 2)}


def graph_chain(capture, batch_sizes=(1, 3), device="cpu", space=SPACE):
    members = {name: GraphModel(name, module.to(device), capture) for name, module in modules().items()}
    chain = Chain(members.pop("target"), members, capacity=CAPACITY)
    chain.prepare(space)
    chain.prepare_passes(space.shapes(), batch_sizes)
    return chain


def decode(chain, plans, prompts, params=GREEDY):
    """Texts of ``prompts`` as one batch, plan after plan in turn."""
    size, turn = len(prompts), 0
    chain.start(Sequences(prompts, (params,) * size, (NEW,) * size, ((),) * size))
    texts = [[] for _ in prompts]
    while chain.running:
        for text, tokens in zip(texts, chain.round(plans[turn % len(plans)]).tokens, strict=True):
            text += tokens
        turn += 1
    return texts


def reports(chain):
    return {name: member.report for name, member in chain.members.items()}


@pytest.fixture(scope="module")
def prepared():
    return graph_chain(Watched())


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
@pytest.mark.parametrize("plan", PLANS)
def test_the_text_is_that_of_a_full_forward_per_token(prepared, plan, prompts):
    expected = [greedy_loop(tiny("llama"), prompt, NEW) for prompt in prompts]
    assert decode(prepared, [Plan.parse(plan)], prompts) == expected
    assert prepared.target.module.config._attn_implementation == "adaspec_grouped"


def test_every_decoding_pass_is_a_replay_and_nothing_is_captured_after_the_start():
    capture = Watched()
    chain = graph_chain(capture)
    before = capture.captures
    decode(chain, tuple(SPACE), PROMPTS)
    decode(chain, tuple(SPACE), PROMPTS[:1], SamplingParams(temperature=1.0, seed=3))
    assert capture.captures == before
    assert before == sum(len(report.shapes) for report in reports(chain).values())
    for name, report in reports(chain).items():
        assert not report.eager, f"{name} ran eagerly: {report.eager}"
        assert not report.failed
        assert report.replays > 10


def test_shapes_are_those_that_the_plans_can_ask_for():
    shapes = {name: report.shapes for name, report in reports(graph_chain(Rehearsal(), (1,))).items()}
    slots = 64  # of 40 + 1, aligned
    assert shapes["target"] == [Shape(1, query_len, slots) for query_len in (1, 2, 4, 5)]
    assert [shape.query_len for shape in shapes["draft"]] == [1, 2]
    assert [shape.query_len for shape in shapes["mid"]] == [1, 2, 3, 4]


def test_a_larger_batch_runs_eagerly_with_the_reason_and_the_graphs_serve_again_after_it():
    chain = graph_chain(Rehearsal(), (1,))
    expected = [greedy_loop(tiny("llama"), prompt, NEW) for prompt in PROMPTS]
    assert decode(chain, [Plan.parse(PLANS[2])], PROMPTS) == expected
    report = chain.target.report
    assert report.replays == 0
    assert report.eager["3 x 5: nothing was prepared for sequences that large"] > 2
    report.eager.clear()
    assert decode(chain, [Plan.parse(PLANS[2])], PROMPTS[:1]) == expected[:1]
    assert not report.eager
    assert report.replays > 2


def test_an_unprepared_window_is_told_and_right():
    chain = graph_chain(Rehearsal(), (1,))
    assert decode(chain, [Plan.parse("target/draft:7")], PROMPTS[:1]) == [greedy_loop(tiny("llama"), PROMPTS[0], NEW)]
    assert chain.target.report.eager["1 x 8: no such shape was prepared"] > 0


def test_a_capture_that_fails_costs_its_shape_and_is_told():
    class Failing(Rehearsal):
        turn = 0

        def __call__(self, run):
            self.turn += 1
            if self.turn % 2:
                raise RuntimeError("operation not permitted\nwhen capturing")
            return super().__call__(run)

    chain = graph_chain(Failing(), (1,))
    for plan in PLANS:
        assert decode(chain, [Plan.parse(plan)], PROMPTS[:1]) == [greedy_loop(tiny("llama"), PROMPTS[0], NEW)]
    assert set(chain.target.report.failed.values()) == {"operation not permitted"}
    assert chain.target.report.eager or chain.members["mid"].report.eager


def test_a_pass_fits_into_a_graph_with_more_rows_positions_and_slots():
    module = tiny("llama")
    module.set_attn_implementation(register())
    model, reference = GraphModel("m", module, Rehearsal()), Model("r", tiny("llama"))
    model.prepare([4], [3], CAPACITY)
    buffer = TokenBuffer(2, 12)
    buffer.append(torch.arange(24).view(2, 12), torch.tensor([12, 9]))
    first, active = torch.tensor([9, 6]), torch.ones(2, dtype=torch.bool)
    logits = []
    for each in (model, reference):
        each.start(2, 12)
        each.catch_up(buffer, first)
        logits.append(each.logits(buffer, first, 3, active))
    assert model.report.replays == 1
    assert torch.allclose(*logits, atol=1e-5)


def test_tapped_states_are_those_of_the_pass():
    model, reference = GraphModel("m", tiny("llama"), Rehearsal()), Model("r", tiny("llama"))
    buffer = TokenBuffer(1, 12)
    buffer.append(torch.arange(3, 15)[None], torch.tensor([12]))
    states, layers = [], (0, 1, 2)
    for each in (model, reference):
        each.start(1, 12)
        each.tap(layers)
        each.prepare([2, 1], [1], CAPACITY)
        each.start(1, 12)
        each.catch_up(buffer, torch.tensor([10]))
        each.logits(buffer, torch.tensor([10]), 2, torch.tensor([True]))
        states.append(each.features(layers, torch.tensor([0]), 12))
    assert model.report.replays == 1
    assert torch.allclose(*states, atol=1e-5)


def test_states_tapped_after_the_capture_end_the_graphs():
    model = GraphModel("m", tiny("llama"), Rehearsal())
    model.prepare([1], [1], CAPACITY)
    model.start(1, 12)
    model.tap((1,))
    buffer = TokenBuffer(1, 12)
    buffer.append(torch.arange(3, 15)[None], torch.tensor([12]))
    model.logits(buffer, torch.tensor([11]), 1, torch.tensor([True]))
    assert model.report.replays == 0
    assert model.features((1,), torch.tensor([11]), 1).abs().sum() > 0


@pytest.mark.parametrize(("heads", "shared", "queries"), [(4, 4, 1), (4, 2, 1), (6, 2, 5), (8, 1, 3)])
def test_grouped_attention_is_attention_with_repeated_heads(heads, shared, queries):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, *size, generator=generator) for size in ((heads, queries, 8), (shared, 11, 8), (shared, 11, 8))
    )
    mask = torch.arange(11) <= torch.arange(5, 5 + queries)[None, None, :, None]
    repeated = [each.repeat_interleave(heads // shared, 1) for each in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask, scale=0.3)
    assert torch.allclose(attention(query, key, value, mask, 0.3), expected.transpose(1, 2), atol=1e-6)


def test_grouped_attention_serves_a_module_on_its_own():
    module, grouped = tiny("llama"), tiny("llama")
    grouped.set_attn_implementation(register())
    tokens = torch.arange(3, 20)[None]
    assert torch.allclose(grouped(tokens).logits, module(tokens).logits, atol=1e-5)


def test_what_grouped_attention_cannot_do_is_refused_and_registering_again_changes_nothing():
    function, query = AttentionInterface()[register()], torch.randn(1, 2, 3, 8)
    assert AttentionInterface()[register()] is function  # or compiled models would be compiled anew
    for unknown in ({"softcap": 30.0}, {"position_bias": query}, {"s_aux": query}):
        with pytest.raises(ValueError, match=f"{NAME}.*{next(iter(unknown))}"):
            function(torch.nn.Module().eval(), query, query, query, None, **unknown)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_real_graphs_give_the_text_of_the_eager_model(prompts):
    chain = graph_chain(CudaCapture(), device="cuda")
    eager = {name: Model(name, module.to("cuda")) for name, module in modules().items()}
    reference = Chain(eager.pop("target"), eager, capacity=CAPACITY)
    for plan in SPACE:
        assert decode(chain, [plan], prompts) == decode(reference, [plan], prompts)
    assert not any(report.eager or report.failed for report in reports(chain).values())
