// The open conversation, and replies that stream into any: sending, branching, stopping.

import { $, count, el, keyed, put, say, sure, tell } from "./dom.js";
import * as api from "./api.js";
import * as drawn from "./message.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import * as titles from "./titles.js";
import * as tools from "./tools.js";

const SAVE_MS = 2000;

let conversation = null;
let leaves = false; // the page goes, and with it the connection, but not the reply
let hooks = {}; // callbacks; see app.js
const runs = new Map(); // by the conversation's id: {message, controller, progress, streamed}

export const current = () => conversation;
export const runOf = (given) => runs.get(given.id) ?? null;
export const elementOf = (message) => $("messages").querySelector(`[data-key="${message.id}"]`);

export function connect(given) {
  hooks = given;
  drawn.connect({ again: hooks.again, answer, decide: useTools, edit, erase, go, proceed, regenerate, retry });
  let before = 0;
  scroll().addEventListener("scroll", () => {
    const { scrollTop: top, scrollHeight, clientHeight } = scroll();
    // Only a person who scrolls up stays there; growing content does not.
    if (top < before - 2) follows = false;
    if (scrollHeight - top - clientHeight < 40) follows = true;
    before = top;
  }, { passive: true });
  new ResizeObserver(() => bottom()).observe($("messages"));
  addEventListener("pagehide", () => (leaves = true));
  addEventListener("pageshow", () => (leaves = false));
}

const scroll = () => $("scroll");
let follows = true;
function bottom(force = false) {
  follows ||= force;
  if (follows) scroll().scrollTop = scroll().scrollHeight;
}

export function open(given) {
  conversation = given;
  $("messages").replaceChildren();
  draw();
  bottom(true);
}

// Bring a message into view, with the focus.
export function goTo(message) {
  follows = false;
  elementOf(message)?.scrollIntoView({ block: "center" });
  elementOf(message)?.focus({ preventScroll: true });
}

async function keep(own = conversation) {
  if (own.gone) return;
  own.updated = Date.now();
  try {
    await store.save(own);
  } catch (error) {
    tell(`The browser could not store this conversation: ${error.message}`);
  }
  hooks.changed();
}

// -- drawing ---------------------------------------------------------------------------------------------------------

export function draw() {
  const path = store.path(conversation), kin = store.families(conversation), run = runOf(conversation);
  const title = store.titleOf(conversation), box = $("messages");
  $("title").textContent = title;
  document.title = (path.length ? title + " · " : "") + "pyctl";
  drawSystem();
  box.querySelector(".hello")?.remove();
  keyed(box, path, (message) => message.id, drawn.make, (made, message) => {
    const siblings = kin.get(message.parent ?? "").filter((each) => each.role === message.role);
    drawn.update(made, message, {
      run: run?.message === message ? run : null, siblings, isLeaf: conversation.leaf === message.id,
    });
  });
  if (!path.length) box.append(hello());
  $("send").textContent = run ? "Stop" : "Send";
  $("send").classList.toggle("stop", run !== null);
  hooks.drawn(path);
}

const hello = () =>
  el("div", { class: "hello" }, el("span", { class: "logo big", "aria-hidden": "true" }),
    el("h2", {}, "Start a conversation"),
    el("p", { class: "dim" }, "Each reply shows how many tokens came from the cache and how many were evaluated. " +
      "Edit a message to branch. Branches share their common prefix."),
    el("p", { class: "dim keys" }, "Press ", el("kbd", {}, "?"), " for the list of keys."));

function drawSystem() {
  const text = conversation.system ?? settings.systemPrompt();
  const box = $("system");
  box.hidden = !text;
  if (text) put(box, el("summary", {}, "System prompt"), el("pre", { tabindex: "0" }, text));
}

// -- what people do --------------------------------------------------------------------------------------------------

const busy = () => runOf(conversation) !== null;

export function send(text, files = []) {
  if (busy() || (!text.trim() && !files.length)) return false;
  conversation.system ??= settings.systemPrompt();
  conversation.preset = settings.presetName();
  store.add(conversation, conversation.leaf, { role: "user", content: text, ...(files.length ? { files } : {}) });
  reply(store.add(conversation, conversation.leaf, { role: "assistant" }));
  return true;
}

function go(message) {
  store.show(conversation, message.id);
  draw();
  elementOf(message)?.scrollIntoView({ block: "nearest" });
  elementOf(message)?.querySelector(".branch button:not(:disabled)")?.focus({ preventScroll: true });
  keep();
}

function regenerate(message) {
  if (!busy()) reply(store.add(conversation, message.parent, { role: "assistant" }));
}

function retry(message) {
  if (!busy()) reply(message);
}

function proceed(message) {
  if (!busy()) reply(message, true);
}

