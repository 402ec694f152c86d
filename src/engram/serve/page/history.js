// History: lessons and how accuracy went, undo, downloads.

import { api } from "./api.js";
import { lessonChart } from "./charts.js";
import { busy, button, count, duration, fill, h, listing, percent, reported, sentence, showError } from "./dom.js";
import { change, confusionMatrix, emptyState, fillLater } from "./parts.js";
import { model, path } from "./store.js";
import { undoLesson } from "./teach.js";

/** The accuracy of all classes after a lesson, from those of old, taught again and new ones. */
function overall(entry, by) {
  const plain = entry.plain ?? {};
  const heldout = entry.heldout ?? {};
  const parts = [["after", "after"], ["new", "new"]].map(([name, key]) => [reported(plain[name], by), heldout[key] ?? 0]).filter(([share, n]) => share !== null && n);
  const images = parts.reduce((sum, [, n]) => sum + n, 0);
  return images ? parts.reduce((sum, [share, n]) => sum + share * n, 0) / images : null;
}

const DONE = { learned: "Learned", removed: "Removed" };

export function historyView() {
  let loaded = null;
  const element = h("div", { class: "view" });

  async function show() {
    const of = model();
    if (!of?.exists) {
      loaded = null;
      fill(element, h("h1", {}, "History"), emptyState("No lessons yet",
        "Each lesson is listed here with what it taught and what was forgotten. The first one starts in Teach.", "Teach the first classes", "teach"));
      return;
    }
    try {
      const lessons = await api.get(path("/lessons"));
      const now = `${of.name} ${of.digest}`;
      if (loaded === now && element.childElementCount) return;
      loaded = now;
      draw(of, lessons);
    } catch (error) {
      showError(error);
    }
  }

  function draw(of, lessons) {
    const by = of.predictors ?? [];
    const learned = lessons.filter((each) => each.what === "learned");
    const series = [
      { name: "all classes", kind: "all", values: learned.map((each) => overall(each, by)) },
      { name: "old classes", kind: "old", values: learned.map((each) => reported(each.after, by)) },
      { name: "new classes", kind: "new", values: learned.map((each) => reported(each.new, by)) },
    ].filter((each) => each.values.some((value) => value !== null));
    const undo = button("Undo the last change", { icon: "undo", disabled: of.can_undo === false, onclick: () => undoLesson(undo) });
    const matrix = h("div", {}, h("p", { class: "hint" }, "Loading…"));
    fill(element,
      h("h1", {}, "History"),
      h("p", { class: "lead" }, facts(of)),
      h("div", { class: "actions start" }, undo,
        button("Download ONNX", { icon: "download", onclick: (event) => busy(event.currentTarget, () => download("/export.onnx", `${of.name}.onnx`)) }),
        button("Download the report", { icon: "download", onclick: (event) => busy(event.currentTarget, () => download("/report.html", `${of.name}-report.html`)) })),
      !of.can_undo && of.why_no_undo && h("p", { class: "hint" }, sentence(of.why_no_undo)),
      h("div", { class: "two" },
        h("section", { class: "card", "aria-labelledby": "chart-title" }, h("h2", { id: "chart-title" }, "Accuracy over lessons"),
          series.length ? lessonChart(series, learned.map((_, place) => place + 1)) : h("p", { class: "hint" }, "No images were held out, so no accuracy was measured.")),
        h("section", { "aria-labelledby": "lessons-title" }, h("h2", { id: "lessons-title" }, "Lessons and changes"),
          h("ol", { class: "timeline" }, lessons.map((entry, place) => lesson(entry, place, lessons, by)).reverse()))),
      h("section", { class: "card", "aria-labelledby": "matrix-title" }, h("h2", { id: "matrix-title" }, "Which classes are mixed up"), matrix));
    fillLater(matrix, confusionMatrix());
  }

  function facts(of) {
    const parts = [count(of.num_classes, "class", "classes"), of.method && `method ${of.method}`, of.backbone && `network ${of.backbone}`,
      of.weights && `starting from ${of.weights}`, of.image_size && `images of ${[of.image_size].flat().join(" × ")} pixels`];
    return `${of.name}: ${parts.filter(Boolean).join(", ")}.`;
  }

  function lesson(entry, place, lessons, by) {
    const names = entry.classes;
    const what = DONE[entry.what];
    const title = `${what} ${names.length ? listing(names, 6) : count(entry.num_classes, "class", "classes")}`;
    const before = reported(entry.before, by);
    const after = reported(entry.after, by);
    const again = reported(entry.refreshed_after, by);
    const fresh = reported(entry.new, by);
    const when = entry.date ? new Date(entry.date) : null;
    return h("li", { class: "card lesson" },
      h("h3", {}, title),
      h("p", { class: "hint" }, place === lessons.length - 1 && [h("span", { class: "badge" }, "latest"), " "], [
        when && !Number.isNaN(when.valueOf()) && when.toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
        entry.images && count(entry.images, "image"), entry.epochs && count(entry.epochs, "epoch"), entry.seconds && duration(entry.seconds),
      ].filter(Boolean).join(" · ")),
      (after !== null || fresh !== null || again !== null) && h("dl", { class: "numbers" },
        after !== null && h("div", {}, h("dt", {}, "Old classes"), h("dd", {}, before !== null && [percent(before), " → "], h("strong", {}, percent(after)), " ", before !== null && change(before, after))),
        again !== null && h("div", {}, h("dt", {}, "Taught again"), h("dd", {}, percent(reported(entry.refreshed_before, by)), " → ", h("strong", {}, percent(again)), " ", change(reported(entry.refreshed_before, by), again))),
        fresh !== null && h("div", {}, h("dt", {}, again === null ? "New classes" : "Classes of the lesson"), h("dd", {}, h("strong", {}, percent(fresh))))));
  }

  return {
    element, show,
    changed: (kind) => { if (kind === "models" && element.isConnected) show(); },
  };
}

async function download(rest, name) {
  const blob = await api.file(path(rest));
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name, class: "hidden" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
