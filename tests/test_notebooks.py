"""The notebooks: stripped of outputs, code that compiles; slow: each one runs from top to bottom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ["01_quickstart", "02_theorem", "03_bring_your_own_drafter", "04_read_a_run", "05_compare_policies"]

EXECUTE = """
import sys
import nbformat
from nbclient import execute
folder, name, out = sys.argv[1:]
book = nbformat.read(f"{folder}/{name}.ipynb", as_version=4)
execute(book, cwd=folder, timeout=600, kernel_name="python3")
nbformat.write(book, out)
"""  # in a process of its own: Jupyter leaves kernels and warnings behind, which are errors here


def book(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_known() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped_and_the_code_compiles(name: str) -> None:
    from IPython.core.inputtransformer2 import TransformerManager

    found = book(name)
    nbformat.validate(found)
    assert found.cells[0].cell_type == "markdown"
    assert set(found.metadata) == {"kernelspec", "language_info"}
    for cell in found.cells:
        assert not cell.metadata
        if cell.cell_type == "code":
            assert cell.execution_count is None
            assert cell.outputs == []
            compile(TransformerManager().transform_cell(cell.source), f"{name}, {cell.id}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    out = tmp_path / "executed.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(FOLDER), name, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = nbformat.read(out, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)  # there is something to look at
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
