"""The order in which a run asks its methods, and how it goes on, with methods that only note what they are asked."""

from types import SimpleNamespace

import pytest
from bench_runs import lines
from omegaconf import OmegaConf

from adaspec.bench import harness
from adaspec.bench.harness import _Run
from adaspec.bench.journal import Journal
from adaspec.bench.methods import Answer
from adaspec.bench.workload import Question
from adaspec.plan import Plan

QUESTIONS = [Question(id=f"q{number}", kind="chat", turns=("one", "two")[: 1 + number % 2]) for number in range(3)]


class Noting:
    """A method whose state is how often it was asked since it was started."""

    def __init__(self, name, log):
        self.name, self.log, self.asked = name, log, 0

    def start(self, seed):
        self.asked = 0
        self.log.append((self.name, "start", seed))

    def restore(self, state):
        self.asked = state["asked"]
        self.log.append((self.name, "restore", self.asked))

    def state(self):
        return {"asked": self.asked}

    def answer(self, request, tag=""):
        self.asked += 1
        self.log.append((self.name, request, tag))
        return Answer((self.asked,), 0.5, None, 1)


def run(folder, log, names=("a", "b", "c"), repeats=2, tagged=True):
    ask = SimpleNamespace(
        request=lambda prompt, before=(), seed=0, tokens=None: (prompt, tuple(before), seed),
        text=lambda tokens: f"answer {tokens[0]}",
    )
    config = OmegaConf.create({"repeats": repeats, "seed": 10, "workload": {"tagged": tagged}})
    made = _Run(config, Journal(folder), ask, QUESTIONS, {})
    made.methods = [Noting(name, log) for name in names]
    return made


NO_MIRROR = SimpleNamespace(add=lambda prompts, rounds: None)


def test_every_question_is_asked_of_all_before_the_next_and_the_first_changes(tmp_path):
    run(tmp_path, []).play(NO_MIRROR)
    order = {}
    for line in lines(tmp_path / "prompts.jsonl"):
        own = order.setdefault((line["repeat"], line["prompt"]), [])
        own += [line["method"]] if line["method"] not in own else []
    assert list(order) == [(repeat, question.id) for repeat in range(2) for question in QUESTIONS]
    assert ["".join(own) for own in order.values()] == ["abc", "bca", "cab", "bca", "cab", "abc"]


def test_a_repetition_begins_anew_with_a_seed_of_its_own(tmp_path):
    log = []
    run(tmp_path, log, names=("a",)).play(NO_MIRROR)
    assert [event for event in log if event[1] in ("start", "restore")] == [("a", "start", 10), ("a", "start", 11)]
    assert {request[2] for _, request, tag in log if tag == "chat"} == {0, 1}


def test_the_best_fixed_plan_is_searched_once(tmp_path, monkeypatch):
    """A run that goes on compares with the plan that it began with."""
    found = [{Plan.parse("t/d:2"): 3.0, Plan.parse("t"): 1.0}]
    monkeypatch.setattr(harness, "best_plan", lambda *given: found.pop())
    for _ in range(2):
        best = harness._best(OmegaConf.create({"methods": ["best_fixed"]}), Journal(tmp_path), None, (), print)
        assert list(map(str, best)) == ["t/d:2", "t"]
    assert harness._best(OmegaConf.create({"methods": ["plain"]}), Journal(tmp_path), None, (), print) == {}


@pytest.mark.parametrize("tagged", [True, False])
def test_a_turn_knows_what_was_said_before_and_a_tag_only_where_it_is_wanted(tmp_path, tagged):
    log = []
    run(tmp_path, log, names=("a",), repeats=1, tagged=tagged).play(NO_MIRROR)
    asked = [(request, tag) for _, request, tag in log if isinstance(request, tuple)]
    assert [request[:2] for request, _ in asked] == [
        ("one", ()), ("one", ()), ("two", (("one", "answer 2"),)), ("one", ()),
    ]  # fmt: skip
    assert {tag for _, tag in asked} == {"chat" if tagged else ""}


class Interrupted(Noting):
    """Stops the run at its seventh answer: in the second turn of a question, in the second repetition."""

    left = 6

    def answer(self, request, tag=""):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        return super().answer(request, tag)


def test_a_run_that_was_interrupted_comes_to_the_lines_of_one_that_was_not(tmp_path):
    """The answers tell how often a method was asked since it began, so nothing is forgotten or asked again."""
    run(tmp_path / "whole", [], names=("a", "b")).play(NO_MIRROR)
    begun = run(tmp_path / "own", [], names=("a", "b"))
    begun.methods[1] = Interrupted("b", [])
    with pytest.raises(KeyboardInterrupt):
        begun.play(NO_MIRROR)
    before = lines(tmp_path / "own" / "prompts.jsonl")
    assert len(before) == 12
    log = []
    run(tmp_path / "own", log, names=("a", "b")).play(NO_MIRROR)
    after = lines(tmp_path / "own" / "prompts.jsonl")
    assert after == lines(tmp_path / "whole" / "prompts.jsonl")
    assert after[:12] == before
    assert [name for name, request, _ in log if isinstance(request, tuple)] == ["b", "b", "b", "a"]
