// Conversations: trees of messages in IndexedDB. `leaf` is where the open branch ends, `pick` the child seen last.

import { newId } from "./dom.js";

let db = null;
const request = (made) => new Promise((resolve, reject) => { made.onsuccess = () => resolve(made.result); made.onerror = () => reject(made.error); });

export async function open() {
  const opening = indexedDB.open("pyctl", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
  db = await request(opening);
}

const store = (mode) => db.transaction("conversations", mode).objectStore("conversations");
export const all = async () => (await request(store("readonly").getAll())).sort((a, b) => b.updated - a.updated);
export const save = (conversation) => request(store("readwrite").put(structuredClone(conversation)));
export const drop = (id) => request(store("readwrite").delete(id));

export function create(system = "") {
  const now = Date.now();
  return { id: newId(), title: "", named: false, created: now, updated: now, system, messages: {}, leaf: null, pick: {} };
}

export function add(conversation, parent, fields) {
  const message = { id: newId(), parent, created: Date.now(), content: "", ...fields };
  conversation.messages[message.id] = message;
  show(conversation, message.id);
  return message;
}

export function path(conversation) {
  const found = [];
  for (let at = conversation.messages[conversation.leaf]; at; at = conversation.messages[at.parent]) found.push(at);
  return found.reverse();
}

export const siblings = (conversation, message) => Object.values(conversation.messages).filter((each) => each.parent === message.parent && each.role === message.role).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
const children = (conversation, id) => Object.values(conversation.messages).filter((each) => each.parent === id).sort((a, b) => a.created - b.created);

// Open the branch of a message, as deep as it was seen last.
export function show(conversation, id) {
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent]) conversation.pick[at.parent ?? ""] = at.id;
  for (;;) {
    const below = children(conversation, id);
    if (!below.length) break;
    id = below.find((each) => each.id === conversation.pick[id])?.id ?? below.at(-1).id;
  }
  conversation.leaf = id;
}

// Remove a message and all that follows it.
export function prune(conversation, id) {
  const message = conversation.messages[id];
  const others = siblings(conversation, message).filter((each) => each.id !== id);
  const going = [id];
  while (going.length) {
    const next = going.pop();
    going.push(...children(conversation, next).map((each) => each.id));
    delete conversation.messages[next];
    delete conversation.pick[next];
  }
  if (others.length) show(conversation, others.at(-1).id);
  else conversation.leaf = message.parent;
}

export function titleOf(conversation) {
  const first = Object.values(conversation.messages).find((each) => each.parent === null && each.role === "user");
  return conversation.title || (first?.content || "New conversation").split("\n")[0].slice(0, 60);
}

export const dump = (conversations) => JSON.stringify({ format: "pyctl-conversations", version: 1, conversations }, null, 1);

// The conversations of a file; an Error says what is wrong with it. Those that are here already come as copies.
export function parse(text, known) {
  const data = JSON.parse(text);
  if (data.format !== "pyctl-conversations" || !Array.isArray(data.conversations)) throw new Error("This is no export of this page.");
  return data.conversations.map((each) => {
    const made = { ...create(), title: String(each.title || ""), system: String(each.system || ""), created: +each.created || Date.now(), updated: +each.updated || Date.now() };
    if (typeof each.id === "string" && !known.has(each.id)) made.id = each.id;
    for (const [id, message] of Object.entries(each.messages || {})) {
      if (!["user", "assistant", "system", "tool"].includes(message.role)) throw new Error("A message has an unknown role.");
      const { content, reasoning, parent, ...rest } = message;
      made.messages[id] = { ...rest, id, parent: parent ?? null, content: String(content ?? ""), ...(reasoning ? { reasoning: String(reasoning) } : {}) };
    }
    for (const message of Object.values(made.messages)) {
      const seen = new Set();
      for (let at = message; at; at = made.messages[at.parent]) {
        if (seen.has(at.id)) throw new Error("The messages form a circle.");
        seen.add(at.id);
        if (at.parent !== null && !made.messages[at.parent]) at.parent = null;
      }
    }
    made.pick = Object.fromEntries(Object.entries(each.pick || {}).filter(([, id]) => made.messages[id]));
    const last = made.messages[each.leaf] ? each.leaf : Object.keys(made.messages).at(-1);
    if (last) show(made, last);
    return made;
  });
}
