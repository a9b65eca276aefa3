// The cache: a tree of prefixes, where each lies, and what the last reply used and added.

import { $, ago, count, el, icon, keyed, plain, put, rate, short, size, sure, svg, tell, time, tokens } from "./dom.js";
import * as api from "./api.js";
import { TreeMap } from "./map.js";
import { drawTimeline } from "./timeline.js";

const LIT_MS = 4000;
let fading = 0;

let latest = null; // the body of GET /cache, and when it came
let revision = 0, path = new Set(), used = "", added = new Set(), view = null, failed = "", hooks = {};

// The ids of what the open conversation resumed from and left.
export function markPath(ids) {
  const now = [...ids].join();
  if (now === [...path].join()) return;
  path = new Set(ids);
  draw();
}

// A reply has ended: what it resumed from and what it added light up.
export async function replied(cache) {
  if (cache) {
    used = cache.restored;
    added = new Set(cache.saved);
  }
  await look();
  draw(); // also if nothing has changed: the last look may have come after the reply's end
  view?.map.travel(used);
  clearTimeout(fading);
  fading = setTimeout(() => {
    used = "";
    added = new Set();
    draw();
  }, LIT_MS);
}

export const refresh = () => view && hooks.ready() && look();

// Another model has another cache.
export function reset() {
  if (!view) return;
  revision = 0;
  latest = null;
  for (const part of [view.totals, view.tree, view.timeline, view.chart]) put(part);
  view.drawn.hidden = view.tree.hidden = true;
  refresh();
}

const isShown = () => $("cache").offsetParent !== null && getComputedStyle($("cache")).visibility === "visible";

// Once a second while it is visible; nothing is sent as long as nothing has changed.
async function watch() {
  for (;;) {
    const began = performance.now();
    if (!document.hidden && isShown() && hooks.ready()) await look();
    const took = performance.now() - began;
    await new Promise((go) => setTimeout(go, Math.max(failed ? 2000 : 1000, 20 * took)));
  }
}

async function look() {
  try {
    const body = await api.get("cache" + (revision ? "?since=" + revision : ""), { quiet: true });
    const changed = body.revision !== revision || failed;
    revision = body.revision;
    failed = "";
    if (body.prefixes) latest = { ...body, at: Date.now() };
    if (changed) draw();
  } catch (error) {
    revision = 0;
    if (!failed) hooks.lost(error);
    failed = error.message;
    draw();
  }
}

// -- the tree --------------------------------------------------------------------------------------------------------

const TIERS = { device: "device", ram: "RAM", disk: "disk" };

function wordsOf(node) {
  if (node.label !== undefined) return plain(node.label);
  const head = plain(node.head), tail = plain(node.tail);
  if (!head || !tail) return head || tail; // what a prefix adds to its parent may be a line end alone
  return tail.endsWith(head) || head.endsWith(tail) ? head : `${head} … ${tail}`;
}

// Siblings of which some share more than their parent get a place where they part, though nothing can be resumed there.
function forked(items, from) {
  const groups = [];
  items.forEach((item, i) => (i && item.shared > from ? groups.at(-1).push(item) : groups.push([item])));
  return groups.map((group) => {
    if (group.length === 1) return group[0];
    const n = Math.min(...group.slice(1).map((item) => item.shared));
    return { id: "fork " + group[0].id, n, node: null, shared: group[0].shared, children: forked(group, n) };
  });
}

// Items {id, n, node, children, ...}, the newest first.
function treeOf(body) {
  const known = new Map(), names = hooks.names();
  const itemOf = (node) => {
    const item = { id: node.id, n: node.n, node, shared: node.shared ?? 0, tier: node.tiers[0] ?? "disk" };
    item.words = wordsOf(node);
    item.name = names.get(node.id) ?? "";
    item.bytes = node.row_bytes + node.state_bytes + node.device_bytes;
    known.set(node.id, item);
    item.children = forked(node.children.map(itemOf), node.n);
    return item;
  };
  const roots = forked(body.prefixes.map(itemOf), 0);
  for (const entry of [...body.stored].sort((a, b) => a.n - b.n)) {
    const sizes = { row_bytes: entry.bytes, state_bytes: 0, device_bytes: 0 };
    const node = { ...entry, ...sizes, tiers: ["disk"], children: [], stored: true };
    (known.get(entry.parent)?.children ?? roots).push(itemOf(node));
  }
  for (const seq of body.sequences) {
    const item = known.get(seq.at);
    if (item && !item.seq?.busy) item.seq = seq;
  }
  const finish = (item) => {
    item.children.forEach(finish);
    item.children.sort((a, b) => a.idle - b.idle);
    item.idle = Math.min(item.seq?.busy ? 0 : item.node?.idle ?? Infinity, ...item.children.map((child) => child.idle));
    item.onPath = path.has(item.id) || item.children.some((child) => child.onPath);
    item.tier ??= item.children[0].tier;
    return item;
  };
  // A name stands where its conversation starts.
  const begin = (item, before) => {
    const name = item.name || before;
    if (item.name === before) item.name = "";
    item.children.forEach((child) => begin(child, name));
  };
  roots.forEach((root) => begin(root, ""));
  return roots.map(finish).sort((a, b) => a.idle - b.idle);
}

