// Recognise: images in, classes out; and the wrong ones into the draft.

import { api } from "./api.js";
import { add, announce, bar, busy, button, count, fill, h, icon, nameInput, notify, remoteImage, sentence, showError } from "./dom.js";
import { dropZone } from "./files.js";
import { emptyState } from "./parts.js";
import { examplePath, model, path, store, takeDraft } from "./store.js";

const FILES = 8; // of one request
const BYTES = 24e6;
const AT_ONCE = 2;
const PAGE = 60; // cards drawn at first, and by each press of "Show more"
const NEIGHBOURS = 4;

export function recogniseView() {
  const shots = []; // {file, url, state: "waiting"/"asked"/"done"/"failed", answer, generation, card, corrected}
  let limit = PAGE;
  let order = "added";
  let asked = 0;
  let names = [];

  const summary = h("p", { class: "summary", role: "status", "aria-live": "polite" });
  const stale = h("div", { class: "note", hidden: true });
  const list = h("ul", { class: "shots", "aria-label": "Recognised images" });
  const more = button("Show more", { onclick: () => { limit += PAGE; draw(); } });
  const orderSelect = h("select", { class: "field", onchange: () => { order = orderSelect.value; draw(); } },
    h("option", { value: "added" }, "as added"), h("option", { value: "unsure" }, "least sure first"), h("option", { value: "class" }, "by class"));
  const tools = h("div", { class: "toolbar", hidden: true }, summary,
    h("label", { class: "inline" }, h("span", {}, "Order"), orderSelect),
    button("Clear", { kind: "quiet", onclick: clear }));
  const zone = dropZone("Drop images or folders here", "or paste them. They are compared with what the model has learned, and are not kept.", take);
  const element = h("div", { class: "view" }, h("h1", {}, "Recognise"));
  const body = h("div", {}, zone, stale, tools, list, h("div", { class: "center" }, more));
  const empty = emptyState("Nothing has been learned yet",
    "Go to Teach, make a class for each thing you want to tell apart, and give each a few images. After the first lesson, drop any image here to see what it is.",
    "Teach the first classes", "teach");

  function show() {
    const exists = Boolean(model()?.exists);
    const content = exists ? body : empty;
    if (content.parentNode !== element) fill(element, h("h1", {}, "Recognise"), content);
    if (exists) loadNames();
    draw();
  }

  async function loadNames() {
    try {
      names = (await api.get(path("/classes"))).map((each) => each.name);
    } catch (error) {
      showError(error);
    }
  }

  function take(images) {
    if (!model()?.exists) {
      notify("The model has not learned anything yet. Teach it some classes first.", { error: true });
      return;
    }
    for (const { file } of images) shots.push({ file, url: URL.createObjectURL(file), state: "waiting" });
    draw();
    pump();
  }

  function clear() {
    for (const shot of shots) URL.revokeObjectURL(shot.url);
    shots.length = 0;
    limit = PAGE;
    draw();
  }

  function pump() {
    while (asked < AT_ONCE) {
      const batch = [];
      let bytes = 0;
      for (const shot of shots) {
        if (shot.state !== "waiting") continue;
        if (batch.length && (batch.length >= FILES || bytes + shot.file.size > BYTES)) break;
        batch.push(shot);
        bytes += shot.file.size;
        shot.state = "asked";
      }
      if (!batch.length) return;
      asked += 1;
      ask(batch).finally(() => { asked -= 1; drawSummary(); pump(); });
    }
  }

  async function ask(batch) {
    const form = new FormData();
    for (const shot of batch) form.append("images", shot.file, shot.file.name || "image");
    try {
      const answer = await api.send(path(`/predict?top=5&neighbours=${NEIGHBOURS}`), form);
      batch.forEach((shot, row) => {
        const found = answer.predictions[row];
        shot.state = found?.error ? "failed" : "done";
        shot.answer = found;
        shot.generation = answer.generation;
      });
    } catch (error) {
      if (batch.length > 1 && [400, 413, 422].includes(error.status)) {
        for (const shot of batch) await ask([shot]); // one of them is the reason
        return;
      }
      for (const shot of batch) {
        shot.state = "failed";
        shot.answer = { error: error.message };
        shot.again = Boolean(error.lost) || error.status >= 500 || error.status === 429;
      }
    }
    for (const shot of batch) drawShot(shot);
  }

  function again(some) {
    for (const shot of some) {
      shot.state = "waiting";
      shot.answer = null;
      drawShot(shot);
    }
    draw();
    pump();
  }

  function sorted() {
    const sure = (shot) => (shot.state === "done" ? (shot.answer.unknown ? 0 : shot.answer.probability) : 2);
    if (order === "unsure") return [...shots].sort((a, b) => sure(a) - sure(b));
    if (order === "class") return [...shots].sort((a, b) => (a.answer?.class ?? "").localeCompare(b.answer?.class ?? ""));
    return shots;
  }

  function draw() {
    tools.hidden = !shots.length;
    more.hidden = shots.length <= limit;
    const focus = document.activeElement;
    const cards = sorted().slice(0, limit).map((shot) => (shot.card ??= drawShot(shot)));
    const same = cards.length === list.children.length && cards.every((card, row) => card === list.children[row]);
    if (!same) list.replaceChildren(...cards);
    if (focus?.isConnected && focus !== document.activeElement) focus.focus();
    zone.classList.toggle("compact", shots.length > 0);
    drawSummary();
    drawStale();
  }

  function drawSummary() {
    const done = shots.filter((shot) => shot.state === "done");
    const waiting = shots.filter((shot) => shot.state === "waiting" || shot.state === "asked").length;
    const failed = shots.filter((shot) => shot.state === "failed").length;
    const unsure = done.filter((shot) => shot.answer.unknown).length;
    const parts = [count(shots.length, "image")];
    if (waiting) parts.push(`${waiting} to go`);
    if (unsure) parts.push(`not sure of ${unsure}`);
    if (failed) parts.push(`${failed} failed`);
    const text = parts.join(" · ");
    if (summary.textContent !== text) summary.textContent = text;
  }

  function drawStale() {
    const generation = model()?.generation;
    const old = shots.filter((shot) => shot.state === "done" && shot.generation !== generation);
    stale.hidden = !old.length;
    fill(stale, h("p", {}, "The model has changed since these images were recognised."),
      button("Recognise them again", { kind: "small", onclick: () => again(old) }));
  }

  function drawShot(shot) {
    const card = shot.card ?? h("li", { class: "card shot" });
    shot.card = card;
    const name = shot.file.name || "image";
    const image = h("img", { src: shot.url, alt: name, class: "subject", decoding: "async", loading: "lazy" });
    image.addEventListener("error", () => image.replaceWith(h("div", { class: "subject missing" }, h("span", {}, "This browser cannot show the file"))));
    const side = h("div", { class: "shot-body" });
    fill(card, h("div", { class: "shot-picture" }, image, h("p", { class: "hint file", title: name }, name)), side);
    if (shot.state === "waiting" || shot.state === "asked") {
      add(side, h("p", { class: "shot-name waiting" }, "Looking…"));
    } else if (shot.state === "failed") {
      add(side, h("p", { class: "shot-name" }, icon("warn"), "Cannot be recognised"), h("p", {}, sentence(shot.answer.error)),
        shot.again && button("Try again", { kind: "small", onclick: () => again([shot]) }));
    } else {
      add(side, answerParts(shot.answer));
      add(card, h("div", { class: "shot-extra" }, nearest(shot.answer, model()), correction(shot)));
    }
    return card;
  }

  function correction(shot) {
    const box = h("div", { class: "correction" });
    const fold = () => {
      if (shot.corrected) {
        fill(box, h("p", { class: "good-line" }, icon("check"), h("span", {}, "In the draft as ", h("strong", {}, shot.corrected), ". "),
          h("a", { href: `#/${encodeURIComponent(store.name)}/teach` }, "Go to Teach")));
        return;
      }
      fill(box, button("Correct", {
        icon: "edit", kind: "small", "aria-expanded": "false", "aria-label": `Correct ${shot.file.name || "image"}`, onclick: open,
      }));
    };
    const open = () => {
      const other = shot.answer.top.map((each) => each.class).filter((each) => shot.answer.unknown || each !== shot.answer.class).slice(0, 4);
      const known = [...new Set([...names, ...store.draft.classes.map((each) => each.name)])];
      const input = nameInput("Right class", { names: known, placeholder: "Choose or type a class" });
      const put = (right, pressed) => busy(pressed, async () => {
        const form = new FormData();
        form.append("class", right);
        form.append("images", shot.file, shot.file.name || "image");
        const draft = await api.send(path("/draft/images"), form);
        takeDraft(draft);
        const [refused] = draft.rejected;
        if (refused) {
          notify(sentence(`${refused.name}: ${refused.error}`), { error: true });
          return;
        }
        shot.corrected = right;
        announce(`Put into the draft as ${right}`);
        fold();
        box.querySelector("a")?.focus();
      });
      const form = h("form", {
        class: "correct-form",
        onsubmit: (event) => { event.preventDefault(); const right = input.field.value.trim(); if (right) put(right, save); },
        onkeydown: (event) => { if (event.key === "Escape") { fold(); box.querySelector("button")?.focus(); } },
      });
      const save = button("Put into the draft", { kind: "main small", type: "submit" });
      const chips = other.map((right) => h("button", { type: "button", class: "chip", onclick: (event) => put(right, event.currentTarget) }, right));
      add(form, chips.length > 0 && h("div", { class: "chips", role: "group", "aria-label": "Likely classes" }, chips), input.box,
        h("div", { class: "actions start" }, save, button("Cancel", { kind: "quiet small", onclick: () => { fold(); box.querySelector("button")?.focus(); } })));
      fill(box, form);
      input.field.focus();
    };
    fold();
    return box;
  }

  show();
  return {
    element, show, take,
    changed: (kind) => { if (kind === "models") show(); },
  };
}

