// Teach: the draft of a lesson, the lesson while it runs, and what came of it.

import { api, withoutPictures } from "./api.js";
import { lossCurve } from "./charts.js";
import { add, announce, askText, bar, busy, button, confirmed, count, duration, fill, freshId, h, icon, listing, nameInput, notify, openDialog, remoteImage, sentence, showError } from "./dom.js";
import { dropZone, droppable, sources } from "./files.js";
import { confusionMatrix, figures, fillLater, learnedTable, sentences } from "./parts.js";
import { draftPath, model, path, refreshDraft, refreshLesson, refreshModels, store, takeDraft } from "./store.js";

const FILES = 16; // of one request
const BYTES = 24e6;
const THUMBS = 22; // of a class, before "Show all"
const KINDS = {
  unreadable: "Unreadable",
  exact: "The same image more than once",
  near: "Nearly the same image more than once",
  label: "Perhaps in the wrong class",
  blurry: "Blurry",
  tiny: "Very small",
};
const PHASES = { starting: "starting", read: "images read", kernels: "compiling kernels", importance: "after training", exemplars: "choosing images to keep", evaluate: "measuring accuracy", main: "training", features: "computing features" };
const MARKS = { exact: "duplicate", near: "similar", label: "other class?", blurry: "blurry", tiny: "small" };

/** Takes the last change of the model back, after asking. */
export async function undoLesson(pressed) {
  const sure = await confirmed("Undo the last change?",
    "The model goes back to the state before its last lesson, removal or renaming. What a lesson brought is forgotten.", "Undo");
  if (!sure) return;
  await busy(pressed, async () => {
    const { gone, again } = await withoutPictures(async () => {
      const undone = await api.post(path("/undo"));
      await Promise.all([refreshModels(), refreshLesson(), refreshDraft()]);
      return undone;
    });
    const parts = [gone.length && `${listing(gone)} ${gone.length === 1 ? "is" : "are"} gone`, again.length && `${listing(again)} ${again.length === 1 ? "is" : "are"} as before`].filter(Boolean);
    notify(sentence(`the last change was undone${parts.length ? `: ${parts.join(", and ")}` : ""}`));
  });
}

