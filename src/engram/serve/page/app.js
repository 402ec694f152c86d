// The frame of the page: which model and which view, the connection, the token.

import { api, onUnauthorised, takeToken } from "./api.js";
import { classesView } from "./classes.js";
import { compareView } from "./compare.js";
import { announce, askText, fill, freshId, h, icon, listing, notify, showError } from "./dom.js";
import { receive, fromTransfer } from "./files.js";
import { historyView } from "./history.js";
import { recogniseView } from "./recognise.js";
import { choose, model, on, refreshModels, store } from "./store.js";
import { teachView } from "./teach.js";

const VIEWS = {
  recognise: { title: "Recognise", make: recogniseView },
  teach: { title: "Teach", make: teachView },
  classes: { title: "Classes", make: classesView },
  history: { title: "History", make: historyView },
  compare: { title: "Compare", make: compareView },
};
const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
let made = {}; // views of the chosen model, by name
let shown = null; // name of the view

onUnauthorised(() => askText("This server asks for a token", {
  label: "Token", yes: "Continue", type: "password",
  hint: "It is the text that was given to engram serve with --token or ENGRAM_TOKEN. This tab remembers it until it is closed.",
}));

function place() {
  const [, name = "", view = ""] = location.hash.split("/");
  let decoded = "";
  try {
    decoded = decodeURIComponent(name);
  } catch {
    // not an address of this page
  }
  return { name: decoded, view };
}

/** The address of a view of a model. */
function address(view, name = store.name) {
  return `#/${encodeURIComponent(name ?? "")}/${view}`;
}

function usual() {
  return model()?.exists ? "recognise" : "teach";
}

function drawTabs() {
  for (const link of tabs.querySelectorAll("a")) {
    const view = link.dataset.view;
    link.href = address(view);
    if (view === "compare") link.hidden = store.models.length < 2;
    if (view === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const waiting = store.draft.images.length;
  const badge = document.getElementById("draft-count");
  badge.hidden = !waiting;
  fill(badge, String(waiting), h("span", { class: "hidden" }, ` ${waiting === 1 ? "image" : "images"} in the draft`));
}

let told = ""; // of the models, so that the box is drawn only when they change

function drawModel() {
  const place = document.getElementById("model");
  const now = JSON.stringify([store.name, store.models.map((each) => [each.name, each.num_classes, each.exists])]);
  if (now === told) return;
  told = now;
  const chosen = model();
  const says = (each) => (each.exists ? `${each.num_classes} ${each.num_classes === 1 ? "class" : "classes"}` : "new");
  if (store.models.length > 1) {
    const id = freshId("model");
    const select = h("select", { id, class: "field", onchange: () => { location.hash = address(shown, select.value); } },
      store.models.map((each) => h("option", { value: each.name, selected: each.name === store.name }, `${each.name} (${says(each)})`)));
    fill(place, h("label", { for: id, class: "hidden" }, "Model"), select);
  } else {
    fill(place, chosen && [h("span", { class: "model-name" }, chosen.name), h("span", { class: "hint" }, says(chosen))]);
  }
}

async function route() {
  const asked = place();
  const known = store.models.some((each) => each.name === asked.name);
  const name = known ? asked.name : store.models[0]?.name;
  if (!name) return;
  if (name !== store.name || !Object.keys(made).length) {
    made = {};
    await choose(name);
  }
  const view = VIEWS[asked.view] && (asked.view !== "compare" || store.models.length > 1) ? asked.view : usual();
  if (address(view) !== location.hash) {
    history.replaceState(null, "", address(view));
  }
  show(view);
}

function show(view) {
  const moved = shown !== null;
  const same = shown === view && main.firstElementChild === made[view]?.element;
  shown = view;
  made[view] ??= VIEWS[view].make();
  if (!same) {
    main.replaceChildren(made[view].element);
    window.scrollTo(0, 0);
    if (moved) {
      main.focus({ preventScroll: true });
      announce(VIEWS[view].title);
    }
  }
  made[view].show?.();
  drawTabs();
  drawTitle();
}

function drawTitle() {
  const { state, progress } = store.lesson;
  const learning = state === "running" ? `${Math.floor(100 * (progress?.done ?? 0))} % · ` : "";
  document.title = `${learning}${VIEWS[shown]?.title ?? ""} · ${store.name ?? ""} · engram`;
}

function drawConnection() {
  const bar = document.getElementById("connection");
  if (store.connected) {
    fill(bar);
    return;
  }
  fill(bar, icon("warn"), h("span", {}, "The connection to the server is lost. The page tries again until the server is back."));
}

for (const kind of ["models", "draft", "lesson"]) {
  on(kind, (before) => {
    for (const view of Object.values(made)) view.changed?.(kind, before);
  });
}
on("models draft chosen", () => { drawModel(); drawTabs(); });
on("lesson", (before) => {
  drawTitle();
  const { state, interrupted, result } = store.lesson;
  if (state === before.state && Boolean(interrupted) === Boolean(before.interrupted)) return;
  const link = (text) => h("a", { href: address("teach"), class: "button small" }, text);
  if (before.state === "running" && state === "finished") {
    const said = `The lesson is finished: the model has learned ${listing(result?.new ?? [])}.`;
    if (shown === "teach") announce(said); // the result is there to see
    else notify(said, { action: link("See the result") });
  } else if (before.state === "running" && state === "failed") {
    notify("The lesson failed.", { error: true, action: shown !== "teach" && link("See why") });
  } else if (interrupted) {
    notify("A lesson was interrupted. It can be continued or discarded.", { error: true, action: shown !== "teach" && link("Show it") });
  }
});
let wasLost = false;
on("connection", () => {
  drawConnection();
  if (store.connected && wasLost) notify("The server is back.");
  wasLost = !store.connected;
});

window.addEventListener("hashchange", () => {
  if (location.hash.startsWith("#/")) route().catch(showError);
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

// Images dropped or pasted anywhere go to the view that is shown, and never replace the page.
for (const kind of ["dragover", "drop"]) {
  window.addEventListener(kind, (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    if (kind === "drop" && made[shown]?.take) fromTransfer(event.dataTransfer).then((images) => receive(images, made[shown].take), showError);
  });
}
window.addEventListener("paste", async (event) => {
  if (document.querySelector("dialog[open]") || !made[shown]?.take) return;
  const images = await fromTransfer(event.clipboardData);
  if (!images.length) return;
  made[shown].take(images);
});

async function start() {
  takeToken();
  for (;;) {
    try {
      await api.get("/health");
      await refreshModels();
      break;
    } catch (error) {
      if (!error.lost) {
        fill(main, h("div", { class: "empty" }, h("h1", {}, "The page cannot be shown"), h("p", {}, error.message),
          h("button", { class: "button main", type: "button", onclick: () => location.reload() }, "Try again")));
        return;
      }
      store.connected = false;
      drawConnection();
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  store.connected = true;
  drawConnection();
  await route();
}

start().catch(showError);
