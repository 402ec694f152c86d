// Compare: two models side by side, class by class, and on the same image.

import { api, modelPath } from "./api.js";
import { bar, count, fill, freshId, h, percent, reported, sentence, showError } from "./dom.js";
import { dropZone } from "./files.js";
import { change, scrollBox } from "./parts.js";
import { answerParts } from "./recognise.js";
import { store } from "./store.js";

const MOST = 20; // images at a time

export function compareView() {
  let pair = null;
  const images = []; // {file, url}
  const choosers = h("div", { class: "toolbar pair" });
  const table = h("div", {});
  const results = h("ul", { class: "compared", "aria-label": "Images recognised by both models" });
  const zone = dropZone("Drop images here to see what both models say", "or paste them.", take, { folders: false });
  const element = h("div", { class: "view" }, h("h1", {}, "Compare"), choosers, table, zone, results);

  function models() {
    return pair.map((name) => store.models.find((each) => each.name === name));
  }

  function show() {
    const names = store.models.map((each) => each.name);
    if (!pair || !pair.every((name) => names.includes(name))) {
      const other = names.find((name) => name !== store.name);
      pair = [store.name, other];
    }
    fill(choosers, pair.map((name, place) => {
      const id = freshId("pair");
      const select = h("select", { id, class: "field", onchange: () => { pair[place] = select.value; show(); } },
        store.models.map((each) => h("option", { value: each.name, selected: each.name === name }, each.name)));
      return h("div", { class: "labelled" }, h("label", { for: id }, place ? "Second model" : "First model"), select);
    }));
    drawTable();
    drawImages();
  }

  async function drawTable() {
    const both = models();
    const asked = pair.join("\n");
    try {
      const known = await Promise.all(both.map((each) => (each.exists ? api.get(modelPath(each.name, "/classes")) : [])));
      if (asked !== pair.join("\n")) return;
      const shares = known.map((classes, place) => new Map(classes.map((each) => [each.name, reported(each.accuracy, both[place].predictors ?? [])])));
      const names = [...new Set(known.flat().map((each) => each.name))];
      const rows = names.map((name) => ({ name, first: shares[0].get(name), second: shares[1].get(name), in: shares.map((each) => each.has(name)) }));
      const gap = (row) => (typeof row.first === "number" && typeof row.second === "number" ? Math.abs(row.second - row.first) : -1);
      rows.sort((a, b) => gap(b) - gap(a));
      const mean = (place) => { const all = [...shares[place].values()].filter((each) => typeof each === "number"); return all.length ? all.reduce((sum, each) => sum + each, 0) / all.length : null; };
      const cell = (value, has) => h("td", {}, has ? h("span", { class: "with-bar" }, percent(value), typeof value === "number" && bar(value / 100, percent(value))) : h("span", { class: "hint" }, "not known"));
      fill(table, h("section", { class: "card" }, h("h2", {}, "Accuracy class by class"),
        h("p", { class: "hint" }, "Each model is measured on its own held-out images."),
        names.length ? scrollBox("Accuracy of both models", h("table", { class: "compare" },
          h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "text" }, "Class"), both.map((each) => h("th", { scope: "col" }, each.name)), h("th", { scope: "col" }, "Difference"))),
          h("tbody", {}, h("tr", { class: "total" }, h("th", { scope: "row", class: "text" }, "Mean of its classes"), both.map((each, place) => h("td", {}, h("strong", {}, percent(mean(place))), h("span", { class: "hint wide-only" }, ` ${count(shares[place].size, "class", "classes")}`))), h("td", {}, change(mean(0), mean(1)))),
            rows.map((row) => h("tr", {}, h("th", { scope: "row", class: "text" }, row.name), cell(row.first, row.in[0]), cell(row.second, row.in[1]), h("td", {}, change(row.first, row.second))))))) : h("p", {}, "Neither model has learned anything yet.")));
    } catch (error) {
      showError(error);
    }
  }

  function take(found) {
    for (const { file } of found.slice(0, MOST)) images.unshift({ file, url: URL.createObjectURL(file) });
    for (const gone of images.splice(MOST)) URL.revokeObjectURL(gone.url);
    drawImages();
  }

  function drawImages() {
    zone.classList.toggle("compact", images.length > 0);
    fill(results, images.map(({ file, url }) => {
      const answers = models().map((each) => {
        const place = h("div", { class: "answer" }, h("p", { class: "label" }, each.name), h("p", { class: "hint" }, each.exists ? "Looking…" : "Has not learned anything yet."));
        if (each.exists) ask(each, file, place);
        return place;
      });
      return h("li", { class: "card compared-card" }, h("img", { src: url, alt: file.name || "image", class: "subject" }), answers);
    }));
  }

  async function ask(each, file, place) {
    const form = new FormData();
    form.append("images", file, file.name || "image");
    const title = h("p", { class: "label" }, each.name);
    try {
      const { predictions: [answer] } = await api.send(modelPath(each.name, "/predict?top=4"), form);
      fill(place, title, answer.error ? h("p", {}, sentence(answer.error)) : answerParts(answer));
    } catch (error) {
      fill(place, title, h("p", {}, sentence(error.message)));
    }
  }

  return { element, show, take, changed: (kind) => { if (kind === "models" && element.isConnected && pair) drawTable(); } };
}
