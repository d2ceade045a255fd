"""The requests that are understood: the part of OpenAI's schema that the service honours, and what it adds.

A field that cannot be honoured is refused by name, never ignored; one that changes nothing at its neutral value is
accepted at that value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from adaspec.decoding.sampling import SamplingParams
from adaspec.plan import Override, Plan


def _utf8(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"is no UTF-8 text (at character {error.start})") from None
    return text


def _plan(text: str) -> str:
    Plan.parse(text)
    return text


Text = Annotated[str, AfterValidator(_utf8)]
StopText = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_utf8)]
Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1)]
Prompt = Annotated[str, Field(min_length=1), AfterValidator(_utf8)]


class _Strict(BaseModel):
    """A body whose unknown fields are refused; so are infinities, and numbers written as text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, strict=True)


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the usage."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Steering(_Strict):
    """What a request asks of the controller (an addition): see ``adaspec.Override`` and ``adaspec.Context``."""

    tag: Annotated[str, Field(max_length=64, pattern=r"^[\w.:-]*$")] = ""
    plan: Annotated[str, Field(max_length=256), AfterValidator(_plan)] | None = None
    max_depth: Annotated[int, Field(ge=1, le=64)] | None = None
    speculation: bool = True

    def override(self) -> Override | None:
        """For the controller; None when nothing is asked.

        Raises:
            ValueError: a pinned plan that the rest forbids.
        """
        plan = None if self.plan is None else Plan.parse(self.plan)
        demand = Override(plan, self.max_depth, self.speculation)
        return None if demand == Override() else demand


class Common(_Strict):
    """What both kinds of request share."""

    model: Annotated[Text, Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=1, description="One answer per prompt.")] | None = 1
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: Text | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    adaspec: Steering = Steering()

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, seed: int) -> SamplingParams:
        """How to sample; ``seed`` stands in where the request has none."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = 1.0 if self.top_p is None else self.top_p
        seed = seed if self.seed is None else self.seed
        return SamplingParams(temperature, self.top_k, top_p, self.min_p, self.repetition_penalty, seed)


class CompletionRequest(Common):
    """A text, or token ids, to continue; or several of either."""

    prompt: Prompt | Tokens | Annotated[list[Prompt] | list[Tokens], Field(min_length=1, max_length=64)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=5, description="The likeliest at each token.")] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are told at each of the answer's; None: no log-probabilities at all."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]


class TextPart(_Strict):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: Text


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=256)]
    name: Text | None = None

    def turn(self) -> dict[str, str]:
        """As chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class TextFormat(_Strict):
    """Plain text, the only format of an answer."""

    type: Literal["text"]


class ChatRequest(Common):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are told at each of the answer's; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """Tokens of the answer at most; None: as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