/** What a model says about one image: class, how sure, the top classes. */
export function answerParts(answer) {
  const unsure = answer.unknown === true;
  const title = unsure
    ? h("p", { class: "shot-name unsure" }, icon("question"), h("span", {}, "Not sure"))
    : h("p", { class: "shot-name" }, h("span", {}, answer.class));
  const hint = unsure && h("p", { class: "hint" }, "It is unlike what the model has learned. The nearest is ", h("strong", {}, answer.class), ".");
  const ranks = answer.top.map((each, place) => {
    const share = `${(100 * each.probability).toFixed(each.probability < 0.0995 ? 1 : 0)} %`;
    return h("li", {}, h("span", { class: "rank-name" }, each.class), bar(each.probability, share, unsure ? "unsure" : place ? "other" : ""),
      h("span", { class: "rank-share", "aria-hidden": "true" }, share));
  });
  return [title, hint, h("ol", { class: "ranks", "aria-label": "Most likely classes" }, ranks)];
}

function nearest(answer, of) {
  if (!answer.neighbours?.length) return null;
  return h("div", { class: "near" }, h("p", { class: "label" }, "Nearest kept examples"),
    h("ul", { class: "strip" }, answer.neighbours.map((each) => h("li", {},
      remoteImage(examplePath(each.example, of), `Example of ${each.class}`), h("span", { class: "tiny" }, each.class)))));
}
