// The cache: a tree of prefixes as rails, where each lies, and what the last reply used and added.

import { $, ago, ask, count, el, keyed, put, say, short, size } from "./dom.js";
import * as api from "./api.js";

let revision = 0, view = null, path = new Set(), used = "", added = new Set(), asked = 0, failed = false;
let latest = null; // the body of GET /cache
const speeds = JSON.parse(localStorage.getItem("speeds") || "[]"); // [when, read per second, written per second]

export function markPath(ids) {
  path = new Set(ids);
  draw();
}

export async function replied(cache, timings) {
  if (cache) { used = cache.restored; added = new Set(cache.saved); }
  if (timings) {
    speeds.push([Date.now(), timings.prompt_n > 16 ? timings.prompt_per_second : 0, timings.predicted_per_second || 0]);
    while (speeds.length && speeds[0][0] < Date.now() - 3600e3) speeds.shift();
    localStorage.setItem("speeds", JSON.stringify(speeds.slice(-240)));
  }
  await look(true);
  setTimeout(() => { used = ""; added = new Set(); draw(); }, 4000);
}

// Once a second while somebody can see it; the server sends nothing as long as nothing has changed.
export async function watch() {
  for (;;) {
    if (document.visibilityState === "visible" && isShown()) await look();
    await new Promise((go) => setTimeout(go, failed ? 3000 : 1000));
  }
}

const isShown = () => $("cache").offsetParent !== null;

async function look(force = false) {
  if (asked++ && !isShown() && !force) return;
  try {
    const body = await api.get("cache" + (revision ? "?since=" + revision : ""));
    const changed = body.revision !== revision;
    revision = body.revision;
    if (body.prefixes) latest = body;
    if (failed || changed) { failed = false; draw(); }
  } catch (error) {
    if (!failed) { failed = true; draw(error); }
  }
}

// -- the tree --------------------------------------------------------------------------------------------------------

// Rows in the order of the tree. Only children stay on the rail of their parent, branches get rails of their own:
// `passes` are rails of others that go by, `joins` says that this row leaves its parent's rail, the last one ends it.
export function rows(prefixes) {
  const found = [];
  const walk = (node, depth, passes, joins) => {
    const alone = node.children.length === 1;
    found.push({ node, depth, passes, joins, up: joins === "", down: alone, forks: node.children.length > 1 });
    if (alone) return walk(node.children[0], depth, joins === "mid" ? [...passes, depth - 1] : passes, "");
    const around = joins === "mid" ? [...passes, depth - 1] : passes;
    node.children.forEach((child, i) => walk(child, depth + 1, around, i < node.children.length - 1 ? "mid" : "last"));
  };
  for (const node of prefixes) walk(node, 0, [], "root");
  return found;
}

const newest = (node) => Math.min(node.idle, ...node.children.map(newest));
const sorted = (nodes) => [...nodes].sort((a, b) => newest(a) - newest(b));

const NAMES = { device: "device", ram: "RAM", disk: "disk" };

function row({ node, depth, forks }) {
  const made = el("li", { class: "node", role: "treeitem", tabindex: "-1", "aria-level": String(depth + 1) },
    el("span", { class: "rail", "aria-hidden": "true" }, el("b", { class: "dot" })),
    el("div", { class: "what" }, el("span", { class: "words" }), el("span", { class: "meta" })),
    el("span", { class: "acts" }));
  made.addEventListener("click", () => made.classList.toggle("open"));
  made.addEventListener("keydown", (event) => {
    const all = [...made.parentNode.children], at = all.indexOf(made);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined && all[to]) { event.preventDefault(); all[to].focus(); }
    if (event.key === "Enter" && event.target === made) made.classList.toggle("open");
  });
  return made;
}

function words(node) {
  const one = (text) => (text ?? "").replace(/<\|[a-z_]+\|>/g, " ").replace(/\s+/g, " ").trim();
  const head = one(node.head), tail = one(node.tail);
  if (node.head === undefined) return node.label ?? "";
  return head.length > 8 && tail.endsWith(head) ? head : `${head} … ${tail}`;
}

