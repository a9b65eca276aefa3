// The server, by addresses relative to this page. A person's actions prompt for the key; background requests do not.

let key = localStorage.getItem("key") || "";
let askForKey = null;
let asking = null;
let model = ""; // the one of several that requests name

export const setModel = (name) => (model = name);
export const modelName = () => model;

export const onKey = (ask) => (askForKey = ask);
export const hasKey = () => Boolean(key);

export function setKey(value) {
  key = value;
  if (value) localStorage.setItem("key", value);
  else localStorage.removeItem("key");
}

export class Refusal extends Error {
  constructor(message, status, more = {}) {
    super(message);
    this.status = status; // 0 without an answer
    this.more = more; // all that the server reports of it
  }
}

async function call(path, { body, raw, quiet = false, bare = false, named, ...options } = {}) {
  if (model && !bare && !/^(page\/|tools|v1\/models)/.test(path)) {
    if (body) body = { ...body, model };
    else path += (path.includes("?") ? "&" : "?") + "model=" + encodeURIComponent(model);
  }
  for (;;) {
    const headers = {};
    if (body) headers["content-type"] = "application/json";
    const sent = key;
    if (sent) headers.authorization = "Bearer " + sent;
    if (named) headers["x-conversation-id"] = named;
    let answer;
    try {
      const content = raw ?? (body && JSON.stringify(body));
      answer = await fetch(path, { ...options, headers, body: content, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal("No answer from the server.", 0);
    }
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    const refusal = new Refusal(error?.message || answer.statusText || `HTTP ${answer.status}`, answer.status, error);
    if (answer.status !== 401) throw refusal;
    if (sent !== key) continue;
    if (quiet || !askForKey) throw refusal;
    asking ??= askForKey(Boolean(sent)).finally(() => (asking = null));
    if (!(await asking)) throw new Refusal("This server requires an API key.", 401);
  }
}

export const get = async (path, options) => (await call(path, options)).json();
export const post = async (path, body, options) => (await call(path, { method: "POST", body, ...options })).json();
export const pdfText = async (file) => (await (await call("page/pdf", { method: "POST", raw: file })).json()).text;
export const remove = async (path) => (await call(path, { method: "DELETE" })).json();

// An id by which the server keeps a stream; it is all that another page would need to read that.
export const streamId = () =>
  [...crypto.getRandomValues(new Uint32Array(4))].map((each) => each.toString(36)).join("-");

const streamPath = (id) => "v1/stream?conv_id=" + id;
export const forget = (id) => call(streamPath(id), { method: "DELETE", quiet: true }).catch(() => {});

// The events of a stream that the server keeps under the id, each with its bytes; an error in it is thrown.
export const stream = async (path, body, id, signal) =>
  events(await call(path, { method: "POST", body: { ...body, stream: true }, named: id, signal }));

const ASK_MS = 500;
const MAX_ASKED = 1200; // ten minutes, as long as the server holds a request while its model loads

// The events of a kept stream from a byte on. One that `isExpected` is waited for: another tab
// has just sent its request.
export async function resume(id, from, signal, isExpected = false) {
  for (let asked = 0; ; asked++) {
    const body = { conversation_ids: [id] };
    const kept = await post("v1/streams/lookup", body, { quiet: true, bare: true, signal });
    const found = kept.find((each) => each.conversation_id === id);
    if (found?.is_done || found?.total_bytes)
      return events(await call(`${streamPath(id)}&from=${from}`, { quiet: true, signal }));
    if (!found && !(isExpected && asked < MAX_ASKED))
      throw new Refusal("The server no longer has this reply.", 404);
    await new Promise((go) => setTimeout(go, ASK_MS)); // it has not started
    signal.throwIfAborted();
  }
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader(), encoder = new TextEncoder();
  let rest = "", ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const found = (rest + value).split("\n\n");
      rest = found.pop();
      for (const event of found) {
        if (event === "data: [DONE]") ended = true;
        const data = !ended && event.startsWith("data: ") ? JSON.parse(event.slice(6)) : {};
        if (data.error) throw new Refusal(data.error.message, data.error.code, data.error);
        yield { data, bytes: encoder.encode(event).length + 2 };
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Refusal("The connection was lost.", 0);
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!ended) throw new Refusal("The connection was lost.", 0);
}

// -- Markdown to HTML by the server, each text once -------------------------------------------------------------------

const MAX_KNOWN = 2000, MAX_AT_ONCE = 32;
const known = new Map();
let waiting = [];

export function html(text) {
  if (!known.has(text)) {
    if (known.size > MAX_KNOWN) known.clear();
    known.set(text, new Promise((resolve, reject) => waiting.push({ text, resolve, reject })));
    if (waiting.length === 1) queueMicrotask(renderAll);
  }
  return known.get(text);
}

const rendered = async (texts) => (await post("page/markdown", { texts }, { quiet: true })).html;
export const render = async (text) => (await rendered([text]))[0];

async function renderAll() {
  while (waiting.length) {
    const batch = waiting.splice(0, MAX_AT_ONCE);
    try {
      const html = await rendered(batch.map((each) => each.text));
      batch.forEach((each, i) => each.resolve(html[i]));
    } catch (error) {
      for (const each of batch) {
        known.delete(each.text);
        each.reject(error);
      }
    }
  }
}
