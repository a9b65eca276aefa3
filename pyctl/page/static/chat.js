// The open conversation: its messages, what is being said, and what each reply cost.

import { $, ask, count, el, keyed, say, short, time } from "./dom.js";
import * as api from "./api.js";
import * as store from "./store.js";
import { requestOf } from "./settings.js";

let conversation = null;
let running = null; // {message, controller, progress}
let hooks = {};
export const connect = (given) => (hooks = given);
export const current = () => conversation;
export const isRunning = () => running !== null;

export function open(given) {
  stop();
  conversation = given;
  $("messages").replaceChildren();
  draw();
  bottom(true);
}

const scroll = () => $("scroll");
let follows = true;
export function watchScroll() {
  scroll().addEventListener("scroll", () => { const s = scroll(); follows = s.scrollHeight - s.scrollTop - s.clientHeight < 60; }, { passive: true });
}
function bottom(force = false) {
  if (force) follows = true;
  if (follows) scroll().scrollTop = scroll().scrollHeight;
}

async function keep() {
  conversation.updated = Date.now();
  await store.save(conversation);
  hooks.changed(conversation);
}

// -- drawing ---------------------------------------------------------------------------------------------------------

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); entry.target.draw?.(); }
}, { rootMargin: "600px" });

export function draw() {
  const path = store.path(conversation);
  $("title").textContent = store.titleOf(conversation);
  document.title = (conversation.title || path.length ? store.titleOf(conversation) + " · " : "") + "pyctl";
  const box = $("messages");
  box.querySelector(".hello")?.remove();
  keyed(box, path, (message) => message.id, make, update);
  if (!path.length) box.append(hello());
  $("send").textContent = running ? "Stop" : "Send";
  $("send").classList.toggle("stop", running !== null);
  hooks.path(path.flatMap((each) => [each.stats?.cache?.restored, ...(each.stats?.cache?.saved ?? [])]).filter(Boolean));
}

const hello = () => el("div", { class: "hello" }, el("span", { class: "logo big", "aria-hidden": "true" }), el("h2", {}, "What shall we talk about?"),
  el("p", { class: "dim" }, "Every reply shows what was remembered and what was read anew. Edit a message to branch: what both branches share is not read twice."));

const names = { user: "You", assistant: "Reply", system: "System", tool: "Tool" };

function make(message) {
  const body = el("div", { class: "body" });
  const made = el("article", { class: "message " + message.role, tabindex: "0", "aria-label": names[message.role] },
    el("div", { class: "think" }), body, el("div", { class: "calls" }), el("div", { class: "stats" }), el("div", { class: "tools" }));
  made.draw = () => fill(made, message);
  seen.observe(made);
  return made;
}

function update(made, message) {
  if (made.drawn && made.drawn !== message.content.length + "/" + (message.reasoning?.length ?? 0)) fill(made, message);
  const busy = running?.message === message;
  made.classList.toggle("busy", busy);
  drawStats(made.querySelector(".stats"), message, busy);
  drawTools(made.querySelector(".tools"), message, busy);
}

async function fill(made, message) {
  const stamp = message.content.length + "/" + (message.reasoning?.length ?? 0);
  if (made.drawn === stamp) return;
  made.drawn = stamp;
  const body = made.querySelector(".body");
  drawThought(made.querySelector(".think"), message);
  drawCalls(made.querySelector(".calls"), message);
  if (message.role !== "assistant") {
    body.textContent = message.content;
    body.append(...(message.files ?? []).map((file) => el("details", { class: "file" }, el("summary", {}, file.name + " · " + count(file.text.length) + " characters"), el("pre", {}, file.text))));
    return;
  }
  if (!body.childNodes.length) body.textContent = message.content;
  const html = await api.html(message.content).catch(() => null);
  if (html !== null && made.drawn === stamp) show(body, html);
}

// HTML from the server is harmless by its promise, and the policy of this page holds whatever comes.
function show(box, html) {
  box.innerHTML = html;
  bottom();
}

