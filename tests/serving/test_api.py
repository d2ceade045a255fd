"""The service as OpenAI's own client sees it, on a tiny random model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from service_helpers import NAME, hold, running, until

from adaspec.decoding.chain import Score
from adaspec.decoding.generate import Step
from adaspec.decoding.text import TextStream
from adaspec.outcome import Decision, RoundOutcome
from adaspec.plan import Context, Plan
from adaspec.serving.engine import Limits
from adaspec.serving.service import Settings

PROMPTS = ["the quick brown fox", "over the lazy dog", "and runs along the river", "again and again and again", "a"]


def complete(client, prompt="the quick brown fox", **options):
    defaults = {"model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 24}
    return client.completions.create(**(defaults | options))


def test_a_greedy_answer_is_the_offline_one_with_its_usage(client, offline) -> None:
    answer = complete(client)
    assert answer.choices[0].text == offline("the quick brown fox", 24)
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage.completion_tokens == 24
    assert usage.total_tokens == usage.prompt_tokens + 24
    counters = usage.model_extra["adaspec"]
    assert counters["rounds"] + counters["accepted_tokens"] == 24
    assert sum(counters["plans"].values()) == counters["rounds"]
    assert usage.completion_tokens_details.accepted_prediction_tokens == counters["accepted_tokens"]


def test_answers_do_not_depend_on_their_batch(client, offline) -> None:
    jobs = [(prompt, count) for prompt in PROMPTS for count in (5, 17, 30)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: complete(client, job[0], max_tokens=job[1]), jobs))
    for (prompt, count), answer in zip(jobs, answers):
        assert answer.choices[0].text == offline(prompt, count)


def test_several_prompts_and_token_ids_make_several_choices(client, server, offline) -> None:
    texts = PROMPTS[:3]
    ids = [list(server.service.assembly.tokenizer(text)["input_ids"]) for text in texts]
    for prompts in (texts, ids):
        choices = complete(client, prompts).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        assert [choice.text for choice in choices] == [offline(text, 24) for text in texts]
    assert complete(client, ids[1]).choices[0].text == offline(texts[1], 24)


def test_a_stream_joins_to_the_whole_answer_and_ends_with_its_usage(client, offline) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == offline("the quick brown fox", 24)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 24
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_is_its_template_continued(client, offline) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    wanted = offline("system: be brief\nuser: hi\nassistant:", 20)
    options = {"model": NAME, "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    answer = client.chat.completions.create(**options)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == wanted
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_chat_without_a_limit_fills_the_cache(client, server) -> None:
    answer = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "hi"}], temperature=0)
    assert answer.usage.total_tokens == server.service.capacity


def test_a_stop_string_ends_the_text_before_it(client, offline) -> None:
    whole = offline("the quick brown fox", 24)
    stop = whole[6:8]
    wanted = whole[: whole.index(stop)]
    for stream in (False, True):
        answer = complete(client, stop=[stop], stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == wanted
        assert choices[-1].finish_reason == "stop"


def test_a_seed_with_a_pinned_plan_reproduces_a_sampled_text(client) -> None:
    steering = {"adaspec": {"plan": "target/lookup:2"}}
    texts = [complete(client, temperature=1, seed=seed, extra_body=steering).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_what_a_request_asks_of_the_controller_is_honoured(client) -> None:
    for steering, allowed in (
        ({"speculation": False}, {"target"}),
        ({"plan": "target/small:4"}, {"target/small:4"}),
        ({"max_depth": 1, "tag": "tenant-a"}, {"target"}),
    ):
        usage = complete(client, extra_body={"adaspec": steering}).usage
        assert set(usage.model_extra["adaspec"]["plans"]) == allowed


def test_logprobs_belong_to_the_tokens_of_the_answer(client) -> None:
    answer = complete(client, logprobs=0, max_tokens=8)
    scores = answer.choices[0].logprobs
    assert "".join(scores.tokens) == answer.choices[0].text
    assert len(scores.token_logprobs) == 8
    assert all(value <= 0 for value in scores.token_logprobs)
    streamed = [chunk.choices[0] for chunk in complete(client, logprobs=0, max_tokens=8, stream=True)]
    parts = [choice.logprobs for choice in streamed if choice.logprobs]
    assert [token for part in parts for token in part.tokens] == scores.tokens
    assert [offset for part in parts for offset in part.text_offset] == scores.text_offset
    for token, offset in zip(scores.tokens, scores.text_offset):
        assert answer.choices[0].text[offset:].startswith(token)
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=6, logprobs=True
    )
    assert len(chat.choices[0].logprobs.content) == 6


def test_offsets_are_those_of_the_text_though_its_tokens_split_characters(server, client, monkeypatch) -> None:
    """The greedy text of the random model is replaced: two characters of three and four bytes, byte by byte."""
    tokenizer, engine = server.service.assembly.tokenizer, server.service.engine
    ids = tokenizer("a€😀b")["input_ids"]
    assert len(ids) == 9
    score = Score(-1.0, ())

    def stream(requests, **options):
        text = TextStream(tokenizer)
        for number, token in enumerate(ids, 1):
            text.push([token])
            last = number == len(ids)
            decision, outcome = Decision(Plan(("target",)), Context(), 1.0, number), RoundOutcome(1, 0.1)
            piece = text.take() + (text.finish() if last else "")
            yield Step(decision, outcome, [[token]], [piece], [last], [False], [[score]])

    monkeypatch.setattr(engine.generator, "stream", stream)
    wanted = [0, 1, 1, 1, 2, 2, 2, 2, 3]
    choice = complete(client, logprobs=0, max_tokens=9).choices[0]
    assert (choice.text, choice.logprobs.text_offset) == ("a€😀b", wanted)
    streamed = [chunk.choices[0] for chunk in complete(client, logprobs=0, max_tokens=9, stream=True)]
    assert [offset for part in streamed if part.logprobs for offset in part.logprobs.text_offset] == wanted


def test_a_token_that_is_a_part_of_a_character_tells_its_bytes(client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 6, "logprobs": True}
    [chat] = client.chat.completions.create(**options, top_logprobs=20).choices
    told = [(other.token, bytes(other.bytes)) for place in chat.logprobs.content for other in place.top_logprobs]
    assert all(spelt == token.encode() for token, spelt in told if "\ufffd" not in token)
    parts = [spelt for token, spelt in told if "\ufffd" in token]
    assert parts
    assert not any(b"\xef\xbf\xbd" in spelt for spelt in parts)


def test_the_likeliest_tokens_are_told_best_first_whatever_the_batch_asks_for(client) -> None:
    with ThreadPoolExecutor(3) as pool:
        first, third, none = pool.map(lambda top: complete(client, logprobs=top, max_tokens=8).choices[0], (1, 3, 0))
    assert none.logprobs.top_logprobs is None
    for choice, count in ((first, 1), (third, 3)):
        scores = choice.logprobs
        for token, value, top in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
            assert len(top) <= count  # tokens of one text are told once
            assert max(top.values()) == top[token] == value  # greedy
    messages = [{"role": "user", "content": "hi"}]
    options = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 6, "logprobs": True}
    [chat] = client.chat.completions.create(**options, top_logprobs=4).choices
    for place in chat.logprobs.content:
        values = [other.logprob for other in place.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert place.logprob == values[0]
    parts = client.chat.completions.create(**options, top_logprobs=4, stream=True)
    streamed = [part for chunk in parts if chunk.choices[0].logprobs for part in chunk.choices[0].logprobs.content]
    assert streamed == chat.logprobs.content


def test_models_and_health(client, server) -> None:
    assert [model.id for model in client.models.list().data] == [NAME]
    assert client.models.retrieve(NAME).model_extra["max_model_len"] == server.service.capacity
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_metrics_decisions_and_live_data_tell_of_the_traffic(client, server) -> None:
    complete(client, extra_body={"adaspec": {"plan": "target/lookup:4"}})
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'adaspec:plan_rounds_total{plan="target/lookup:4"}' in metrics
    assert 'adaspec:spec_decode_num_drafts_total{drafter="lookup",verifier="target"}' in metrics
    assert "adaspec:generation_tokens_total" in metrics
    decisions = httpx.get(f"{server.url}/decisions", params={"last": 5}).json()["decisions"]
    assert len(decisions) == 5
    assert decisions[-1]["plan"] == "target/lookup:4"
    live = httpx.get(f"{server.url}/live").json()
    assert live["model"] == NAME
    assert live["plans"][0]["rounds"] > 0


def test_a_full_queue_answers_429_and_a_disconnect_frees_its_place(new_assembly) -> None:
    with running(new_assembly(), Settings(NAME, limits=Limits(max_batch=1, queue=1))) as run:
        client = run.client()
        gate = hold(run)
        first = client.completions.create(model=NAME, prompt="a", max_tokens=200, temperature=0, stream=True)
        assert gate.entered.wait(30.0)
        pool = ThreadPoolExecutor(1)
        second = pool.submit(complete, client)
        until(lambda: run.service.engine.load() == (1, 1))
        with pytest.raises(openai.RateLimitError) as refused:
            complete(client)
        assert refused.value.code == "queue_full"
        assert refused.value.response.headers["retry-after"] == "1"
        first.close()
        gate.open.set()
        assert len(second.result(30.0).choices) == 1
        until(lambda: run.service.engine.load() == (0, 0))
        metrics = run.service.telemetry.exposition().decode()
        assert 'request_success_total{finished_reason="abort"} 1.0' in metrics
        pool.shutdown()


def test_hanging_up_ends_a_whole_answer_too(new_assembly) -> None:
    with running(new_assembly()) as run:
        gate = hold(run)
        with pytest.raises(openai.APITimeoutError):
            complete(run.client().with_options(timeout=1.0), max_tokens=200)
        until(lambda: run.service.engine._running[0].cancelled)
        gate.open.set()
        until(lambda: run.service.engine.load() == (0, 0))
        assert sum(record["tokens"] for record in run.service.telemetry.decisions()) < 200


def test_a_request_that_takes_too_long_is_told_so(new_assembly) -> None:
    with running(new_assembly(), Settings(NAME, timeout=0.3)) as run:
        gate = hold(run)
        with pytest.raises(openai.InternalServerError) as late:
            complete(run.client(), max_tokens=200)
        assert late.value.status_code == 504
        assert late.value.code == "timeout"
        chunks = complete(run.client(), max_tokens=200, stream=True)
        with pytest.raises(openai.APIError):
            list(chunks)
        gate.open.set()


def test_a_shutdown_finishes_what_runs_and_saves_the_state(new_assembly, tmp_path, offline) -> None:
    path = tmp_path / "state.json"
    settings = Settings(NAME, limits=Limits(max_batch=1), state=str(path))
    with running(new_assembly(), settings) as run, ThreadPoolExecutor(3) as pool:
        gate = hold(run)
        answers = [pool.submit(complete, run.client(), max_tokens=40) for _ in range(3)]
        until(lambda: run.service.engine.load() == (1, 2))
        run.server.drain()
        until(lambda: not run.service.engine.alive)
        gate.open.set()
        assert {answer.result(30.0).choices[0].text for answer in answers} == {offline("the quick brown fox", 40)}
    assert path.is_file()
    before = run.service.assembly.controller.table()
    with running(new_assembly(), settings) as again:
        after = again.service.assembly.controller.table()
    assert {row.plan: row.rounds for row in after} == {row.plan: row.rounds for row in before}
    path.write_text("{ broken")
    with running(new_assembly(), settings):
        [aside] = tmp_path.glob("state.json.corrupt-*")
    assert aside.read_text() == "{ broken"


def test_a_shutdown_whose_grace_is_over_reports_what_is_left(new_assembly) -> None:
    with running(new_assembly(), Settings(NAME, limits=Limits(max_batch=1), grace=0.2)) as run:
        gate = hold(run)
        pool = ThreadPoolExecutor(2)
        answers = [pool.submit(complete, run.client(), max_tokens=100) for _ in range(2)]
        until(lambda: run.service.engine.load() == (1, 1))
        run.server.drain()
        for answer in answers:
            with pytest.raises(openai.InternalServerError) as lost:
                answer.result(30.0)
            assert lost.value.status_code == 503
        gate.open.set()
        pool.shutdown()


def test_a_token_is_asked_for_and_never_shown(new_assembly) -> None:
    settings = Settings(NAME, token="secret-token")
    assert "secret-token" not in repr(settings)
    with running(new_assembly(), settings) as run:
        assert complete(run.client("secret-token"), max_tokens=2).choices
        for key in ("secret-toke", "secret-token2", "geheim-\u00e9"):
            status = httpx.get(f"{run.url}/live", headers={"Authorization": f"Bearer {key}".encode()}).status_code
            assert status == 401
        with pytest.raises(openai.AuthenticationError):
            complete(run.client("wrong"))
        assert httpx.get(f"{run.url}/metrics").status_code == 401
        assert httpx.get(f"{run.url}/health").status_code == 200
        assert httpx.get(f"{run.url}/").status_code == 200
        named = {"Authorization": "Bearer secret-token", "Host": "models.example"}
        assert httpx.get(f"{run.url}/live", headers=named).status_code == 200


def test_a_token_may_have_any_letters(new_assembly) -> None:
    with running(new_assembly(), Settings(NAME, token="clé-ключ")) as run:
        for key, status in (("clé-ключ", 200), ("clé-ключи", 401)):
            answer = httpx.get(f"{run.url}/live", headers={"Authorization": f"Bearer {key}".encode()})
            assert answer.status_code == status
