"""`model.generate` with and without speculation, on tiny random models in float32."""

from collections import Counter
from itertools import cycle
from string import ascii_letters

import pytest
import torch
from scipy.stats import chi2_contingency
from tiny_models import VOCAB, noisy, tiny
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from adaspec import Controller, Decision, EpsilonGreedy, Plan, PlanSpace
from adaspec.adapters.hf import Speculation, _playable, generate
from adaspec.adapters.hf_assisted import Assisted
from adaspec.decoding.feature import FeatureDrafter
from adaspec.decoding.feature_load import head_rows, save_feature_drafter
from adaspec.decoding.feature_net import FeatureNet, FeatureShape
from adaspec.decoding.lookup import LookupDrafter
from adaspec.decoding.native.head import NativeFeatureDrafter

PROMPT = torch.tensor([[5, 9, 17, 5, 9, 17, 5, 9]])
RAGGED = torch.tensor([[2, 2, 2, 5, 9, 17], [2, 2, 2, 2, 2, 7], [4, 8, 15, 16, 23, 42], [2, 30, 31, 32, 30, 31]])
MASK = (RAGGED != 2).long()
PLANS = PlanSpace([Plan.parse(text) for text in ("target/draft:3", "target/lookup:4", "target/draft/lookup:5,2")])


@pytest.fixture(scope="module")
def models():
    target = tiny("llama", seed=3)
    target.generation_config.eos_token_id = None  # a random model meets its token by chance; the tests name their own
    return target, noisy(target, 0.15, seed=1)


class Turns:
    """Plays every plan in turn."""

    space = PLANS

    def __init__(self):
        self.plans, self.played = cycle(PLANS), Counter()

    def choose(self, context):
        return Decision(next(self.plans), context, 1.0, 0)

    def observe(self, decision, outcome):
        self.played[decision.plan] += 1


@pytest.fixture
def speculation(models):
    target, draft = models
    return Speculation(target, {"draft": draft, "lookup": "lookup"}, controller=Turns(), profile=False)