function answer(message, typed) {
  Object.assign(tools.resultsOf(message), Object.fromEntries(typed));
  useTools(message);
}

// Run the calls of a reply that may run, and one as was chosen; when all have results the model goes on.
async function useTools(message, chosen = -1, choice = "", own = conversation) {
  if (runs.has(own.id)) return;
  const path = store.path(own), controller = new AbortController();
  const redraw = () => own === conversation && draw();
  let isStopped = false;
  if (chosen >= 0 || tools.anyMayRun(own, message, path)) {
    runs.set(own.id, { message, controller, progress: null });
    redraw();
    try {
      await tools.run(own, message, path, controller.signal, chosen, choice);
    } catch {
      if (own === conversation) say("Tool stopped");
      isStopped = true;
    }
    runs.delete(own.id);
    redraw();
  }
  if (own.gone || isStopped || !tools.areDone(message)) return;
  let at = message.id;
  for (const [i, { id, name }] of message.calls.entries())
    at = store.add(own, at, { role: "tool", content: tools.resultsOf(message)[i], call: id, name }).id;
  reply(store.add(own, at, { role: "assistant" }), false, own);
}

async function erase(message) {
  const own = conversation;
  const follow = store.families(own).get(message.id);
  const what = "All messages after it are deleted, in all branches.";
  if (follow && !(await sure("Delete this message?", what, "Delete"))) return;
  if (runs.has(own.id)) return tell("A reply is being written");
  store.prune(own, message.id);
  if (own === conversation) draw();
  await keep(own);
}

function edit(message) {
  if (busy()) return;
  const ours = message.role === "assistant";
  follows = false;
  drawn.edit(elementOf(message), ours ? "Save in a new branch" : "Send in a new branch", (content) => {
    const { parent, role, files, reasoning } = message;
    store.add(conversation, parent, { role, content, files, reasoning, finish: ours ? "edited" : undefined });
    if (!ours) return reply(store.add(conversation, conversation.leaf, { role: "assistant" }));
    draw();
    keep();
  });
}

export function editLast() {
  const last = store.path(conversation).filter((each) => each.role === "user").at(-1);
  if (last) edit(last);
}

export function stop(given = conversation) {
  const run = runOf(given);
  if (!run) return;
  run.controller.abort();
  if (run.message.stream) api.forget(run.message.stream.id); // a tool has none
}

// Go on with the replies that run at the server since before this page was loaded.
export function resume(conversations) {
  for (const own of conversations)
    for (const message of Object.values(own.messages)) if (message.stream && !runs.has(own.id)) follow(own, message);
}

// Another tab writes the reply that this one took for its own: what it has read so far is also the other's.
export function yields(own) {
  const run = runOf(own);
  if (!run?.resumed) return;
  run.lost = true;
  run.controller.abort();
}

// -- asking ----------------------------------------------------------------------------------------------------------

