// Classes: what the model knows.

import { api, withoutPictures } from "./api.js";
import { askText, bar, busy, button, confirmed, count, fill, h, icon, notify, percent, remoteImage, reported, showError } from "./dom.js";
import { emptyState } from "./parts.js";
import { examplePath, model, path, refreshLesson, refreshModels } from "./store.js";
import { teachMoreOf } from "./teach.js";

const EXAMPLES = 5;

export function classesView() {
  let classes = [];
  let loaded = null; // the generation that is shown
  let order = "learned";
  const search = h("input", { type: "search", class: "field", placeholder: "Find a class", "aria-label": "Find a class", oninput: () => draw() });
  const select = h("select", { class: "field", onchange: () => { order = select.value; draw(); } },
    h("option", { value: "learned" }, "as learned"), h("option", { value: "name" }, "by name"), h("option", { value: "weak" }, "least accurate first"));
  const said = h("p", { class: "summary", role: "status" });
  const tools = h("div", { class: "toolbar" }, said, search, h("label", { class: "inline" }, h("span", {}, "Order"), select));
  const list = h("ul", { class: "classes", "aria-label": "Classes" });
  const body = h("div", {}, tools, list);
  const element = h("div", { class: "view" });

  function accuracy(each) {
    return reported(each.accuracy, model()?.predictors ?? []);
  }

  async function show() {
    if (!model()?.exists) {
      loaded = null;
      fill(element, h("h1", {}, "Classes"), emptyState("No classes yet",
        "The model has not learned anything. In Teach you make classes and give them images.", "Teach the first classes", "teach"));
      return;
    }
    if (body.parentNode !== element) fill(element, h("h1", {}, "Classes"), body);
    const now = `${model().name} ${model().digest}`;
    try {
      classes = await api.get(path("/classes"));
      loaded = now;
      draw();
    } catch (error) {
      showError(error);
    }
  }

  function draw() {
    const wanted = search.value.trim().toLowerCase();
    let some = classes.filter((each) => each.name.toLowerCase().includes(wanted));
    if (order === "name") some = [...some].sort((a, b) => a.name.localeCompare(b.name));
    if (order === "weak") some = [...some].sort((a, b) => (accuracy(a) ?? 101) - (accuracy(b) ?? 101));
    said.textContent = some.length === classes.length ? count(classes.length, "class", "classes") : `${some.length} of ${count(classes.length, "class", "classes")}`;
    search.hidden = classes.length < 8;
    fill(list, some.map(card));
  }

  function card(each) {
    const share = accuracy(each);
    const examples = (each.examples ?? []).slice(0, EXAMPLES);
    return h("li", { class: "card class-card" },
      examples.length
        ? h("div", { class: "strip square" }, examples.map((id, place) => remoteImage(examplePath(id), `Example ${place + 1} of ${each.name}`)))
        : h("p", { class: "hint no-examples" }, "No images of it are kept."),
      h("h2", {}, each.name),
      typeof share === "number" && h("div", { class: "accuracy" }, bar(share / 100, `${percent(share)} of held-out images are recognised`, share < 50 ? "weak" : ""), h("span", { "aria-hidden": "true" }, percent(share))),
      typeof share !== "number" && h("p", { class: "hint" }, "Accuracy not measured"),
      h("p", { class: "hint" }, [count(each.images ?? 0, "image"), typeof each.kept === "number" && `${each.kept} kept`, each.lesson && `lesson ${each.lesson}`].filter(Boolean).join(" · ")),
      h("div", { class: "actions start" },
        button("Add images", { icon: "plus", kind: "small", "aria-label": `Add images to ${each.name}`, onclick: () => teachMoreOf(each.name) }),
        button("Rename", { icon: "edit", kind: "small", "aria-label": `Rename ${each.name}`, onclick: (event) => rename(each, event.currentTarget) }),
        h("button", { type: "button", class: "button small quiet icon-only", "aria-label": `Remove ${each.name}`, title: "Remove", onclick: (event) => remove(each, event.currentTarget) }, icon("bin"))));
  }

  async function changed() {
    await Promise.all([refreshModels(), refreshLesson()]);
    await show();
  }

  async function rename(each, pressed) {
    const name = await askText(`Rename ${each.name}`, { label: "New name", value: each.name, yes: "Rename" });
    if (!name || name === each.name) return;
    await busy(pressed, () => withoutPictures(async () => {
      await api.patch(path(`/classes/${encodeURIComponent(each.name)}`), { name });
      notify(`${each.name} is called ${name} now.`);
      await changed();
    }));
  }

  async function remove(each, pressed) {
    const sure = await confirmed(`Remove ${each.name}?`, `The model will not say ${each.name} any more, and its kept images are dropped. Undo, in History, brings it back; the images stay in the model's folder until that is no longer possible.`, "Remove");
    if (!sure) return;
    await busy(pressed, () => withoutPictures(async () => {
      await api.remove(path(`/classes/${encodeURIComponent(each.name)}`));
      notify(`${each.name} was removed.`);
      await changed();
    }));
  }

  return {
    element, show,
    changed: (kind) => {
      const now = model();
      if (kind === "models" && element.isConnected && loaded !== (now?.exists ? `${now.name} ${now.digest}` : null)) show();
    },
  };
}
