"""Balanced and plain accuracy, and when a loss is more than chance."""

from __future__ import annotations

import pytest

from engram.models.accuracies import balanced_accuracy, is_harmed, plain_accuracy
from engram.models.history import LessonRecord
from engram.models.lesson_plan import forgetting_warnings


def test_a_class_with_many_images_counts_more_only_in_plain_accuracy() -> None:
    accuracy = {"a": {"cnn": 100.0}, "b": {"cnn": 0.0, "nme": 50.0}, "c": {}}
    assert balanced_accuracy(accuracy, "abc") == {"cnn": 50.0}
    assert plain_accuracy(accuracy, {"a": 9, "b": 1}, "abc") == {"cnn": 90.0}
    assert balanced_accuracy(accuracy, "c") == plain_accuracy(accuracy, {}, "c") == {}


@pytest.mark.parametrize(
    ("before", "after", "images", "harmed"),
    [
        (80, 74, 1000, True),
        (80, 76, 1000, False),  # 4 points are allowed
        (80, 70, 20, False),  # chance
        (100, 0, 4, True),
        (80, 65, 0, False),  # of an early version
        (80, 55, 0, True),
    ],
)
def test_a_loss_must_be_more_than_chance(before: float, after: float, images: int, harmed: bool) -> None:
    assert is_harmed(before, after, images) is harmed


def test_plain_accuracy_warns_too_and_says_how_to_undo() -> None:
    plain = {"before": {"cnn": 66.0}, "after": {"cnn": 45.7}}
    entry = LessonRecord("learned", "", before={"cnn": 68.5}, after={"cnn": 74.3}, plain=plain, heldout={"after": 300})
    (warning,) = forgetting_warnings(entry, undoable=True)
    assert "old classes (plain cnn from 66.0 to 45.7 % on 300 held-out images); take it back" in warning.message
    assert list(forgetting_warnings(LessonRecord("learned", ""), undoable=True)) == []