class Odd(LogitsProcessor):
    """Forbids the tokens that stand an odd number of times in the text so far: a wrong history shows at once."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for text, row in zip(input_ids.tolist(), scores):
            for token, count in Counter(text).items():
                if count % 2:
                    row[token] = -torch.inf
        return scores


class InPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1] % VOCAB] += 3.0
        return scores


SETTINGS = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 2, "min_new_tokens": 12},
    "own": {"logits_processor": LogitsProcessorList([Odd(), InPlace()])},
    "bad words": {"bad_words_ids": [[9], [5, 17]], "suppress_tokens": [3]},
    "eos": {"eos_token_id": [11, 25, 40], "pad_token_id": 2},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rows", [1, 4])
def test_greedy_texts_are_those_of_generate_without_it(models, speculation, setting, rows):
    inputs = {"input_ids": PROMPT} if rows == 1 else {"input_ids": RAGGED, "attention_mask": MASK}
    options = {"max_new_tokens": 40, "do_sample": False} | SETTINGS[setting]
    expected = models[0].generate(**inputs, **options)
    for _ in range(2):
        assert torch.equal(models[0].generate(**inputs, **options, custom_generate=speculation), expected)
    assert len(speculation.controller.played) == len(PLANS)


def test_the_function_form_takes_drafters_by_kind(models):
    target, draft = models
    expected = target.generate(PROMPT, max_new_tokens=20, do_sample=False)
    for drafters in (["lookup"], ["lookup", draft], {"small": draft}, [LookupDrafter("ngrams")], [draft, draft]):
        options = {"max_new_tokens": 20, "do_sample": False, "custom_generate": generate, "drafters": drafters}
        assert torch.equal(target.generate(PROMPT, **options), expected)
    controller = Turns()
    options |= {"drafters": {"draft": draft, "lookup": "lookup"}, "controller": controller}
    target.generate(PROMPT, **options)
    assert len(controller.played) > 3


@pytest.mark.parametrize("kind", [FeatureDrafter, NativeFeatureDrafter])
def test_nothing_stands_between_the_target_and_what_reads_it(kind):
    plans = [Plan.parse(text) for text in ("target/head:4", "target/low/head:4,2")]
    assert [_playable(plan, {"head": object.__new__(kind)}) for plan in plans] == [True, False]


def test_the_folder_of_a_feature_drafter_is_a_drafter(models, tmp_path):
    target = models[0]
    torch.manual_seed(5)
    net = FeatureNet(FeatureShape(LlamaConfig(**target.config.to_dict()), target.config.hidden_size))
    tokens = torch.arange(0, VOCAB, 2)
    save_feature_drafter(tmp_path, net, tokens, head_rows(target, tokens), "tiny")
    controller = Turns()
    controller.space = PlanSpace([Plan.parse("target/head:3"), Plan.parse("target/lookup:2")])
    controller.plans = cycle(controller.space)
    ours = Speculation(target, {"head": str(tmp_path), "lookup": "lookup"}, controller=controller, profile=False)
    plain = target.generate(PROMPT, max_new_tokens=24, do_sample=False)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=24, do_sample=False, custom_generate=ours), plain)
    assert controller.played[Plan.parse("target/head:3")] > 2
    several = Speculation(target, {"head": str(tmp_path), "draft": models[1], "lookup": "lookup"}, profile=False)
    texts = {str(plan) for plan in several.controller.space}
    assert "target/head:2" in texts
    assert "target/draft/lookup:4,2" in texts
    assert "target/draft/head:4,2" not in texts  # a feature drafter reads the target alone


def test_scores_and_logits_are_those_of_generate(models, speculation):
    options = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.3}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = models[0].generate(PROMPT, **options)
    ours = models[0].generate(PROMPT, **options, custom_generate=speculation)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name]) == 24
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(plain[name]), atol=1e-4, rtol=1e-4)


def test_scores_of_a_batch_are_those_of_its_rows_and_0_behind_their_ends(models, speculation):
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": [11, 25, 40], "pad_token_id": 2}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    plain = models[0].generate(RAGGED, attention_mask=MASK, **options)
    ours = models[0].generate(RAGGED, attention_mask=MASK, **options, custom_generate=speculation)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.logits is None
    ended = 0
    for step, (mine, theirs) in enumerate(zip(ours.scores, plain.scores, strict=True)):
        before = ours.sequences[:, 6 : 6 + step]
        running = ~torch.isin(before, torch.tensor([11, 25, 40])).any(1)
        torch.testing.assert_close(mine[running], theirs[running], atol=1e-4, rtol=1e-4)
        assert not mine[~running].any()
        ended += int((~running).sum())
    assert ended


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        self.pieces.append(value.reshape(-1).tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_gets_the_prompt_every_token_and_the_end(models, speculation):
    plain, ours = Recorder(), Recorder()
    options = {"max_new_tokens": 20, "do_sample": False}
    models[0].generate(PROMPT, **options, streamer=plain)
    speculation.generate(PROMPT, **options, streamer=ours)
    assert ours.pieces == plain.pieces
    assert ours.ended == 1


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of one letter per token."""
    vocab = {letter: index for index, letter in enumerate(ascii_letters[:VOCAB])}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_strings_end_a_row_as_in_generate(models, speculation, letters):
    expected = models[0].generate(PROMPT, max_new_tokens=30, do_sample=False)
    stop = "".join(letters.convert_ids_to_tokens(expected[0, 15:17].tolist()))
    options = {"max_new_tokens": 30, "do_sample": False, "stop_strings": [stop], "tokenizer": letters}
    plain = models[0].generate(PROMPT, **options)
    assert plain.shape[1] < expected.shape[1]
    assert torch.equal(speculation.generate(PROMPT, **options), plain)
    config = GenerationConfig(max_new_tokens=30, do_sample=False, stop_strings=[stop])
    assert torch.equal(speculation.generate(PROMPT, config, tokenizer=letters), plain)
    with pytest.raises(ValueError, match="tokenizer"):
        speculation.generate(PROMPT, config)


class After(StoppingCriteria):
    """Ends a row behind its n-th occurrence of a token."""

    def __init__(self, token, times):
        self.token, self.times = token, times

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids == self.token).sum(1) >= self.times


def test_own_stopping_criteria_are_asked_at_every_token(models, speculation):
    text = models[0].generate(RAGGED, attention_mask=MASK, max_new_tokens=30, do_sample=False)
    token = int(text[0, 12])
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": 1, "pad_token_id": 2}
    options["stopping_criteria"] = StoppingCriteriaList([After(token, 1), MaxTimeCriteria(60.0)])
    plain = models[0].generate(RAGGED, attention_mask=MASK, **options)
    ours = models[0].generate(RAGGED, attention_mask=MASK, **options, custom_generate=speculation)
    assert torch.equal(ours, plain)
    assert (plain[:, 6:] == 2).any()


