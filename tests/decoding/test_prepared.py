"""After the start nothing is prepared any more, and switching plans allocates nothing that stays."""

import gc

import pytest
import torch
from tiny_models import noisy, tiny

from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.graphs import GraphModel, Rehearsal
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.model import Model
from adaspec.decoding.native.library import CompileError, library
from adaspec.decoding.native.model import NativeModel
from adaspec.decoding.packed import pack
from adaspec.decoding.sampling import GREEDY, SamplingParams
from adaspec.plan import Plan, PlanSpace

SPACE = PlanSpace(
    map(Plan.parse, ("target/draft:1", "target/draft:4", "target/mid/draft:4,2", "target/lookup:3", "target/mid:2"))
)
PROMPT, CAPACITY, NEW = (3, 4, 5, 6, 3, 4), 100, 90
SWITCHES = 60


def native(name, module):
    try:
        library()
    except CompileError as error:
        pytest.skip(str(error))
    return NativeModel(name, module, "fp16")


RUNNERS = {
    "native": native,
    "packed": lambda name, module: Model(name, pack(module, "fp16")),
    "graphs": lambda name, module: GraphModel(name, module, Rehearsal()),
}


class Preparations(Chain):
    """Counts what is built, and what is captured, from when ``watch`` is called."""

    built = 0

    def _build(self, plan):
        self.built += 1
        return super()._build(plan)


@pytest.fixture(params=RUNNERS)
def chain(request):
    target = tiny("llama")
    modules = {"target": target, "mid": noisy(target, 0.2, 1), "draft": noisy(target, 0.4, 2)}
    members = {name: RUNNERS[request.param](name, module) for name, module in modules.items()}
    members["lookup"] = LookupDrafter("lookup")
    chain = Preparations(members.pop("target"), members, capacity=CAPACITY)
    chain.prepare(SPACE)
    chain.prepare_passes(SPACE.shapes())
    return chain


def models(chain):
    return [member for member in chain.members.values() if isinstance(member, Model)]


def storages(chain):
    """Where every model keeps keys and values, and what it has captured."""
    found = []
    for model in models(chain):
        if isinstance(model, NativeModel):
            found.append(model.decoder._cache.data_ptr())
        else:
            found += [each.data_ptr() for layer in model._store._layers.values() for each in layer]
        if isinstance(model, GraphModel):
            found += [model.report.shapes, [graph.logits.data_ptr() for graph in model._graphs]]
    return found


def switch(chain, rounds, params=GREEDY):
    """Plays so many rounds, another plan each time, text after text."""
    for turn in range(rounds):
        if not turn or not chain.running:
            chain.start(Sequences((PROMPT,), (params,), (NEW,), ((),)))
        chain.round(SPACE[turn % len(SPACE)])
        chain.context()


def live_tensors():
    """How many tensors anybody still holds, and their bytes."""
    gc.collect()
    held = [each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return len(held), sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "sampled"])
def test_switching_plans_prepares_nothing_and_keeps_nothing(chain, params):
    switch(chain, 18, params)
    chain.built, before, (count, size) = 0, storages(chain), live_tensors()
    switch(chain, SWITCHES, params)
    later = live_tensors()
    assert chain.built == 0
    assert storages(chain) == before
    assert later[0] <= count + 8  # less than one per five rounds
    assert later[1] <= size + 4096  # a text's own buffer and counters
    for model in models(chain):
        assert not isinstance(model, GraphModel) or (not model.report.eager and model.report.replays > SWITCHES // 5)


def test_a_round_that_keeps_a_tensor_would_be_seen(chain):
    switch(chain, 6)
    count, _ = live_tensors()
    kept = []
    for _ in range(18):
        switch(chain, 1)
        kept.append(chain._batch.sequence.lengths.clone())
    assert live_tensors()[0] > count + 8


def test_the_count_of_preparations_can_rise(chain):
    chain.built = 0
    chain.start(Sequences((PROMPT,), (GREEDY,), (NEW,), ((),)))
    chain.round(Plan.parse("target/draft:3"))
    assert chain.built == 1
