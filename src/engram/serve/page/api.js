// The API: requests with the token, errors as sentences, and the stream of a lesson's events.

const ROOT = "api/v1";
const TOKEN = "engram-token";

let askToken = null; // set by app.js: a function that asks the person for the token
let asking = null;

class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
    this.lost = status === 0;
  }
}

/** Sets the function that asks for the token; it resolves with the token or null. */
export function onUnauthorised(ask) {
  askToken = ask;
}

/** Takes the token out of the address `#token=...` that the server prints, so that it is not seen or shared. */
export function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  sessionStorage.setItem(TOKEN, decodeURIComponent(found[1]));
}

function stored() {
  try {
    return sessionStorage.getItem(TOKEN);
  } catch {
    return null;
  }
}

function headers(more = {}) {
  const token = stored();
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

async function newToken(used) {
  if (stored() !== used) return true; // somebody has given a new one meanwhile
  asking ??= askToken().finally(() => { asking = null; });
  const token = await asking;
  if (!token) return false;
  sessionStorage.setItem(TOKEN, token);
  return true;
}

async function message(answer) {
  try {
    const body = await answer.clone().json();
    if (typeof body.error === "string") return body.error;
    if (typeof body.detail === "string") return body.detail;
  } catch {
    // not JSON: the status has to do
  }
  return `the server answered with status ${answer.status}`;
}

async function request(path, options = {}) {
  for (;;) {
    const used = stored();
    let answer;
    try {
      answer = await fetch(`${ROOT}${path}`, { cache: "no-store", ...options, headers: headers(options.headers) });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the server does not answer", 0);
    }
    if (answer.status === 401 && (await newToken(used))) continue;
    if (!answer.ok) throw new ApiError(await message(answer), answer.status);
    return answer;
  }
}

async function json(path, options) {
  const answer = await request(path, options);
  return answer.status === 204 ? null : answer.json();
}

function body(method, content) {
  if (content === undefined) return { method };
  return { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) };
}

/** The address of a model below the API; the name is escaped. */
export function modelPath(model, rest = "") {
  return `/models/${encodeURIComponent(model)}${rest}`;
}

const waiting = []; // pictures: a few at a time, so that other requests are not behind them
const loading = new Set();
let held = 0;
const AT_ONCE = 3;

function next() {
  while (!held && loading.size < AT_ONCE && waiting.length) {
    const { path, wanted, resolve, reject } = waiting.shift();
    const asked = wanted() ? request(path) : Promise.reject(new DOMException("not seen any more", "AbortError"));
    const loaded = asked.then((answer) => answer.blob()).then(resolve, reject).finally(() => { loading.delete(loaded); next(); });
    loading.add(loaded);
  }
}

/** Does something that changes the model while no picture is asked for: the ids of examples are others after it. */
export async function withoutPictures(work) {
  held += 1;
  try {
    await Promise.all(loading);
    return await work();
  } finally {
    held -= 1;
    next();
  }
}

export const api = {
  get: (path) => json(path),
  post: (path, content) => json(path, body("POST", content)),
  patch: (path, content) => json(path, body("PATCH", content)),
  remove: (path, content) => json(path, body("DELETE", content)),
  send: (path, form, signal) => json(path, { method: "POST", body: form, signal }),
  file: async (path) => (await request(path)).blob(),
  /** A picture; not asked for if `wanted()` is false when its turn comes. */
  blob: (path, wanted) => new Promise((resolve, reject) => { waiting.push({ path, wanted, resolve, reject }); next(); }),
};

const SILENCE = 45_000; // milliseconds without a byte, after which the connection counts as lost

/**
 * Reads server-sent events until the signal aborts or the connection ends, and calls `each(event, data)`.
 * It is a fetch and not an EventSource, because that one cannot send the token.
 */
export async function readEvents(path, each, signal) {
  const ended = new AbortController();
  const stop = () => ended.abort();
  signal.addEventListener("abort", stop, { once: true });
  let watchdog = null;
  const awake = () => { clearTimeout(watchdog); watchdog = setTimeout(stop, SILENCE); };
  try {
    awake();
    const answer = await request(path, { signal: ended.signal, headers: { Accept: "text/event-stream" } });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      awake();
      buffer += value.replaceAll("\r\n", "\n");
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        deliver(buffer.slice(0, end), each);
        buffer = buffer.slice(end + 2);
      }
    }
  } finally {
    clearTimeout(watchdog);
    signal.removeEventListener("abort", stop);
    ended.abort();
  }
}

function deliver(block, each) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (!data.length) return;
  try {
    each(event, JSON.parse(data.join("\n")));
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
}