// Rows of a list. An only child stays on the rail of its parent, branches get their own rails: `passes` are the
// rails of others that go by, with whether the open conversation runs on them.
function rowsOf(roots) {
  const found = [];
  const walk = (item, depth, passes, join) => {
    const { children } = item, forks = children.length > 1;
    found.push({ item, depth, passes, join, up: join === "only", down: children.length > 0 });
    if (!forks) return children.forEach((child) => walk(child, depth, passes, "only"));
    const last = children.findLastIndex((child) => child.onPath);
    children.forEach((child, i) => {
      const goesOn = i < children.length - 1 ? [[depth, i < last]] : [];
      walk(child, depth + 1, [...passes, ...goesOn], "branch");
    });
  };
  roots.forEach((root) => walk(root, 0, [], "root"));
  return found;
}

function row({ item, depth }) {
  const made = el("li", { class: "node", role: "treeitem", tabindex: "-1", "aria-level": depth + 1 },
    el("span", { class: "rail", "aria-hidden": "true" }),
    el("div", { class: "words" }), el("div", { class: "meta" }), el("div", { class: "acts" }));
  const toggle = () => made.setAttribute("aria-expanded", made.classList.toggle("open"));
  made.addEventListener("click", toggle);
  made.addEventListener("mouseenter", () => view.map.mark(item.id));
  made.addEventListener("focusin", () => view.map.mark(item.id));
  made.addEventListener("mouseleave", () => view.map.mark(""));
  made.addEventListener("keydown", (event) => {
    if (event.target !== made) return;
    const all = [...made.parentNode.children], at = all.indexOf(made);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (all[to]) walkTo(all[to]);
    else if (event.key === "Enter" || event.key === " ") toggle();
    else if (to === undefined) return;
    event.preventDefault();
  });
  return made;
}