function update(made, { node, depth, passes, joins, up, down, forks }) {
  const best = node.tiers[0] ?? "disk";
  made.className = ["node", best, made.classList.contains("open") && "open", path.has(node.id) && "path", node.id === used && "used", added.has(node.id) && "added", node.pinned && "pinned", forks && "forks"].filter(Boolean).join(" ");
  made.style.setProperty("--depth", depth);
  const line = (kind, level) => el("i", { class: kind, vars: { "--l": level } });
  put(made.querySelector(".rail"), passes.map((level) => line("pass", level)), joins === "mid" || joins === "last" ? line("join " + joins, depth - 1) : null, up ? line("up", depth) : null, down || forks ? line("down", depth) : null, el("b", { class: "dot" }));
  const where = node.tiers.map((tier) => NAMES[tier]).join(", ");
  const bytes = node.row_bytes + node.state_bytes + node.device_bytes;
  made.setAttribute("aria-label", `${count(node.n)} tokens, ${size(bytes)}, in ${where}, ${node.hits} hits${node.pinned ? ", pinned" : ""}`);
  made.querySelector(".words").textContent = words(node) || "(words are shown with the key, or on this machine)";
  put(made.querySelector(".meta"), el("b", {}, count(node.n)), " tokens", ...node.tiers.map((tier) => el("span", { class: "tier " + tier }, NAMES[tier])), el("span", {}, size(bytes)), el("span", {}, node.hits === 1 ? "1 hit" : node.hits + " hits"), el("span", {}, ago(node.idle)), node.live ? el("span", { class: "tier live" }, node.live.busy ? "writing" : "live") : null, node.pinned ? el("span", { class: "pin" }, "pinned") : null);
  const act = (text, label, run) => el("button", { type: "button", "aria-label": label, onclick: (event) => { event.stopPropagation(); run(); } }, text);
  put(made.querySelector(".acts"), ...(node.stored ? [] : [act(node.pinned ? "Unpin" : "Pin", node.pinned ? "Unpin" : "Pin", () => change(api.post("cache/pin", { id: node.id, pinned: !node.pinned })))]), node.pinned ? "" : act("Drop", "Drop", () => change(api.remove("cache/" + encodeURIComponent(node.id)))));
}

async function change(going) {
  try { await going; } catch (error) { say(error.message); }
  await look(true);
}

export async function warm(messages) {
  say("Making ready");
  try {
    const { ready, evaluated } = await api.post("cache/warm", { messages });
    say(`${count(ready)} tokens are ready, ${count(evaluated)} read`);
  } catch (error) { say(error.message); }
  await look(true);
}

// -- all of it -------------------------------------------------------------------------------------------------------

function frame(onWarm) {
  view = { totals: el("div", { class: "totals" }), tree: el("ul", { class: "tree", role: "tree", "aria-label": "Cached prefixes" }), chart: el("div", { class: "chart" }), note: el("p", { class: "note dim" }) };
  const clear = async () => { if ((await ask("Drop everything that is not pinned?", el("p", {}, "What is on disk stays there."), el("footer", {}, el("span", { class: "grow" }), el("button", { value: "" }, "Cancel"), el("button", { value: "yes", class: "primary" }, "Drop")))) === "yes") change(api.remove("cache")); };
  $("cache").replaceChildren(
    el("header", {}, el("h2", {}, "What is remembered"), el("span", { class: "grow" }), el("button", { type: "button", onclick: onWarm, title: "Read the open conversation ahead, as far as it is certain" }, "Warm"), el("button", { type: "button", onclick: clear }, "Drop all"), el("button", { class: "icon close", type: "button", "aria-label": "Close", onclick: () => document.body.classList.remove("show-cache") }, "✕")),
    view.totals, view.note, view.tree, view.chart);
  view.tree.addEventListener("focus", () => {}, true);
}

export function start(onWarm) {
  frame(onWarm);
  watch();
}

