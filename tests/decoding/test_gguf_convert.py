"""The conversion of GGUF files that the tests write themselves, against the weights they were written from."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tiny_gguf import random_model, vocabulary, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaspec.decoding.gguf_file import GGUFFile
from adaspec.decoding.gguf_tokenizer import build_tokenizer, write_tokenizer
from adaspec.decoding.store import StoreError, resolve


@pytest.fixture(scope="module")
def llama():
    return random_model("llama")


@pytest.fixture(scope="module")
def llama_file(llama, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(24).reshape(2, 12)).logits


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", False), ("qwen3", True)]
)
def test_converted_model_computes_what_the_source_does(architecture, tied, tmp_path):
    source = random_model(architecture, tied)
    path = write_gguf(tmp_path / "m.gguf", source)
    folder = resolve(str(path), cache_dir=tmp_path)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(converted), logits(source), rtol=0, atol=0)
    assert type(converted) is type(source)
    assert converted.config.tie_word_embeddings == tied
    assert converted.config.max_position_embeddings == 128
    stops = [vocabulary()[0].index(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert converted.generation_config.eos_token_id == stops
    assert not list(folder.glob("*.bin"))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1, Kind.BF16])
def test_every_weight_is_the_dequantised_one(kind, llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama, kind)
    converted = load_file(resolve(str(path), cache_dir=tmp_path) / "model.safetensors")
    for name, value in llama.state_dict().items():
        if name == "lm_head.weight":
            assert name not in converted
        elif value.dim() == 1:
            assert torch.equal(converted[name], value)
        else:
            expected = torch.from_numpy(dequantize(quantize(value.numpy(), kind), kind))
            assert torch.equal(converted[name], expected if kind == Kind.BF16 else expected.half())


def test_header_agrees_with_the_gguf_package(llama_file):
    mine, theirs = GGUFFile.read(llama_file), gguf.GGUFReader(llama_file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert mine.metadata == fields
    for tensor in theirs.tensors:
        own = mine.tensors[tensor.name]
        assert (own.start, own.kind, own.size) == (tensor.data_offset, tensor.tensor_type.name, tensor.n_elements)
        rows = np.concatenate([block.reshape(-1, own.shape[-1]) for block in mine.rows(own)])
        assert np.array_equal(rows, tensor.data.reshape(rows.shape))


def test_tokenizer(llama_file, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve(str(llama_file), cache_dir=tmp_path))
    tokens = vocabulary()[0]
    text = "the other<|im_end|>the <tool> 12é\n"
    ids = tokenizer(text)["input_ids"]
    assert [tokens[index] for index in ids[:6]] == ["the", "Ġ", "o", "the", "r", "<|im_end|>"]
    assert tokenizer.decode(ids) == text
    assert "<|im_end|>" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<tool>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert len(tokenizer) == len(tokens) - 1  # without the unused entry
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ123", "ĠOK", "'", "LL", "!!", "Ċ", "Ċ", "x"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "ĠOK", "'", "LL", "!!", "Ċ", "Ċ", "x"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "ĠOK", "'LL", "!!ĊĊ", "x"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "ĠOK", "'LL", "!!ĊĊ", "x"]),
    ],
)
def test_words_are_cut_as_in_the_original_tokenizer(pre, pieces, llama_file):
    metadata = dict(GGUFFile.read(llama_file).metadata) | {"tokenizer.ggml.pre": pre}
    cut = build_tokenizer(metadata).pre_tokenizer.pre_tokenize_str("It's 123 OK'LL!!\n\nx")
    assert [piece for piece, _ in cut] == pieces


def test_bos_where_the_file_asks_for_it(llama_file):
    metadata = dict(GGUFFile.read(llama_file).metadata) | {"tokenizer.ggml.add_bos_token": True}
    assert build_tokenizer(metadata).encode("the").tokens == ["<|im_start|>", "the"]


def test_a_tokenizer_that_cannot_be_written_is_no_fault_of_the_file(llama_file, tmp_path):
    (tmp_path / "tokenizer.json").mkdir()  # as good as a full disk
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        write_tokenizer(GGUFFile.read(llama_file).metadata, tmp_path)


def test_every_truncation_is_refused(llama_file, tmp_path):
    whole = llama_file.read_bytes()
    for size in [0, 3, 7, 20, 100, 5000, len(whole) // 2, len(whole) - 1]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"^cut.gguf is (truncated|no GGUF|empty)"):
            resolve(str(path), cache_dir=tmp_path)
    assert not list((tmp_path / "models").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skip": "model.layers.1.mlp.up_proj.weight"}, r"m.gguf holds no tensor 'blk.1.ffn_up.weight'"),
        ({"extra": ["rope_freqs.weight"]}, "scaled rope"),
        ({"extra": ["blk.0.other.weight"]}, "'blk.0.other.weight'"),
        ({"pre": "viking"}, "'viking'"),
    ],
)
def test_what_cannot_be_converted_is_refused(change, message, llama, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama, **change)
    with pytest.raises(StoreError, match=message):
        resolve(str(path), cache_dir=tmp_path)
    assert not list((tmp_path / "models").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": None}, "is broken: tokenizer.ggml.tokens is no list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "is broken: .* but 1 token types"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "is broken: Exception: .*out of vocabulary"),
        ({"tokenizer.ggml.eos_token_id": -3}, "is broken: tokenizer.ggml.eos_token_id = -3"),
        ({"tokenizer.ggml.eos_token_id": 10**9}, "is broken: tokenizer.ggml.eos_token_id = 1000000000"),
        ({"general.architecture": ["llama"]}, "is broken: TypeError"),
        ({"llama.rope.freq_base": 1e300}, "freq_base = 1e\\+300"),
        ({"llama.block_count": 2**62}, "is broken: .* layers, but"),
        ({"llama.attention.head_count": 2**60}, "with shape"),
        ({"llama.attention.key_length": 15, "llama.rope.dimension_count": 15}, "an even number"),
    ],
)
def test_wrong_metadata_is_one_line(change, message, llama_file, tmp_path, monkeypatch):
    file = GGUFFile.read(llama_file)
    changed = replace(file, metadata=dict(file.metadata) | change)
    monkeypatch.setattr(GGUFFile, "read", lambda path: changed)
    with pytest.raises(StoreError, match=rf"^tiny.gguf [^\n]*{message}[^\n]*$"):
        resolve(str(llama_file), cache_dir=tmp_path)
    assert not list((tmp_path / "models").rglob("*.safetensors"))


def test_other_architectures_and_values_that_do_not_fit_are_refused(llama, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StoreError, match="architecture 'mamba'"):
        resolve(str(tmp_path / "m.gguf"), cache_dir=tmp_path)
    broken = random_model("llama")
    with torch.no_grad():
        broken.model.layers[0].mlp.up_proj.weight[3, 3] = torch.nan
    path = write_gguf(tmp_path / "nan.gguf", broken)
    with pytest.raises(StoreError, match=r"cannot hold in tensor 'blk.0.ffn_up.weight'"):
        resolve(str(path), cache_dir=tmp_path)