function drawThought(box, message) {
  if (!message.reasoning) return box.replaceChildren();
  let details = box.querySelector("details");
  if (!details) box.replaceChildren((details = el("details", {}, el("summary"), el("div", { class: "thought" }))));
  const took = message.thought ? " for " + time(message.thought) : "";
  details.querySelector("summary").textContent = message.content || message.thought ? "Thought" + took : "Thinking…";
  details.querySelector(".thought").textContent = message.reasoning;
}

function drawCalls(box, message) {
  box.replaceChildren(...(message.calls ?? []).map((call) => {
    let text = call.arguments;
    try { text = JSON.stringify(JSON.parse(text), null, 2); } catch { /* unfinished: as it is */ }
    return el("details", { class: "call", open: true }, el("summary", {}, "Calls ", el("code", {}, call.name)), el("pre", { tabindex: "0" }, text));
  }));
}

const tiers = { live: "live", ram: "RAM", disk: "disk", none: "" };

function drawStats(box, message, busy) {
  if (busy && running.progress) return drawProgress(box, running.progress);
  const stats = message.stats;
  if (message.error) return box.replaceChildren(el("p", { class: "error", role: "alert" }, message.error));
  if (!stats) return box.replaceChildren();
  const { cache_n: cached, prompt_n: evaluated, predicted_n: said } = stats;
  const source = stats.cache?.source ?? "ram";
  const total = Math.max(cached + evaluated + said, 1);
  const part = (n, kind) => n ? el("i", { class: kind, vars: { "--w": Math.max((100 * n) / total, 0.8) } }) : null;
  const legend = (kind, n, text) => el("span", { class: "item" }, el("b", { class: "dot " + kind, "aria-hidden": "true" }), count(n) + " " + text);
  const speed = stats.predicted_per_second ? ` · ${stats.predicted_per_second.toFixed(1)} tokens/s` : "";
  const shown = [
    el("div", { class: "bar", role: "img", "aria-label": `${cached} restored, ${evaluated} evaluated, ${said} generated` }, part(cached, source), part(evaluated, "evaluated"), part(said, "said")),
    el("div", { class: "legend" },
      cached ? legend(source, cached, "restored from " + (tiers[source] || "cache") + (stats.warmed_n ? `, ${count(stats.warmed_n)} made ready ahead` : "")) : null,
      legend("evaluated", evaluated, `read in ${time(stats.prompt_ms)}`),
      legend("said", said, `written in ${time(stats.predicted_ms)}${speed}`),
      stats.draft_n ? el("span", { class: "item" }, `${count(stats.draft_n_accepted)} of ${count(stats.draft_n)} drafted`) : null),
  ];
  const miss = stats.cache?.miss;
  if (miss) shown.push(el("p", { class: "miss" }, ...missed(miss)));
  box.replaceChildren(...shown);
}

// Where the prompt left a recent one, in words.
function missed(miss) {
  const at = `Differs from a recent prompt at token ${count(miss.position)}; resumed at ${count(miss.nearest)}.`;
  if (miss.was === undefined) return [at];
  const [before, was, is] = difference(miss.was, miss.is);
  return [at + " Was ", el("del", {}, "…" + before + was), ", is ", el("ins", {}, "…" + before + is), "."];
}

function difference(was, is) {
  let n = 0;
  while (n < was.length && n < is.length && was[n] === is[n]) n++;
  const from = Math.max(was.lastIndexOf(" ", Math.max(n - 12, 0)), 0);
  const cut = (text) => text.slice(n, n + 28).split("\n")[0];
  return [was.slice(from, n), cut(was), cut(is)];
}

