"""The notebook runs as it stands, and the outputs that readers see are those of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "digits.ipynb"


def printed(notebook):
    """What each code cell prints or shows as text."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(out.get("text", "") or out["data"]["text/plain"] for out in cell.outputs) for cell in cells]


def words(text):
    """Without numbers: another processor may round in another way, and training amplifies this."""
    return re.sub(r"[\d.]+(e-\d+)?", "#", text)


@pytest.mark.filterwarnings("ignore")  # of Jupyter's packages
def test_the_notebook_runs_and_shows_what_it_prints():
    saved = nbformat.read(NOTEBOOK, 4)
    fresh = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(fresh, timeout=500, kernel_name="python3").execute()
    assert [words(text) for text in printed(saved)] == [words(text) for text in printed(fresh)]
    for told in (printed(saved), printed(fresh)):
        text = "\n".join(told)
        population, folded = (re.search(rf"{name}: ([\d.]+) %", text)[1] for name in ("population inference", "folded"))
        assert population == folded and float(folded) > 90
        assert "norms left: 0" in text
