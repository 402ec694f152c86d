// Elements, pictures, messages and dialogs. Text always goes in as text nodes.

import { api } from "./api.js";

/** Makes an element: `h("button", { class: "quiet", onclick }, "Stop")`. Strings become text nodes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in PROPERTIES) element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

const PROPERTIES = { value: 1, checked: 1, disabled: 1, indeterminate: 1 };

/** Appends children to an element; arrays are flattened, empty ones left out. */
export function add(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child);
  }
  return element;
}

/** Replaces the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  return add(element, ...children);
}

const SVG = "http://www.w3.org/2000/svg";

/** Makes an SVG element. */
export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, String(value));
  }
  return add(element, children);
}

/** An icon of the sprite in index.html; it says nothing to a screen reader. */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" },
    svg("use", { href: `#i-${name}` }));
}

/** A button with an icon and a word. */
export function button(text, { icon: name = "", kind = "", ...props } = {}) {
  return h("button", { type: "button", class: `button ${kind}`.trim(), ...props }, name && icon(name), h("span", {}, text));
}

let number = 0;

/** An id that no other element of the page has. */
export function freshId(stem = "e") {
  number += 1;
  return `${stem}-${number}`;
}

/** `3 images`, `1 image`. */
export function count(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

/** A percentage with one decimal, or a dash. */
export function percent(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${value.toFixed(1)} %` : "–";
}

/** A duration in words: `12 s`, `3 min 20 s`, `2 h 5 min`. */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s % 60 ? ` ${s % 60} s` : ""}`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

/** Names as a list in a sentence: `a, b and 3 more`. */
export function listing(names, most = 4) {
  const shown = names.length > most + 1 ? names.slice(0, most) : names;
  const rest = names.length - shown.length;
  const parts = rest ? [...shown, `${rest} more`] : shown;
  return parts.length > 1 ? `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}` : parts.join("");
}

/** A number of percent by predictor, or a plain number: the one that is reported. */
export function reported(value, predictors = []) {
  if (typeof value === "number") return value;
  if (!value || typeof value !== "object") return null;
  for (const by of predictors) if (typeof value[by] === "number") return value[by];
  const first = Object.values(value).find((each) => typeof each === "number");
  return first ?? null;
}

// ---- pictures of the server, fetched with the token and kept as blobs

const pictures = new Map(); // address -> promise of a blob address; the oldest go first
const MOST_PICTURES = 1500;

function picture(path, image) {
  let found = pictures.get(path);
  if (!found) {
    found = api.blob(path, () => image.checkVisibility()).then((blob) => URL.createObjectURL(blob));
    found.catch(() => pictures.delete(path));
    pictures.set(path, found);
    if (pictures.size > MOST_PICTURES) {
      const [oldest, made] = pictures.entries().next().value;
      pictures.delete(oldest);
      made.then((url) => URL.revokeObjectURL(url), () => {});
    }
  }
  return found;
}

const nearView = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) load(entry.target);
}, { rootMargin: "300px" });

async function load(image) {
  try {
    const url = await picture(image.dataset.path, image);
    nearView.unobserve(image);
    image.src = url;
    image.onerror = () => { // the address is not valid any more: fetch the picture again, once
      image.onerror = null;
      pictures.delete(image.dataset.path);
      load(image);
    };
  } catch (error) {
    if (error.name !== "AbortError") image.classList.add("broken");
    else if (image.checkVisibility()) load(image); // it was asked for by another one, which is gone
  }
}

/** An image below the API, loaded when it comes near the visible part of the page. */
export function remoteImage(path, alt, props = {}) {
  const image = h("img", { alt, width: 96, height: 96, decoding: "async", ...props });
  image.dataset.path = path;
  nearView.observe(image);
  return image;
}

// ---- messages

/** Says something to a screen reader, politely. */
export function announce(text) {
  const place = document.getElementById("announce");
  place.textContent = "";
  setTimeout(() => { place.textContent = text; }, 50);
}

/** Shows a message; errors stay until they are closed. */
export function notify(text, { error = false, action = null } = {}) {
  const place = document.getElementById("notices");
  for (const other of [...place.children]) if (other.dataset.text === text) other.remove();
  const box = h("div", { class: `notice ${error ? "error" : "good"}`, role: error ? "alert" : "status" },
    icon(error ? "warn" : "check"), h("p", {}, text), action,
    h("button", { type: "button", class: "close", "aria-label": "Close the message", onclick: () => box.remove() }, icon("close")));
  box.dataset.text = text;
  place.append(box);
  while (place.children.length > 4) place.firstElementChild.remove();
  if (!error) setTimeout(() => box.remove(), 7000);
}