function drawProgress(box, progress) {
  const { total, cache, processed, time_ms: ms } = progress;
  const done = processed - cache, left = total - processed;
  const rest = done > 0 && left > 0 ? `, about ${time((ms * left) / done)} left` : "";
  box.replaceChildren(el("progress", { max: total, value: processed, "aria-label": "Reading the prompt" }), el("div", { class: "legend" }, `${cache ? count(cache) + " of " : ""}${count(total)} tokens ${cache ? "were remembered, " : ", "}${count(left)} to read${rest}`));
}

function drawTools(box, message, busy) {
  if (busy) return box.replaceChildren();
  const others = store.siblings(conversation, message), at = others.indexOf(message);
  const button = (text, label, run) => el("button", { type: "button", "aria-label": label, title: label, onclick: run }, text);
  const step = (n) => { store.show(conversation, others[at + n].id); draw(); keep(); };
  const last = conversation.leaf === message.id;
  const shown = [
    others.length > 1 ? el("span", { class: "branch" }, Object.assign(button("‹", "Previous branch", () => step(-1)), { disabled: at === 0 }), `${at + 1}/${others.length}`, Object.assign(button("›", "Next branch", () => step(1)), { disabled: at === others.length - 1 })) : null,
    button("Copy", "Copy message", () => copy(message.content)),
    message.role === "user" || message.role === "assistant" ? button("Edit", "Edit message", () => edit(message)) : null,
    message.role === "assistant" ? button("Again", "Regenerate reply", () => regenerate(message)) : null,
    message.role === "assistant" && last ? button("Continue", "Continue reply", () => proceed(message)) : null,
    button("Delete", "Delete message and what follows", () => erase(message)),
  ];
  box.replaceChildren(...shown.filter(Boolean));
}

export async function copy(text) {
  try { await navigator.clipboard.writeText(text); say("Copied"); } catch { say("Copying was refused"); }
}

// -- changing --------------------------------------------------------------------------------------------------------

export function send(text, files = []) {
  if (running) return stop();
  if (!text.trim() && !files.length) return;
  store.add(conversation, conversation.leaf, { role: "user", content: text, ...(files.length ? { files } : {}) });
  reply(store.add(conversation, conversation.leaf, { role: "assistant" }));
}

export async function regenerate(message) {
  if (running) return;
  reply(store.add(conversation, message.parent, { role: "assistant" }));
}

export const proceed = (message) => { if (!running) reply(message, true); };

async function erase(message) {
  if (running) return;
  store.prune(conversation, message.id);
  draw();
  await keep();
}

function edit(message) {
  if (running) return;
  const made = $("messages").querySelector(`[data-key="${message.id}"]`), body = made.querySelector(".body");
  const field = el("textarea", { class: "edit", "aria-label": "Message", rows: Math.min(message.content.split("\n").length + 1, 14) });
  field.value = message.content;
  const close = () => { made.drawn = ""; body.replaceChildren(); fill(made, message); };
  const done = () => {
    const text = field.value;
    if (text === message.content) return close();
    if (message.role === "user") {
      store.add(conversation, message.parent, { role: "user", content: text, ...(message.files ? { files: message.files } : {}) });
      reply(store.add(conversation, conversation.leaf, { role: "assistant" }));
    } else {
      store.add(conversation, message.parent, { role: "assistant", content: text, reasoning: message.reasoning, edited: true });
      draw();
      keep();
    }
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); done(); }
  });
  body.replaceChildren(field, el("div", { class: "row" }, el("button", { type: "button", class: "primary", onclick: done }, message.role === "user" ? "Ask in a new branch" : "Keep as a new branch"), el("button", { type: "button", onclick: close }, "Cancel")));
  field.focus();
}

export function editLast() {
  const last = store.path(conversation).filter((each) => each.role === "user").at(-1);
  if (last) edit(last);
}

export function stop() {
  running?.controller.abort();
}

