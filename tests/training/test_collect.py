"""Collected output is the target's own, with its own features; a shard is a function of its seed."""

import pytest
import torch
from saved_models import SIZES, save_model
from tiny_models import greedy_loop
from transformers import LlamaConfig

from adaspec.decoding.model import Model, load_module, load_tokenizer
from adaspec.training.collect import LOOP, Collector, Dialogue, Recipe, read_shard, write_shard
from adaspec.training.prompts import Kind, PromptSource, read_prompts

CONFIG = SIZES | {"initializer_range": 0.3, "eos_token_id": 7}
KINDS = {
    "talk": Kind(
        ("the quick {animal}", "a dog and a {animal} {a}"), {"animal": ("dog", "fox")}, ("the dog", "a fox runs")
    )
}
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}again {% endif %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    source = save_model(tmp_path_factory.mktemp("target"), config=LlamaConfig(**CONFIG))
    return load_module(source), load_tokenizer(source)


def collector(target, *, chat=False, **recipe):
    module, tokenizer = target
    tokenizer.chat_template = TEMPLATE if chat else None
    dialogue = Dialogue(tokenizer, (7,))
    return Collector(Model("target", module), dialogue, Recipe(**({"rows": 6, "passes": 60, "length": 24} | recipe)))


def silent(passes):
    pass


def test_learned_tokens_are_the_greedy_continuation_of_what_was_given(target):
    texts = collector(target).shard(PromptSource(KINDS, "0"), 0, silent)
    assert sum(len(text.tokens) for text in texts) == 6 * 60
    for text in texts:
        given = int((~text.learn).sum())
        assert bool(text.learn[given:].all())
        said = text.tokens[given:].tolist()
        assert said == greedy_loop(target[0], text.tokens[:given].tolist(), len(said))
        assert len(text.tokens) <= 24
        assert 7 not in said[:-1]


def test_features_are_the_last_states_of_the_target(target):
    for text in collector(target).shard(PromptSource(KINDS, "0"), 0, silent)[:4]:
        with torch.no_grad():
            states = target[0](text.tokens[None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(text.features.float(), states, atol=5e-3, rtol=5e-3)


def test_the_model_makes_up_a_share_of_the_users_turns(target):
    texts = collector(target, chat=True, invented=0.5, passes=100).shard(PromptSource(KINDS, "0"), 0, silent)
    tokenizer = target[1]
    opening, closing = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("<", ">again "))
    invented = [
        text for text in texts if int((~text.learn).sum()) < 4 or bool(text.learn[1:-1].any() and text.learn[1])
    ]
    assert 2 < len(invented) < len(texts) - 2
    for text in invented:
        assert text.tokens[: len(opening)].tolist() == opening
        later = (~text.learn).nonzero()[len(opening) :, 0]
        if len(later) == len(closing):  # the turn has ended: the frame closes, and the answer is greedy
            assert text.tokens[later].tolist() == closing
            start = int(later[-1]) + 1
            said = text.tokens[start:].tolist()
            assert said == greedy_loop(target[0], text.tokens[:start].tolist(), len(said))


def test_a_shard_is_a_function_of_seed_and_number(target, tmp_path):
    def tokens(index, seed=0):
        texts = collector(target, chat=True, seed=seed).shard(PromptSource(KINDS, f"{seed}/{index}"), index, silent)
        write_shard(tmp_path / "shard.safetensors", texts)
        return [text.tokens.tolist() for text in read_shard(tmp_path / "shard.safetensors")]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(1) != tokens(1, seed=1)


def test_a_text_ends_when_it_repeats_itself(target):
    """A target that only ever says one token."""
    talker = collector(target, length=200, passes=150, rows=3)
    talker._model.module = Monotone(target[0])
    for text in talker.shard(PromptSource(KINDS, "0"), 0, silent)[:3]:
        assert int(text.learn.sum()) == LOOP + 2


class Monotone(torch.nn.Module):
    """A module with another module's states, whose logits favour token 9."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def __call__(self, **inputs):
        result = self.inner(**inputs)
        result.logits = torch.nn.functional.one_hot(torch.full(result.logits.shape[:2], 9), 300).float()
        return result

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(super().__getattr__("inner"), name)


def test_held_out_answers_are_greedy_side_by_side(target):
    texts = collector(target).answers(KINDS["talk"].held_out, 10)
    for text, prompt in zip(texts, KINDS["talk"].held_out):
        given = target[1](prompt)["input_ids"]
        said = text.tokens[len(given) :].tolist()
        assert text.tokens[: len(given)].tolist() == given
        assert said == greedy_loop(target[0], given, 10, (7,))
        assert text.learn.tolist() == [False] * len(given) + [True] * len(said)


def test_given_text_is_cut_into_pieces(target):
    tokens = list(range(10, 60))
    pieces = list(collector(target).read(tokens))
    assert [len(piece.tokens) for piece in pieces] == [24, 24, 2]
    assert torch.cat([piece.tokens for piece in pieces]).tolist() == tokens


def test_our_own_prompts_are_read_and_filled():
    kinds = read_prompts()
    assert set(kinds) == {"chat", "code", "summary", "maths"}
    source = PromptSource(kinds, "0")
    prompts = [source.next() for _ in range(300)]
    assert len(set(prompts)) > 250
    assert not any("{" in prompt for prompt in prompts)
    held_out = {prompt for kind in kinds.values() for prompt in kind.held_out}
    assert not held_out & set(prompts)


def test_an_answer_is_quoted_later():
    source = PromptSource(read_prompts(), "1")
    source.answered("too short")
    source.answered(" ".join(["purple"] * 150))
    quoted = [prompt for prompt in (source.next() for _ in range(200)) if "purple" in prompt]
    assert len(quoted) > 10
    assert quoted[0].count("purple") == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "no TOML file of prompts"),
        ("a = 1", "'a' is no table of a kind"),
        ("[a]\nheld_out = ['x']", "the kind 'a' has no templates"),
        ("[a]\ntemplates = ['about {thing}']", "'a' has no list things for 'about {thing}'"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, text, message):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "p.toml")


@pytest.mark.parametrize("change", [{"rows": 0}, {"passes": 0}, {"length": 3}])
def test_recipes_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        Recipe(**change)
