"""The report of a run: what is read, what is measured, what the page holds. Runs come from real controllers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import exploring, write_run

from adaspec.bench.figures import figures
from adaspec.bench.report import groups, measures, page, records, regret, theme
from adaspec.cli import main

FIGURES = ("speedup", "timeline", "forecast", "acceptance", "passes", "regret")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", players=exploring(0, 0.3), prompts=3)


@pytest.fixture(scope="module")
def whole(folder: Path) -> groups.Group:
    return groups.group([records.read(folder)])[0]


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return page.html(page.report([records.read(folder)]))


def lines(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def copy(folder: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".html":
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_the_command_writes_one_page_and_says_where(folder: Path, text: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "deep" / "page.html"
    assert main(["report", str(folder), "--out", str(out), "--png", str(tmp_path / "png")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert out.read_text("utf-8") == text  # the same run gives the same page
    for name in FIGURES:
        assert f'<figure id="{name}">' in text
        assert (tmp_path / "png" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("<svg") == 2 * len(FIGURES)
    assert text.count("<details>") == len(FIGURES)
    assert not re.search(r"https?://|<script|<link rel=.stylesheet|@import", text.replace('xmlns="http://', ""))


class Ids(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.used: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            self.ids += [value or ""] if key == "id" else []
            self.used += [(value or "")[1:]] if key == "href" and (value or "").startswith("#") else []
            self.used += re.findall(r"url\(#([^)]*)\)", value or "")


def test_ids_are_unique_and_lead_somewhere(text: str) -> None:
    parser = Ids()
    parser.feed(text)
    assert len(set(parser.ids)) == len(parser.ids)
    assert set(parser.used) <= set(parser.ids)
    assert parser.used


def test_the_speed_up_is_that_of_mean_tokens_per_second(folder: Path, whole: groups.Group) -> None:
    found = {(one.method, one.kind): one for one in measures.speedups(whole)}
    answers = lines(folder, "prompts.jsonl")
    ratios = []
    for repeat in (0, 1):
        own, plain = (
            [one["tokens"] / one["seconds"] for one in answers if one["repeat"] == repeat and one["method"] == method]
            for method in ("thompson", "plain")
        )
        ratios.append(np.mean(own) / np.mean(plain))
    one = found["thompson", measures.ALL]
    assert one.ratio == pytest.approx(np.mean(ratios))
    assert (one.low, one.high) == pytest.approx((min(ratios), max(ratios)))
    assert one.differing == 0
    assert {kind for method, kind in found if method == "thompson"} == {measures.ALL, "chat", "code", "quoting"}


def test_page_and_summary_tell_the_same_speed_ups(folder: Path, tmp_path: Path) -> None:
    answers = [one for one in lines(folder, "prompts.jsonl") if one["method"] != "plain" or one["prompt"] != "p1"]
    other = copy(folder, tmp_path / "other")
    (other / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    found = measures.speedups(groups.group([records.read(other)])[0])
    summary = figures(answers, greedy=True)
    for one in found:
        own = summary[one.method] if one.kind == measures.ALL else summary[one.method]["kinds"][one.kind]
        assert (one.ratio, [one.low, one.high]) == (own["speedup"], own["speedup_spread"])
        assert one.repetitions == own["repeats"]
    assert {one.kind for one in found} == {measures.ALL, "chat", "quoting"}  # plain decoding did not answer the code


def test_a_text_that_differs_is_told(folder: Path, tmp_path: Path) -> None:
    other = copy(folder, tmp_path / "other")
    answers = lines(folder, "prompts.jsonl")
    answers[2]["digest"] = "another"
    (other / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    found = measures.speedups(groups.group([records.read(other)])[0])
    assert {one.method: one.differing for one in found if one.kind == measures.ALL} == {"fixed-d4": 0, "thompson": 1}
    (other / "config.yaml").write_text("sampling: {temperature: 0.7}\n")
    found = measures.speedups(groups.group([records.read(other)])[0])
    assert {one.differing for one in found} == {None}


def test_tracks_hold_every_round_of_the_adaptive_method(folder: Path, whole: groups.Group) -> None:
    (track,) = measures.tracks(whole)
    own = [one for one in lines(folder, "rounds.jsonl") if one["method"] == "thompson"]
    assert list(map(str, track.plans)) == [one["plan"] for one in sorted(own, key=lambda one: one["round"])]
    assert len(track.begins) == 6


def test_one_plan_is_fixed_only_if_nothing_else_could_have_come(whole: groups.Group) -> None:
    own = [one for one in whole.rounds if one.method == "fixed-d4"]
    assert list(measures.fixed_methods(own)) == ["fixed-d4"]
    chance = replace(own[0], decision=replace(own[0].decision, propensity=0.5))
    assert measures.fixed_methods([chance, *own[1:]]) == {}
    assert measures.adaptive_methods([chance, *own[1:]]) == ["fixed-d4"]


def test_measured_is_a_ratio_of_sums_with_an_interval_that_holds_it(folder: Path, whole: groups.Group) -> None:
    uses = measures.plan_uses(whole)
    assert sum(use.share for use in uses) == pytest.approx(1.0)
    for use in uses:
        own = [
            one for one in lines(folder, "rounds.jsonl") if one["method"] == "thompson" and one["plan"] == str(use.plan)
        ]
        assert use.rounds == len(own)
        assert use.measured == pytest.approx(sum(one["tokens"] for one in own) / sum(one["seconds"] for one in own))
        assert use.forecast == pytest.approx(np.mean([one["forecast"] for one in own]))


def test_acceptance_sums_the_counts_of_every_edge(folder: Path, whole: groups.Group) -> None:
    counts: dict[tuple[str, str, int], list[int]] = {}
    for one in lines(folder, "rounds.jsonl"):
        for edge in one["edges"]:
            for position, seen in enumerate(zip(edge["reached"], edge["offered"], edge["accepted"]), 1):
                sums = counts.setdefault((edge["verifier"], edge["drafter"], position), [0, 0, 0])
                sums[:] = [total + new for total, new in zip(sums, seen)]
    found = {(*one.edge, one.position): [one.reached, one.offered, one.accepted] for one in measures.acceptance(whole)}
    assert found == {key: sums for key, sums in counts.items() if sums[0]}


@given(trials=st.integers(1, 10_000), share=st.floats(0.0, 1.0))
def test_a_wilson_interval_holds_its_rate(trials: int, share: float) -> None:
    rate, low, high = measures.wilson(round(share * trials), trials)
    assert 0.0 <= low <= rate + 1e-12
    assert rate - 1e-12 <= high <= 1.0
    assert high - low <= 2.0 * 1.96 * 0.5 / math.sqrt(trials) + 1e-9


def test_the_fit_is_what_the_controller_believed(folder: Path, whole: groups.Group) -> None:
    believed = measures.cost_model(whole)
    assert believed is not None
    times = measures.pass_times(whole, believed[0])
    assert {one.model for one in times} == {"t", "m", "d", "l"}
    for one in times:
        if one.passes > 50:
            assert one.fit == pytest.approx(one.median, rel=0.15)


def test_without_a_state_the_cost_model_learns_the_rounds_again(folder: Path, tmp_path: Path) -> None:
    other = copy(folder, tmp_path / "other")
    (other / "controller-thompson.json").unlink()
    believed = measures.cost_model(groups.group([records.read(other)])[0])
    assert believed is not None
    assert "learned the recorded rounds" in believed[1]
    times = measures.pass_times(groups.group([records.read(other)])[0], believed[0])
    assert all(one.fit == pytest.approx(one.median, rel=0.15) for one in times if one.passes > 50)


def test_regret_ends_at_the_difference_of_decoding_seconds(folder: Path, whole: groups.Group) -> None:
    (run,) = whole.runs
    best = regret.best_fixed(run)
    assert best is not None
    spent = {
        method: sum(one["seconds"] for one in lines(folder, "rounds.jsonl") if one["method"] == method)
        for method in ("plain", "fixed-d4", "thompson")
    }
    assert best[0] == min(("plain", "fixed-d4"), key=spent.__getitem__)
    for one in regret.regrets(run, best[0]):
        assert one.seconds[-1] == pytest.approx(spent[one.method] - spent[best[0]])  # every text has as many tokens
        assert one.seconds[0] == 0.0


def test_half_a_last_line_and_a_missing_summary_are_told(folder: Path, tmp_path: Path) -> None:
    other = copy(folder, tmp_path / "cut")
    (other / "summary.json").unlink()
    text = (other / "rounds.jsonl").read_text()
    (other / "rounds.jsonl").write_text(text[:-40])
    run = records.read(other)
    assert run.cut == ("rounds.jsonl",)
    assert len(run.rounds) == text.count("\n") - 1
    found = page.html(page.report([run]))
    assert "half a last line of rounds.jsonl was passed over" in found
    assert "did not come to its end" in found


BROKEN = {
    "{": "line 2 of",
    '{"method": "plain"}': "'plan' is missing",
    "[1]": "line 2 of",
    "NaN": "NaN is no number",
}


@pytest.mark.parametrize("line", [*BROKEN, "seconds", "plan", "edges"])
def test_a_broken_line_is_named_by_its_number(folder: Path, tmp_path: Path, capsys, line: str) -> None:
    other = copy(folder, tmp_path / "broken")
    good = (other / "rounds.jsonl").read_text().splitlines()
    edge = {"verifier": "t", "drafter": "d", "reached": [1], "offered": [1], "accepted": [2]}
    wrong = {"seconds": -1.0, "plan": -1.0, "edges": [edge]}
    bad = json.dumps(json.loads(good[1]) | {line: wrong[line]}) if line in wrong else line
    (other / "rounds.jsonl").write_text("\n".join([good[0], bad, *good[2:]]) + "\n")
    assert main(["report", str(other)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "line 2 of" in told[0]
    assert BROKEN.get(line, "line 2 of") in told[0] or "missing" in told[0]
    assert not (other / "report.html").exists()


def test_what_is_no_run_is_told_in_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    for place, told in (("no", "there is no run"), ("empty", "there is nothing to report")):
        assert main(["report", str(tmp_path / place)]) == 2
        assert told in capsys.readouterr().err
    for name in ("rounds.jsonl", "prompts.jsonl"):
        (tmp_path / "empty" / name).write_text("")
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "no round and no prompt" in capsys.readouterr().err


def test_a_run_without_anything_is_passed_over_beside_others(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "prompts.jsonl").write_text("")
    assert main(["report", str(folder), str(tmp_path / "empty"), "--out", str(tmp_path / "both.html")]) == 0
    assert "no round and no prompt" in capsys.readouterr().err
    assert (tmp_path / "both.html").stat().st_size > 1000


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "something"}', '{"format": "adaspec.controller"}'])
def test_a_broken_state_is_told_in_one_line(folder: Path, tmp_path: Path, capsys, text: str) -> None:
    other = copy(folder, tmp_path / "state")
    (other / "controller-thompson.json").write_text(text)
    assert main(["report", str(other)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("kept", [["prompts.jsonl"], ["rounds.jsonl"]])
def test_a_part_of_a_run_is_a_report_too(folder: Path, tmp_path: Path, kept: list[str]) -> None:
    other = copy(folder, tmp_path / "part")
    for file in list(other.iterdir()):
        if file.name not in kept:
            file.unlink()
    text = page.html(page.report([records.read(other)]))
    for name in FIGURES:
        assert f'<figure id="{name}">' in text


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path: Path) -> None:
    made = []
    for name in ("thompson", "ucb"):
        for seed in (0, 1):
            config = {"policy": {"name": name, "rule": {"of": name}}}
            made.append(write_run(tmp_path / f"{name}-{seed}", prompts=1, repeats=1, seed=seed, config=config))
    found = groups.group([records.read(folder) for folder in records.find([tmp_path])])
    assert [(one.name, len(one.runs)) for one in found] == [("policy=thompson", 2), ("policy=ucb", 2)]
    alone = groups.group([records.read(folder) for folder in made[:2]])
    assert [(one.name, len(one.runs)) for one in alone] == [("", 2)]
    text = page.html(page.report([records.read(folder) for folder in made]))
    assert '<figure id="1-policy-thompson-regret">' in text
    assert '<figure id="2-policy-ucb-regret">' in text
    assert "thompson · policy=ucb" in text


def test_values_that_differ_are_told_where_no_name_does() -> None:
    config = [{"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"x": 1, "y": 4}, "b": 3}]
    runs = [records.Run(Path(str(number)), (), (), own) for number, own in enumerate(config)]
    assert [one.name for one in groups.group(runs)] == ["a.y=2", "a.y=4"]


def test_text_from_a_run_is_never_markup(folder: Path, tmp_path: Path) -> None:
    other = copy(folder, tmp_path / "nasty")
    nasty = "<script>alert(1)</script>\"'&$x$\x00\u202e" + "long" * 40
    for name in ("rounds.jsonl", "prompts.jsonl"):
        changed = [
            one | {"kind": f"{one['kind']}{nasty}", "method": one["method"].replace("thompson", nasty)}
            for one in lines(folder, name)
        ]
        (other / name).write_text("".join(json.dumps(one) + "\n" for one in changed))
    (other / "summary.json").write_text(json.dumps({"command": nasty, "machine": {nasty: nasty}}))
    text = page.html(page.report([records.read(other)]))
    assert "<script" not in text
    assert text.count("<svg") == 2 * len(FIGURES)


def contrast(one: str, other: str) -> float:
    """Of two colours (WCAG 2.2)."""

    def luminance(color: str) -> float:
        parts = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255.0
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ (0.2126, 0.7152, 0.0722))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_in_both_themes() -> None:
    dark_paper = theme.DARK[theme.PAPER]
    for light in (theme.INK, *theme.SERIES):
        assert contrast(light, theme.PAPER) > 4.5
        assert contrast(theme.DARK[light], dark_paper) > 4.5
    assert contrast(theme.FAINT, theme.PAPER) > 3.0
    assert contrast(theme.DARK[theme.FAINT], dark_paper) > 3.0