/** Shows an error of the server, or of this page, as a sentence. */
export function showError(error) {
  if (error?.name === "AbortError" || error?.lost) return; // the connection bar says it
  notify(sentence(error?.message ?? String(error)), { error: true });
}

/** The text with a capital letter and a full stop. */
export function sentence(text) {
  const clean = String(text).trim();
  if (!clean) return "Something went wrong.";
  const start = clean[0].toUpperCase() + clean.slice(1);
  return /[.!?…]$/.test(start) ? start : `${start}.`;
}

/** Runs an action of a button: it is busy meanwhile, and an error is shown. Returns undefined after an error. */
export async function busy(element, work) {
  if (element?.getAttribute("aria-busy") === "true") return undefined;
  element?.setAttribute("aria-busy", "true");
  try {
    return await work();
  } catch (error) {
    showError(error);
    return undefined;
  } finally {
    element?.removeAttribute("aria-busy");
  }
}

// ---- dialogs

/**
 * Opens a modal dialog and resolves with the value of the button that closed it, or null.
 * `build` gets the dialog and a function that closes it with a value, and returns the content.
 */
export function openDialog(title, build, { wide = false } = {}) {
  return new Promise((resolve) => {
    const before = document.activeElement;
    const heading = freshId("dialog");
    const dialog = h("dialog", { class: wide ? "wide" : "", "aria-labelledby": heading });
    let value = null;
    const close = (result = null) => { value = result; dialog.close(); };
    add(dialog,
      h("div", { class: "dialog-head" }, h("h2", { id: heading }, title),
        h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => close() }, icon("close"))),
      build(dialog, close));
    dialog.addEventListener("click", (event) => { if (event.target === dialog) close(); });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      resolve(value);
    });
    document.body.append(dialog);
    dialog.showModal();
    dialog.querySelector("[autofocus]")?.focus();
  });
}

/** Asks before something is done; resolves with true or false. */
export async function confirmed(title, text, yes, { danger = true } = {}) {
  const answer = await openDialog(title, (_, close) => [
    h("p", {}, text),
    h("div", { class: "actions" },
      button("Cancel", { kind: "quiet", onclick: () => close(false), autofocus: true }),
      button(yes, { kind: danger ? "danger" : "main", onclick: () => close(true) })),
  ]);
  return answer === true;
}

/** Asks for a text; resolves with it, or null. `names` are offered. */
export function askText(title, { label, value = "", yes = "Save", hint = "", names = [], type = "text" }) {
  return openDialog(title, (_, close) => {
    const input = nameInput(label, { value, names, type, autofocus: true });
    input.field.select();
    return h("form", {
      method: "dialog",
      onsubmit: (event) => {
        event.preventDefault();
        const text = input.field.value.trim();
        if (text) close(text);
      },
    }, input.box, hint && h("p", { class: "hint" }, hint),
    h("div", { class: "actions" },
      button("Cancel", { kind: "quiet", onclick: () => close() }),
      button(yes, { kind: "main", type: "submit" })));
  });
}

/** A labelled text field with names to choose from. */
export function nameInput(label, { value = "", names = [], hiddenLabel = false, type = "text", ...props } = {}) {
  const id = freshId("field");
  const list = freshId("names");
  const field = h("input", {
    id, type, value, class: "field", autocomplete: "off", spellcheck: "false", autocapitalize: "off", required: true,
    maxlength: type === "password" ? 4096 : 200, list: names.length ? list : null, ...props,
  });
  const options = names.length ? h("datalist", { id: list }, names.map((name) => h("option", { value: name }))) : null;
  const box = h("div", { class: "labelled" }, h("label", { for: id, class: hiddenLabel ? "hidden" : "" }, label), field, options);
  return { box, field };
}

/** A meter: a bar with its value said in words. `share` is 0 to 1. */
export function bar(share, label, kind = "") {
  const inner = h("span", { class: "bar-fill" });
  inner.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return h("span", { class: `bar ${kind}`.trim(), role: "img", "aria-label": label }, inner);
}
