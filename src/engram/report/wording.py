"""The sentences of the report: title, headline, facts and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engram.core.metrics import Estimate
from engram.report.formatting import count_runs, glued, join, predictor_name
from engram.report.groups import RunGroup, comparable_groups, have_same_orders, leaders
from engram.runs.stored_run import StoredRun

_NAMED = 5  # groups in the title and the headline, at most


def title(groups: Sequence[RunGroup]) -> str:
    """The names of the groups (or how many there are), and the data set."""
    data = join(dict.fromkeys(group.data.name for group in groups))
    methods = list(dict.fromkeys(group.first.method for group in groups))
    if len(groups) <= _NAMED:
        return f"{join(group.label for group in groups)} on {data}"
    if len(methods) == len(groups):
        return f"{len(methods)} methods on {data}"
    return f"{len(groups)} configurations of {methods[0] if len(methods) == 1 else f'{len(methods)} methods'} on {data}"


def headline(groups: Sequence[RunGroup]) -> str:
    """The result in one sentence: the final accuracy of the best configuration of each method.

    If there is only one method, of each configuration.
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
    """Predictor, protocol, number of runs, devices and dates."""
    runs = [run for group in groups for run in group.runs]
    protocols = list(dict.fromkeys(_stages_in_words(run) for run in runs))
    stages = protocols[0] if len(protocols) == 1 else f"{len(protocols)} different protocols"
    devices = join(dict.fromkeys(str(run.manifest.hardware.get("device", "unknown device")) for run in runs))
    predictors = join(dict.fromkeys(predictor_name(group.predictors[0]) for group in groups))
    dates = sorted({run.manifest.created[:10] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Top-1 accuracy of the {predictors} predictor on the test images of all classes seen. {stages}; "
        f"{count_runs(len(runs))} on {devices}, {when}."
    )


def _stages_in_words(run: StoredRun) -> str:
    base, later = run.manifest.stage_sizes[0], run.manifest.stage_sizes[1:]
    if not later:
        return f"{base} classes in one stage"
    # Stages of one size, of which the last may be smaller, or every size if they are uneven.
    sizes = join(str(size) for size in (later if len(set(later[:-1])) > 1 else dict.fromkeys(later)))
    plural = "" if set(later) == {1} else "es"
    return f"{base} base classes, then {len(later)} stage{'s' if len(later) > 1 else ''} of {sizes} class{plural}"


def notes(groups: Sequence[RunGroup], repeats: int) -> list[str]:
    """Warnings about comparing the numbers. repeats: number of repeated runs that were left out."""
    found = []
    if not _same_protocol(groups):
        found.append(
            "These runs differ in data or in how it was split into stages, so their numbers are not comparable."
        )
    found += [f"{group.first.recipe}: {group.first.stopped}." for group in groups if group.first.stopped]
    codes = {(group.first.recipe, group.first.manifest.method_code) for group in groups}
    found += [
        f"{recipe}: the method's code differs between runs; runs with different code are separate groups."
        for recipe, times in sorted(Counter(recipe for recipe, _ in codes).items())
        if times > 1
    ]
    if repeats:
        found.append(
            f"{repeats} run{' repeats' if repeats == 1 else 's repeat'} the configuration, class order and seed of "
            f"another and {'is' if repeats == 1 else 'are'} left out: the newest complete one counts, once."
        )
    if not all(have_same_orders(peers) for peers in comparable_groups(groups)):
        found.append(
            "Not every group has the same class orders and seeds, which change the results: "
            "compare only runs with the same class order and seed."
        )
    if len(groups) > 1 and _all_complete(groups):
        if all(group.n == 1 for group in groups):
            found.append("One run each: a difference of a point or two may be chance. Run more class orders and seeds.")
        else:
            found += _lead(leaders(groups))
    return found


def _same_protocol(groups: Sequence[RunGroup]) -> bool:
    return len({group.protocol for group in groups}) == 1


def _all_complete(groups: Sequence[RunGroup]) -> bool:
    return _same_protocol(groups) and not any(group.first.stopped for group in groups)


def comparable(groups: Sequence[RunGroup]) -> bool:
    """Whether all groups are complete, with the same protocol, class orders and seeds: then means can be ranked."""
    return _all_complete(groups) and have_same_orders(groups)


def _lead(best: Sequence[RunGroup]) -> list[str]:
    """The difference between the two best methods over pairs of runs, if there are at least two pairs."""
    if len(best) < 2:
        return []
    first, second = best[:2]
    gap = first.difference(second, "final_accuracy")
    if gap is None or gap.std is None:
        return []
    size = f"{glued(Estimate(abs(gap.mean), gap.std, gap.n), 1)} points"
    ends, detail = f"{size} {'above' if gap.mean > 0 else 'below'}", ""
    if float(f"{gap.mean:.1f}") == 0:
        ends, detail = "level with", f"{size}, "
    verdict = "more than" if abs(gap.mean) > gap.std else "within"
    return [
        f"{first.label} ends {ends} {second.label} ({detail}mean and standard deviation over {gap.n} pairs of runs "
        f"with the same class order and seed; higher in {gap.higher}): {verdict} the spread of these differences."
    ]
