"""The notebook runs from start to end, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "turntree.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    """What a reader sees was made on the reader's own machine, and a diff shows text only."""
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert len(cells) >= 6
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = read()
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.text for cell in notebook.cells for output in cell.get("outputs", ()) if output.output_type == "stream"
    )
    assert f"reward {1:g}" in printed
    assert "6 trajectories" in printed
    assert "V(tree 0, root)" in printed
    assert "step 2:" in printed


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
