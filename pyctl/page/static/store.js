// Conversations: trees of messages in IndexedDB. `leaf` is where the open branch ends, `pick` the child seen last.

import { newId } from "./dom.js";

let db = null;

const request = (made) =>
  new Promise((resolve, reject) => {
    made.onsuccess = () => resolve(made.result);
    made.onerror = () => reject(made.error);
  });

export async function open() {
  const opening = indexedDB.open("pyctl", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", { keyPath: "id" });
  db = await request(opening);
}

// Other tabs hear of writes here.
const others = new BroadcastChannel("pyctl");
export const onOthers = (run) => (others.onmessage = (event) => run(event.data));

const table = (mode) => db.transaction("conversations", mode).objectStore("conversations");
export const all = () => request(table("readonly").getAll());
export const read = (id) => request(table("readonly").get(id));

// Committed at once: a page that is closed before the event would lose the change.
async function change(id, run) {
  const objects = table("readwrite"), made = request(run(objects));
  objects.transaction.commit();
  await made;
  others.postMessage(id);
}

export const save = (conversation) => change(conversation.id, (objects) => objects.put(conversation));

// Whether another tab has ended the reply that came through this stream, or writes another one in its
// place. An error ends nothing: only the tab that reports it may have lost the server.
export const isEnded = ({ stream, finish }, id) =>
  stream ? stream.id !== id : Boolean(finish);

// Keep a reply that several tabs read, and nothing else of its conversation. False if another tab has
// ended it, or deleted the conversation.
export async function saveReply(conversation, message, stream) {
  const objects = table("readwrite");
  const written = await new Promise((resolve, reject) => {
    const reading = objects.get(conversation.id);
    const fail = () => reject(reading.error ?? objects.transaction.error);
    reading.onerror = objects.transaction.onabort = fail;
    reading.onsuccess = () => {
      const kept = reading.result, before = kept?.messages[message.id];
      if (!kept || (before && isEnded(before, stream))) return resolve(false);
      const messages = { ...kept.messages, [message.id]: message };
      const writing = objects.put({ ...kept, updated: conversation.updated, messages });
      writing.onsuccess = () => resolve(true);
      objects.transaction.commit();
    };
  });
  if (written) others.postMessage(conversation.id);
  return written;
}

export const drop = (id) => change(id, (objects) => objects.delete(id));

// -- trees -----------------------------------------------------------------------------------------------------------

export function create() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system: null, messages: {}, leaf: null, pick: {} };
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

// The children of each message, the oldest first; the children of "" are the first ones.
export function families(conversation) {
  const found = new Map();
  for (const message of Object.values(conversation.messages)) {
    const parent = message.parent ?? "";
    if (found.has(parent)) found.get(parent).push(message);
    else found.set(parent, [message]);
  }
  for (const each of found.values()) each.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  return found;
}

// Open the branch of a message, as deep as it was seen last.
export function show(conversation, id) {
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent])
    conversation.pick[at.parent ?? ""] = at.id;
  const below = families(conversation);
  while (below.has(id)) {
    const children = below.get(id);
    id = (children.find((each) => each.id === conversation.pick[id]) ?? children.at(-1)).id;
  }
  conversation.leaf = id;
}

// Remove a message and all that follows it.
export function prune(conversation, id) {
  const { parent } = conversation.messages[id], below = families(conversation);
  const left = below.get(parent ?? "").filter((each) => each.id !== id);
  const going = [id];
  while (going.length) {
    const next = going.pop();
    going.push(...(below.get(next) ?? []).map((each) => each.id));
    delete conversation.messages[next];
    delete conversation.pick[next];
  }
  if (left.length) show(conversation, left.at(-1).id);
  else conversation.leaf = parent;
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.messages).find((each) => each.parent === null && each.role === "user");
  return (first?.content || first?.files?.[0]?.name || "New conversation").trim().split("\n")[0].slice(0, 80);
}

// -- exports ---------------------------------------------------------------------------------------------------------

// All but the ids of streams, by which replies that run could be read.
export const dump = (conversations) => JSON.stringify({ format: "pyctl-conversations", version: 1, conversations },
  (name, value) => (name === "stream" ? undefined : value), 1);

// The open branch of a conversation as a text for people.
export function markdown(conversation) {
  const names = { user: "You", assistant: "Reply", system: "System", tool: "Tool result" };
  const fence = (text) => "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  const block = (text) => `${fence(text)}\n${text.trimEnd()}\n${fence(text)}`;
  const parts = ["# " + titleOf(conversation)];
  if (conversation.system) parts.push("## System", conversation.system);
  for (const { role, content, files = [], calls = [] } of path(conversation)) {
    parts.push("## " + names[role], ...files.map(({ name, text }) => (text ? `${name}:\n\n${block(text)}` : name)));
    parts.push(content.trim(), ...calls.map((call) => `Calls ${call.name}:\n\n${block(call.arguments)}`));
  }
  return parts.filter(Boolean).join("\n\n") + "\n";
}

