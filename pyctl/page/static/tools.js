// Tools of MCP servers: those offered to the model, those that run without confirmation, and their results.

import { $, ask, count, el } from "./dom.js";
import * as api from "./api.js";

const MAX_ALONE = 100; // calls after one message; then each is asked about again
const REFUSED = "The user refused this call.";

let tools = []; // as GET /tools lists them
let rules = {}; // by the tool's name: "always" or "off"; others are confirmed each time
try {
  rules = JSON.parse(localStorage.getItem("tools")) ?? {};
} catch { /* as if there were none */ }

export async function learn({ tools: runs }) {
  tools = runs ? await api.get("tools", { quiet: true }) : [];
  draw();
}

export const find = (name) => tools.find(({ tool }) => tool === name && rules[name] !== "off");
const offered = () => tools.filter(({ tool }) => rules[tool] !== "off");

// Their part of a request.
export const fields = () => (offered().length ? { tools: offered().map(({ definition }) => definition) } : {});

function draw() {
  $("tools").hidden = !tools.length;
  $("tools").textContent = `Tools ${offered().length}`;
}

const badge = (text, kind = "") => [" ", el("span", { class: "effect " + kind }, text)];
const effect = ({ permissions: { write } }) => (write ? badge("can change things", "writes") : badge("reads only"));
export const mark = (name) => (find(name) ? effect(find(name)) : null);

// -- what may run ----------------------------------------------------------------------------------------------------

// Whether a call may run without a question; `path` are the messages before it.
export function mayRun(conversation, name, path) {
  const since = path.length - 1 - path.findLastIndex(({ role }) => role === "user");
  const known = rules[name] === "always" || Boolean(conversation.allowed?.includes(name));
  return Boolean(find(name)) && known && since < 2 * MAX_ALONE;
}

// A choice for one call also holds for later ones: in this chat or always.
function remember(conversation, name, choice) {
  if (choice === "chat") conversation.allowed = [...(conversation.allowed ?? []), name];
  if (choice !== "always") return;
  rules[name] = "always";
  localStorage.setItem("tools", JSON.stringify(rules));
}

const CHOICES = [["Run once", "once", "primary"], ["Allow in this chat", "chat"], ["Always allow", "always"],
  ["Refuse", "refuse"]];

export const choices = (decide) => el("div", { class: "row wrap" }, CHOICES.map(([text, choice, kind]) =>
  el("button", { type: "button", class: kind, onclick: () => decide(choice) }, text)));

// The dialog with all of them.
export async function open() {
  const options = [["", "ask before each call"], ["always", "run without asking"], ["off", "not for the model"]];
  const row = (given) => {
    const { tool, definition } = given;
    const field = el("select", { name: tool, "aria-label": tool }, options.map(([value, text]) =>
      el("option", { value, selected: value === (rules[tool] ?? "") }, text)));
    field.addEventListener("change", () => {
      if (field.value) rules[tool] = field.value;
      else delete rules[tool];
      localStorage.setItem("tools", JSON.stringify(rules));
      draw();
    });
    const text = el("p", { class: "dim" }, definition.function.description);
    return el("div", { class: "offer" }, el("div", {}, el("code", {}, tool), effect(given), text), field);
  };
  const note = "MCP servers run them on the server's machine, as its user.";
  const body = el("div", { class: "offers" }, el("p", { class: "dim" }, note), tools.map(row));
  await ask("Tools", body, ["Done", "", "primary"]);
}

// -- calls -----------------------------------------------------------------------------------------------------------

const results = new WeakMap(); // of a reply whose calls have no messages yet: {number of the call: text}

export function resultsOf(message) {
  if (!results.has(message)) results.set(message, {});
  return results.get(message);
}

export const areDone = (message) => message.calls.every((_, i) => resultsOf(message)[i] !== undefined);

// Run the calls that may run, and number `chosen` by `choice`; an abort is thrown.
export async function run(conversation, message, path, signal, chosen = -1, choice = "") {
  const found = resultsOf(message);
  if (chosen >= 0) remember(conversation, message.calls[chosen].name, choice);
  for (const [i, call] of message.calls.entries()) {
    if (found[i] !== undefined) continue;
    if (i === chosen && choice === "refuse") found[i] = REFUSED;
    else if (i === chosen || mayRun(conversation, call.name, path)) found[i] = await result(call, signal);
  }
}

export const anyMayRun = (conversation, message, path) =>
  message.calls.some(({ name }, i) => resultsOf(message)[i] === undefined && mayRun(conversation, name, path));

async function result({ name, arguments: given }, signal) {
  try {
    const params = JSON.parse(given || "{}");
    const said = await api.post("tools", { tool: name, params }, { signal });
    return said.plain_text_response ?? JSON.stringify(said);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return JSON.stringify({ error: error.message });
  }
}

// A result, folded.
export function folded(message) {
  const { name, content } = message, title = (name ? "Result of " + name : "Result") + " · ";
  if (content === REFUSED) return el("p", { class: "dim" }, `You refused ${name}.`);
  return el("details", { class: "file" }, el("summary", {}, `${title}${count(content.length)} characters`),
    el("pre", { tabindex: "0" }, content));
}