export function teachView() {
  const empty = []; // names of classes that have no image yet
  const selected = new Set(); // ids
  const open = new Set(); // classes with all thumbnails shown
  const thumbs = new Map(); // id -> element
  let known = []; // names of the model's classes
  let checked = null; // ids of the images that were checked, as a set
  let resultOf = null; // the generation whose result is drawn
  let sending = null; // {done, total, stop}

  const element = h("div", { class: "view" });
  const heading = h("h1", {}, "Teach");
  const lessonPlace = h("div", {});
  const draftPlace = h("div", { class: "draft" });
  add(element, heading, lessonPlace, draftPlace);

  // ---- the draft

  const intro = h("p", { class: "lead" });
  const nameField = nameInput("Name of a class", { placeholder: "for example: bicycle" });
  const addButton = button("Add class", { icon: "plus", kind: "main", type: "submit" });
  const nameForm = h("form", {
    class: "name-form card",
    onsubmit: (event) => {
      event.preventDefault();
      const name = nameField.field.value.trim();
      if (!name) return;
      nameField.field.value = "";
      addClass(name);
    },
  }, nameField.box, addButton);
  const zone = dropZone("Drop a folder of class folders", "Each folder becomes a class with the folder's name. Images without a folder: the page asks for their class.", takeLoose, { main: false });
  const upload = h("div", { class: "note upload", hidden: true });
  const rejected = h("div", {});
  const findingsPlace = h("div", {});
  const sections = h("div", { class: "sections" });
  const startPlace = h("div", {});
  const selection = h("div", { class: "selection", role: "toolbar", "aria-label": "Selected images", hidden: true });
  add(draftPlace, intro, h("div", { class: "add-row" }, nameForm, zone), upload, startPlace, rejected, findingsPlace, sections, selection);

  function classNames() {
    return [...new Set([...store.draft.classes.map((each) => each.name), ...empty])];
  }

  function allNames() {
    return [...new Set([...classNames(), ...known])];
  }

  function addClass(name, focus = true) {
    if (!classNames().includes(name)) empty.push(name);
    drawDraft();
    const section = [...sections.children].find((each) => each.dataset.name === name);
    section?.scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    if (focus) section?.querySelector("button")?.focus({ preventScroll: true });
    announce(`Class ${name} is in the draft`);
  }

  /** Images from the large zone: by folder, or of a class that the person names. */
  async function takeLoose(images) {
    const groups = new Map();
    for (const { file, folder } of images) groups.set(folder, [...(groups.get(folder) ?? []), file]);
    const loose = groups.get("") ?? [];
    groups.delete("");
    for (const [name, files] of groups) await send(name, files);
    if (!loose.length) return;
    const names = allNames();
    const name = await askText(`Which class ${loose.length === 1 ? "is this image" : `are these ${loose.length} images`} of?`, {
      label: "Class", names, yes: "Add to the draft", hint: names.length ? "Choose a class or type a new name." : "Type the name of a new class.",
    });
    if (name) await send(name, loose);
  }

  let queue = Promise.resolve();

  /** Uploads files into a class of the draft, one group after the other. */
  function send(name, files) {
    sending ??= { done: 0, total: 0, stop: new AbortController(), added: 0 };
    const mine = sending;
    mine.total += files.length;
    if (!classNames().includes(name)) empty.push(name);
    drawUpload();
    drawDraft();
    queue = queue.then(async () => {
      let rest = [...files];
      while (rest.length && !mine.stop.signal.aborted) {
        const batch = [];
        let bytes = 0;
        while (rest.length && (!batch.length || (batch.length < FILES && bytes + rest[0].size <= BYTES))) {
          bytes += rest[0].size;
          batch.push(rest.shift());
        }
        const form = new FormData();
        form.append("class", name);
        for (const file of batch) form.append("images", file, file.name || "image");
        try {
          const draft = await api.send(path("/draft/images"), form, mine.stop.signal);
          mine.added += draft.added.length;
          mine.done += batch.length;
          takeDraft(draft);
        } catch (error) {
          mine.done += batch.length;
          if (error.lost) mine.stop.abort();
          showError(error);
          if ([403, 409, 507].includes(error.status)) rest = [];
        }
        drawUpload();
      }
    }).finally(() => {
      if (mine.done < mine.total && !mine.stop.signal.aborted) return;
      if (sending === mine) sending = null;
      drawUpload();
      announce(`${count(mine.added, "image")} added to the draft`);
    });
    return queue;
  }

  function drawUpload() {
    upload.hidden = !sending;
    if (!sending) { fill(upload); return; }
    const share = sending.done / Math.max(1, sending.total);
    fill(upload, h("p", {}, `Adding images: ${sending.done} of ${sending.total}`), bar(share, `${Math.round(100 * share)} % of the images are added`),
      button("Cancel", { kind: "small quiet", onclick: () => { sending?.stop.abort(); } }));
  }

  let waiting = 0; // images of the draft when it was drawn last

  function drawDraft() {
    const { images, rejected: refused } = store.draft;
    const result = lessonPlace.querySelector(".result");
    if (result && images.length && !waiting) result.open = false; // the next lesson is at hand
    waiting = images.length;
    for (const id of [...selected]) if (!images.some((each) => each.id === id)) selected.delete(id);
    for (const id of [...thumbs.keys()]) if (!images.some((each) => each.id === id)) thumbs.delete(id);
    for (const each of store.draft.classes) if (empty.includes(each.name) && each.images) empty.splice(empty.indexOf(each.name), 1);
    const first = !model()?.exists && !images.length && !empty.length;
    intro.hidden = images.length > 0 || empty.length > 0;
    intro.textContent = first
      ? "This model is new. Make at least two classes, give each about ten images or more, and start learning; part of the images is kept aside to measure how well it works."
      : "Add new classes, or more images of classes that the model knows. Part of the images is kept aside to measure what was learned and forgotten.";
    addButton.classList.toggle("main", !images.length);
    zone.classList.toggle("compact", images.length > 0 || empty.length > 0);
    const focus = document.activeElement;
    const focused = focus?.closest?.("[data-name]")?.dataset.name;
    fill(sections, classNames().map(drawSection));
    if (focused && !focus.isConnected) [...sections.children].find((each) => each.dataset.name === focused)?.querySelector("button")?.focus({ preventScroll: true });
    drawRejected(refused);
    drawFindings();
    drawStart();
    drawSelection();
  }

  function drawSection(name) {
    const images = store.draft.images.filter((each) => each.class === name);
    const old = known.includes(name);
    const id = freshId("class");
    const section = h("section", { class: "card class-section", "aria-labelledby": id, "data-name": name });
    const shown = open.has(name) ? images : images.slice(0, THUMBS);
    add(section,
      h("div", { class: "section-head" },
        h("h2", { id }, name), h("span", { class: "hint" }, images.length ? count(images.length, "image") : "no images yet"),
        old && h("span", { class: "badge" }, "known, more images"),
        h("div", { class: "spread" }),
        sources((found) => send(name, found.map(({ file }) => file)), { name, folders: false, small: true }),
        h("button", { type: "button", class: "button small quiet icon-only", "aria-label": `Take ${name} out of the draft`, title: "Take the class out of the draft", onclick: (event) => dropClass(name, images, event.currentTarget) }, icon("bin"))),
      images.length
        ? h("div", { class: "thumbs" }, shown.map(thumb))
        : h("p", { class: "drop-hint" }, "Drop the images of this class here."),
      shown.length < images.length && button(`Show all ${images.length}`, { kind: "small quiet", onclick: () => { open.add(name); drawDraft(); } }));
    return droppable(section, (found) => send(name, found.map(({ file }) => file)));
  }

  function findingsOf(image) {
    const here = new Set(store.draft.images.map((each) => each.id));
    return image.findings.filter(({ kind, like }) => !["exact", "near"].includes(kind) || like.some((id) => here.has(id)));
  }

  function thumb(image) {
    const found = findingsOf(image);
    const says = [image.name, ...found.map((each) => each.text)].join(". ");
    let box = thumbs.get(image.id);
    if (!box) {
      const tick = h("input", {
        type: "checkbox", "aria-label": says,
        onchange: () => {
          if (tick.checked) selected.add(image.id);
          else selected.delete(image.id);
          drawSelection();
        },
      });
      box = h("label", { class: "thumb" }, tick, remoteImage(draftPath(image.id), ""), h("span", { class: "tick", "aria-hidden": "true" }, icon("check")), h("span", { class: "marks" }));
      thumbs.set(image.id, box);
    }
    const tick = box.querySelector("input");
    tick.checked = selected.has(image.id);
    tick.setAttribute("aria-label", says);
    box.title = says;
    fill(box.querySelector(".marks"), found.slice(0, 1).map((each) => h("span", { class: "mark" }, MARKS[each.kind] ?? "finding")));
    return box;
  }

  async function dropClass(name, images, pressed) {
    if (images.length) {
      const sure = await confirmed(`Take ${name} out of the draft?`, `Its ${count(images.length, "image")} will not be learned. Your files stay as they are.`, "Take out");
      if (!sure) return;
      await busy(pressed, () => discard(images.map((each) => each.id)));
    }
    if (empty.includes(name)) empty.splice(empty.indexOf(name), 1);
    drawDraft();
    nameField.field.focus();
  }

  async function discard(ids) {
    await api.remove(path("/draft/images"), { ids });
    for (const id of ids) selected.delete(id);
    await refreshDraft();
    announce(`${count(ids.length, "image")} taken out of the draft`);
  }

  async function move(ids, name) {
    await api.patch(path("/draft/images"), { ids, class: name });
    for (const id of ids) selected.delete(id);
    await refreshDraft();
    announce(`${count(ids.length, "image")} moved to ${name}`);
  }

  function drawSelection() {
    selection.hidden = !selected.size;
    if (!selected.size) { fill(selection); return; }
    const ids = [...selected];
    const again = selection.contains(document.activeElement) ? [...selection.children].indexOf(document.activeElement) : -1;
    fill(selection,
      h("span", { class: "selection-count", role: "status" }, `${ids.length} selected`),
      button("Move to…", {
        kind: "small",
        onclick: async (event) => {
          const pressed = event.currentTarget;
          const name = await askText(`Move ${count(ids.length, "image")} to a class`, { label: "Class", names: allNames(), yes: "Move" });
          if (name) await busy(pressed, () => move(ids, name));
        },
      }),
      button("Discard", { kind: "small", icon: "bin", onclick: (event) => busy(event.currentTarget, () => discard(ids)) }),
      button("Clear selection", { kind: "small quiet", onclick: () => { selected.clear(); drawDraft(); } }));
    if (again > 0) selection.children[again]?.focus();
  }

  function drawRejected(refused) {
    fill(rejected, refused.length > 0 && h("details", { class: "note warn", open: refused.length <= 3 },
      h("summary", {}, icon("warn"), h("span", {}, `${count(refused.length, "file")} could not be used`)),
      h("ul", { class: "plain" }, refused.slice(0, 100).map((each) => h("li", {}, h("strong", {}, each.name), ": ", sentence(each.error))))));
  }

  // ---- the check

  function unchecked() {
    return checked === null ? store.draft.images.length : store.draft.images.filter((each) => !checked.has(each.id)).length;
  }

  async function check(pressed) {
    return busy(pressed, async () => {
      const draft = await api.post(path("/draft/check"));
      checked = new Set(draft.images.map((each) => each.id));
      takeDraft(draft);
      const n = found().length;
      announce(n ? `The check has findings about ${count(n, "image")}` : "The check found nothing");
      return n;
    });
  }

  function found() {
    return store.draft.images.filter((each) => findingsOf(each).length);
  }

  function drawFindings() {
    const images = found();
    const byKind = new Map();
    for (const image of images) {
      for (const each of findingsOf(image)) {
        byKind.set(each.kind, [...(byKind.get(each.kind) ?? []), { image, ...each }]);
      }
    }
    if (!byKind.size) {
      fill(findingsPlace, checked && store.draft.images.length > 0 && !unchecked() && h("p", { class: "note good-line" }, icon("check"), "The check found nothing wrong with these images."));
      return;
    }
    const id = freshId("findings");
    fill(findingsPlace, h("section", { class: "card findings", "aria-labelledby": id },
      h("h2", { id }, `Look at ${count(images.length, "image")} before learning`),
      Object.keys(KINDS).filter((kind) => byKind.has(kind)).map((kind) => findingGroup(kind, byKind.get(kind)))));
  }

  function copies(entries) {
    const place = new Map(store.draft.images.map((each, row) => [each.id, row]));
    const gone = new Set();
    for (const { image, like } of entries) {
      if (like.some((other) => place.has(other) && place.get(other) < place.get(image.id))) gone.add(image.id);
    }
    return [...gone];
  }

  function findingGroup(kind, entries) {
    const extra = kind === "exact" || kind === "near" ? copies(entries) : [];
    return h("details", { class: "finding-group", open: entries.length <= 12 },
      h("summary", {}, h("span", {}, KINDS[kind]), h("span", { class: "badge" }, String(entries.length))),
      extra.length > 0 && h("div", { class: "actions start" },
        button(`Keep one of each, discard ${extra.length}`, { kind: "small", onclick: (event) => busy(event.currentTarget, () => discard(extra)) })),
      h("ul", { class: "finding-list" }, entries.slice(0, 60).map(({ image, text, suggested }) => h("li", {},
        remoteImage(draftPath(image.id), `${image.name} in ${image.class}`),
        h("div", { class: "finding-text" }, h("p", {}, sentence(text)), h("p", { class: "hint file" }, `${image.class} · ${image.name}`)),
        h("div", { class: "actions start" },
          suggested && suggested !== image.class && button(`Move to ${suggested}`, { kind: "small", onclick: (event) => busy(event.currentTarget, () => move([image.id], suggested)) }),
          button("Discard", { kind: "small quiet", "aria-label": `Discard ${image.name}`, onclick: (event) => busy(event.currentTarget, () => discard([image.id])) }))))),
      entries.length > 60 && h("p", { class: "hint" }, `and ${entries.length - 60} more`));
  }

  // ---- the start

  let howLong = "auto";
  const epochs = h("input", { type: "number", class: "field short", min: 1, max: 10000, value: "20", "aria-label": "Number of epochs" });
  const minutes = h("input", { type: "number", class: "field short", min: 0.1, max: 10000, step: "any", value: "5", "aria-label": "Number of minutes" });
  const radioName = freshId("long");

  function longOption(value, ...text) {
    const radio = h("input", { type: "radio", name: radioName, value, checked: howLong === value, onchange: () => { howLong = value; } });
    return h("label", { class: "option" }, radio, h("span", {}, text));
  }
  const options = h("details", { class: "options" }, h("summary", {}, "How long to learn"),
    h("fieldset", {}, h("legend", { class: "hidden" }, "How long to learn"),
      longOption("auto", "Automatic, by the number of images"),
      h("div", { class: "option-row" }, longOption("epochs", "This many epochs (each image once per epoch)"), epochs),
      h("div", { class: "option-row" }, longOption("minutes", "As much as fits into this many minutes"), minutes)));
  for (const [field, value] of [[epochs, "epochs"], [minutes, "minutes"]]) {
    field.addEventListener("input", () => {
      howLong = value;
      const radio = options.querySelector(`input[value=${value}]`);
      radio.checked = true;
    });
  }

  function drawStart() {
    const images = store.draft.images;
    if (!images.length) { fill(startPlace); return; }
    const classes = store.draft.classes.filter((each) => each.images);
    const fresh = classes.filter((each) => !isKnown(each));
    const old = classes.filter(isKnown);
    const parts = [];
    if (fresh.length) parts.push(`${count(fresh.length, "new class", "new classes")} (${listing(fresh.map((each) => each.name))})`);
    if (old.length) parts.push(`more images of ${listing(old.map((each) => each.name))}`);
    const problem = !model()?.exists && classes.length < 2 ? "A new model needs at least two classes." : "";
    const waiting = unchecked();
    const id = freshId("learn");
    const start = button("Start learning", { kind: "main large", disabled: Boolean(problem), onclick: () => begin(start) });
    const look = button(waiting ? "Check the images" : "Check again", { kind: "large", onclick: () => check(look) });
    const again = startPlace.contains(document.activeElement) ? document.activeElement.textContent : "";
    fill(startPlace, h("section", { class: "card start", "aria-labelledby": id },
      h("h2", { id }, "Learn"),
      h("p", {}, `${count(images.length, "image")}: ${parts.join(", and ")}.`, old.length > 0 && " Known classes are trained again, on these images and the kept ones."),
      problem && h("p", { class: "problem" }, problem),
      options,
      h("div", { class: "actions start" }, start, look, button("Discard the draft", { kind: "quiet large", onclick: (event) => discardAll(event.currentTarget) }))));
    if (again) [...startPlace.querySelectorAll("button")].find((each) => /^(Start|Check)/.test(again) && each.textContent.slice(0, 5) === again.slice(0, 5))?.focus();
  }

  function isKnown(each) {
    return each.known ?? known.includes(each.name);
  }

  async function discardAll(pressed) {
    const n = store.draft.images.length;
    if (!(await confirmed("Discard the draft?", `${count(n, "image")} will be taken out of the draft. Your files stay as they are.`, "Discard"))) return;
    empty.length = 0;
    await busy(pressed, async () => { await api.remove(path("/draft/images")); await refreshDraft(); });
  }

  async function begin(pressed) {
    const wanted = {};
    if (howLong === "epochs") wanted.epochs = Number(epochs.value);
    if (howLong === "minutes") wanted.minutes = Number(minutes.value);
    if (Object.values(wanted).some((value) => !(value > 0))) {
      notify("The length of the lesson must be a number above 0.", { error: true });
      return;
    }
    if (wanted.epochs) wanted.epochs = Math.round(wanted.epochs);
    if (unchecked() && store.draft.images.length > 1) { // one image has no other to be compared with
      const n = await check(pressed);
      if (n === undefined) return;
      if (n) {
        const go = await openDialog("Look at the images first?", (_, close) => [
          h("p", {}, `The check has findings about ${count(n, "image")}: duplicates, blurry or small images, or labels that may be wrong.`),
          h("div", { class: "actions" }, button("Learn anyway", { onclick: () => close("go") }), button("Show me", { kind: "main", autofocus: true, onclick: () => close("look") })),
        ]);
        if (go !== "go") {
          if (go === "look") {
            findingsPlace.scrollIntoView({ block: "start" });
            findingsPlace.querySelector("summary")?.focus();
          }
          return;
        }
      }
    }
    await startLesson(pressed, { ...wanted, more_of_known: store.draft.classes.some((each) => each.images && isKnown(each)) });
  }

  async function startLesson(pressed, wanted) {
    await busy(pressed, async () => {
      await api.post(path("/lesson"), wanted);
      await refreshLesson();
      window.scrollTo(0, 0);
      heading.setAttribute("tabindex", "-1");
      heading.focus({ preventScroll: true });
    });
  }

  // ---- the lesson

  const curve = lossCurve();
  const filled = h("span", { class: "bar-fill" });
  const meter = h("div", { class: "bar tall", role: "progressbar", "aria-label": "Progress of the lesson", "aria-valuemin": "0", "aria-valuemax": "100" }, filled);
  const phase = h("p", { class: "phase" });
  const facts = h("p", { class: "hint" });
  const stop = button("Stop", { onclick: () => stopLesson() });
  const runningTitle = h("h2", { id: "running-title" }, "Learning");
  const running = h("section", { class: "card running", "aria-labelledby": "running-title" },
    h("div", { class: "section-head" }, runningTitle, h("div", { class: "spread" }), stop), meter,
    h("div", { class: "running-line" }, phase, facts), curve.element, h("div", { class: "warnings" }),
    h("p", { class: "hint" }, "You can close this page; the lesson goes on. Until it is finished, the model answers as before."));
  let toldAt = -1;
  let heard = null; // {left, at}: the time left, and when the server said so
  let stopping = false;
  setInterval(() => { if (running.isConnected && store.lesson.state === "running") drawTimeLeft(); }, 1000);

  function drawTimeLeft() {
    const { progress, images } = store.lesson;
    const left = progress?.seconds_left;
    if (typeof left !== "number") heard = null;
    else if (heard?.left !== left) heard = { left, at: performance.now() };
    const rest = heard && Math.max(1, heard.left - (performance.now() - heard.at) / 1000);
    const text = [stopping && "saving, then it stops", rest && `about ${duration(rest)} left`, images && count(images, "image")].filter(Boolean).join(" · ");
    if (facts.textContent !== text) facts.textContent = text;
  }

  function drawRunning() {
    const { progress, classes } = store.lesson;
    const done = Math.max(0, Math.min(1, progress?.done ?? 0));
    filled.style.width = `${100 * done}%`;
    meter.setAttribute("aria-valuenow", String(Math.floor(100 * done)));
    runningTitle.textContent = classes?.length ? `Learning ${listing(classes)}` : "Learning";
    const what = sentence(PHASES[progress?.phase] ?? progress?.phase ?? "starting").replace(/\.$/, "");
    const epoch = progress?.epochs ? `epoch ${Math.max(1, progress.epoch)} of ${progress.epochs}` : "";
    const text = [`${Math.floor(100 * done)} %`, what, epoch].filter(Boolean).join(" · ");
    if (phase.textContent !== text) phase.textContent = text;
    const left = progress?.seconds_left;
    drawTimeLeft();
    curve.draw(store.lesson.losses ?? []);
    meter.classList.toggle("unknown", done === 0);
    fill(running.querySelector(".warnings"), sentences(store.lesson.notes ?? []));
    const quarter = Math.floor(4 * done);
    if (quarter !== toldAt) {
      toldAt = quarter;
      announce(`The lesson is ${Math.floor(100 * done)} percent done${typeof left === "number" ? `, about ${duration(left)} left` : ""}`);
    }
  }

  async function stopLesson() {
    await busy(stop, async () => {
      await api.remove(path("/lesson"));
      stopping = true;
      await refreshLesson();
    });
  }

  function drawStopped() {
    const { interrupted, progress, classes, error, state } = store.lesson;
    const failed = state === "failed";
    const done = progress?.done ? ` at ${Math.floor(100 * progress.done)} %` : "";
    const names = classes?.length ? ` of ${listing(classes)}` : "";
    const id = freshId("stopped");
    const same = Object.fromEntries(Object.entries(store.lesson.options ?? {}).filter(([, value]) => value !== null));
    const go = button(failed ? "Try again" : "Continue", { kind: "main", onclick: () => startLesson(go, failed ? same : {}) });
    const drop = button("Discard the lesson", {
      onclick: async () => {
        const sure = await confirmed("Discard the lesson?", "What it has learned so far is dropped. The model stays as it was before, and the images go back to the draft.", "Discard");
        if (sure) await busy(drop, async () => { await api.remove(path("/lesson?discard=true")); await Promise.all([refreshLesson(), refreshDraft()]); });
      },
    });
    const title = failed ? "The lesson failed" : interrupted ? "A lesson was interrupted" : "The lesson is stopped";
    const text = failed
      ? sentence(error ?? "The server gives no reason")
      : interrupted
        ? `The server ended while a lesson${names} was running${done}. The model is as it was before that lesson. Continue it, or discard it.`
        : `The lesson${names} was stopped${done}. What it has learned so far is saved. The model changes only when the lesson is finished.`;
    return h("section", { class: "card stopped", "aria-labelledby": id },
      h("h2", { id }, icon("warn"), title), h("p", {}, text), failed && h("p", { class: "hint" }, "The model is as it was before."),
      sentences(store.lesson.notes ?? []), h("div", { class: "actions start" }, go, drop));
  }

  function lossOf(losses) {
    const curve = lossCurve();
    curve.draw(losses);
    return curve.element;
  }

  function drawResult(open) {
    const { result } = store.lesson;
    const matrix = h("div", {}, h("p", { class: "hint" }, "Loading…"));
    const again = result.refreshed ?? [];
    const fresh = result.new.filter((each) => !again.includes(each));
    const done = [fresh.length && `learned ${listing(fresh)}`, again.length && `trained ${listing(again)} again`].filter(Boolean).join(", and ");
    const undo = button("Undo", { icon: "undo", disabled: model()?.can_undo === false, onclick: () => undoLesson(undo) });
    const section = h("details", { class: "card result", open },
      h("summary", {}, icon("check"), h("h2", {}, "Learned and forgotten")),
      h("p", {}, `The model has ${done || "finished the lesson"} in ${duration(result.seconds)}. It knows ${count(result.num_classes, "class", "classes")} now.`),
      h("div", { class: "actions start" },
        h("a", { class: "button main", href: `#/${encodeURIComponent(store.name)}/recognise` }, icon("eye"), h("span", {}, "Recognise images")), undo),
      sentences(store.lesson.notes ?? []),
      figures(result), lossOf(store.lesson.losses ?? []), h("h3", {}, "Class by class"), learnedTable(result), h("h3", {}, "Which classes are mixed up"), matrix);
    fillLater(matrix, confusionMatrix());
    return section;
  }

  function drawLesson() {
    const { state, interrupted, result } = store.lesson;
    const working = state === "running";
    const halted = state === "stopped" || state === "failed" || (interrupted && !working);
    draftPlace.hidden = working || state === "stopped" || Boolean(interrupted);
    if (working) {
      resultOf = null;
      if (running.parentNode !== lessonPlace) {
        fill(lessonPlace, running);
        toldAt = -1;
        stopping = false;
      }
      stop.disabled = stopping;
      drawRunning();
    } else if (halted) {
      const key = JSON.stringify(store.lesson);
      if (resultOf !== key) { resultOf = key; fill(lessonPlace, drawStopped()); }
    } else if (state === "finished" && result?.by_class) {
      const key = `${model()?.digest} ${result.seconds} ${result.new.join()}`;
      if (resultOf !== key) {
        resultOf = key;
        const open = lessonPlace.contains(running) || !store.draft.images.length;
        fill(lessonPlace, drawResult(open), h("h2", { class: "next" }, "Next lesson"));
      }
    } else {
      resultOf = null;
      fill(lessonPlace);
    }
  }

  async function loadKnown() {
    if (!model()?.exists) { known = []; return; }
    try {
      known = (await api.get(path("/classes"))).map((each) => each.name);
      drawDraft();
    } catch (error) {
      showError(error);
    }
  }

  /** The Classes view asks for more images of a class so. */
  function teachMore(name) {
    addClass(name);
  }

  drawDraft();
  drawLesson();
  return {
    element,
    take: (images) => { if (!draftPlace.hidden) takeLoose(images); },
    teachMore,
    show: () => { const name = wantedClass(); loadKnown(); drawDraft(); drawLesson(); if (name) teachMore(name); },
    changed: (kind) => {
      if (kind === "draft") drawDraft();
      if (kind === "lesson") drawLesson();
      if (kind === "models") { loadKnown(); drawDraft(); drawLesson(); }
    },
  };
}

let wantedName = null;

/** Opens the Teach view with this class in the draft. */
export function teachMoreOf(name) {
  wantedName = name;
  location.hash = `#/${encodeURIComponent(store.name)}/teach`;
}

function wantedClass() {
  const name = wantedName;
  wantedName = null;
  return name;
}
