// Elements, lists that keep theirs, dialogs, and numbers for people.

function dress(made, props, kids) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.setAttribute("class", value);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string" && typeof value !== "number") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...there(kids));
  return made;
}

const there = (kids) => kids.flat(2).filter((kid) => kid !== null && kid !== undefined && kid !== false && kid !== "");

export const el = (tag, props = {}, ...kids) => dress(document.createElement(tag), props, kids);

export const svg = (tag, props = {}, ...kids) =>
  dress(document.createElementNS("http://www.w3.org/2000/svg", tag), props, kids);

// A button that shows a sign; people who do not see it hear the label.
export const icon = (sign, label, onclick, props = {}) =>
  el("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...props }, sign);

// Make a field for text as high as its text, and no higher than a share of the window.
export function fit(field) {
  field.style.height = "auto";
  const border = field.offsetHeight - field.clientHeight;
  field.style.height = Math.min(field.scrollHeight + border, innerHeight * FIELD_SHARE) + "px";
}

const FIELD_SHARE = 0.4;

export const put = (box, ...kids) => box.replaceChildren(...there(kids));

export const $ = (id) => document.getElementById(id);

// Make the children of `parent` match `items`: elements of known keys stay and get their new item.
export function keyed(parent, items, keyOf, make, update = () => {}) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    const place = before ? before.nextSibling : parent.firstChild;
    if (child !== place) parent.insertBefore(child, place);
    update(child, item);
    before = child;
  }
  for (const child of known.values()) child.remove();
}

// -- numbers ---------------------------------------------------------------------------------------------------------

const counts = new Intl.NumberFormat("en");
export const count = (n) => counts.format(Math.round(n));
export const tokens = (n) => (n === 1 ? "1 token" : count(n) + " tokens");

export function short(n) {
  if (n < 1000) return String(Math.round(n));
  return n < 10000 ? (n / 1000).toFixed(1) + "k" : n < 1e6 ? Math.round(n / 1000) + "k" : (n / 1e6).toFixed(1) + "M";
}

export const rate = (n) => (n < 10 ? n.toFixed(1) : count(n)) + " tokens/s";

export function size(bytes) {
  for (const [unit, width] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (bytes >= width) return +(bytes / width).toPrecision(bytes / width < 100 ? 2 : 3) + " " + unit;
  return Math.round(bytes) + " B";
}

export function time(ms) {
  if (ms < 1000) return ms.toFixed(ms < 10 ? 1 : 0) + " ms";
  if (ms < 59500) return (ms / 1000).toFixed(1) + " s";
  const s = Math.round(ms / 1000), min = Math.floor(s / 60);
  return min < 60 ? `${min} min ${s % 60} s` : `${Math.floor(min / 60)} h ${min % 60} min`;
}

export function ago(seconds) {
  for (const [unit, width] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= width) return Math.floor(seconds / width) + " " + unit;
  return Math.max(Math.floor(seconds), 0) + " s";
}

const ROLES = { user: "You: ", assistant: "Reply: ", system: "System: ", tool: "Tool: " };

// Tokens as people read them: without marks, with names for roles.
export const plain = (text) =>
  (text ?? "")
    .replace(/^[a-z_]*\|?>/, "")
    .replace(/<\|im_start\|>([a-z]+)\n?|^(system|user|assistant|tool)\n/g, (_, a, b) => ROLES[a ?? b] ?? a + ": ")
    .replace(/<\|[^|<>\n]{1,30}\|>|<\/?think>/g, " ")
    .replace(/\s+/g, " ")
    .trim();

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

// -- telling and asking ----------------------------------------------------------------------------------------------

let hiding = 0;

// For screen readers; with `shown` for everybody.
export function say(text, shown = false) {
  const box = $("live");
  box.textContent = text;
  box.classList.toggle("toast", shown);
  clearTimeout(hiding);
  if (shown) hiding = setTimeout(() => box.classList.remove("toast"), 5000);
}

export const tell = (text) => say(text, true);

// A dialog of elements; the value of the button that ended it, "" if nothing was chosen. An element for each:
// the event that one was closed comes later than its closing, and would end the next one. One that is still open gives
// way; one that was heard of is empty.
export function ask(title, body, ...buttons) {
  const before = $("dialog"), dialog = el("dialog", { id: "dialog", "aria-label": title });
  const close = icon("✕", "Close", () => dialog.close(""));
  // The first of these is what Enter presses.
  const foot = el("footer", {}, buttons.map(([text, value, kind]) =>
    el("button", { value, class: kind, formnovalidate: kind !== "primary" }, text)));
  put(dialog, el("form", { method: "dialog" }, el("header", {}, el("h2", {}, title), close), body, foot));
  before.close("");
  before.replaceWith(dialog);
  dialog.showModal();
  return new Promise((go) => dialog.addEventListener("close", () => {
    put(dialog);
    go(dialog.returnValue);
  }, { once: true }));
}

export const sure = async (title, text, verb) =>
  (await ask(title, el("p", {}, text), [verb, "yes", "primary"], ["Cancel", ""])) === "yes";

export async function copy(text, button = null) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that came without TLS from another machine have no clipboard.
    const field = el("textarea", { class: "visually-hidden" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    if (!done) return tell("The browser refused to copy");
  }
  say("Copied");
  if (!button) return;
  button.dataset.said ??= button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = button.dataset.said), 1200);
}
