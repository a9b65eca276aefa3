// One message: its thoughts, its text, its calls, what it cost, and what can be done with it.

import { copy, count, el, fit, plain, put, rate, time, tokens } from "./dom.js";
import * as api from "./api.js";
import * as tools from "./tools.js";

const NAMES = { user: "You", assistant: "Reply", system: "System", tool: "Tool result" };

let acts = {}; // what the buttons do; see chat.js
export const connect = (given) => (acts = given);

// Old messages are rendered when they come near to the screen.
const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    target.isNear = true;
    fill(target);
  }
}, { rootMargin: "600px" });

export function make(message) {
  const made = el("article", { class: "message " + message.role, tabindex: "0", "aria-label": NAMES[message.role] },
    ["think", "body", "calls", "stats", "tools"].map((name) => el("div", { class: name })));
  made.message = message;
  made.box = (name) => made.querySelector(":scope > ." + name);
  seen.observe(made);
  return made;
}

// `run` is the reply that streams into this message, or null.
export function update(made, message, { run, siblings, isLeaf }) {
  made.message = message;
  if (made.isNear && !run) fill(made);
  made.classList.toggle("busy", run !== null);
  made.setAttribute("aria-busy", run !== null);
  drawStats(made.box("stats"), message, run);
  const at = siblings.indexOf(message);
  const state = JSON.stringify([run !== null, at, siblings.length, isLeaf, message.content !== "", message.error,
    message.calls && tools.resultsOf(message)]);
  if (made.state === state) return;
  made.state = state;
  drawTools(made.box("tools"), message, run, siblings, at, isLeaf);
  drawCalls(made.box("calls"), message, isLeaf && run === null, run !== null && !run.streamed);
}

export const FAILED_MS = 2000; // between two tries, while the server renders nothing
let again = 0;

// The text as HTML; until that is here, as it is.
export async function fill(made, anew = false) {
  const { message } = made, body = made.box("body"), stamp = message.content + "\0" + (message.reasoning ?? "");
  if ((made.filled === stamp && !anew) || body.querySelector(".edit")) return;
  made.filled = stamp;
  drawThought(made.box("think"), message);
  if (message.role === "tool") return put(body, tools.folded(message));
  const isTyped = message.role !== "assistant";
  const whole = [{ text: message.content, isMarkdown: true }];
  const parts = isTyped ? typedParts(message.content) : whole;
  const boxes = parts.map(({ text }) => el("div", { class: "plain" }, text));
  if (isTyped) put(body, boxes, (message.files ?? []).map(attached));
  else if (!body.childNodes.length) put(body, boxes);
  for (const [i, { text, isMarkdown }] of parts.entries()) {
    if (!isMarkdown) continue;
    const html = text ? await api.html(text).catch(() => null) : "";
    if (made.filled !== stamp) return;
    if (html === null) return fillLater(made);
    // The server makes it harmless, and so does our policy.
    const box = isTyped ? boxes[i] : body;
    box.innerHTML = html;
    if (isTyped) box.className = "block";
  }
}

// The server renders nothing now.
function fillLater(made) {
  made.filled = null;
  clearTimeout(again);
  again = setTimeout(acts.again, FAILED_MS);
}

// Text that a person typed or pasted stays as it is, but for code between fences. A fence that is
// never closed holds the rest, as in Markdown.
export function typedParts(text) {
  const parts = [];
  let lines = [], fence = "";
  const flush = (isMarkdown) => {
    const isText = (line) => line.trim() !== "";
    const first = lines.findIndex(isText), last = lines.findLastIndex(isText);
    if (first >= 0) parts.push({ text: lines.slice(first, last + 1).join("\n"), isMarkdown });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const [, mark] = /^ {0,3}(\x60{3,}(?=[^\x60]*$)|~{3,})/.exec(line) ?? [];
    const isMark = line.trim() === mark;
    const closes = fence && isMark && mark[0] === fence[0] && mark.length >= fence.length;
    if (!fence && mark) {
      flush(false);
      fence = mark;
    }
    lines.push(line);
    if (!closes) continue;
    flush(true);
    fence = "";
  }
  flush(fence !== "");
  return parts;
}

const attached = (file) =>
  file.image
    ? el("img", { class: "picture", src: file.image, alt: file.name })
    : el("details", { class: "file" }, el("summary", {}, `${file.name} · ${count(file.text.length)} characters`),
        el("pre", { tabindex: "0" }, file.text));

export function drawThought(box, message) {
  if (!message.reasoning) return box.replaceChildren();
  if (!box.firstChild) put(box, el("details", {}, el("summary"), el("div", { class: "thought" })));
  const done = message.thought ? "Thought for " + time(message.thought) : "Thought";
  const isOver = message.content || message.thought || message.finish;
  box.querySelector("summary").textContent = isOver ? done : "Thinking…";
  box.querySelector(".thought").textContent = message.reasoning;
}

