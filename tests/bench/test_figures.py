"""Figures by Spec-Bench's protocol, against ones worked out by hand."""

import pytest

from adaspec.bench.figures import figures, table


def line(method, prompt, tokens, seconds, *, repeat=0, turn=0, kind="chat", rounds=None, digest="x", **more):
    base = {"method": method, "prompt": prompt, "repeat": repeat, "turn": turn, "kind": kind, "tokens": tokens}
    return {**base, "seconds": seconds, "rounds": rounds or tokens, "digest": digest, **more}


LINES = [
    line("plain", "a", 10, 1.0),
    line("plain", "a", 10, 3.0, turn=1),  # 5 tokens/s over both turns
    line("plain", "b", 30, 2.0, kind="code"),  # 15
    line("ours", "a", 10, 1.0, rounds=5),
    line("ours", "a", 10, 1.0, turn=1, rounds=5, digest="y"),  # 10
    line("ours", "b", 30, 1.0, kind="code", rounds=20),  # 30
    line("plain", "a", 20, 2.0, repeat=1),  # 10
    line("ours", "a", 20, 1.0, repeat=1, rounds=10),  # 20
    line("ours", "b", 30, 3.0, repeat=1, kind="code", rounds=20),  # plain has not answered it: no part of the ratio
]


def test_speeds_are_means_over_questions_and_speedups_ratios_of_them():
    own = figures(LINES, greedy=True)["ours"]
    assert own["tokens_per_second"] == pytest.approx(((10 + 30) / 2 + (20 + 10) / 2) / 2)
    assert own["speedup_spread"] == pytest.approx([(10 + 30) / (5 + 15)] * 2)
    assert own["speedup"] == pytest.approx(2.0)
    assert own["mean_accepted_length"] == pytest.approx(100 / 60)
    assert own["texts_equal"] is False
    assert own["texts_equal_share"] == pytest.approx(3 / 4)
    assert own["kinds"]["code"]["speedup"] == pytest.approx(2.0)
    assert own["kinds"]["code"]["texts_equal"] is True


def test_a_ratio_is_one_of_means_and_repetitions_count_alike():
    lines = [
        line("plain", "a", 5, 0.5),
        line("plain", "a", 5, 0.5, turn=1, digest="y"),  # 10 tokens/s
        line("plain", "b", 10, 2.0),  # 5
        line("plain", "a", 10, 1.0, repeat=1),  # 10
        line("ours", "a", 20, 0.5),
        line("ours", "a", 20, 0.5, turn=1, digest="y"),  # 40
        line("ours", "b", 10, 2.0),  # 5
        line("ours", "a", 10, 1.0, repeat=1),  # 10
    ]
    own = figures(lines, greedy=True)["ours"]
    assert own["speedup_spread"] == pytest.approx([10 / 10, (40 + 5) / (10 + 5)])
    assert own["speedup"] == pytest.approx(2.0)
    assert own["tokens_per_second"] == pytest.approx(((40 + 5) / 2 + 10) / 2)
    assert own["texts_equal"] is True  # turn by turn


def test_sampled_texts_are_not_compared_and_a_run_without_plain_has_no_speedup():
    assert figures(LINES, greedy=False)["ours"]["texts_equal"] is None
    alone = figures([one for one in LINES if one["method"] == "ours"], greedy=True)["ours"]
    assert (alone["speedup"], alone["speedup_spread"], alone["texts_equal"]) == (None, None, None)
    assert "| ours |" in table({"ours": alone})
    assert figures([], greedy=True) == {}


def test_the_latency_of_a_stream_counts_the_waiting():
    lines = [line("m", str(n), 5, 4.0, arrival=at) for n, at in enumerate((0.0, 1.0, 20.0))]
    assert figures(lines, greedy=True)["m"]["latency_seconds"] == pytest.approx((4 + 7 + 4) / 3)
