"""Bad requests get OpenAI's error shape and the right status, and nothing makes the server fail."""

from __future__ import annotations

import json

import httpx
import pytest
from service_helpers import NAME

GOOD = {"model": NAME, "prompt": "the fox", "max_tokens": 2, "temperature": 0}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
BAD = [
    ({"n": 2}, 400, "n"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": "2"}, 400, "max_tokens"),
    ({"max_tokens": 2.5}, 400, "max_tokens"),
    ({"max_tokens": 10**400}, 400, "max_tokens"),
    ({"max_tokens": 2**31}, 400, "max_tokens"),
    ({"max_tokens": 2**31 - 1}, 400, "prompt"),
    ({"max_tokens": 1e30}, 400, "max_tokens"),
    ({"max_tokens": 100000}, 400, "prompt"),
    ({"max_tokens": True}, 400, "max_tokens"),
    ({"prompt": "fox " * 400}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", [1]]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [10**6]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt"),
    ({"prompt": [1.5]}, 400, "prompt"),
    ({"prompt": {"text": "a"}}, 400, "prompt"),
    ({"prompt": "bytes \udcff"}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"model": "gpt-9"}, 404, "model"),
    ({"model": "\ud800"}, 400, "model"),
    ({"model": 3}, 400, "model"),
    ({"temperature": -0.1}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": float("nan")}, 400, None),
    ({"temperature": float("inf")}, 400, None),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"top_k": -1}, 400, "top_k"),
    ({"repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    ({"seed": 2**63}, 400, "seed"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"stop": ["a", ""]}, 400, "stop"),
    ({"stop": {"a": 1}}, 400, "stop"),
    ({"stop": [1]}, 400, "stop"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"logprobs": 6}, 400, "logprobs"),
    ({"echo": True}, 400, "echo"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"no_such_field": 1}, 400, "no_such_field"),
    ({"\udcff": 1}, 400, None),
    ({"adaspec": {"plan": "target/lookup:0"}}, 400, "adaspec"),
    ({"adaspec": {"plan": "target/nobody:3"}}, 400, "adaspec"),
    ({"adaspec": {"plan": "target/lookup:2", "speculation": False}}, 400, "adaspec"),
    ({"adaspec": {"tag": "x" * 65}}, 400, "adaspec"),
    ({"adaspec": []}, 400, "adaspec"),
]
BAD_CHATS = [
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "a " * 400}]}, 400, "prompt"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
]


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


def error_of(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"].endswith("_error")
    return error


def post(http: httpx.Client, path: str, body: dict) -> httpx.Response:
    return http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("change", "status", "param"), BAD, ids=[str(change)[:40] for change, _, _ in BAD])
def test_a_bad_completion_names_its_fault(http, change, status, param) -> None:
    error = error_of(post(http, "/v1/completions", GOOD | change), status)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"stop": ["a", ""]}, "at least 1 character"),
        ({"stop": ["a"] * 17}, "at most 16 items"),
        ({"prompt": ["a"] * 65}, "at most 64 items"),
        ({"prompt": [-1]}, "greater than or equal to 0"),
        ({"prompt": 3, "stop": ""}, "stop: String should have at least 1 character"),
    ],
    ids=str,
)
def test_a_field_of_several_types_tells_what_is_wrong_with_the_one_it_has(http, change, told) -> None:
    assert told in error_of(post(http, "/v1/completions", GOOD | change), 400)["message"]


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-39])
def test_a_temperature_next_to_nothing_takes_the_likeliest_tokens(http, temperature) -> None:
    greedy, cold = (post(http, "/v1/completions", GOOD | {"temperature": each}).json() for each in (0, temperature))
    assert cold["choices"] == greedy["choices"]


@pytest.mark.parametrize(("change", "status", "param"), BAD_CHATS, ids=[str(change)[:40] for change, _, _ in BAD_CHATS])
def test_a_bad_chat_names_its_fault(http, change, status, param) -> None:
    assert error_of(post(http, "/v1/chat/completions", CHAT | change), status)["param"] == param


@pytest.mark.parametrize("change", [{"tools": None}, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}])
def test_a_chat_with_no_tool_may_say_so(http, change) -> None:
    assert post(http, "/v1/chat/completions", CHAT | change).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\xff\xfe", b'"text"', b"[" * 100_000, b'{"model": ' * 50_000, b"1" * 10_000],
    ids=["empty", "cut", "null", "list", "bytes", "text", "nested list", "nested dict", "long number"],
)
def test_a_body_that_is_no_request_is_400(http, content) -> None:
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error_of(answer, 400)


def test_a_body_of_another_type_is_400(http) -> None:
    answer = http.post("/v1/completions", content=json.dumps(GOOD), headers={"Content-Type": "text/plain"})
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


def test_a_bad_query_names_its_parameter(http) -> None:
    assert error_of(http.get("/decisions", params={"last": 9999}), 400)["param"] == "last"


def test_a_huge_prompt_is_413_announced_or_not(http) -> None:
    body = json.dumps(GOOD | {"prompt": "a" * 10_000_000}).encode()
    error_of(http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 413)

    def pieces():
        for start in range(0, 2_000_000, 100_000):
            yield body[start : start + 100_000]

    try:
        answer = http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    except httpx.TransportError:  # the server hung up before all was sent
        return
    error_of(answer, 413)


def test_other_paths_and_methods_have_the_same_shape(http) -> None:
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get("/v1/completions"), 405)
    error_of(http.get("/decisions", params={"last": 0}), 400)


@pytest.mark.parametrize(
    "name", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[::2]:80", ""]
)
def test_without_a_token_the_loopback_service_answers_to_its_own_names_alone(http, name) -> None:
    assert error_of(http.get("/v1/models", headers={"Host": name}), 403)["code"] == "unknown_host"
    for own in ("localhost:8000", "LOCALHOST", "[::1]:80", "127.0.0.1"):
        assert http.get("/v1/models", headers={"Host": own}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/live", "/v1/nothing", "/metrics"])
def test_browsers_are_told_to_guess_and_keep_nothing(http, path) -> None:
    headers = http.get(path).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_the_server_goes_on_after_all_of_it(http) -> None:
    assert post(http, "/v1/completions", GOOD).status_code == 200
    assert post(http, "/v1/chat/completions", CHAT).status_code == 200
