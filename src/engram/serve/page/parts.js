// Parts that several views share: empty states, the table of a lesson, the confusion matrix.

import { api } from "./api.js";
import { add, bar, count, fill, h, icon, openDialog, percent, remoteImage, reported, sentence } from "./dom.js";
import { examplePath, model, path, store } from "./store.js";

/** What is shown where there is nothing yet: a title, two sentences, and where to go. */
export function emptyState(title, text, action, view) {
  return h("div", { class: "empty" }, h("div", { class: "zone-icon" }, icon("book")), h("h2", {}, title), h("p", {}, text),
    h("a", { class: "button main", href: `#/${encodeURIComponent(store.name)}/${view}` }, action));
}

/** A box that scrolls sideways and can be reached by keyboard. */
export function scrollBox(label, ...content) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
}

/** The difference of two accuracies, as text and as a class. */
export function change(before, after) {
  if (typeof before !== "number" || typeof after !== "number") return h("span", { class: "hint" }, "–");
  const points = after - before;
  if (Math.abs(points) < 0.05) return h("span", { class: "hint" }, "± 0.0");
  const worse = points < 0;
  return h("span", { class: worse ? "worse" : "better" }, `${worse ? "−" : "+"}${Math.abs(points).toFixed(1)}`);
}

/** The table of what was learned and forgotten, class by class, the most forgotten first. */
export function learnedTable(result) {
  const by = model()?.predictors ?? [];
  const again = new Set(result.refreshed ?? []);
  const rows = (result.by_class ?? []).map((entry) => ({
    name: entry.class,
    before: entry.before ? reported(entry.before, by) : null,
    after: reported(entry.after, by),
    fresh: !entry.before,
    again: again.has(entry.class),
  }));
  const lost = (row) => (row.fresh ? Infinity : (row.after ?? 0) - (row.before ?? 0));
  rows.sort((a, b) => lost(a) - lost(b));
  const compared = rows.some((row) => !row.fresh);
  const only = (...cells) => (compared ? cells : null); // a first lesson has nothing before
  return scrollBox("Accuracy of each class before and after the lesson",
    h("table", { class: "learned" },
      h("caption", { class: "hidden" }, "Accuracy of each class on held-out images, before and after the lesson"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "text" }, "Class"), only(h("th", { scope: "col" }, "Before")),
        h("th", { scope: "col" }, compared ? "After" : "Accuracy"), only(h("th", { scope: "col" }, "Change")), h("th", { scope: "col", class: "wide-only" }, h("span", { class: "hidden" }, "After, as a bar")))),
      h("tbody", {}, rows.map((row) => h("tr", {},
        h("th", { scope: "row", class: "text" }, h("span", {}, row.name), " ", compared && row.fresh && h("span", { class: "badge new" }, "new"), row.again && h("span", { class: "badge" }, "taught again")),
        only(h("td", {}, row.fresh ? h("span", { class: "hint" }, "–") : percent(row.before))),
        h("td", {}, h("strong", {}, percent(row.after))),
        only(h("td", {}, row.fresh ? h("span", { class: "hint" }, "–") : change(row.before, row.after))),
        h("td", { class: "wide-only bar-cell" }, typeof row.after === "number" && beforeAfterBar(row)))))));
}

function beforeAfterBar(row) {
  const drawn = bar(row.after / 100, `${percent(row.after)} after`, row.fresh ? "fresh" : "");
  if (typeof row.before === "number") {
    const mark = h("span", { class: "bar-mark" });
    mark.style.left = `${row.before}%`;
    drawn.append(mark);
  }
  return drawn;
}

/** Two or three large numbers of a lesson. */
export function figures(result) {
  const by = model()?.predictors ?? [];
  const before = reported(result.before, by);
  const after = reported(result.after, by);
  const fresh = reported(result.new_accuracy, by);
  const heldout = result.heldout ?? {};
  const tested = (n) => (n ? `of ${count(n, "held-out image")}` : "on held-out images");
  const box = h("div", { class: "figures" });
  if (after !== null) {
    add(box, h("div", {}, h("span", { class: "figure-label" }, "Old classes"),
      h("span", { class: "figure-value" }, percent(after)),
      h("span", { class: "hint" }, before === null ? tested(heldout.after) : [`before ${percent(before)}, `, change(before, after), " points"])));
  }
  const refreshed = reported(result.refreshed_after, by);
  if (refreshed !== null) {
    add(box, h("div", {}, h("span", { class: "figure-label" }, "Classes taught again"), h("span", { class: "figure-value" }, percent(refreshed)),
      h("span", { class: "hint" }, `before ${percent(reported(result.refreshed_before, by))}, `, change(reported(result.refreshed_before, by), refreshed), " points")));
  }
  if (fresh !== null && result.new.length > (result.refreshed ?? []).length) {
    add(box, h("div", {}, h("span", { class: "figure-label" }, (result.refreshed ?? []).length ? "Classes of the lesson" : "New classes"), h("span", { class: "figure-value" }, percent(fresh)),
      h("span", { class: "hint" }, tested(heldout.new))));
  }
  return box;
}

