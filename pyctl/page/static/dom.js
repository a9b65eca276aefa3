// Elements, lists that keep theirs, and numbers for people.

export function el(tag, props = {}, ...kids) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name === "vars") for (const [key, text] of Object.entries(value)) made.style.setProperty(key, text);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...kids.flat().filter((kid) => kid !== null && kid !== undefined && kid !== false));
  return made;
}

// Make the children of `parent` those of `items`: the elements of known keys stay and are told of their item.
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

// The children of `box`, less those that are nothing.
export const put = (box, ...kids) => box.replaceChildren(...kids.flat().filter((kid) => kid !== null && kid !== undefined && kid !== false && kid !== ""));

export const $ = (id) => document.getElementById(id);

const counts = new Intl.NumberFormat("en");
export const count = (n) => counts.format(Math.round(n));
export const short = (n) => (n < 1000 ? String(Math.round(n)) : n < 10000 ? (n / 1000).toFixed(1) + "k" : Math.round(n / 1000) + "k");

export function size(bytes) {
  for (const [unit, width] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) if (bytes >= width) return (bytes / width).toPrecision(bytes / width < 100 ? 2 : 3) * 1 + " " + unit;
  return Math.round(bytes) + " B";
}

export function time(ms) {
  if (ms < 100) return ms.toFixed(ms < 10 ? 1 : 0) + " ms";
  if (ms < 1000) return Math.round(ms) + " ms";
  return ms < 60000 ? (ms / 1000).toFixed(1) + " s" : Math.floor(ms / 60000) + " min " + Math.round((ms % 60000) / 1000) + " s";
}

export function ago(seconds) {
  for (const [unit, width] of [["d", 86400], ["h", 3600], ["min", 60]]) if (seconds >= width) return Math.floor(seconds / width) + " " + unit;
  return Math.max(Math.floor(seconds), 0) + " s";
}

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

export function say(text) {
  $("live").textContent = text;
}

export function ask(title, ...content) {
  const dialog = $("dialog");
  dialog.setAttribute("aria-label", title);
  dialog.replaceChildren(el("form", { method: "dialog" }, el("header", {}, el("h2", {}, title), el("button", { class: "icon", "aria-label": "Close", value: "" }, "✕")), ...content));
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}
