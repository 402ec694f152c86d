"""Properties of the stream of classes, the memory of exemplars, and the metrics of the accuracy matrix."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram.core import metrics
from engram.core.errors import EngramError
from engram.data.memory import Memory, MemoryConfig
from engram.data.stage import Samples
from engram.data.stream import Stream, class_order, describe_order
from engram.runs.result import StageRecord, summarise

# The stream


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """A class order, a base and an increment."""
    count = draw(st.integers(1, 30))
    return draw(st.permutations(range(count))), draw(st.integers(1, count)), draw(st.integers(1, 12))


@settings(deadline=None)
@given(streams())
def test_the_stages_partition_the_classes_in_order(case: tuple[list[int], int, int]) -> None:
    order, base, increment = case
    stream = Stream.build(order, base, increment)
    labels = [label for stage in range(len(stream)) for label in stream.new_labels(stage)]
    assert labels == list(range(len(order)))
    assert [stream.order[label] for label in labels] == order
    assert stream.sizes[0] == base
    assert all(size == increment for size in stream.sizes[1:-1])
    if len(stream) > 1:
        left = (len(order) - base) % increment
        assert stream.sizes[-1] == (left or increment)  # the last stage takes what is left
    assert len(stream) == 1 + math.ceil((len(order) - base) / increment)
    seen = 0
    for stage in range(len(stream)):
        assert stream.new_labels(stage) == range(seen, seen + stream.sizes[stage])
        seen += stream.sizes[stage]
        assert stream.num_seen(stage) == seen


@settings(deadline=None)
@given(streams())
def test_labels_and_class_ids_map_both_ways(case: tuple[list[int], int, int]) -> None:
    stream = Stream.build(*case)
    ids = np.arange(len(stream.order))
    labels = stream.labels_of(ids)
    assert [stream.order[label] for label in labels] == ids.tolist()
    assert stream.labels_of(np.array(stream.order)).tolist() == ids.tolist()
    assert stream.labels_of(np.array([stream.order[0]] * 3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("order", "base", "increment", "sentence"),
    [
        ([0, 1, 1], 1, 1, "must name each of the 3 classes once"),
        ([0, 1, 3], 1, 1, "must name each of the 3 classes once"),
        ([-1, 0, 1], 1, 1, "must name each of the 3 classes once"),
        ([0, 1, 2], 4, 1, "1 to 3 classes .* got 4"),
        ([0, 1, 2], 0, 1, "1 to 3 classes .* got 0"),
        ([0, 1, 2], 1, 0, "at least 1 class per stage, got 0"),
        ([0, 1, 2], 1, -2, "at least 1 class per stage, got -2"),
    ],
)
def test_impossible_streams_are_refused(order: list[int], base: int, increment: int, sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        Stream.build(order, base, increment)


# Class orders

NAMES = ["ant", "bee", "cat", "dog", "elk"]


@settings(deadline=None)
@given(st.permutations(range(5)), st.lists(st.booleans(), min_size=5, max_size=5))
def test_an_order_is_given_by_name_or_by_id_and_not_by_both(order: list[int], by_name: list[bool]) -> None:
    spec = ", ".join(NAMES[i] if named else str(i) for i, named in zip(order, by_name, strict=True))
    if len(set(by_name)) == 1:
        assert class_order(spec, "folder", NAMES) == tuple(order)
    else:
        with pytest.raises(EngramError, match=r"both names, such as '.*, and ids, such as '.*; give every class by"):
            class_order(spec, "folder", NAMES)


def test_in_an_order_of_classes_that_are_called_by_numbers_numbers_are_names() -> None:
    names = ["1", "2", "3", "4"]
    assert class_order("4,3,2,1", "folder", names) == (3, 2, 1, 0)
    for spec in ("0,4,3,2", "0,1,2,3"):
        with pytest.raises(EngramError, match="and ids, such as '0'; give every class by its name"):
            class_order(spec, "folder", names)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_a_seeded_order_is_a_permutation_that_repeats(seed: int, count: int) -> None:
    names = [f"class {i}" for i in range(count)]
    order = class_order(f"seed:{seed}", "folder", names)
    assert sorted(order) == list(range(count))
    assert class_order(f" seed:{seed} ", "folder", names) == order
    # A set without published orders takes a number as the seed.
    assert class_order(str(seed), "folder", names) == order


def test_seeds_differ_and_natural_is_by_id() -> None:
    names = [f"class {i}" for i in range(30)]
    assert len({class_order(f"seed:{seed}", "folder", names) for seed in range(10)}) == 10
    assert class_order("natural", "folder", names) == tuple(range(30))


def test_published_orders_have_a_number() -> None:
    names = [f"class {i}" for i in range(100)]
    orders = [class_order(str(number), "cifar100", names) for number in (1, 2, 3)]
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(100)) for order in orders)
    # The first order begins as in the released configurations of PODNet and AFC.
    assert orders[0][:4] == (87, 0, 52, 58)
    assert describe_order("1", "cifar100") == "1 (published)"
    assert class_order("seed:1", "cifar100", names) not in orders


@pytest.mark.parametrize(
    ("spec", "dataset", "sentence"),
    [
        ("ant,bee,cat,dog,ant", "folder", "names ant more than once"),
        ("0,1,2,3,0", "folder", "names ant more than once"),
        ("ant,bee,cat", "folder", "lacks 2 of the 5 classes: dog, elk"),
        ("ant,bee,cat,dgo,elk", "folder", r"names 'dgo', but there is no such class: did you mean 'dog'\?"),
        ("ant,bee,cat,dog,7", "folder", "names '7', but there is no such class"),
        ("0,1,2,3,5", "folder", "names '5', but there is no such class"),
        ("ant,bee,cat,dog,", "folder", "names '', but there is no such class"),
        ("backwards", "folder", "'backwards' is none of"),
        ("seed:x", "folder", "'seed:x' is none of"),
        ("-1", "folder", "'-1' is none of"),
        ("", "folder", "'' is none of"),
        ("0", "cifar100", "published class orders 1 to 3, got 0"),
        ("4", "cifar100", "published class orders 1 to 3, got 4; 'seed:4'"),
        ("²", "folder", "'²' is none of"),
        ("seed:²", "folder", "'seed:²' is none of"),
        ("ant,bee,cat,dog,²", "folder", "names '²', but there is no such class"),
    ],
)
def test_bad_orders_are_refused(spec: str, dataset: str, sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        class_order(spec, dataset, NAMES)


# The memory


@st.composite
def histories(draw: st.DrawFn) -> list[list[int]]:
    """For each stage the number of images chosen of each of its new classes."""
    return draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5))


def pool_of(label_counts: dict[int, int], first: int) -> Samples:
    """Images of these labels in shuffled order, each with a source and pixels of its own."""
    labels = torch.tensor([label for label, count in label_counts.items() for _ in range(count)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(first))]
    sources = torch.arange(first, first + len(labels))
    images = (sources % 256).to(torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3).contiguous()
    return Samples(images, labels, sources, torch.zeros(len(labels), dtype=torch.bool))


def play(config: MemoryConfig, history: list[list[int]]) -> tuple[Memory, dict[int, list[int]], list[int]]:
    """The memory after these stages, the sources chosen of each class in their order, and the size after each stage."""
    memory, offered, sizes = Memory(config), {}, []
    seen = first = 0
    for counts in history:
        new = dict(enumerate(counts, start=seen))
        seen += len(counts)
        pool = pool_of(new, first)
        first += len(pool)
        quota = config.per_class(seen)
        chosen: dict[int, torch.Tensor] = {}
        for label in new if quota != 0 else ():
            rows = pool.rows_of(label).flip(0)[:quota]
            chosen[label] = rows
            offered[label] = pool.sources[rows].tolist()
        before = {label: memory.of(label).sources.tolist() for label in memory.labels}
        memory.update(pool, chosen, seen)
        for label, sources in before.items():  # what is kept is the beginning of what was there
            kept = memory.of(label).sources.tolist()
            assert kept == sources[: len(kept)]
        sizes.append(len(memory))
    return memory, offered, sizes


@settings(deadline=None)
@given(histories(), st.integers(1, 6))
def test_a_budget_per_class_is_kept(history: list[list[int]], size: int) -> None:
    memory, offered, _ = play(MemoryConfig("per_class", size), history)
    assert memory.labels == list(range(sum(map(len, history))))
    for label, sources in offered.items():
        assert memory.of(label).sources.tolist() == sources[:size]
        assert len(memory.of(label)) == min(size, len(sources))


@settings(deadline=None)
@given(histories(), st.integers(0, 40))
def test_a_total_budget_is_never_exceeded_and_shared_alike(history: list[list[int]], spare: int) -> None:
    num_classes = sum(map(len, history))
    config = MemoryConfig("total", num_classes + spare)
    config.check(num_classes)
    memory, offered, sizes = play(config, history)
    assert max(sizes) <= config.size
    share = config.size // num_classes
    for label, sources in offered.items():
        assert memory.of(label).sources.tolist() == sources[:share]


@settings(deadline=None)
@given(histories())
def test_all_keeps_everything_and_none_nothing(history: list[list[int]]) -> None:
    memory, offered, _ = play(MemoryConfig("all", 0), history)
    assert len(memory) == sum(map(sum, history))
    assert {label: memory.of(label).sources.tolist() for label in memory.labels} == offered
    memory, _, sizes = play(MemoryConfig("none", 0), history)
    assert set(sizes) == {0}
    assert memory.samples() is None
    assert memory.state_dict() == {}


@settings(deadline=None)
@given(histories(), st.integers(1, 6))
def test_samples_are_marked_copies_class_by_class(history: list[list[int]], size: int) -> None:
    memory, _, _ = play(MemoryConfig("per_class", size), history)
    samples = memory.samples()
    assert samples is not None
    assert samples.exemplar.all()
    assert samples.labels.tolist() == sorted(samples.labels.tolist())
    assert samples.pixels[:, 0, 0, 0].tolist() == [source % 256 for source in samples.sources.tolist()]


@settings(max_examples=40, deadline=None)
@given(histories(), st.integers(1, 6))
def test_a_saved_memory_comes_back_and_goes_on_alike(history: list[list[int]], size: int) -> None:
    config = MemoryConfig("total", size * sum(map(len, history)) + 1)
    memory, _, _ = play(config, history)
    copy = Memory(config)
    copy.load_state_dict({name: value.clone() for name, value in memory.state_dict().items()})
    pool = pool_of({len(memory.labels): 3}, first=1000)
    for _ in range(2):
        assert copy.labels == memory.labels
        for label in memory.labels:
            ours, theirs = memory.of(label), copy.of(label)
            for field in ("images", "labels", "sources", "exemplar"):
                assert torch.equal(getattr(ours, field), getattr(theirs, field))
        num_classes = len(memory.labels) + 1
        for each in (memory, copy):
            each.update(pool, {num_classes - 1: torch.arange(len(pool))}, num_classes)


def test_an_exemplar_does_not_change_with_the_pool_it_came_from() -> None:
    memory, pool = Memory(MemoryConfig("per_class", 2)), pool_of({0: 4}, first=5)
    memory.update(pool, {0: torch.tensor([2, 0])}, 1)
    pool.pixels.zero_()
    assert memory.of(0).pixels[:, 0, 0, 0].tolist() == [7, 5]


def test_a_class_that_keeps_some_of_its_exemplars_keeps_its_place() -> None:
    memory = Memory(MemoryConfig("per_class", 2))
    pool = pool_of({0: 2, 1: 2}, first=5)
    memory.update(pool, {label: pool.rows_of(label) for label in (0, 1)}, 2)
    last = memory.of(0).sources.tolist()[1]
    memory.keep(0, torch.tensor([1]))
    samples = memory.samples()
    assert samples is not None
    assert samples.labels.tolist() == [0, 1, 1]
    assert samples.sources.tolist() == [last, *memory.of(1).sources.tolist()]
    memory.keep(0, torch.tensor([], dtype=torch.int64))
    assert memory.labels == [1]


@pytest.mark.parametrize(
    ("text", "budget", "size"),
    [("per_class=20", "per_class", 20), ("total=2000", "total", 2000), ("all", "all", 0), ("none", "none", 0)],
)
def test_a_budget_is_written_as_it_is_read(text: str, budget: str, size: int) -> None:
    config = MemoryConfig.parse(text)
    assert (config.budget, config.size, config.selection) == (budget, size, "herding")
    assert str(config) == text


def test_shares_of_the_two_budgets_of_the_paper() -> None:
    assert [MemoryConfig.parse("per_class=20").per_class(n) for n in (50, 51, 100)] == [20, 20, 20]
    assert [MemoryConfig.parse("total=2000").per_class(n) for n in (50, 51, 100)] == [40, 39, 20]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("per_class=0", "at least one exemplar per class, got per_class=0"),
        ("total=-5", "at least one exemplar per class, got total=-5"),
        ("per_klass=3", "'per_klass=3' is none of"),
        ("20", "'20' is none of"),
        ("total=2.5", "'total=2.5' is none of"),
    ],
)
def test_bad_budgets_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        MemoryConfig.parse(text)


def test_a_total_below_one_a_class_is_refused() -> None:
    MemoryConfig.parse("total=10").check(10)
    with pytest.raises(EngramError, match="less than one for each of 11 classes; give at least total=11"):
        MemoryConfig.parse("total=10").check(11)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"selection": "herdin"}, r"no exemplar selection 'herdin': did you mean 'herding'\?"),
        ({"budget": "totl"}, r"no memory budget 'totl': did you mean 'total'\?"),
    ],
)
def test_misspelt_memories_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EngramError, match=sentence):
        MemoryConfig(**fields)


# Metrics


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float]]:
    """An accuracy matrix: row t has t + 1 entries in percent."""
    stages = draw(st.integers(1, 7))
    percent = st.floats(0, 100)
    return [draw(st.lists(percent, min_size=t + 1, max_size=t + 1)) for t in range(stages)]


@st.composite
def predictions(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Stage sizes, targets that cover every stage, and predictions."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    num_classes = sum(sizes)
    label = st.integers(0, num_classes - 1)
    targets = draw(st.permutations([*range(num_classes), *draw(st.lists(label, max_size=15))]))
    predicted = draw(st.lists(label, min_size=len(targets), max_size=len(targets)))
    return sizes, targets, predicted


@settings(deadline=None)
@given(matrices())
def test_backward_transfer_and_forgetting_are_their_sums(matrix: list[list[float]]) -> None:
    last = len(matrix) - 1
    if last == 0:
        assert metrics.backward_transfer(matrix) is None
        assert metrics.forgetting(matrix) is None
        return
    transfer = lost = 0.0
    for i in range(last):
        transfer += matrix[last][i] - matrix[i][i]
        best = -math.inf
        for t in range(last):
            if t >= i and matrix[t][i] > best:
                best = matrix[t][i]
        lost += best - matrix[last][i]
    backward, forgetting = metrics.backward_transfer(matrix), metrics.forgetting(matrix)
    assert backward == pytest.approx(transfer / last)
    assert forgetting == pytest.approx(lost / last)
    assert backward is not None
    assert forgetting is not None
    assert -100 <= backward <= 100
    assert -100 <= forgetting <= 100
    # The best accuracy on a stage is at least that of the stage itself.
    assert forgetting >= -backward - 1e-9


def test_backward_transfer_by_class_is_that_of_every_class_alone() -> None:
    matrix, sizes = [[80.0], [70.0, 90.0], [60.0, 60.0, 95.0]], [5, 2, 3]
    alone = [60.0 - 80.0] * 5 + [60.0 - 90.0] * 2
    assert metrics.backward_transfer(matrix, sizes) == pytest.approx(sum(alone) / 7)
    assert metrics.backward_transfer(matrix, [1, 1, 9]) == pytest.approx(metrics.backward_transfer(matrix))
    assert metrics.backward_transfer(matrix[:1], sizes) is None


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_average_incremental_accuracy_counts_every_stage_alike(per_stage: list[float]) -> None:
    average = metrics.average_incremental_accuracy(per_stage)
    assert average == pytest.approx(sum(per_stage) / len(per_stage))
    assert min(per_stage) - 1e-9 <= average <= max(per_stage) + 1e-9


@settings(deadline=None)
@given(predictions())
def test_accuracies_and_confusion_are_their_counts(case: tuple[list[int], list[int], list[int]]) -> None:
    sizes, targets, predicted = case
    y, p = np.array(targets, dtype=np.int16), np.array(predicted, dtype=np.int16)
    right = sum(a == b for a, b in zip(targets, predicted, strict=True))
    assert metrics.accuracy(y, p) == pytest.approx(100 * right / len(targets))

    by_stage, first = [], 0
    for size in sizes:
        inside = [(a, b) for a, b in zip(targets, predicted, strict=True) if first <= a < first + size]
        by_stage.append(100 * sum(a == b for a, b in inside) / len(inside))
        first += size
    assert metrics.accuracy_by_stage(y, p, sizes) == pytest.approx(by_stage)
    assert all(0 <= value <= 100 for value in by_stage)

    num_classes = sum(sizes)
    counts = np.zeros((num_classes, num_classes), dtype=int)
    for a, b in zip(targets, predicted, strict=True):
        counts[a, b] += 1
    table = metrics.confusion(y, p, num_classes)
    assert table.tolist() == counts.tolist()
    assert table.sum() == len(targets)
    assert np.trace(table) == right


def test_many_classes_do_not_overflow_the_confusion() -> None:
    labels = np.array([299, 150], dtype=np.int16)
    table = metrics.confusion(labels, np.array([298, 150], dtype=np.int16), 300)
    assert (table[299, 298], table[150, 150], table.sum()) == (1, 1, 2)


def test_metrics_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one prediction"):
        metrics.accuracy(np.array([]), np.array([]))
    with pytest.raises(ValueError, match="at least one stage"):
        metrics.average_incremental_accuracy([])


def test_an_estimate_is_over_all_runs_or_none() -> None:
    assert metrics.estimate([1.0, 3.0, 5.0]) == metrics.Estimate(3.0, 2.0, 3)
    assert metrics.estimate([4.0]) == metrics.Estimate(4.0, None, 1)
    for values in ([], [None], [1.0, None, 3.0]):
        assert metrics.estimate(values) is None


def test_differences_are_of_runs_that_both_have() -> None:
    ours, theirs = {"a": 4.0, "b": 2.0, "c": 9.0, "d": None, "e": 1.0}, {"a": 2.0, "b": 2.0, "d": 5.0, "e": 3.0}
    assert metrics.paired(ours, theirs) == metrics.Difference(0.0, 2.0, 3, higher=1)
    assert metrics.paired({"c": 9.0}, theirs) is None


def test_a_result_is_made_of_its_stages() -> None:
    by_stage, seconds = [[80.0], [40.0, 60.0], [50.0, 20.0, 70.0]], {"train": 2.0, "evaluate": 1.0}
    records = [
        StageRecord(i, 2 * i + 2, {"cnn": accuracy}, 3.0, {"cnn": by_stage[i]}, seconds)
        for i, accuracy in enumerate([80.0, 50.0, 56.0])
    ]
    result = summarise({"seed": 1}, records)
    assert result["average_incremental_accuracy"] == {"cnn": pytest.approx(62.0)}
    assert result["final_accuracy"] == {"cnn": 56.0}
    assert result["backward_transfer"] == {"cnn": pytest.approx((50 - 80 + 20 - 60) / 2)}
    assert result["forgetting"] == {"cnn": pytest.approx((80 - 50 + 60 - 20) / 2)}
    assert result["seconds"] == 9.0
    assert result["seconds_by"] == {"train": 6.0, "importance": 0.0, "exemplars": 0.0, "evaluate": 3.0}
    assert [stage["classes"] for stage in result["stages"]] == [2, 4, 6]
