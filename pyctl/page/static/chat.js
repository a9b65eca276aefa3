// The open conversation, and replies that stream into any: sending, branching, stopping.

import { $, el, keyed, put, say, sure, tell } from "./dom.js";
import * as api from "./api.js";
import * as drawn from "./message.js";
import { messagesOf, tooLong } from "./prompt.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { Streamed } from "./streamed.js";
import * as titles from "./titles.js";
import * as tools from "./tools.js";

const SAVE_MS = 2000;

let conversation = null;
let leaves = false; // the page goes, and with it the connection, but not the reply
let hooks = {}; // callbacks; see app.js
// By the conversation's id: {message, controller}, and of a reply that streams what `follow` sets.
const runs = new Map();

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

const complain = (error) => tell(`The browser could not store this conversation: ${error.message}`);

// Whether it could be stored.
async function keep(own = conversation) {
  if (own.gone) return false;
  own.updated = Date.now();
  const isKept = await store.save(own).then(() => true, complain);
  hooks.changed();
  return isKept === true;
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
  if (runs.has(own.id)) return tell("A reply is being generated");
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

export const stop = (given = conversation) => runOf(given)?.controller.abort();

// Go on with the replies that run at the server: since before this page was loaded, or by a request
// that another tab has just sent. That tab shows an error by itself.
export function resume(conversations, isShared = false) {
  for (const own of conversations)
    for (const message of Object.values(own.messages)) {
      if (!message.stream || runs.has(own.id) || (isShared && message.error)) continue;
      follow(own, message, { isShared });
    }
}

// Another tab has written this conversation. A reply that also streams into this tab goes on here,
// unless that tab has ended it.
export function takeOver(own, fresh) {
  const run = runOf(own);
  if (!run) return Object.assign(own, fresh);
  const { message } = run, theirs = fresh.messages[message.id];
  if (!message.stream || !theirs) return; // the tools of this tab run, or its request is newer
  if (store.isEnded(theirs, message.stream.id)) {
    run.isLost = true;
    run.controller.abort();
    return;
  }
  Object.assign(own, fresh);
  own.messages[message.id] = message;
  run.isShared = true;
  run.saved = Date.now();
}

// -- asking ----------------------------------------------------------------------------------------------------------

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
  await follow(own, message, { body });
}

// The events of a reply: of a new one by its request, and of one that runs from where it was read last.
async function* eventsOf(own, run, body) {
  const { message, controller: { signal }, isShared } = run, { stream: kept } = message;
  const first = body ? await api.stream("v1/chat/completions", body, kept.id, signal) : null;
  try {
    yield* first ?? (await api.resume(kept.id, kept.at, signal, isShared));
  } catch (error) {
    if (error.status !== 0 || !first || (await isEndedElsewhere(own, run))) throw error;
    // Where only the connection has gone, the server still has the rest.
    yield* await api.resume(kept.id, kept.at, signal).catch(() => { throw error; });
  }
}

// Whether another tab has ended this reply, or deleted it with its conversation: both also end its
// stream here.
async function isEndedElsewhere({ id }, { message, isKept }) {
  const kept = isKept ? await store.read(id).catch(() => null) : null;
  if (kept === undefined) return true;
  const theirs = kept?.messages[message.id];
  return Boolean(theirs) && store.isEnded(theirs, message.stream.id);
}

// Read the reply to the request `body`, or without one the reply to an earlier request. With
// `isShared` another tab has sent that, and also reads the reply: that tab goes on with its calls and
// its title.
async function follow(own, message, { body = null, isShared = false }) {
  const controller = new AbortController(), streamed = new Streamed(message);
  const run = {
    message, controller, streamed, isShared, progress: null,
    isKept: true, // the conversation, in the browser
    isLost: false, // another tab has ended the reply
    keeps: false, // the server may still have it
    saved: Date.now(),
  };
  titles.stop();
  runs.set(own.id, run);
  delete message.error;
  delete message.finish;
  const times = {}, patience = body ? SAVE_MS : 2 * SAVE_MS; // of several tabs one saves
  let waits = false;
  const show = () => {
    waits = false;
    const made = own === conversation && runs.get(own.id) === run ? elementOf(message) : null;
    if (made) run.streamed.draw(made, run);
  };
  if (own === conversation) {
    draw();
    bottom(!isShared);
    // The pressed button has been removed; keyboards continue from the reply.
    if (body && document.activeElement === document.body)
      elementOf(message)?.focus({ preventScroll: true });
  }
  if (body) run.isKept = await keep(own);
  try {
    for await (const { data: event, bytes } of eventsOf(own, run, body)) {
      message.stream.at += bytes;
      if (event.prompt_progress) run.progress = event.prompt_progress;
      if (take(message, event, times)) run.progress = null;
      if (!waits) requestAnimationFrame(show);
      waits = true;
      if (Date.now() - run.saved > patience && run.isKept && !own.gone) {
        run.saved = Date.now();
        store.saveReply(own, message, message.stream.id).catch(() => {});
      }
    }
  } catch (error) {
    if (leaves) return;
    if (error.name === "AbortError") message.finish = "stopped";
    else if (await isEndedElsewhere(own, run)) run.isLost = true;
    else {
      run.keeps = [0, 401].includes(error.status);
      message.error = error.more?.n_ctx ? tooLong(own, error.more) : error.message;
    }
  }
  if (times.thinking) message.thought ??= performance.now() - times.thinking;
  await end(own, run);
}

const TURN_MS = 2000; // for which the tab that sent the request may be the first to end its reply
const LOOK_MS = 50;

// Store how a reply ended; false if another tab did.
async function keepEnd(own, run, id) {
  if (own.gone || !run.isKept) return keep(own).then(() => true);
  own.updated = Date.now();
  const isFirst = await store.saveReply(own, run.message, id).catch(complain);
  hooks.changed();
  return isFirst !== false;
}

async function end(own, run) {
  const { message } = run, { id } = message.stream, { signal } = run.controller;
  const isComplete = message.finish && message.finish !== "stopped";
  const turn = run.isShared && isComplete ? TURN_MS : 0;
  for (let waited = 0; waited < turn && !run.isLost && !leaves; waited += LOOK_MS)
    await new Promise((go) => setTimeout(go, LOOK_MS));
  if (!run.isLost) {
    if (!run.keeps) delete message.stream;
    run.isLost = !(await keepEnd(own, run, id));
  }
  // Only now, so that the other tabs, whose streams end with it, find how the reply ended.
  if (!message.error) api.forget(id);
  runs.delete(own.id);
  if (run.isLost) return own.gone || hooks.lost(own);
  const made = own === conversation ? elementOf(message) : null;
  // The text since the last frame: the server, which renders it, may be gone.
  if (made) run.streamed.draw(made, run);
  // At once: what stops the reply stops its calls.
  const isCalling = message.calls && message.finish === "tool_calls";
  if (isCalling && !message.error && !signal.aborted) useTools(message, -1, "", own);
  if (made) {
    await drawn.fill(made, true);
    run.streamed.showAll();
  }
  if (own === conversation) {
    draw();
    const ended = message.finish === "tool_calls" ? "Tool called" : "Reply complete";
    say(message.error ?? (message.finish === "stopped" ? "Reply stopped" : ended));
  }
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
