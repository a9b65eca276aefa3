// The server, by addresses relative to this page. What needs a key asks for it once.

let key = localStorage.getItem("key") || "";
let askKey = null;
export const onKey = (ask) => (askKey = ask);
export function setKey(value) {
  key = value;
  if (value) localStorage.setItem("key", value);
  else localStorage.removeItem("key");
}
export const hasKey = () => Boolean(key);

export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let asking = null;
async function call(path, options = {}) {
  for (;;) {
    const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: "Bearer " + key } : {}) };
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal("The server does not answer.", 0);
    }
    if (answer.ok) return answer;
    const body = await answer.json().catch(() => ({}));
    if (answer.status !== 401 || !askKey) throw new Refusal(body.error?.message || answer.statusText, answer.status);
    asking ??= askKey().finally(() => (asking = null));
    if (!(await asking)) throw new Refusal("This server wants an API key.", 401);
  }
}

export const get = async (path) => (await call(path)).json();
export const post = async (path, body, signal) => (await call(path, { method: "POST", body: JSON.stringify(body), signal })).json();
export const remove = async (path) => (await call(path, { method: "DELETE" })).json();

// The events of a stream; what the server says of an error is thrown.
export async function* stream(path, body, signal) {
  const answer = await call(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
        const data = JSON.parse(event.slice(6));
        if (data.error) throw new Refusal(data.error.message, data.error.code);
        yield data;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Refusal("The connection was lost.", 0);
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Markdown to HTML by the server, each text once.
const known = new Map();
let waiting = [];
export function html(text) {
  if (!known.has(text)) {
    if (known.size > 2000) known.clear();
    known.set(text, new Promise((resolve, reject) => waiting.push({ text, resolve, reject })));
    if (waiting.length === 1) queueMicrotask(render);
  }
  return known.get(text);
}

async function render() {
  while (waiting.length) {
    const batch = waiting.splice(0, 32);
    try {
      const { html } = await post("page/markdown", { texts: batch.map((each) => each.text) });
      batch.forEach((each, i) => each.resolve(html[i]));
    } catch (error) {
      for (const each of batch) {
        known.delete(each.text);
        each.reject(error);
      }
    }
  }
}