// -- what the cache did for them -------------------------------------------------------------------------------------

// The titles of the conversations that left or used each prefix, by its id; the newest conversation counts.
export function namesOf(conversations) {
  const found = new Map();
  for (const each of [...conversations].sort((a, b) => a.updated - b.updated))
    for (const { stats } of Object.values(each.messages))
      for (const id of [stats?.cache?.restored, ...(stats?.cache?.saved ?? [])]) if (id) found.set(id, titleOf(each));
  return found;
}

// Milliseconds that prompts took since `start`, and would have taken at the speed of the last one without a cache.
export function waits(conversations, start) {
  const all = conversations.flatMap((each) => Object.values(each.messages))
    .filter(({ created, stats }) => stats && created >= start).sort((a, b) => a.created - b.created);
  const pace = ({ stats }) => (stats.prompt_n >= 32 ? stats.prompt_ms / stats.prompt_n : 0);
  let now = pace(all.find(pace) ?? { stats: {} }), waited = 0, instead = 0;
  for (const each of all) {
    now = pace(each) || now;
    waited += each.stats.prompt_ms;
    instead += each.stats.prompt_ms + now * each.stats.cache_n;
  }
  return { waited, instead };
}

// -- files -----------------------------------------------------------------------------------------------------------

const isText = (value) => typeof value === "string";
const listOf = (value, fits) => (Array.isArray(value) && value.length && value.every(fits) ? value : undefined);
const isFile = (each) => isText(each?.name) && (isText(each.text) || /^data:image\/[a-z]+;base64,/.test(each.image));
const isCall = (each) => isText(each?.name) && isText(each.arguments);

const COUNTS = ["cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"];
const SOURCES = ["none", "live", "ram", "disk"];

// The counts and times of a reply, as the server sent them; nothing if a count is missing.
function statsOf(given) {
  if (!COUNTS.every((name) => Number.isFinite(given?.[name]))) return undefined;
  const found = Object.fromEntries(Object.entries(given).filter(([, value]) => Number.isFinite(value)));
  const { cache } = given;
  if (!SOURCES.includes(cache?.source)) return found;
  const { source, miss } = cache, saved = listOf(cache.saved, isText) ?? [];
  found.cache = { source, restored: isText(cache.restored) ? cache.restored : "", saved };
  if (Number.isFinite(miss?.position) && Number.isFinite(miss.nearest)) {
    found.cache.miss = { position: miss.position, nearest: miss.nearest };
    if (isText(miss.was) && isText(miss.is)) Object.assign(found.cache.miss, { was: miss.was, is: miss.is });
  }
  return found;
}

function messageOf(id, given, messages) {
  if (id in Object.prototype) throw new Error("A message has an unknown id.");
  if (!["user", "assistant", "system", "tool"].includes(given?.role)) throw new Error("A message has an unknown role.");
  const parent = isText(given.parent) && Object.hasOwn(messages, given.parent) ? given.parent : null;
  const message = { id, parent, role: given.role, created: +given.created || 0, content: String(given.content ?? "") };
  for (const name of ["reasoning", "finish", "error", "call", "name"])
    if (isText(given[name])) message[name] = given[name];
  if (Number.isFinite(given.thought)) message.thought = given.thought;
  message.stats = statsOf(given.stats);
  message.files = listOf(given.files, isFile);
  message.calls = listOf(given.calls, isCall);
  return message;
}

// The conversations of a file; an Error names its fault. Those that are here already come as copies.
export function parse(text, known) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("Not JSON.");
  }
  if (data?.format !== "pyctl-conversations" || !Array.isArray(data.conversations))
    throw new Error("Not an export of this page.");
  return data.conversations.map((given) => {
    const made = create(), messages = given?.messages ?? {};
    if (isText(given?.id) && !known.has(given.id)) made.id = given.id;
    if (isText(given?.model)) made.model = given.model;
    if (isText(given.title)) made.title = given.title;
    if (given.pinned === true) made.pinned = true;
    for (const name of ["system", "preset"]) if (isText(given[name])) made[name] = given[name];
    for (const name of ["created", "updated"]) made[name] = +given[name] || made[name];
    for (const [id, message] of Object.entries(messages)) made.messages[id] = messageOf(id, message, messages);
    const sound = new Set();
    for (const start of Object.values(made.messages)) {
      const way = [];
      for (let at = start; at && !sound.has(at.id); at = made.messages[at.parent]) {
        if (way.includes(at.id)) throw new Error("The messages of a conversation refer to each other in a circle.");
        way.push(at.id);
      }
      way.forEach((id) => sound.add(id));
    }
    for (const [id, child] of Object.entries(given.pick ?? {}))
      if (Object.hasOwn(made.messages, child)) made.pick[id] = child;
    const last = Object.hasOwn(made.messages, given.leaf) ? given.leaf : Object.keys(made.messages).at(-1);
    if (last) show(made, last);
    return made;
  });
}
