// The parts of a request besides its messages: presets of system prompt and sampling, the theme, the key.

import { $, ask, el } from "./dom.js";
import * as api from "./api.js";

function kept(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const state = {};
const NAMES = { theme: "system", stats: true, titles: true, presets: [], preset: "", values: {} };
for (const [name, otherwise] of Object.entries(NAMES)) state[name] = kept(name, otherwise);
const write = () => Object.keys(NAMES).forEach((name) => localStorage.setItem(name, JSON.stringify(state[name])));

// name, label, least, most, step, what it does
const FIELDS = [
  ["temperature", "Temperature", 0, 2, 0.05, "0: always the likeliest token; higher: more variety"],
  ["top_p", "Top p", 0, 1, 0.01, "only the likeliest tokens that together have this probability; 1: all"],
  ["top_k", "Top k", 0, 1000, 1, "only this many of the likeliest tokens; 0: all"],
  ["min_p", "Min p", 0, 1, 0.01, "only tokens at least this likely, compared with the likeliest; 0: all"],
  ["repeat_penalty", "Repeat penalty", 0.5, 2, 0.05, "above 1: repeated tokens become less likely"],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "above 0: tokens that occurred become less likely"],
  ["max_tokens", "Token limit", -1, 1e6, 1, "length of a reply; -1: until the context is full"],
  ["seed", "Seed", -1, 4294967295, 1, "the same number gives the same reply; -1: random"],
];
let defaults = {};

// The server's defaults, from GET /props.
export function setDefaults(props) {
  const params = props.default_generation_settings?.params ?? {};
  defaults = { ...params, max_tokens: params.n_predict, seed: "random" };
}

const preset = (wanted = state.preset) => state.presets.find(({ name }) => name === wanted);
export const presetName = () => state.preset;
export const systemPrompt = () => (preset() ?? state.values).system ?? "";

export const givesTitles = () => state.titles;

export function requestOf(name = state.preset) {
  const values = preset(name)?.values ?? state.values, body = {};
  for (const [name] of FIELDS) if (values[name]) body[name] = +values[name];
  if (values.thinking) body.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
  if (values.reasoning_budget) body.reasoning_budget_tokens = +values.reasoning_budget;
  return values.json ? { ...body, ...JSON.parse(values.json) } : body;
}

