"""Plans, plan spaces and outcomes are values; their text form comes back unchanged."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaspec import Context, Decision, EdgeOutcome, Plan, PlanSpace, RoundOutcome

names = st.text(st.characters(exclude_characters="/:,?", exclude_categories=("Cs", "Zs", "Zl", "Zp", "Cc")), min_size=1)


@st.composite
def plans(draw):
    models = draw(st.lists(names.filter(lambda name: name == name.strip()), min_size=1, max_size=5, unique=True))
    windows = draw(st.lists(st.integers(1, 10**6), min_size=len(models) - 1, max_size=len(models) - 1))
    stops = st.just(0.0) | st.floats(0.0, 1.0, exclude_max=True) if windows else st.just(0.0)
    return Plan(tuple(models), tuple(windows), draw(stops))


@given(plans())
def test_the_text_form_comes_back(plan):
    assert Plan.parse(str(plan)) == plan


@given(plans())
def test_edges_and_query_lengths_agree(plan):
    edges = list(plan.edges())
    assert [edge[0] for edge in edges] + [plan.models[-1]] == list(plan.models)
    assert list(plan.query_lens()) == [(v, window + 1) for v, _, window in edges] + [(plan.models[-1], 1)]
    assert plan.depth == len(edges) + 1


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
    assert space.shapes() == {"t": {1, 3, 5}, "d": {1}, "m": {1, 2, 4}}
    assert list(PlanSpace.grid("t", ["d"], [2], max_depth=1)) == [Plan(("t",))]
    assert [str(plan) for plan in PlanSpace.grid("t", ["d"], [4], stops=[0.0, 0.3])] == ["t", "t/d:4", "t/d:4?0.3"]


def test_outcomes_are_frozen_values():
    edge = EdgeOutcome("t", "d", (5, 3), (4, 3), (3, 1))
    assert edge.verifications == 5
    assert EdgeOutcome("t", "d", (), (), ()).verifications == 0
    assert Decision(Plan(("t",)), Context(), 1.0, 7) == Decision(Plan(("t",)), Context(), 1.0, 7)
    with pytest.raises(FrozenInstanceError):
        RoundOutcome(1, 0.5).tokens = 2