// The arguments of a call: its fields by their names, as people read them.
function readable(text) {
  let given = null;
  try {
    given = JSON.parse(text || "{}");
  } catch { /* unfinished */ }
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  if (given === null || typeof given !== "object" || Array.isArray(given)) return el("pre", { tabindex: "0" }, text);
  const rows = Object.entries(given).map(([name, value]) => [el("dt", {}, name), el("dd", {}, shown(value))]);
  if (!rows.length) return null;
  return el("div", { class: "given", tabindex: "0", role: "group", "aria-label": "Arguments" }, el("dl", {}, rows));
}

// The calls of the model, and their choices: calls of the server's tools run when that is allowed, the results of
// others are typed.
export function drawCalls(box, message, canAnswer = false, runs = false) {
  const calls = message.calls ?? [];
  if (!calls.length) return box.replaceChildren();
  const fields = [], isOpen = (i) => tools.resultsOf(message)[i] === undefined;
  put(box, calls.map((call, i) => {
    const isRun = tools.find(call.name);
    // A call that was cut off cannot run yet.
    const asks = canAnswer && isOpen(i) && (!isRun || message.finish === "tool_calls");
    const field = isRun ? tools.choices((choice) => acts.decide(message, i, choice)) :
      el("textarea", { rows: 2, "aria-label": "Result of " + call.name, placeholder: "Its result" });
    if (asks && !isRun) fields.push([i, field]);
    return el("div", { class: asks && isRun ? "call asks" : "call" },
      el("details", { open: !isRun || asks },
        el("summary", {}, "Calls ", el("code", {}, call.name), tools.mark(call.name),
          runs && isOpen(i) ? el("span", { class: "runs" }, "running, Esc stops") : null),
        readable(call.arguments)),
      asks ? field : null);
  }));
  const send = () => acts.answer(message, fields.map(([i, field]) => [i, field.value]));
  const verb = fields[1] ? "Send results" : "Send result";
  if (fields.length) box.append(el("button", { type: "button", onclick: send }, verb));
}

// -- what it cost ----------------------------------------------------------------------------------------------------

const ENDS = { stopped: "Stopped.", length: "Stopped at the token limit.", edited: "Edited." };
const FROM = { live: "live", ram: "from RAM", disk: "from disk" };

export function drawStats(box, message, run) {
  if (run?.progress) return drawProgress(box, run.progress);
  if (run) return box.firstElementChild?.localName === "progress" ? box.replaceChildren() : undefined;
  const drawn = message.error ?? message.stats ?? message.finish;
  if (box.drawn === drawn) return;
  box.drawn = drawn;
  const error = message.error ? el("p", { class: "error", role: "alert" }, message.error) : null;
  const end = ENDS[message.finish] ? el("p", { class: "miss" }, ENDS[message.finish]) : null;
  put(box, error, message.stats ? costs(message.stats) : null, end);
}

function costs(stats) {
  const { cache_n: restored, prompt_n: evaluated, predicted_n: generated, cache = {} } = stats;
  const source = cache.source && cache.source !== "none" ? cache.source : "ram";
  const all = Math.max(restored + evaluated + generated, 1);
  const part = (n, kind) => n ? el("i", { class: kind, vars: { "--w": Math.max((100 * n) / all, 0.8) } }) : null;
  const dot = (kind) => el("b", { class: "dot " + kind, "aria-hidden": "true" });
  const item = (kind, text) => el("span", { class: "item" }, dot(kind), text);
  const speed = (value) => (value ? " · " + rate(value) : "");
  const ahead = stats.warmed_n ? `, ${count(stats.warmed_n)} prewarmed` : "";
  // At the speed of this very prompt; of a few tokens nothing can be said.
  const saved = evaluated >= 32 ? (restored * stats.prompt_ms) / evaluated : 0;
  const line = [restored ? `${count(restored)} ${FROM[source]}` : null, `${count(evaluated)} evaluated`,
    cache.miss && !isPart(cache.miss) ? "differs at token " + count(cache.miss.position) : null,
    stats.prompt_ms >= 1000 ? "first token after " + time(stats.prompt_ms) : null,
    stats.predicted_per_second ? rate(stats.predicted_per_second) : null];
  const label = `${tokens(restored)} restored, ${evaluated} evaluated, ${generated} generated`;
  const pace = evaluated > 16 ? speed(stats.prompt_per_second) : "";
  return el("details", { class: "costs" },
    el("summary", {},
      el("span", { class: "bar", role: "img", "aria-label": label },
        part(restored, source), part(evaluated, "evaluated"), part(generated, "said")),
      el("span", { class: "line" }, line.filter(Boolean).join(" · "))),
    el("div", { class: "legend" },
      restored ? item(source, `${count(restored)} restored ${FROM[source]}${ahead}`) : null,
      item("evaluated", `${count(evaluated)} evaluated in ${time(stats.prompt_ms)}${pace}`),
      item("said", `${count(generated)} generated in ${time(stats.predicted_ms)}${speed(stats.predicted_per_second)}`),
      stats.draft_n
        ? el("span", {}, `${count(stats.draft_n_accepted)} of ${count(stats.draft_n)} drafts accepted`) : null,
      saved > 1000 ? el("span", {}, `about ${time(saved)} saved`) : null),
    cache.miss ? el("p", { class: "miss" }, missed(cache.miss)) : null);
}

