"""tools/fill_cards.py: ours beside the published in a method's card, and the cards that are committed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from engram.core.errors import EngramError
from engram.reproduce.paper import load_paper
from engram.reproduce.results_files import write_file
from paper_helpers import make_record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # as it is when the tool is run
TOOL: Any = importlib.import_module("fill_cards")


def card_of(tmp_path: Path, name: str, text: str | None = None) -> Path:
    place = f"# A card\n\n{TOOL.BEGIN}\nold\n{TOOL.END}\n\nthe end\n"
    folder = tmp_path / "cards"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.md").write_text(place if text is None else text, encoding="utf-8")
    return folder


def test_ours_stands_beside_the_published_and_nothing_in_place_of_a_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    runs = [
        make_record("ucir-cifar100-b50-s10", 62.0, order="1"),
        make_record("ucir-cifar100-b50-s5", 64.0, order="1"),
        make_record("ucir-cifar100-b50-s5", 65.0, order="2"),
        make_record("ucir-cifar100-b50-s5", 66.0, order="3"),
    ]
    write_file(results / "cifar100.jsonl", runs)
    folder = card_of(tmp_path, "ucir")
    card_of(tmp_path, "other", "# Not a card\n")
    TOOL.main([str(folder), str(results)])
    text = (folder / "ucir.md").read_text(encoding="utf-8")
    assert text.startswith(f"# A card\n\n{TOOL.BEGIN}\n")
    assert text.endswith(f"{TOOL.END}\n\nthe end\n")
    assert "old" not in text
    lines = text.splitlines()
    assert "| Table 1: UCIR (CNN), 50 stages | 49.30 ± 0.32 | not run | – |" in lines
    assert "| Table 1: UCIR (CNN), 10 stages | 61.22 ± 0.69 | 62.00 (n = 1 of 3, class order 1) | +0.78 ◐ |" in lines
    assert "| Table 1: UCIR (CNN), 5 stages | 64.01 ± 0.91 | 65.00 ± 1.00 (n = 3) | +0.99 ◐ |" in lines
    # Made-up runs have nme one point lower at every stage.
    assert "| Table 1: UCIR (NME), 10 stages | 60.83 ± 0.70 | 61.00 (n = 1 of 3, class order 1) | +0.17 ● |" in lines
    assert (folder / "other.md").read_text(encoding="utf-8") == "# Not a card\n"


def test_cards_that_cannot_be_filled_are_refused(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    write_file(results / "cifar100.jsonl", [make_record("ucir-cifar100-b50-s10", 62.0)])
    with pytest.raises(EngramError, match="no card in"):
        TOOL.cards(card_of(tmp_path, "ucir", "# Nothing to fill\n"), results)
    with pytest.raises(EngramError, match="has no place for what was measured"):
        TOOL.cards(card_of(tmp_path, "ucir", f"{TOOL.BEGIN}\nwithout its end\n"), results)
    (tmp_path / "cards" / "ucir.md").unlink()
    with pytest.raises(EngramError, match="no experiment has a row of unheard-of"):
        TOOL.cards(card_of(tmp_path, "unheard-of"), results)


def test_the_committed_cards_are_what_the_command_gives() -> None:
    cards = TOOL.cards(ROOT / "docs" / "methods", ROOT / "results")
    for file, text in cards.items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name}: {TOOL.COMMAND}"
    filled = {method for file in cards for method in TOOL.METHODS.get(file.stem, (file.stem,))}
    rows = {row.recipe for experiment in load_paper().find(list(TOOL.HEADINGS)) for row in experiment.rows}
    assert filled == rows - {"afc"}, "every method that has numbers has them in its card; AFC's is docs/afc.md"