export function applyTheme() {
  if (state.theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = state.theme;
  document.documentElement.classList.toggle("no-stats", !state.stats);
}

const systemTheme = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

// The other look; if that is the system's, the page follows the system again.
export function toggleTheme() {
  const now = state.theme === "system" ? systemTheme() : state.theme;
  const wanted = now === "dark" ? "light" : "dark";
  state.theme = wanted === systemTheme() ? "system" : wanted;
  write();
  applyTheme();
}

// A conversation keeps its preset; a new one has the last one's.
export function usePreset(name = state.preset) {
  state.preset = name;
  drawPresets();
}

export function drawPresets() {
  const select = $("preset");
  const options = state.presets.map(({ name }) => el("option", { value: name }, name));
  select.replaceChildren(el("option", { value: "" }, options.length ? "No preset" : "Default settings"), ...options);
  select.value = state.preset = preset()?.name ?? "";
  select.onchange = () => {
    state.preset = select.value;
    write();
  };
}

// A field with its name, and below it what it does.
function labelled(text, field, hint) {
  const label = el("label", {}, el("span", {}, text), field);
  if (!hint) return label;
  const id = "hint-" + field.name;
  field.setAttribute("aria-describedby", id);
  return el("div", {}, label, el("small", { id, class: "dim" }, hint));
}

function choice(name, text, options, value) {
  const made = options.map(([key, label]) => el("option", { value: key, selected: key === value }, label));
  return labelled(text, el("select", { name }, made));
}

function area(name, text, value, rows, placeholder, autofocus) {
  const field = el("textarea", { name, rows, spellcheck: "false", placeholder, autofocus });
  field.value = value ?? "";
  return labelled(text, field);
}

function isObject(text) {
  try {
    const value = JSON.parse(text || "{}");
    return typeof value === "object" && value !== null && !Array.isArray(value);
  } catch {
    return false;
  }
}

function form(active) {
  const values = active?.values ?? state.values;
  const number = (name, props) => el("input", { name, type: "number", value: values[name], ...props });
  const usual = (name) => (Number.isFinite(defaults[name]) ? +defaults[name].toFixed(3) : defaults[name]);
  const rows = FIELDS.map(([name, label, min, max, step, hint]) =>
    labelled(label, number(name, { min, max, step, placeholder: usual(name) }), hint));
  const thinking = [["", "model's default"], ["on", "on"], ["off", "off"]];
  const placeholder = api.hasKey() ? "known" : "none";
  const key = el("input", { name: "key", type: "password", autocomplete: "off", placeholder });
  const themes = [["system", "as the system"], ["light", "light"], ["dark", "dark"]];
  return el("div", { class: "settings" },
    el("h3", {}, "Page"),
    el("div", { class: "grid" }, choice("theme", "Appearance", themes, state.theme),
      choice("stats", "Statistics of replies", [["yes", "show"], ["no", "hide"]], state.stats ? "yes" : "no"),
      choice("titles", "Titles of conversations", [["yes", "by the model"], ["no", "their first words"]],
        state.titles ? "yes" : "no"),
      labelled("API key", key),
      api.hasKey() ? el("button", { type: "button", class: "low", onclick: forget }, "Remove the key") : null),
    el("h3", {}, "Replies"),
    area("system", "System prompt of new chats", (active ?? values).system, 4, "", matchMedia("(hover:hover)").matches),
    el("div", { class: "grid" }, rows,
      choice("thinking", "Reasoning", thinking, values.thinking ?? ""),
      labelled("Limit of reasoning tokens", number("reasoning_budget", { min: 0, placeholder: "no limit" }),
        "after so many the reply starts")),
    area("json", "Other request fields, as JSON", values.json, 2, '{"tools": [...]}'),
    labelled("Save as preset", el("input", { name: "name", value: active?.name ?? "", placeholder: "Name" })));
}

function forget(event) {
  api.setKey("");
  event.target.disabled = true;
}

export async function openSettings() {
  const active = preset(), body = form(active);
  const json = body.querySelector("[name=json]"), note = el("p", { class: "error", role: "alert" });
  const closing = ask(active ? "Settings · " + active.name : "Settings", body,
    ["Save", "save", "primary"], ["Cancel", ""], ...(active ? [["Delete preset", "remove"]] : []));
  body.after(note); // next to the buttons, which stay in sight
  body.closest("form").addEventListener("submit", (event) => {
    if (event.submitter?.value !== "save" || isObject(json.value)) return;
    event.preventDefault();
    note.textContent = "Not a JSON object.";
    json.focus();
  });
  const fields = body.closest("form").elements, answer = await closing;
  if (answer === "remove") {
    state.presets = state.presets.filter((each) => each !== active);
    state.preset = "";
  } else if (answer === "save") {
    const given = [...fields].filter((each) => each.name && each.value !== "");
    const found = Object.fromEntries(given.map((each) => [each.name, each.value]));
    const { name, system = "", theme, stats, titles, key, ...values } = found;
    if (key) api.setKey(key);
    state.theme = theme;
    state.stats = stats === "yes";
    state.titles = titles === "yes";
    if (name) {
      const others = state.presets.filter((each) => each !== active && each.name !== name);
      state.presets = [...others, { name, system, values }];
      state.preset = name;
    } else state.values = { ...values, system };
  }
  write();
  applyTheme();
  drawPresets();
}

// Whether there is one now; `refused` if there was one and it did not do.
export async function askForKey(refused) {
  const field = el("input", { name: "key", type: "password", autocomplete: "off", autofocus: true, required: true });
  const text = refused ? "The server rejected this key." : "The server runs with --api-key.";
  const body = el("div", { class: "settings" }, el("p", { class: "dim" }, text), labelled("API key", field));
  const answer = await ask("This server requires an API key", body, ["Use it", "save", "primary"], ["Cancel", ""]);
  if (answer !== "save") return false;
  api.setKey(field.value.trim());
  return true;
}