// Whether a prompt ends within a recent one, as Continue's does where a title was asked for.
const isPart = ({ was, is }) => was?.startsWith(is);

// Where the prompt left a recent one, in words.
function missed({ position, nearest, was, is }) {
  const from = nearest ? `evaluated again from token ${count(nearest)} on` : "evaluated again from the start";
  const at = `At token ${count(position)} this differs from a recent prompt; ${from}.`;
  if (was === undefined) return at;
  if (isPart({ was, is })) return `This ends at token ${count(position)}, within a recent prompt; ${from}.`;
  let n = 0;
  while (n < was.length && n < is.length && was[n] === is[n]) n++;
  const start = was.lastIndexOf(" ", n - 1) + 1, first = Math.max(start, n - 24);
  const cut = (text) => "…" + plain(text.slice(first, n + 40)).slice(0, 60);
  return [at + " It was ", el("del", {}, cut(was)), ", it is ", el("ins", {}, cut(is)), "."];
}

function drawProgress(box, { total, cache, processed, waiting: place, left_ms: ms }) {
  const left = total - processed;
  const rest = ms && left > 0 ? `, about ${time(Math.max(ms, 100))} left` : "";
  const known = cache ? `${count(cache)} of ${tokens(total)} restored` : tokens(total);
  box.drawn = null;
  if (box.firstElementChild?.localName !== "progress")
    put(box, el("progress", { "aria-label": "Evaluating the prompt" }), el("div", { class: "legend" }));
  const [bar, words] = box.children;
  bar.max = total;
  bar.value = processed;
  const queue = place ? `place ${count(place)} in the queue: ` : "";
  words.textContent = `${queue}${known}, ${count(left)} to evaluate${rest}`;
}

// -- what can be done ------------------------------------------------------------------------------------------------

function drawTools(box, message, run, siblings, at, isLeaf) {
  if (run) return box.replaceChildren();
  const button = (text, label, onclick, disabled = false) =>
    el("button", { type: "button", "aria-label": label, title: label, disabled, onclick }, text);
  const { role } = message, ours = role === "assistant";
  const failed = ours && !message.content && !message.calls;
  put(box,
    siblings.length > 1 ? el("span", { class: "branch" },
      button("‹", "Previous branch", () => acts.go(siblings[at - 1]), at === 0),
      `${at + 1}/${siblings.length}`,
      button("›", "Next branch", () => acts.go(siblings[at + 1]), at === siblings.length - 1)) : null,
    button("Copy", "Copy message", (event) => copy(message.content, event.target)),
    role === "user" || ours ? button("Edit", "Edit message", () => acts.edit(message)) : null,
    ours && failed && isLeaf ? button("Try again", "Try again", () => acts.retry(message)) : null,
    ours && !(failed && isLeaf) ? button("Regenerate", "Regenerate reply", () => acts.regenerate(message)) : null,
    ours && isLeaf && message.content ? button("Continue", "Continue reply", () => acts.proceed(message)) : null,
    button("Delete", "Delete message and all after it", () => acts.erase(message)));
}

// A field in place of the text; `done` gets the typed text, if it differs.
export function edit(made, verb, done) {
  const { message } = made, body = made.box("body");
  const oninput = () => fit(field);
  const field = el("textarea", { class: "edit", "aria-label": "Edited message", oninput });
  field.value = message.content;
  made.filled = null; // a rendering in progress does not replace the field
  const close = () => {
    body.replaceChildren();
    fill(made, true);
    made.focus();
  };
  const finish = () => (close(), field.value !== message.content && done(field.value));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) finish();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  put(body, field, el("div", { class: "row" },
    el("button", { type: "button", class: "primary", onclick: finish }, verb),
    el("button", { type: "button", onclick: close }, "Cancel")));
  fit(field);
  field.focus();
  body.scrollIntoView({ block: "nearest" });
}
