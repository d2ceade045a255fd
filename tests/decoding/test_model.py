"""What a Hugging Face model is taken for and what is refused; vocabularies, tokenizers and rolled back caches."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import VOCAB, greedy_loop, noisy, tiny
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.chain import Chain, Sequences
from adaspec.decoding.model import Model, PlainModel, check_same_tokenizer, sequence_limit, stop_token_ids
from adaspec.decoding.sampling import GREEDY
from adaspec.plan import Plan

PROMPT = (3, 4, 5, 6, 7)


def mamba():
    return tiny("mamba", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)


def decode(chain, plan, prompts=(PROMPT,), new=10):
    size = len(prompts)
    chain.start(Sequences(prompts, (GREEDY,) * size, (new,) * size, ((),) * size))
    texts = [[] for _ in prompts]
    while chain.running:
        for text, tokens in zip(texts, chain.round(Plan.parse(plan)).tokens, strict=True):
            text += tokens
    return texts


def buffer_of(*rows, capacity=32):
    buffer = TokenBuffer(len(rows), capacity)
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    buffer.append(padded, torch.tensor([len(row) for row in rows]))
    return buffer


def test_a_state_space_model_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="m: MambaForCausalLM keeps a recurrent state"):
        Model("m", mamba())


def test_an_encoder_decoder_model_is_refused():
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    module = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING["t5"](**small))
    with pytest.raises(ValueError, match=r"t5 model: .* is an encoder-decoder model"):
        Model("t5 model", module)


def test_a_model_without_explicit_positions_is_refused():
    with pytest.raises(ValueError, match="bloom: BloomForCausalLM does not take explicit positions"):
        Model("bloom", tiny("bloom", vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2))


def test_a_request_beyond_the_sliding_window_is_refused_with_both_numbers():
    model = Model("m", tiny("mistral", sliding_window=16))
    model.start(1, 16)
    with pytest.raises(ValueError, match=r"m: .* 17 tokens, its sliding window .* is 16"):
        model.start(1, 17)


def test_a_request_within_the_sliding_window_decodes_as_the_module_does():
    module = tiny("mistral", sliding_window=16)
    chain = Chain(Model("target", module), {"c": Model("c", noisy(module, 0.2, 1))})
    assert decode(chain, "target/c:3", new=11) == [greedy_loop(module, PROMPT, 11)]


def test_a_request_beyond_the_models_positions_is_refused_with_both_numbers():
    module = tiny("llama", max_position_embeddings=20)
    chain = Chain(Model("target", module), {})
    assert len(decode(chain, "target", new=15)[0]) == 15
    with pytest.raises(ValueError, match=r"target: .* 21 tokens, its number of positions is 20"):
        decode(chain, "target", new=16)


def test_the_tighter_of_two_limits_counts():
    config = SimpleNamespace(max_position_embeddings=64, sliding_window=8, layer_types=["full_attention"])
    assert sequence_limit(config) == (64, "its number of positions")  # no layer slides
    config.layer_types = ["full_attention", "sliding_attention"]
    assert sequence_limit(config)[0] == 8
    assert sequence_limit(SimpleNamespace()) is None


def test_a_state_space_model_decodes_plainly_as_its_module_does():
    module = mamba()
    chain = Chain(PlainModel("target", module), {})
    for prompt in (PROMPT, (9,)):
        assert decode(chain, "target", (prompt,)) == [greedy_loop(module, prompt, 10)]


def test_a_state_space_model_neither_drafts_nor_verifies_nor_takes_a_batch():
    llama = Model("llama", tiny("llama"))
    with pytest.raises(ValueError, match=r"mamba can only decode plainly: .* recurrent state"):
        Chain(llama, {"mamba": PlainModel("mamba", mamba())}).prepare([Plan.parse("llama/mamba:2")])
    chain = Chain(PlainModel("mamba", mamba()), {"llama": llama})
    with pytest.raises(ValueError, match="mamba can only decode plainly"):
        chain.prepare([Plan.parse("mamba/llama:2")])
    with pytest.raises(ValueError, match=r"mamba decodes one sequence at a time .* got 2"):
        decode(chain, "mamba", (PROMPT, PROMPT))


def test_a_plain_model_refuses_to_roll_back():
    model = PlainModel("mamba", mamba())
    model.start(1, 8)
    model.logits(buffer_of(PROMPT), torch.tensor([4]), 1, torch.tensor([True]))
    model.rollback(torch.tensor([5]))
    with pytest.raises(ValueError, match="mamba cannot be rolled back"):
        model.rollback(torch.tensor([4]))


@pytest.mark.parametrize("rows", [VOCAB - 8, VOCAB + 8])
def test_a_drafter_with_another_padding_of_the_vocabulary_drafts(rows):
    """A longer head is cut, a shorter one filled with -inf, and a token it cannot embed does no harm."""
    target, drafter = tiny("llama"), tiny("llama", vocab_size=rows)
    for name, weight in drafter.named_parameters():
        other = target.get_parameter(name)
        shared = min(len(weight), len(other))
        weight[:shared] = other[:shared]
    chain = Chain(Model("target", target), {"d": Model("d", drafter, VOCAB)})
    prompt = (VOCAB - 1, 3, VOCAB - 1, 4)
    assert decode(chain, "target/d:3", (prompt,)) == [greedy_loop(target, prompt, 10)]
    model = chain.members["d"]
    model.start(1, 32)
    logits = model.logits(buffer_of(PROMPT), torch.tensor([4]), 1, torch.tensor([True]))
    assert logits.shape == (1, 1, VOCAB)
    assert logits.isinf().sum() == max(0, VOCAB - rows)


def test_vocabularies_of_different_size_are_refused_unless_fitted():
    with pytest.raises(ValueError, match=f"d has {VOCAB + 8} tokens, target has {VOCAB}"):
        Chain(Model("target", tiny("llama")), {"d": Model("d", tiny("llama", vocab_size=VOCAB + 8))})


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt", "gpt_neox"])
def test_a_rolled_back_cache_agrees_with_a_fresh_forward(kind):
    """Ragged rows, a rejected draft overwritten by another text; to 1e-5."""
    module = tiny(kind)
    model = Model("m", module)
    model.start(3, 24)
    rows = [[3, 4, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15]]
    everyone = torch.ones(3, dtype=torch.bool)
    model.logits(buffer_of(*[[*row, 20, 21, 22] for row in rows]), torch.tensor([8, 5, 6]), 1, everyone)
    model.rollback(torch.tensor([5, 3, 2]))
    texts = [[*row, 30, 31] for row in rows]
    first = torch.tensor([len(row) for row in rows])
    logits = model.logits(buffer_of(*texts), first, 2, torch.tensor([True, True, True]))
    for row, text in enumerate(texts):
        with torch.inference_mode():
            want = module(torch.tensor([text]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(logits[row], want, atol=1e-5, rtol=0)


def test_rows_that_are_not_active_keep_their_cache():
    module = tiny("llama")
    model = Model("m", module)
    model.start(2, 24)
    text = buffer_of([3, 4, 5], [6, 7, 8, 9])
    model.logits(text, torch.tensor([2, 3]), 1, torch.tensor([True, False]))
    assert model.lengths.tolist() == [3, 0]
    text.append(torch.tensor([[10], [11]]), torch.tensor([1, 1]))
    logits = model.logits(text, torch.tensor([3, 4]), 1, torch.tensor([True, True]))
    for row in range(2):
        with torch.inference_mode():
            want = module(torch.tensor([text.row(row)]), use_cache=False).logits[0, -1:]
        torch.testing.assert_close(logits[row], want, atol=1e-5, rtol=0)


def tokenizer(words, **special):
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


WORDS = [f"word{index}" for index in range(200)]


def test_the_same_tokenizer_passes_with_entries_that_only_one_side_has():
    check_same_tokenizer(tokenizer(WORDS), tokenizer(WORDS), "big", "small")
    check_same_tokenizer(tokenizer([*WORDS, "<added>"]), tokenizer(WORDS), "big", "small")
    check_same_tokenizer(tokenizer(WORDS), tokenizer([*WORDS, "<a>", "<b>"]), "big", "small")


def test_another_tokenizer_is_refused_with_both_names_and_the_overlap():
    shifted = [*WORDS[:150], *WORDS[151:], WORDS[150]]
    with pytest.raises(ValueError, match=r"small cannot draft for big: .*150 of 200 tokens agree, 75\.0 %"):
        check_same_tokenizer(tokenizer(WORDS), tokenizer(shifted), "big", "small")
    others = [f"other{index}" for index in range(200)]
    with pytest.raises(ValueError, match="0 of 200"):
        check_same_tokenizer(tokenizer(WORDS), tokenizer(others), "big", "small")


def test_one_exchanged_pair_is_enough_to_refuse():
    exchanged = [WORDS[1], WORDS[0], *WORDS[2:]]
    with pytest.raises(ValueError, match="198 of 200"):
        check_same_tokenizer(tokenizer(WORDS), tokenizer(exchanged), "big", "small")


def test_stop_ids_come_from_every_place_that_names_one():
    module = tiny("llama", eos_token_id=5)
    module.generation_config.eos_token_id = [9, 5]
    assert stop_token_ids(module, tokenizer(WORDS, eos_token="word7")) == (5, 7, 9)
    module.generation_config.eos_token_id = None
    module.config.eos_token_id = None
    assert stop_token_ids(module, tokenizer(WORDS)) == ()
