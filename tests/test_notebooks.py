"""The notebooks: stripped of outputs, code that compiles; slow: each one runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ["01_quickstart", "02_theorem", "03_bring_your_own_drafter", "04_read_a_run", "05_compare_policies"]


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
@pytest.mark.filterwarnings("default")  # Jupyter's own
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_from_top_to_bottom(name: str) -> None:
    from nbclient import NotebookClient

    found = book(name)
    client = NotebookClient(found, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    outputs = [output for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1  # there is something to look at
    complaints = [output.text for output in outputs if output.get("name") == "stderr"]
    assert not complaints
