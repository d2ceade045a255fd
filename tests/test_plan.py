"""Plans, plan spaces and outcomes are values; their text form comes back unchanged."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec import Context, Decision, EdgeOutcome, Plan, PlanSpace, RoundOutcome

names = st.text(st.characters(exclude_characters="/:,?", exclude_categories=("Cs", "Zs", "Zl", "Zp", "Cc")), min_size=1)


@st.composite
def plans(draw, longest=10**6):
    models = draw(st.lists(names.filter(lambda name: name == name.strip()), min_size=1, max_size=5, unique=True))
    windows = draw(st.lists(st.integers(1, longest), min_size=len(models) - 1, max_size=len(models) - 1))
    stops = st.just(0.0) | st.floats(0.0, 1.0, exclude_max=True) if windows else st.just(0.0)
    return Plan(tuple(models), tuple(windows), draw(stops))


@given(plans())
def test_the_text_form_comes_back(plan):
    assert Plan.parse(str(plan)) == plan


@given(plans(100))
def test_edges_and_query_lengths_agree(plan):
    edges = list(plan.edges())
    assert [edge[0] for edge in edges] + [plan.models[-1]] == list(plan.models)
    assert plan.depth == len(edges) + 1
    lengths = list(plan.query_lens())
    assert [model for model, _ in lengths] == sorted((model for model, _ in lengths), key=plan.models.index)
    assert lengths[-1] == (plan.models[-1], 1)
    for model, _, window in edges:
        assert all(1 <= length <= window + 1 for name, length in lengths if name == model)


@pytest.mark.parametrize(
    ("text", "varying", "lengths"),
    [
        ("t", (), {"t": [1]}),
        ("t/d:3", (), {"t": [4], "d": [1]}),
        ("t/d:3?0.4", (), {"t": [1, 2, 3, 4], "d": [1]}),
        ("t/d:3", ("d",), {"t": [1, 2, 3, 4], "d": [1]}),
        ("t/m/d:5,3?0.4", ("m",), {"t": [6], "m": [1, 2, 3, 4], "d": [1]}),
        ("t/m/d:2,4", (), {"t": [3], "m": [1, 2], "d": [1]}),
        ("t/m/n/d:4,3,9", (), {"t": [5], "m": [1, 2, 3, 4], "n": [1, 2, 3], "d": [1]}),
    ],
)
def test_every_reachable_query_length_is_listed(text, varying, lengths):
    plan = Plan.parse(text)
    assert list(plan.query_lens(varying)) == [(model, n) for model, listed in lengths.items() for n in listed]
    shapes = PlanSpace([plan]).shapes(varying)
    assert shapes == {model: {*listed, *([1] if model == "t" else [])} for model, listed in lengths.items()}


def test_batch_sizes_fall_into_half_octaves():
    assert [Context(size).bucket for size in (0, 1, 2, 3, 4, 5, 6, 8, 11, 12, 100)] == [
        1,
        1,
        2,
        3,
        4,
        4,
        6,
        8,
        8,
        12,
        96,
    ]


def test_a_plan_reads_as_written():
    plan = Plan.parse(" target/mid/draft:8,3 ")
    assert (plan.models, plan.windows) == (("target", "mid", "draft"), (8, 3))
    assert str(Plan(("target",))) == "target"
    early = Plan.parse("target/mid/draft:8,3?0.4")
    assert early == Plan(("target", "mid", "draft"), (8, 3), 0.4)
    assert list(early.edges()) == [("target", "mid", 8), ("mid", "draft?0.4", 3)]


@pytest.mark.parametrize(
    "text",
    [
        *["", "t/d", "t/d:", "t/d:x", "t/d:0", "t/d:-1", "t/d:1,2", "t/t:1", "t/:1", "t/ d:1", "t:1", "t,d"],
        *["t?.1", "t/d?.1", "t/d:2?", "t/d:2?1", "t/d:2?-.1", "t/d:2?x", "t/d:2?nan"],
    ],
)
def test_what_is_no_plan_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match="plan"):
        Plan.parse(text)


def test_a_space_starts_with_plain_decoding_and_repeats_nothing():
    pair = Plan.parse("t/d:3")
    space = PlanSpace([pair, pair, Plan(("t",))])
    assert list(space) == [space.plain, pair] == [Plan(("t",)), pair]
    assert space.arm(pair) == 1
    assert pair in space
    assert Plan.parse("t/d:4") not in space
    with pytest.raises(KeyError):
        space.arm(Plan.parse("t/d:4"))


@pytest.mark.parametrize("plans", [[], [Plan(("a",)), Plan(("b",))]])
def test_a_space_needs_one_target(plans):
    with pytest.raises(ValueError, match="share one target"):
        PlanSpace(plans)


def test_a_grid_holds_every_chain_with_shrinking_windows():
    space = PlanSpace.grid("t", ["d", "m"], [2, 4], middles=["m"], inner_windows=[1, 3])
    assert sorted(map(str, space)) == sorted(
        ["t", "t/d:2", "t/d:4", "t/m:2", "t/m:4", "t/m/d:2,1", "t/m/d:4,1", "t/m/d:4,3"]
    )
    assert space.models == ("t", "d", "m")
    assert space.shapes() == {"t": {1, 3, 5}, "d": {1}, "m": {1, 2, 3, 4}}
    assert list(PlanSpace.grid("t", ["d"], [2], max_depth=1)) == [Plan(("t",))]
    assert [str(plan) for plan in PlanSpace.grid("t", ["d"], [4], stops=[0.0, 0.3])] == ["t", "t/d:4", "t/d:4?0.3"]


def test_outcomes_are_frozen_values():
    edge = EdgeOutcome("t", "d", (5, 3), (4, 3), (3, 1))
    assert edge.verifications == 5
    assert EdgeOutcome("t", "d", (), (), ()).verifications == 0
    assert Decision(Plan(("t",)), Context(), 1.0, 7) == Decision(Plan(("t",)), Context(), 1.0, 7)
    with pytest.raises(FrozenInstanceError):
        RoundOutcome(1, 0.5).tokens = 2