function nodesOf(body) {
  const live = new Map();
  for (const seq of body.sequences) if (seq.at && (!live.get(seq.at) || seq.busy)) live.set(seq.at, seq);
  const with_live = (node) => ({ ...node, live: live.get(node.id), children: sorted(node.children.map(with_live)) });
  const roots = body.prefixes.map(with_live), known = new Map();
  const index = (node) => { known.set(node.id, node); node.children.forEach(index); };
  roots.forEach(index);
  for (const entry of [...body.stored].sort((a, b) => a.n - b.n)) {
    const node = { ...entry, tiers: ["disk"], row_bytes: entry.bytes, state_bytes: 0, device_bytes: 0, stored: true, children: [], pinned: entry.pinned };
    known.set(node.id, node);
    (known.get(entry.parent)?.children ?? roots).push(node);
  }
  return sorted(roots);
}

function gauge(kind, name, used_bytes, budget) {
  const share = budget > 0 ? Math.min((100 * used_bytes) / budget, 100) : used_bytes ? 100 : 0;
  return el("div", { class: "gauge" }, el("span", {}, el("b", { class: "dot " + kind, "aria-hidden": "true" }), name), el("span", { class: "track" }, el("i", { class: kind, vars: { "--w": share } })), el("span", { class: "dim" }, size(used_bytes) + (budget > 0 ? " of " + size(budget) : "")));
}

function draw(error) {
  if (!view) return;
  if (error || failed) { view.note.textContent = error?.message ?? view.note.textContent; if (!latest) return; }
  else view.note.textContent = "";
  if (!latest) return;
  const { bytes, totals, disk } = latest;
  const restored = totals.prompt - totals.evaluated;
  view.totals.replaceChildren(
    el("div", { class: "headline" }, el("strong", {}, totals.prompt ? ((100 * restored) / totals.prompt).toFixed(restored === totals.prompt ? 0 : 1) + "\u202f%" : "–"), el("span", {}, "of what was asked was remembered", el("br"), el("span", { class: "dim" }, `${short(restored)} of ${short(totals.prompt)} tokens in ${count(totals.requests)} requests`))),
    ...[bytes.device ? gauge("device", "Device", bytes.device, -1) : null, gauge("ram", "RAM", bytes.resident, bytes.budget), disk ? gauge("disk", "Disk", disk.n_bytes, disk.budget) : null].filter(Boolean));
  const found = rows(nodesOf(latest));
  keyed(view.tree, found, (each) => each.node.id, row, update);
  if (view.tree.firstChild && !view.tree.querySelector('[tabindex="0"]')) view.tree.firstChild.tabIndex = 0;
  if (!found.length && !failed) view.note.textContent = "Nothing yet. The first reply leaves its prompt here.";
  view.tree.hidden = !found.length;
  chart();
}

function chart() {
  const now = Date.now(), recent = speeds.filter((each) => each[0] > now - 3600e3 && each[2] > 0);
  if (recent.length < 2) return view.chart.replaceChildren();
  const most = Math.max(...recent.map((each) => each[2])) * 1.1, svg = "http://www.w3.org/2000/svg";
  const made = (tag, props) => { const e = document.createElementNS(svg, tag); for (const [k, v] of Object.entries(props)) e.setAttribute(k, v); return e; };
  const span = Math.max(now - recent[0][0], 60e3) * 1.05;
  const x = (at) => 298 - ((now - at) / span) * 296, y = (v) => 56 - (v / most) * 52;
  const drawn = made("svg", { viewBox: "0 0 300 60", role: "img", "aria-label": `Tokens written a second in the last hour, ${recent.at(-1)[2].toFixed(0)} now` });
  drawn.append(made("path", { class: "area", d: `M${x(recent[0][0])} 58 ` + recent.map((e) => `L${x(e[0]).toFixed(1)} ${y(e[2]).toFixed(1)}`).join(" ") + ` L${x(recent.at(-1)[0])} 58Z` }), made("polyline", { points: recent.map((e) => `${x(e[0]).toFixed(1)},${y(e[2]).toFixed(1)}`).join(" ") }), ...recent.map((e) => made("circle", { cx: x(e[0]).toFixed(1), cy: y(e[2]).toFixed(1), r: 1.8 })));
  view.chart.replaceChildren(el("p", { class: "dim" }, `Tokens written per second, last ${ago(span / 1000)}: ${recent.at(-1)[2].toFixed(0)} now, ${Math.max(...recent.map((e) => e[2])).toFixed(0)} at best`), drawn);
}
