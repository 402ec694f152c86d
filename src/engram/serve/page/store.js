// What the page knows of the server: models, draft and lesson of the chosen model, and the connection.

import { api, modelPath, readEvents } from "./api.js";
import { showError } from "./dom.js";

const events = new EventTarget();
const PAUSE = [500, 1000, 2000, 3000, 5000]; // milliseconds between attempts to connect again

export const store = {
  models: [],
  name: null, // of the chosen model
  draft: { images: [], classes: [], rejected: [] },
  lesson: { state: "none" },
  connected: true,
  connections: 0, // how often the page has connected: ids of a restarted server mean other pictures
};

/** The chosen model, or null. */
export function model() {
  return store.models.find((each) => each.name === store.name) ?? null;
}

/** The address of something of the chosen model. */
export function path(rest = "") {
  return modelPath(store.name, rest);
}

/** The address of an example of a model; what follows # is not sent, and keeps apart the pictures of generations. */
export function examplePath(id, of = model()) {
  return `${modelPath(of.name, `/examples/${encodeURIComponent(id)}`)}#${of.digest}.${store.connections}`;
}

/** The address of a thumbnail of the draft. */
export function draftPath(id) {
  return `${path(`/draft/images/${encodeURIComponent(id)}`)}#${store.connections}`;
}

/** Calls `listener` when one of these things has changed: "models", "draft", "lesson", "connection", "chosen". */
export function on(kinds, listener) {
  for (const kind of kinds.split(" ")) events.addEventListener(kind, (event) => listener(event.detail));
}

function tell(kind, detail) {
  events.dispatchEvent(new CustomEvent(kind, { detail }));
}

export async function refreshModels() {
  store.models = await api.get("/models");
  if (!model()) store.name = store.models[0]?.name ?? null;
  tell("models");
}

/** Takes a draft that the server sent. The answer to an upload names only the files that were refused in it. */
export function takeDraft(draft) {
  const rejected = draft.added ? [...store.draft.rejected, ...draft.rejected] : draft.rejected;
  store.draft = { images: draft.images, classes: draft.classes, rejected };
  tell("draft");
}

export async function refreshDraft() {
  const name = store.name;
  const draft = await api.get(path("/draft"));
  if (name === store.name) takeDraft(draft);
}

let heard = 0; // states of lessons

/** Takes the state of the lesson. One that has just ended is told after the model and the draft that came of it. */
async function takeLesson(lesson) {
  heard += 1;
  const mine = heard;
  const before = store.lesson;
  const ended = before.state === "running" && lesson.state !== "running";
  if (ended || (lesson.state === "finished" && before.state !== "finished")) {
    await Promise.all([refreshModels(), refreshDraft()]).catch(showError);
    if (mine !== heard) return;
  }
  store.lesson = lesson;
  tell("lesson", before);
}

/** Reads the state of the lesson, for a change that this page has made. */
export async function refreshLesson() {
  const name = store.name;
  const lesson = await api.get(path("/lesson"));
  if (name === store.name) await takeLesson(lesson);
}

// ---- the connection: one stream of events, opened again when it ends

let following = null;

function sleep(time, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, time);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
    window.addEventListener("online", resolve, { once: true });
  });
}

function setConnected(connected) {
  if (store.connected === connected) return;
  store.connected = connected;
  tell("connection");
}

/** Chooses a model, reads its state, and follows its lesson from now on. */
export async function choose(name) {
  following?.abort();
  following = new AbortController();
  const { signal } = following;
  store.name = name;
  store.draft = { images: [], classes: [], rejected: [] };
  store.lesson = { state: "none" };
  heard += 1;
  tell("chosen");
  follow(name, signal);
  await refreshDraft();
}

async function follow(name, signal) {
  let failures = 0;
  let first = true;
  while (!signal.aborted) {
    try {
      await readEvents(modelPath(name, "/lesson/events"), (_, lesson) => {
        if (signal.aborted) return;
        if (!store.connected || first) {
          const back = !store.connected;
          first = false;
          failures = 0;
          setConnected(true);
          if (back) reload();
        }
        takeLesson(lesson);
      }, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return; // the person did not give the token
      if (error.status === 404) { showError(error); return; }
    }
    if (signal.aborted) return;
    setConnected(false);
    await sleep(PAUSE[Math.min(failures, PAUSE.length - 1)], signal);
    failures += 1;
  }
}

async function reload() {
  store.connections += 1;
  try {
    await refreshModels();
    await refreshDraft();
  } catch (error) {
    showError(error);
  }
}
