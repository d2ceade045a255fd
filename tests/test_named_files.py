"""Every option that names a file: a missing, wrong, empty or undecodable one is one line that names it, exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaspec.cli import main
from adaspec.files import check_file, check_folder, read_text
from adaspec.state import StateFile, _Local

TRAIN = ("train-drafter", "head", "--prompts", "prompts.toml", "--text", "text.txt")
READ = {  # the command, with the file left out
    "--corpus": ("generate", "the fox", "--threads", "1"),
    "--api-key-file": ("serve",),
    "--text": TRAIN,
    "--prompts": TRAIN,
    "--begin": TRAIN,
    "index": ("index-corpus", "-o", "index"),
    "export": ("export", "vllm"),
    "report": ("report",),
}
WRITTEN = {
    "--state": ("serve",),
    "--output": ("index-corpus", "text.txt"),
    "--out": ("report", "run"),
    "--png": ("report", "run"),
    "DIR": ("train-drafter",),
}
FOLDERS = ("--png", "DIR")
unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="makes a socket in a folder")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "a_binary").write_bytes(b"\x93\xff" * 40)
    (tmp_path / "an_empty").touch()
    (tmp_path / "text.txt").write_text("the quick brown fox")
    (tmp_path / "prompts.toml").write_text("[a]\ntemplates = ['the fox']\nheld_out = ['a dog']")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ADASPEC_API_KEY", raising=False)
    return tmp_path


def complaint(words: list[str], model: str, capsys: pytest.CaptureFixture[str]) -> str:
    known = [] if words[0] in ("export", "report") else ["--target", model, "--offline"]
    assert main([*words, *known]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("adaspec: ")
    assert "Errno" not in line
    return line


@pytest.mark.parametrize("file", ["missing", "a_folder", "a_binary", "an_empty"])
@pytest.mark.parametrize("option", READ)
def test_a_file_that_cannot_be_read_is_one_line(here: Path, model: str, capsys, option: str, file: str) -> None:
    named = [option, file] if option.startswith("--") else [file]
    line = complaint([*READ[option], *named], model, capsys)
    assert file in line
    assert option in line or option in ("--corpus", "--begin", "index", "export", "report")
    assert not (here / "head").exists()  # so that it can be put right


@pytest.mark.parametrize(
    ("option", "place"),
    [(option, "a_binary" if option in FOLDERS else "a_folder") for option in WRITTEN]
    + [(option, "an_empty/below") for option in WRITTEN],
)
def test_a_place_that_cannot_be_written_is_one_line(here: Path, model: str, capsys, option: str, place: str) -> None:
    named = [option, place] if option.startswith("--") else [place]
    line = complaint([*WRITTEN[option], *named], model, capsys)
    assert f"{option} {place}" in line


@pytest.fixture
def special(here: Path) -> Iterator[Path]:
    """Something that is neither a file nor a folder."""
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("a_socket")  # relative, since such a path is short
        yield here / "a_socket"


@unix
@pytest.mark.parametrize("option", ["--state", "--output"])
def test_what_is_replaced_as_a_whole_is_no_device(special: Path, model: str, capsys, option: str) -> None:
    line = complaint([*WRITTEN[option], option, special.name], model, capsys)
    assert f"{option} {special.name} is a device" in line
    assert special.is_socket()


@unix
def test_a_state_replaces_and_renames_no_device(special: Path) -> None:
    store = StateFile(special)
    for write in (store.claim, lambda: _Local(special).replace(b"{}"), store.set_aside):
        with pytest.raises(ValueError, match="a_socket is a device"):
            write()
    assert special.is_socket()


def test_a_failure_of_the_system_names_the_file_and_not_its_number(monkeypatch, capsys) -> None:
    monkeypatch.setattr("adaspec.commands.models._list", lambda _: Path("/no/such/folder/file").write_text(""))
    assert main(["models", "list"]) == 1
    assert capsys.readouterr().err == "adaspec: /no/such/folder/file: No such file or directory\n"


def test_text_is_read_as_it_is(here: Path) -> None:
    (here / "text.txt").write_text(" grün \n", encoding="utf-8")
    assert read_text(here / "text.txt", "--text") == " grün \n"
    assert read_text(here / "an_empty", "--text", may_be_empty=True) == ""


def test_places_that_are_free_or_fit_are_let_pass(here: Path) -> None:
    for path in (here / "a_binary", here / "new", here / "new/file"):
        check_file(path, "--out")
    for path in (here / "a_folder", here / "new", here / "new/folder"):
        check_folder(path, "--png")
