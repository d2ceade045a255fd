"""A tiny random model with a tokenizer and a chat template, served once for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import OpenAI
from saved_models import save_model
from service_helpers import Running, running
from transformers import AutoTokenizer

from adaspec.assemble import Assembly, DrafterSpec, Setup, assemble

torch.set_num_threads(1)
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def new_assembly(folder: Path):
    """Builds an assembly with a controller of its own."""

    def build() -> Assembly:
        drafters = (DrafterSpec("lookup", "lookup"), DrafterSpec("small", "int8"))
        setup = Setup(str(folder), drafters, windows=(2, 4), inner_windows=(1,), precision="float32", threads=1)
        return assemble(setup, lambda what, share: None)

    return build


@pytest.fixture(scope="session")
def server(new_assembly) -> Iterator[Running]:
    with running(new_assembly()) as run:
        yield run


@pytest.fixture(scope="session")
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture(scope="session")
def offline(new_assembly):
    """The text and tokens of one greedy request, decoded alone and plainly."""
    assembly = new_assembly()

    def answer(prompt: str, count: int, stop: tuple[str, ...] = ()) -> str:
        from adaspec.compare import run_fixed
        from adaspec.decoding.sampling import GREEDY

        request = assembly.request(prompt, raw=True, max_new_tokens=count, sampling=GREEDY, stop=stop)
        return run_fixed(assembly.generator, request, assembly.space.plain).completions[0].text

    return answer
