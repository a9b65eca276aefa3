// The conversations at the left: those that are searched for, in groups by day, pinned ones first.

import { $, el, icon, keyed, put, svg } from "./dom.js";
import * as store from "./store.js";

let hooks = {}; // what the buttons do, and which conversations are open or busy; see app.js
export const connect = (given) => (hooks = given);

const wanted = () => $("search").value.trim().toLowerCase();
export const isFound = (text) => text.toLowerCase().includes(wanted());
export const isFoundIn = ({ content }) => isFound(content);

// The text that was searched for, with some words before and after it.
function around(text) {
  const word = wanted(), at = text.toLowerCase().indexOf(word);
  return ["…" + text.slice(Math.max(0, at - 12), at), el("b", {}, text.slice(at, at + word.length)),
    text.slice(at + word.length, at + 80)];
}

// The heading over a conversation. A day starts at midnight of this browser.
export function groupOf({ pinned, updated }, now = Date.now()) {
  if (pinned) return "Pinned";
  const startOf = (daysAgo) => {
    const day = new Date(now);
    day.setHours(0, 0, 0, 0);
    return day.setDate(day.getDate() - daysAgo);
  };
  if (updated >= startOf(0)) return "Today";
  if (updated >= startOf(1)) return "Yesterday";
  if (updated >= startOf(7)) return "Previous 7 days";
  if (updated >= startOf(30)) return "Previous 30 days";
  return new Date(updated).toLocaleString("en", { month: "long", year: "numeric" });
}

function grouped(conversations) {
  const sorted = [...conversations].sort((a, b) => Boolean(b.pinned) - Boolean(a.pinned) || b.updated - a.updated);
  const groups = new Map();
  for (const each of sorted) {
    const name = groupOf(each);
    if (groups.has(name)) groups.get(name).push(each);
    else groups.set(name, [each]);
  }
  return [...groups];
}

export function draw(conversations) {
  const fits = (each) => isFound(store.titleOf(each)) || Object.values(each.messages).some(isFoundIn);
  const groups = grouped(conversations.filter(fits));
  keyed($("list"), groups, ([name]) => name, group, (made, [, members]) =>
    keyed(made.lastChild, members, (each) => each.id, entry, update));
}

const group = ([name]) => el("section", {}, el("h2", {}, name), el("ul", { "aria-label": name }));

const pinSign = () => svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" },
  svg("path", { d: "M5.5 2h5L10 7l2.5 2.5h-9L6 7zM8 9.5V14" }));

function entry(conversation) {
  const find = () => hooks.find(conversation.id);
  const name = {
    class: "name", type: "button", onclick: () => hooks.open(find()), ondblclick: () => hooks.change(find()),
  };
  return el("li", {}, el("button", name), el("span", { class: "acts" },
    icon(pinSign(), "Pin conversation", () => hooks.pin(find())),
    icon("⋯", "Conversation options", () => hooks.change(find())),
    icon("✕", "Delete conversation", () => hooks.erase(find()))));
}

function update(made, each) {
  const [name, { firstChild: pin }] = made.children;
  const title = store.titleOf(each), found = !isFound(title) && Object.values(each.messages).find(isFoundIn);
  put(name, title, found && el("small", {}, around(found.content)));
  name.title = `${title}\n${new Date(each.updated).toLocaleString()}`;
  pin.title = each.pinned ? "Unpin conversation" : "Pin conversation";
  pin.setAttribute("aria-label", pin.title);
  made.classList.toggle("pinned", Boolean(each.pinned));
  made.classList.toggle("current", hooks.isOpen(each));
  made.classList.toggle("busy", hooks.isBusy(each));
  if (hooks.isOpen(each)) name.setAttribute("aria-current", "true");
  else name.removeAttribute("aria-current");
}

// Give the focus to a button of an entry, which may have moved to another group.
export const focusPin = ({ id }) => $("list").querySelector(`[data-key="${id}"] .acts button`)?.focus();
