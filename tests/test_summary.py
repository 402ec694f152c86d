"""What was measured of each recipe, in a few numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engram.experiment.recipes import recipe
from engram.reproduce.results_files import SUMMARY_COMMAND, measured, merge, read_results, summarise, summary_text
from paper_helpers import make_record

ROOT = Path(__file__).parents[1]


def test_a_recipe_has_the_mean_and_spread_of_its_runs() -> None:
    runs = [make_record("afc-cifar100-b50-s10", value, order=order) for order, value in (("1", 60.0), ("2", 63.0))]
    (numbers,) = summarise(runs).values()
    assert numbers == {
        "predictor": "cnn",
        "n": 2,
        "mean": 61.5,
        "std": pytest.approx(2.12),
        "seconds": 100,
        "hardware": "Example GPU",
    }


def test_one_run_has_no_spread_and_the_predictor_is_the_recipes() -> None:
    (numbers,) = summarise([make_record("afc-nme-cifar100-b50-s10", 60.0)]).values()
    assert (numbers["predictor"], numbers["mean"], numbers["std"], numbers["n"]) == ("nme", 59.0, None, 1)


def test_of_one_order_and_seed_the_latest_counts() -> None:
    runs = [
        make_record("afc-cifar100-b50-s10", 70.0, created="2026-02-01T00:00:00+00:00", commit="new"),
        make_record("afc-cifar100-b50-s10", 60.0, commit="old"),
    ]
    assert summarise(runs)["afc-cifar100-b50-s10"]["mean"] == 70


def test_changed_settings_and_other_precisions_do_not_count() -> None:
    changed = recipe("afc-cifar100-b50-s10").with_settings(lambda_disc=2.0)
    assert summarise([make_record(changed)]) == {}
    assert summarise([make_record("afc-cifar100-b50-s10", precision="float32")]) == {}


def test_the_committed_numbers_are_what_their_command_gives() -> None:
    numbers = summarise(merge(read_results([ROOT / "results"]).records))
    assert numbers == measured(), SUMMARY_COMMAND
    assert json.loads(summary_text(numbers)) == numbers