export function messagesOf(path, system) {
  const text = (message) => message.content + (message.files ?? []).map((file) => `\n\n${file.name}:\n\`\`\`\n${file.text}\n\`\`\``).join("");
  const said = path.map((message) => ({ role: message.role, content: text(message), ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
    ...(message.calls ? { tool_calls: message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) } : {}) }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

async function reply(message, continues = false) {
  const own = conversation, controller = new AbortController();
  const isOpen = () => conversation === own;
  running = { message, controller, progress: null };
  delete message.error;
  const path = store.path(own);
  const asked = { ...requestOf(own), messages: messagesOf(continues ? path : path.slice(0, -1), own.system), return_progress: true, return_cache: true };
  await keep();
  draw();
  bottom(true);
  const made = () => $("messages").querySelector(`[data-key="${message.id}"]`);
  const streamed = new Streamed(message, made);
  let thinking = 0;
  try {
    for await (const event of api.stream("v1/chat/completions", asked, controller.signal)) {
      if (event.prompt_progress) running.progress = event.prompt_progress;
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) { thinking ||= performance.now(); message.reasoning = (message.reasoning ?? "") + delta.reasoning_content; }
      if (delta.content) {
        if (thinking && !message.thought) message.thought = performance.now() - thinking;
        message.content += delta.content;
      }
      for (const call of delta.tool_calls ?? []) {
        message.calls ??= [];
        const at = (message.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
        at.name += call.function?.name ?? "";
        at.arguments += call.function?.arguments ?? "";
      }
      if (delta.content || delta.reasoning_content || delta.tool_calls) running.progress = null;
      if (event.timings) message.stats = event.timings;
      if (event.choices?.[0]?.finish_reason) message.finish = event.choices[0].finish_reason;
      if (isOpen()) streamed.soon();
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
    else message.finish = "stopped";
  }
  if (thinking && !message.thought) message.thought = performance.now() - thinking;
  running = null;
  own.updated = Date.now();
  await store.save(own);
  hooks.changed(own);
  if (isOpen()) {
    const shown = made();
    if (shown) { shown.drawn = ""; await fill(shown, message); }
    draw();
    bottom();
    say(message.error ?? "Reply complete");
  }
  hooks.replied(message.stats?.cache ?? null);
}

// A reply as it comes: finished blocks are rendered once, the last one is plain text.
class Streamed {
  constructor(message, made) {
    Object.assign(this, { message, made, done: 0, queued: false, chain: Promise.resolve() });
    this.start = message.content.length;
    this.tail = el("div", { class: "tail" });
  }

  soon() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; this.draw(); });
  }

  draw() {
    const made = this.made(), { message } = this;
    if (!made || running?.message !== message) return;
    made.drawn = "streaming";
    const body = made.querySelector(".body");
    drawThought(made.querySelector(".think"), message);
    drawCalls(made.querySelector(".calls"), message);
    drawStats(made.querySelector(".stats"), message, true);
    if (this.tail.parentNode !== body) body.replaceChildren(this.tail);
    const end = finished(message.content, this.done);
    if (end > this.done) {
      const text = message.content.slice(this.done, end), block = el("div", { class: "block" });
      block.textContent = text;
      body.insertBefore(block, this.tail);
      this.done = end;
      api.html(text).then((html) => { if (block.isConnected) show(block, html); }, () => {});
    }
    this.tail.textContent = message.content.slice(this.done).replace(/^\n+/, "");
    bottom();
  }
}

// Where the last finished block of a text ends: at an empty line that is in no fence and no formula.
export function finished(text, from) {
  let fence = "", end = from, at = from;
  while (at < text.length) {
    const stop = text.indexOf("\n", at);
    if (stop < 0) break;
    const line = text.slice(at, stop).trim();
    const mark = line.startsWith("```") ? "```" : line.startsWith("~~~") ? "~~~" : line === "$$" ? "$$" : "";
    if (mark && (!fence || fence === mark)) { fence = fence ? "" : mark; if (!fence) end = stop + 1; }
    else if (!line && !fence && !/^\s/.test(text[stop + 1] ?? " ")) end = stop + 1;
    at = stop + 1;
  }
  return end;
}