@pytest.mark.parametrize("processors", [[], [Odd()]])
def test_sampled_texts_have_the_law_of_generate(models, speculation, processors):
    """Two samples of 2 000 two-token continuations: the same law by a chi-square test of homogeneity at 0.001."""
    rows, options = 2000, {"max_new_tokens": 2, "do_sample": True, "temperature": 0.6, "top_k": 4, "top_p": 0.95}
    options["logits_processor"] = LogitsProcessorList(processors)
    prompts = PROMPT.expand(rows, -1)
    torch.manual_seed(0)
    counts = [
        Counter(map(tuple, texts[:, PROMPT.shape[1] :].tolist()))
        for texts in (
            models[0].generate(prompts, **options),
            models[0].generate(prompts, **options, custom_generate=speculation),
        )
    ]
    cells = [cell for cell in set(counts[0]) | set(counts[1]) if counts[0][cell] + counts[1][cell] >= 10]
    table = [[count[cell] for cell in cells] for count in counts]
    assert len(cells) > 4
    assert min(map(sum, table)) > 0.97 * rows
    assert chi2_contingency(table).pvalue > 0.001


def test_torch_seeds_govern_sampling(models, speculation):
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        own = Speculation(models[0], {"draft": models[1], "lookup": "lookup"}, controller=Turns(), profile=False)
        texts.append(models[0].generate(PROMPT, max_new_tokens=20, do_sample=True, custom_generate=own))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_several_texts_per_prompt(models, speculation):
    texts = models[0].generate(
        PROMPT, max_new_tokens=8, do_sample=True, num_return_sequences=3, custom_generate=speculation
    )
    assert texts.shape == (3, 16)


REFUSED = {
    "num_beams": {"num_beams": 3},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "UnbatchedClassifierFreeGuidance": {"guidance_scale": 2.0},
    "PrefixConstrained": {"prefix_allowed_tokens_fn": lambda row, text: [3, 4]},
    "inputs_embeds": {"inputs_embeds": torch.zeros(4, 6, 32)},
    "padding on the right": {"attention_mask": MASK.flip(1)},
    "position_ids": {"position_ids": torch.arange(6).expand(4, -1) + 7},
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of some of these settings itself
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(models, speculation, name):
    options = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False} | REFUSED[name]
    with pytest.raises(ValueError, match=name):
        models[0].generate(RAGGED, **options, custom_generate=speculation)


def test_a_streamer_of_a_batch_and_another_model_are_refused(models, speculation):
    with pytest.raises(ValueError, match="streamer"):
        speculation.generate(RAGGED, attention_mask=MASK, max_new_tokens=4, streamer=Recorder())
    with pytest.raises(ValueError, match="another model"):
        models[1].generate(PROMPT, max_new_tokens=4, custom_generate=speculation)
    with pytest.raises(ValueError, match="'lookup', a causal LM"):
        Speculation(models[0], ["ngrams"])


def test_prefix_functions_work_for_one_row(models, speculation):
    options = {"max_new_tokens": 12, "do_sample": False, "prefix_allowed_tokens_fn": lambda row, text: [3, 4, 7, 9]}
    plain = models[0].generate(PROMPT, **options)
    assert torch.equal(models[0].generate(PROMPT, **options, custom_generate=speculation), plain)


@pytest.mark.parametrize("seed", range(3))
def test_the_assisted_loop_of_transformers_with_our_number_of_tokens(models, seed):
    target, draft = models
    options = {"max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.2}
    plain = target.generate(PROMPT, **options)
    space = PlanSpace([Plan(("target", "draft"), (window,)) for window in (1, 3)])
    assisted = Assisted(draft, controller=Controller(space, EpsilonGreedy(0.9), hold=1, seed=seed))
    for _ in range(2):
        assert torch.equal(target.generate(PROMPT, **options, custom_generate=assisted), plain)
    rounds = {str(row.plan): row.rounds for row in assisted.controller.table()}
    assert all(rounds.values())
    tokens = sum(row.rounds * row.measured for row in assisted.controller.table())
    assert tokens > 0
