"""What the page says in words: its title, what came out, what it came from, and what a careful reader should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engram.core.metrics import Estimate
from engram.report.formatting import count_runs, glued, join, predictor_name
from engram.report.groups import RunGroup, leaders, met_the_same, rivals
from engram.runs.reader import StoredRun

_NAMED = 5  # groups, at most, in the title and in the headline


def title(groups: Sequence[RunGroup]) -> str:
    """The groups by name, or how many methods and configurations there are, and the data."""
    data = join(dict.fromkeys(group.data.name for group in groups))
    methods = list(dict.fromkeys(group.first.method for group in groups))
    if len(groups) <= _NAMED:
        return f"{join(group.label for group in groups)} on {data}"
    if len(methods) == len(groups):
        return f"{len(methods)} methods on {data}"
    return f"{len(groups)} configurations of {methods[0] if len(methods) == 1 else f'{len(methods)} methods'} on {data}"


def headline(groups: Sequence[RunGroup]) -> str:
    """What came out, in one sentence, from the final accuracy of each group's reported predictor.

    Methods are set beside one another, each by its best configuration; of a single method its configurations.
    """
    one_method = len({group.first.method for group in groups}) == 1
    chosen = list(groups) if one_method else leaders(groups)
    results = [(group.metric("final_accuracy", group.predictors[0]), group) for group in chosen]
    known = [(value, group) for value, group in results if value is not None]
    same_classes = len({group.classes[-1] for _, group in known}) == 1
    clauses = []
    for position, (value, group) in enumerate(known[:_NAMED]):
        verb = "at" if position else "is at" if group.first.stopped else "ends at"
        over = f" over {group.classes[-1]} classes" if position == 0 or not same_classes else ""
        clauses.append(f"{group.label} {verb} {glued(value, 1)}\N{NO-BREAK SPACE}%{over}")
    rest = len(groups) - len(clauses)
    tail = f"; {rest} more {'is' if rest == 1 else 'are'} in the table" if rest > 0 else ""
    each = "each method" if _same_protocol(groups) else "each method in each protocol"
    lead = f"The best of {each}: " if len(chosen) < len(groups) else ""
    return lead + ", ".join(clauses) + tail + "."


def facts(groups: Sequence[RunGroup]) -> str:
    """What the numbers are of: predictor, protocol, number of runs, devices and days."""
    runs = [run for group in groups for run in group.runs]
    protocols = list(dict.fromkeys(_stages_in_words(run) for run in runs))
    stages = protocols[0] if len(protocols) == 1 else f"{len(protocols)} different protocols"
    devices = join(dict.fromkeys(str(run.manifest.hardware.get("device", "unknown device")) for run in runs))
    predictors = join(dict.fromkeys(predictor_name(group.predictors[0]) for group in groups))
    dates = sorted({run.manifest.created[:10] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Top-1 accuracy of the {predictors} predictor over all classes seen. {stages}; "
        f"{count_runs(len(runs))} on {devices}, {when}."
    )


def _stages_in_words(run: StoredRun) -> str:
    base, later = run.manifest.stage_sizes[0], run.manifest.stage_sizes[1:]
    if not later:
        return f"{base} classes in one stage"
    sizes = join(str(size) for size in dict.fromkeys(later))
    plural = "" if set(later) == {1} else "es"
    return f"{base} base classes, then {len(later)} stage{'s' if len(later) > 1 else ''} of {sizes} class{plural}"


def notes(groups: Sequence[RunGroup], repeats: int) -> list[str]:
    """What a careful reader should know before comparing. repeats: runs that were left out as such."""
    found = []
    if not _same_protocol(groups):
        found.append(
            "These runs differ in data or in how it was split into stages, so their numbers are not comparable."
        )
    found += [f"{group.first.recipe}: {group.first.stopped}." for group in groups if group.first.stopped]
    codes = {(group.first.recipe, group.first.manifest.method_code) for group in groups}
    found += [
        f"{recipe}: the code of the method is not the same in all runs; those of different code stand apart."
        for recipe, times in sorted(Counter(recipe for recipe, _ in codes).items())
        if times > 1
    ]
    if repeats:
        found.append(
            f"{repeats} run{' repeats' if repeats == 1 else 's repeat'} the configuration, class order and seed of "
            f"another and {'is' if repeats == 1 else 'are'} left out: the newest complete one counts, once."
        )
    if not all(met_the_same(beside) for beside in rivals(groups)):
        found.append(
            "Not every group has the same class orders and seeds, which alone make a difference: "
            "only runs that have both in common can be held against each other."
        )
    if len(groups) > 1 and _went_the_same_way(groups):
        if all(group.n == 1 for group in groups):
            found.append(
                "One run each: a difference of a point or two may be chance. More orders and seeds would tell."
            )
        else:
            found += _lead(leaders(groups))
    return found


def _same_protocol(groups: Sequence[RunGroup]) -> bool:
    return len({group.protocol for group in groups}) == 1


def _went_the_same_way(groups: Sequence[RunGroup]) -> bool:
    return _same_protocol(groups) and not any(group.first.stopped for group in groups)


def comparable(groups: Sequence[RunGroup]) -> bool:
    """True when all groups went the same way to its end, over the same class orders: a higher mean is a better one."""
    return _went_the_same_way(groups) and met_the_same(groups)


def _lead(best: Sequence[RunGroup]) -> list[str]:
    """How far the first method ends from the second, run by run, where there are differences enough for a spread."""
    if len(best) < 2:
        return []
    first, second = best[:2]
    gap = first.difference(second, "final_accuracy")
    if gap is None or gap.std is None:
        return []
    size = f"{glued(Estimate(abs(gap.mean), gap.std, gap.n), 1)} points"
    ends, told = f"{size} {'above' if gap.mean > 0 else 'below'}", ""
    if float(f"{gap.mean:.1f}") == 0:
        ends, told = "level with", f"{size}, "
    verdict = "more than" if abs(gap.mean) > gap.std else "within"
    return [
        f"{first.label} ends {ends} {second.label} ({told}mean and standard deviation over {gap.n} pairs of runs with "
        f"the same class order and seed; higher in {gap.higher}): {verdict} the spread of these differences."
    ]