function walkTo(made) {
  for (const each of view.tree.querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
  made.tabIndex = 0;
  made.focus();
}

const PRIVATE = "(words are shown with a key, or on the server's machine)";

function update(made, { item, depth, passes, join, up, down }) {
  const { node } = item, on = item.onPath;
  const open = made.classList.contains("open") && "open", fork = !node && "fork";
  const lit = [item.id === used && "used", added.has(item.id) && "added"];
  const kinds = ["node", item.tier, open, fork, on && "path", node?.pinned && "pinned", ...lit];
  made.className = kinds.filter(Boolean).join(" ");
  made.style.setProperty("--depth", depth);
  const idle = node ? ago(node.idle + (Date.now() - latest.at) / 1000) : "";
  const about = node && [node.tiers, node.hits, node.pinned, item.words, item.name, item.bytes, item.seq?.busy];
  const state = JSON.stringify([passes, join, up, down, on, idle, about, item.children.some((child) => child.onPath)]);
  if (made.state === state) return;
  made.state = state;
  const line = (kind, level, lights) => el("i", { class: kind + (lights ? " on" : ""), vars: { "--l": level } });
  put(made.firstChild, passes.map(([level, lights]) => line("pass", level, lights)),
    join === "branch" ? line("join", depth - 1, on) : null, up ? line("up", depth, on) : null,
    down ? line("down", depth, item.children.some((child) => child.onPath)) : null, el("b", { class: "dot" }));
  const [, words, meta, acts] = made.children;
  if (!node) return put(meta, el("b", {}, count(item.n)), " tokens are shared from here up");
  const hits = node.hits === 1 ? "1 hit" : node.hits + " hits";
  put(words, item.name ? el("b", { class: "name" }, item.name) : null, item.words || PRIVATE);
  put(meta, el("b", {}, count(node.n)), " tokens",
    node.tiers.map((tier) => el("span", { class: "tier " + tier }, TIERS[tier])),
    el("span", {}, size(item.bytes)), el("span", {}, hits), el("span", {}, idle),
    item.seq ? el("span", { class: "tier live" }, item.seq.busy ? "in use" : "live") : null,
    node.pinned ? el("span", { class: "pin" }, "pinned") : null);
  // The same buttons stay as long as they can: one may be pressed, or have the focus, right now.
  const task = item.seq?.busy ? item.seq.task : -1;
  const offers = JSON.stringify([node.stored, node.pinned, task]);
  if (made.offers === offers) return;
  made.offers = offers;
  const act = (text, run) => el("button", {
    type: "button", onclick: (event) => {
      event.stopPropagation();
      change(run);
    },
  }, text);
  const pin = () => api.post("cache/pin", { id: node.id, pinned: !node.pinned });
  put(acts, task >= 0 ? act("Stop", () => stopRequest(task)) : null,
    node.stored ? null : act(node.pinned ? "Unpin" : "Pin", pin),
    node.pinned ? null : act("Drop", () => api.remove("cache/" + encodeURIComponent(node.id))));
}

// Its client may be gone; one that is not gets an error.
async function stopRequest(task) {
  const text = "A reply is generated from this prefix. If another program waits for it, that gets an error.";
  if (await sure("Stop this request?", text, "Stop")) await api.remove("cache/requests/" + task);
}

async function change(run) {
  try {
    await run();
  } catch (error) {
    tell(error.message);
  }
  await look();
}

function pick(id) {
  const made = view.tree.querySelector(`[data-key="${CSS.escape(id)}"]`);
  if (!made) return;
  made.classList.add("open");
  made.scrollIntoView({ block: "nearest", behavior: "smooth" });
  walkTo(made);
}

// -- all of it -------------------------------------------------------------------------------------------------------

export function start(given) {
  hooks = given;
  if (view) return look();
  view = { totals: el("div"), tree: el("ul", { class: "tree", role: "tree", "aria-label": "Cached prefixes" }) };
  view.map = new TreeMap(pick);
  view.chart = el("div", { class: "chart" });
  view.timeline = el("ol", { class: "timeline", "aria-label": "Requests, the newest first" });
  view.note = el("p", { class: "note dim" });
  view.drawn = el("div", { class: "picture" }, view.map.element);
  const button = (text, title, onclick) => el("button", { type: "button", title, onclick }, text);
  put($("cache"), el("header", {}, el("h2", {}, "Cache"), el("span", { class: "grow" }),
    button("Prewarm", "Evaluate the open conversation now, before the next message", warm),
    button("Drop all", "Drop all prefixes in RAM that are not pinned", clear),
    icon("⤢", "Enlarge", enlarge, { class: "icon enlarge" }),
    icon("✕", "Close", () => document.body.classList.remove("show-cache"), { class: "icon close" })),
  view.totals, legend(), view.drawn, view.note, view.tree, view.timeline, view.chart);
  new ResizeObserver(() => draw()).observe(view.drawn);
  watch();
}

// How to read the view.
function legend() {
  const dot = (kind) => el("b", { class: "dot " + kind, "aria-hidden": "true" });
  return el("details", { class: "key" }, el("summary", {}, "How to read this"), el("ul", {},
    el("li", {}, "A dot is a prefix that a prompt can resume from: ", dot("device"), " on the device, ", dot("ram"),
      " in RAM, ", dot("disk"), " on disk (dashed line)."),
    el("li", {}, "The thick line is the open conversation. Lines part where prompts differ."),
    el("li", {}, el("b", {}, "live"), ": the device holds it right now. ", el("b", {}, "in use"),
      ": a reply runs on it; click it to stop that."),
    el("li", {}, el("b", {}, "hits"), ": requests that resumed from it. Click a prefix to pin or drop it; ",
      "a pinned one stays."),
    el("li", {}, el("b", {}, "Prewarm"), " evaluates the open conversation before the next message. ",
      el("b", {}, "Drop all"), " empties RAM.")));
}

function enlarge() {
  document.body.classList.toggle("wide");
  draw();
}

async function clear() {
  const text = "Drops all prefixes in RAM that are not pinned. Prefixes on disk stay.";
  if (await sure("Drop everything?", text, "Drop")) change(() => api.remove("cache"));
}

async function warm() {
  await change(async () => {
    tell("Prewarming");
    const { ready, evaluated } = await api.post("cache/warm", { messages: hooks.messages() });
    tell(`${tokens(ready)} are cached, ${count(evaluated)} evaluated now`);
  });
}

function gauge(kind, name, bytes, budget) {
  const share = budget > 0 ? Math.min((100 * bytes) / budget, 100) : 0;
  const filled = bytes ? el("i", { class: kind, vars: { "--w": share } }) : "";
  const track = budget > 0 ? el("span", { class: "track" }, filled) : el("span");
  return el("div", { class: "gauge" }, el("span", {}, el("b", { class: "dot " + kind, "aria-hidden": "true" }), name),
    track, el("span", { class: "dim" }, size(bytes) + (budget > 0 ? " of " + size(budget) : "")));
}

// Snapshots that the server evaluated again while it was idle: null before the first one.
function checks({ canary }) {
  const sum = (counts) => Object.values(counts).reduce((all, n) => all + n, 0);
  const verified = sum(canary?.verified ?? {}), differing = sum(canary?.differing ?? {});
  if (!verified && !differing) return null;
  const wrong = differing ? `, ${count(differing)} differed and left the cache` : "";
  return el("p", { class: differing ? "checks bad" : "checks dim",
    title: "While idle, the server evaluates the end of a snapshot again and compares all bits" },
  `${count(verified)} ${verified === 1 ? "snapshot" : "snapshots"} verified to the bit${wrong}`);
}

const requests = (n) => (n === 1 ? "1 request" : count(n) + " requests");
const seconds = (n) => (n > 0 ? time(1000 * n) : "0 s");

// The time that the cache saved all clients today, as the server counts it; from a server that does
// not count it the time that this browser waited. Null before the first request.
function headline({ saved, totals }) {
  const { waited, instead } = hooks.waits(), isShorter = instead - waited >= 1000;
  const otherwise = isShorter ? `, instead of about ${time(instead)}` : "";
  const dim = (line) => [el("br"), el("span", { class: "dim" }, line)];
  const show = (n, words, ...lines) =>
    el("div", { class: "headline" }, el("strong", {}, seconds(n)),
      el("span", {}, words, lines.filter(Boolean).map(dim)));
  if (saved) {
    const { today, total } = saved;
    if (!total.requests && !totals.requests) return null;
    const before = total.seconds - today.seconds >= 1 ? `, ${seconds(total.seconds)} in total` : "";
    return show(today.seconds, `of waiting saved today${before}, for all clients`,
      `${short(today.tokens)} tokens restored in ${requests(today.requests)}`,
      isShorter && `this browser waited ${time(waited)}${otherwise}`);
  }
  if (!totals.requests && !waited) return null;
  const restored = totals.prompt - totals.evaluated;
  return show(waited / 1000, `waited for prompts today${otherwise}`,
    `${short(restored)} of ${short(totals.prompt)} tokens restored in ${requests(totals.requests)}`);
}

function draw() {
  if (!view) return;
  view.note.textContent = failed;
  if (!latest) return;
  const { bytes, disk } = latest;
  put(view.totals, headline(latest),
    bytes.device ? gauge("device", "Device", bytes.device, -1) : null,
    gauge("ram", "RAM", bytes.resident, bytes.budget),
    disk ? gauge("disk", "Disk", disk.n_bytes, disk.budget) : null,
    checks(latest));
  const roots = treeOf(latest);
  view.drawn.hidden = view.tree.hidden = !roots.length;
  if (!roots.length && !failed) view.note.textContent = "The cache is empty.";
  view.map.draw(roots, latest.sequences, { used, added });
  const held = view.tree.contains(document.activeElement) ? document.activeElement : null;
  keyed(view.tree, rowsOf(roots), ({ item }) => item.id, row, update);
  if (held?.isConnected && held !== document.activeElement) held.focus({ preventScroll: true }); // it was moved
  if (view.tree.firstChild && !view.tree.querySelector('[tabindex="0"]')) view.tree.firstChild.tabIndex = 0;
  drawTimeline(view.timeline, latest.replies.filter((reply) => reply.kind));
  chart(latest.replies.filter((reply) => reply.predicted_n > 1));
}

// Two lines over the last hour at most: how fast prompts were evaluated and replies were generated.
function chart(replies) {
  const counts = (n, ms) => replies.filter((reply) => reply[n] > 8 && reply[ms] > 0);
  const speeds = (n, ms) => counts(n, ms).map((reply) => [reply.age, (1000 * reply[n]) / reply[ms]]);
  const oldest = replies[0]?.age ?? 0;
  if (replies.length < 2) return view.chart.replaceChildren();
  put(view.chart, el("h3", {}, "Speeds, last " + (oldest < 3000 ? ago(oldest) : "hour")),
    spark("evaluated", "Evaluated", speeds("prompt_n", "prompt_ms"), oldest, replies.at(-1).age),
    spark("said", "Generated", speeds("predicted_n", "predicted_ms"), oldest, replies.at(-1).age));
}

function spark(kind, name, points, oldest, newest) {
  if (points.length < 2) return null;
  const most = Math.max(...points.map(([, speed]) => speed)), now = points.at(-1)[1], span = oldest - newest || 1;
  const place = ([age, speed]) =>
    [(6 + ((oldest - age) / span) * 188).toFixed(1), (27 - (speed / most) * 23).toFixed(1)];
  const places = points.map(place), line = places.map((each) => each.join(" ")).join("L");
  return el("div", { class: "spark " + kind }, el("span", {}, name),
    svg("svg", { viewBox: "0 0 200 30", role: "img", "aria-label": `${name}: ${rate(now)} now, ${rate(most)} at most` },
      svg("path", { class: "area", d: `M${places[0][0]} 29L${line}L${places.at(-1)[0]} 29Z` }),
      svg("path", { d: "M" + line }),
      svg("circle", { cx: places.at(-1)[0], cy: places.at(-1)[1], r: 2.5 })),
    el("span", {}, rate(now)));
}