function contentOf({ content, files = [] }) {
  const texts = files.filter((file) => !file.image).map((file) => `\n\n${file.name}:\n\`\`\`\n${file.text}\n\`\`\``);
  const text = content + texts.join(""), images = files.filter((file) => file.image);
  if (!images.length) return text;
  const parts = images.map((file) => ({ type: "image_url", image_url: { url: file.image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export function messagesOf(path, system) {
  const said = path.map((message) => {
    const made = { role: message.role, content: contentOf(message) };
    if (message.reasoning) made.reasoning_content = message.reasoning;
    if (message.call) made.tool_call_id = message.call;
    if (message.calls)
      made.tool_calls = message.calls.map(({ id, name, arguments: given }) =>
        ({ id, type: "function", function: { name, arguments: given } }));
    return made;
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

export const asked = () => messagesOf(store.path(conversation), conversation.system ?? settings.systemPrompt());

function take(message, event, times) {
  const [choice] = event.choices ?? [], delta = choice?.delta ?? {};
  if (delta.reasoning_content) {
    times.thinking ??= performance.now();
    message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  }
  if ((delta.content || delta.tool_calls) && times.thinking) message.thought ??= performance.now() - times.thinking;
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls ?? []) {
    message.calls ??= [];
    const made = (message.calls[call.index] ??= { id: call.id ?? "", name: "", arguments: "" });
    made.name += call.function?.name ?? "";
    made.arguments += call.function?.arguments ?? "";
  }
  if (event.timings) message.stats = event.timings;
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

async function reply(message, continues = false, own = conversation) {
  const path = store.path(own);
  const messages = messagesOf(continues ? path : path.slice(0, -1), own.system ?? "");
  if (message.stream) api.forget(message.stream.id);
  message.stream = { id: api.streamId(), at: 0 };
  own.model = api.modelName() || undefined;
  const wanted = settings.requestOf(own.preset);
  const body = { ...tools.fields(), ...wanted, messages, return_progress: true, return_cache: true };
  if (continues) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  await follow(own, message, body);
}

// The events of a reply: of a new one by its request, and of one that runs from where it was read last.
async function* eventsOf({ stream: kept }, body, signal) {
  const first = body ? await api.stream("v1/chat/completions", body, kept.id, signal) : null;
  try {
    yield* first ?? (await api.resume(kept.id, kept.at, signal));
  } catch (error) {
    if (error.status !== 0 || !first) throw error;
    // Where only the connection has gone, the server still has the rest.
    yield* await api.resume(kept.id, kept.at, signal).catch(() => { throw error; });
  }
}

async function follow(own, message, body = null) {
  const controller = new AbortController(), streamed = new drawn.Streamed(message);
  const run = { message, controller, streamed, progress: null, resumed: !body, keeps: false };
  titles.stop();
  runs.set(own.id, run);
  delete message.error;
  delete message.finish;
  const times = {};
  let saved = Date.now(), waits = false;
  const show = () => {
    waits = false;
    const made = own === conversation && runs.get(own.id) === run ? elementOf(message) : null;
    if (made) run.streamed.draw(made, run);
  };
  if (own === conversation) {
    draw();
    bottom(true);
    // What was pressed is gone by now; keyboards go on from the reply.
    if (document.activeElement === document.body) elementOf(message)?.focus({ preventScroll: true });
  }
  if (body) await keep(own);
  try {
    for await (const { data: event, bytes } of eventsOf(message, body, controller.signal)) {
      message.stream.at += bytes;
      if (event.prompt_progress) run.progress = event.prompt_progress;
      if (take(message, event, times)) run.progress = null;
      if (!waits) requestAnimationFrame(show);
      waits = true;
      if (Date.now() - saved > SAVE_MS && !own.gone) {
        saved = Date.now();
        store.save(own).catch(() => {});
      }
    }
  } catch (error) {
    if (leaves) return;
    run.keeps = [0, 401].includes(error.status); // the server may still have it
    if (error.name === "AbortError") message.finish = "stopped";
    else if (run.resumed && error.status === 404) message.error = "The server no longer has this reply.";
    else message.error = error.more?.n_ctx ? tooLong(own, error.more) : error.message;
  }
  if (times.thinking) message.thought ??= performance.now() - times.thinking;
  await end(own, run);
}

// Why a context is full, and what would help.
function tooLong(own, { n_prompt_tokens: n, n_ctx: most }) {
  const texts = store.path(own).flatMap(({ content, files = [] }) => [[`“${content.slice(0, 30)}…”`, content],
    ...files.filter(({ text }) => text).map(({ name, text }) => [name, text])]);
  const parts = [...texts, ["the system prompt", own.system ?? ""]].sort((a, b) => b[1].length - a[1].length);
  const all = parts.reduce((sum, [, text]) => sum + text.length, 0), [name, text] = parts[0];
  let wanted = 4096;
  while (wanted < 1.1 * n) wanted *= 2;
  return `This prompt has ${count(n)} tokens, but the context holds ${count(most)}. The largest part is ${name}, ` +
    `${Math.round((100 * text.length) / all)} % of the text. Leave it out, or start the server with -c ${wanted}.`;
}

async function end(own, run) {
  const { message } = run, made = own === conversation ? elementOf(message) : null;
  runs.delete(own.id);
  if (run.lost) return hooks.lost(own);
  const { id } = message.stream;
  if (!run.keeps) delete message.stream;
  // What came since the last frame: the server may be gone, which makes HTML of it.
  if (made) run.streamed.draw(made, run);
  // At once: what stops the reply stops its calls.
  if (message.calls && message.finish === "tool_calls" && !message.error) useTools(message, -1, "", own);
  if (made) {
    await drawn.fill(made, true);
    run.streamed.showAll();
  }
  if (own === conversation) {
    draw();
    const ended = message.finish === "tool_calls" ? "Tool called" : "Reply complete";
    say(message.error ?? (message.finish === "stopped" ? "Reply stopped" : ended));
  }
  await keep(own);
  if (!message.error && message.finish !== "stopped") api.forget(id);
  await hooks.replied(message.stats?.cache);
  if (message.finish === "stop") await name(own, message);
}

// After its first reply a conversation gets a title.
async function name(own, message) {
  const path = store.path(own);
  if (own.title || path.length !== 2 || path[1] !== message || runs.size) return;
  const title = await titles.titleFor(messagesOf(path, own.system ?? ""));
  if (!title || own.title || own.gone) return;
  own.title = title;
  await keep(own);
  if (own === conversation) draw();
}
