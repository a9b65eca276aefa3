// What a request says besides its messages: presets of system prompt and sampling, the theme, the key.

import { $, ask, el } from "./dom.js";
import * as api from "./api.js";

const read = (name, otherwise) => { try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; } };
const state = { theme: read("theme", "system"), stats: read("stats", true), presets: read("presets", []), preset: read("preset", ""), values: read("values", {}) };
let defaults = {};
const write = (name) => localStorage.setItem(name, JSON.stringify(state[name]));

const FIELDS = [["temperature", "Temperature", 0, 2, 0.05], ["top_p", "Top p", 0, 1, 0.01], ["top_k", "Top k", 0, 200, 1], ["min_p", "Min p", 0, 1, 0.01], ["repeat_penalty", "Repeat penalty", 0.5, 2, 0.05], ["presence_penalty", "Presence penalty", -2, 2, 0.1], ["max_tokens", "Most tokens", -1, 1e6, 1], ["seed", "Seed", -1, 4294967295, 1]];

export const preset = () => state.presets.find((each) => each.name === state.preset);
export const systemPrompt = () => preset()?.system ?? state.values.system ?? "";

export function requestOf() {
  const values = { ...state.values, ...(preset()?.values ?? {}) };
  const body = {};
  for (const [name] of FIELDS) if (values[name] !== undefined && values[name] !== null && values[name] !== "") body[name] = +values[name];
  if (values.thinking === "off") body.chat_template_kwargs = { enable_thinking: false };
  if (values.thinking === "on") body.chat_template_kwargs = { enable_thinking: true };
  if (values.reasoning_budget) body.reasoning_budget = +values.reasoning_budget;
  try { Object.assign(body, JSON.parse(values.json || "{}")); } catch { /* said when it was entered */ }
  return body;
}

export function applyTheme() {
  if (state.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
  document.documentElement.classList.toggle("no-stats", !state.stats);
}

export function setDefaults(props) {
  const params = props.default_generation_settings?.params ?? {};
  defaults = { ...params, max_tokens: params.n_predict };
}

export function drawPresets() {
  const select = $("preset");
  select.replaceChildren(el("option", { value: "" }, "No preset"), ...state.presets.map((each) => el("option", { value: each.name }, each.name)));
  select.value = state.preset;
  select.onchange = () => { state.preset = select.value; write("preset"); };
}

export async function openSettings() {
  const active = preset(), values = active ? active.values : state.values;
  const input = (name, props) => el("input", { name, id: "set-" + name, ...props, value: values[name] === undefined ? undefined : String(values[name]) });
  const rows = FIELDS.map(([name, label, min, max, step]) => el("label", {}, el("span", {}, label), input(name, { type: "number", min: String(min), max: String(max), step: String(step), placeholder: defaults[name] === undefined ? "" : String(+(+defaults[name]).toFixed(3)) })));
  const choose = (name, label, options, value) => el("label", {}, el("span", {}, label), el("select", { name }, options.map(([key, text]) => el("option", { value: key, selected: key === value }, text))));
  const area = (name, label, text, rows) => { const field = el("textarea", { name, rows: String(rows), spellcheck: "false" }); field.value = text ?? ""; return el("label", { class: "tall" }, el("span", {}, label), field); };
  const note = el("p", { class: "error", role: "alert" });
  const system = area("system", "System prompt", active ? active.system : state.values.system, 4);
  const json = area("json", "More, as JSON", values.json, 2);
  const name = el("input", { name: "name", value: active?.name ?? "", placeholder: "Name, to keep it as a preset" });
  const choice = ask(active ? "Settings · " + active.name : "Settings", el("div", { class: "settings" },
    system, el("div", { class: "grid" }, rows, choose("thinking", "Reasoning", [["", "as the model does"], ["on", "on"], ["off", "off"]], values.thinking ?? ""), el("label", {}, el("span", {}, "Tokens of reasoning"), input("reasoning_budget", { type: "number", placeholder: "no limit" }))),
    json, el("label", {}, el("span", {}, "Preset"), name),
    el("div", { class: "grid" }, choose("theme", "Appearance", [["system", "as the system"], ["light", "light"], ["dark", "dark"]], state.theme), choose("stats", "What replies cost", [["yes", "show"], ["no", "hide"]], state.stats ? "yes" : "no"),
      el("label", {}, el("span", {}, "API key"), el("input", { name: "key", type: "password", autocomplete: "off", placeholder: api.hasKey() ? "known; type to replace" : "none" })))),
    note, el("footer", {}, active ? el("button", { value: "remove" }, "Delete preset") : null, el("span", { class: "grow" }), el("button", { value: "" }, "Cancel"), el("button", { value: "save", class: "primary" }, "Save")));
  const form = $("dialog").querySelector("form");
  form.addEventListener("submit", (event) => {
    if (event.submitter?.value !== "save") return;
    try { const parsed = JSON.parse(form.elements.json.value || "{}"); if (typeof parsed !== "object" || Array.isArray(parsed)) throw new Error(); }
    catch { event.preventDefault(); note.textContent = "More, as JSON: this is no JSON object."; }
  });
  const result = await choice;
  if (result === "remove") { state.presets = state.presets.filter((each) => each !== active); state.preset = ""; }
  if (result === "save") {
    const found = Object.fromEntries([...form.elements].filter((each) => each.name && each.value !== "").map((each) => [each.name, each.value]));
    const { name: called, system: said = "", theme, stats, key, ...rest } = found;
    if (key) api.setKey(key);
    state.theme = theme;
    state.stats = stats !== "no";
    if (called) {
      state.presets = [...state.presets.filter((each) => each !== active && each.name !== called), { name: called, system: said, values: rest }];
      state.preset = called;
    } else state.values = { ...rest, system: said };
  }
  ["theme", "stats", "presets", "preset", "values"].forEach(write);
  applyTheme();
  drawPresets();
}

export async function askForKey() {
  const field = el("input", { name: "key", type: "password", autocomplete: "off", "aria-label": "API key", autofocus: true });
  const result = await ask("This server wants an API key", el("div", { class: "settings" }, field), el("footer", {}, el("span", { class: "grow" }), el("button", { value: "save", class: "primary" }, "Use it")));
  if (result !== "save" || !field.value) return false;
  api.setKey(field.value);
  return true;
}
