"""The notebook of the documentation runs, cell by cell, as Jupyter runs it: with IPython's display."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from test_docs_code import quick

__all__ = ["quick"]  # a fixture: few images, one epoch

FILE = Path(__file__).parents[1] / "docs" / "start" / "comparison.ipynb"
CELLS = json.loads(FILE.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_is_short_and_has_its_outputs() -> None:
    lines = [line for code in CODE for line in code.splitlines() if line.strip()]
    assert len(lines) < 30
    outputs = [output for cell in CELLS if cell["cell_type"] == "code" for output in cell["outputs"]]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/png"} <= kinds, "a code host shows the curve and the plot"
    assert any("tabular" in "".join(output.get("text", "")) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert "/tmp" not in FILE.read_text()


def test_the_notebook_runs(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("IPython", reason="IPython is not installed")
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    published: Any = CapturingDisplayPublisher(parent=shell)
    shell.display_pub = published
    shown: list[str] = []
    try:
        for code in CODE:
            done = shell.run_cell(code, store_history=False)
            assert done.success, done.error_in_exec or done.error_before_exec
            html = getattr(done.result, "_repr_html_", None)
            shown.append(html() if html else "")
    finally:
        InteractiveShell.clear_instance()
    bars = [output["data"]["text/html"] for output in published.outputs if "text/html" in output["data"]]
    assert sum("<progress" in bar for bar in bars) > 6, "a bar that moves, for each run"
    assert "<svg" in shown[2], "a result draws its curve"
    assert "<table" in shown[4]
    out = capsys.readouterr().out
    assert "\\begin{tabular}" in out
    assert out.count("metrics.jsonl") == 3