/** The confusion matrix on held-out images; a cell shows its images. */
export async function confusionMatrix() {
  const of = model();
  const { classes, matrix, cells = {} } = await api.get(path("/confusion"));
  const total = matrix.flat().reduce((sum, n) => sum + n, 0);
  if (!total) return h("p", { class: "hint" }, "No image was held out, so it is not known which classes are mixed up.");
  const right = matrix.reduce((sum, row, i) => sum + row[i], 0);
  const open = (i, j) => {
    const ids = cells[`${i},${j}`] ?? [];
    const n = matrix[i][j];
    const title = i === j ? `${classes[i]}, recognised` : `${classes[i]}, taken for ${classes[j]}`;
    openDialog(title, () => [
      h("p", { class: "hint" }, `${count(n, "held-out image")} of ${count(matrix[i].reduce((sum, each) => sum + each, 0), "image")} of ${classes[i]}.${ids.length < n ? ` The first ${ids.length} are shown.` : ""}`),
      ids.length ? h("div", { class: "pictures" }, ids.map((id, place) => remoteImage(examplePath(id, of), `Image ${place + 1} of ${classes[i]}`))) : h("p", {}, "These images are not kept."),
    ], { wide: true });
  };
  const worst = matrix.flatMap((row, i) => row.map((n, j) => ({ i, j, n }))).filter(({ i, j, n }) => i !== j && n > 0).sort((a, b) => b.n - a.n).slice(0, 5);
  const most = Math.max(1, ...matrix.map((row) => row.reduce((sum, n) => sum + n, 0)));
  const table = h("table", { class: `matrix ${classes.length > 14 ? "dense" : ""}`.trim() },
    h("caption", { class: "hidden" }, "Rows: the right class. Columns: what the model says. Numbers of held-out images."),
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "corner" }, h("span", { class: "hint" }, "right ↓ said →")),
      classes.map((name) => h("th", { scope: "col" }, h("span", { class: "turned" }, name))))),
    h("tbody", {}, matrix.map((row, i) => {
      const sum = Math.max(1, row.reduce((all, n) => all + n, 0));
      return h("tr", {}, h("th", { scope: "row", class: "text" }, classes[i]), row.map((n, j) => {
        if (!n) return h("td", { class: i === j ? "diagonal" : "" }, h("span", { class: "zero" }, "·"));
        const cell = h("button", { type: "button", class: `cell ${i === j ? "right" : "wrong"}`, "aria-label": `${classes[i]} ${i === j ? "recognised" : `taken for ${classes[j]}`}: ${count(n, "image")}`, onclick: () => open(i, j) }, String(n));
        cell.style.setProperty("--share", String(0.12 + 0.88 * Math.min(1, n / (i === j ? sum : Math.max(sum / 2, most / 6)))));
        return h("td", {}, cell);
      }));
    })));
  return h("div", {},
    h("p", { class: "hint" }, `${right} of ${count(total, "held-out image")} are recognised. Rows are the right class, columns what the model says. Press a number to see its images.`),
    worst.length > 0 && h("ul", { class: "worst" }, worst.map(({ i, j, n }) => h("li", {},
      h("button", { type: "button", class: "chip", onclick: () => open(i, j) }, `${classes[i]} taken for ${classes[j]}: ${n}`)))),
    scrollBox("Confusion matrix", table));
}

/** A list of sentences, such as warnings. */
export function sentences(texts, kind = "warning") {
  return texts.length ? h("ul", { class: `sentences ${kind}` }, texts.map((text) => h("li", {}, icon("warn"), h("span", {}, sentence(text))))) : null;
}

/** Fills a place with what a promise brings, and with the error if it brings none. */
export async function fillLater(place, promise) {
  try {
    fill(place, await promise);
  } catch (error) {
    fill(place, h("p", { class: "hint" }, sentence(error.message)));
  }
}
