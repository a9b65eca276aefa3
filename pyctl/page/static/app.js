// The page: conversations at the left, the open one in the middle, the cache at the right.

import { $, ask, count, el, keyed, say } from "./dom.js";
import * as api from "./api.js";
import * as cache from "./cache.js";
import * as chat from "./chat.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

let conversations = [], files = [];

const byTime = () => conversations.sort((a, b) => b.updated - a.updated);

function drawList() {
  const wanted = $("search").value.trim().toLowerCase();
  const fits = (each) => !wanted || store.titleOf(each).toLowerCase().includes(wanted) || Object.values(each.messages).some((message) => message.content.toLowerCase().includes(wanted));
  keyed($("list"), byTime().filter(fits), (each) => each.id, item, (made, each) => {
    made.querySelector(".name").textContent = store.titleOf(each);
    const isOpen = each === chat.current();
    made.classList.toggle("current", isOpen);
    if (isOpen) made.querySelector(".name").setAttribute("aria-current", "true");
    else made.querySelector(".name").removeAttribute("aria-current");
  });
}

function item(each) {
  const find = () => conversations.find((one) => one.id === each.id);
  return el("li", {}, el("button", { class: "name", type: "button", onclick: () => open(find()), ondblclick: () => rename(find()) }),
    el("button", { class: "icon", type: "button", "aria-label": "Rename", onclick: () => rename(find()) }, "✎"),
    el("button", { class: "icon", type: "button", "aria-label": "Delete conversation", onclick: () => erase(find()) }, "✕"));
}

function open(conversation) {
  chat.open(conversation);
  sessionStorage.setItem("open", conversation.id);
  document.body.classList.remove("show-side");
  drawList();
}

function start() {
  const empty = conversations.find((each) => each.leaf === null);
  const made = empty ?? store.create();
  made.system = settings.systemPrompt();
  if (!empty) conversations.push(made);
  open(made);
  $("text").focus();
}

async function rename(conversation) {
  const field = el("input", { "aria-label": "Title", autofocus: true });
  field.value = store.titleOf(conversation);
  const answer = await ask("Rename", el("div", { class: "settings" }, field), el("footer", {}, el("span", { class: "grow" }), el("button", { value: "" }, "Cancel"), el("button", { value: "save", class: "primary" }, "Rename")));
  if (answer !== "save" || !field.value.trim()) return;
  conversation.title = field.value.trim();
  await store.save(conversation);
  drawList();
  chat.draw();
}

async function erase(conversation) {
  const answer = await ask("Delete this conversation?", el("p", {}, `“${store.titleOf(conversation)}”, with all its branches. What the server remembers of it stays until it needs the room.`), el("footer", {}, el("span", { class: "grow" }), el("button", { value: "" }, "Cancel"), el("button", { value: "yes", class: "primary" }, "Delete")));
  if (answer !== "yes") return;
  await store.drop(conversation.id);
  conversations = conversations.filter((each) => each !== conversation);
  if (chat.current() === conversation) {
    if (conversations.length) open(byTime()[0]);
    else start();
  }
  drawList();
}

function save(text, name) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function choose(accept, multiple, run) {
  const field = el("input", { type: "file", accept, multiple });
  field.addEventListener("change", () => run([...field.files]));
  field.click();
}

export async function importText(text) {
  let made;
  try { made = store.parse(text, new Set(conversations.map((each) => each.id))); }
  catch (error) { return say(`Nothing was imported: ${error.message}`); }
  for (const each of made) await store.save(each);
  conversations.push(...made);
  if (made.length) open(made[0]);
  drawList();
  say(`${count(made.length)} conversations imported`);
}

const MOST_FILE_BYTES = 2 ** 20;
async function attach(given) {
  for (const file of given) {
    if (file.size > MOST_FILE_BYTES) { say(`${file.name} is larger than 1 MiB`); continue; }
    const text = await file.text();
    if (text.includes("\0")) { say(`${file.name} is no text`); continue; }
    files.push({ name: file.name, text });
  }
  drawFiles();
}

function drawFiles() {
  $("files").replaceChildren(...files.map((file) => el("span", { class: "chip" }, file.name, el("button", { class: "icon", type: "button", "aria-label": "Remove " + file.name, onclick: () => { files = files.filter((each) => each !== file); drawFiles(); } }, "✕"))));
}

function composer() {
  const field = $("text");
  const fit = () => { field.style.height = "auto"; field.style.height = Math.min(field.scrollHeight, innerHeight * 0.4) + "px"; };
  field.addEventListener("input", fit);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(hover: hover)").matches) { event.preventDefault(); $("ask").requestSubmit(); }
    if (event.key === "ArrowUp" && !field.value) { event.preventDefault(); chat.editLast(); }
  });
  field.addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach([...event.clipboardData.files]); } });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.isRunning()) return chat.stop();
    chat.send(field.value, files);
    field.value = "";
    files = [];
    drawFiles();
    fit();
  });
  $("attach").addEventListener("click", () => choose("text/*,.md,.py,.js,.ts,.json,.yaml,.toml,.c,.h,.cpp,.rs,.go,.java,.sh,.csv,.log", true, attach));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => { event.preventDefault(); attach([...event.dataTransfer.files]); });
}

function keys() {
  addEventListener("keydown", (event) => {
    const command = event.ctrlKey || event.metaKey;
    if (command && event.key === "j") { event.preventDefault(); start(); }
    else if (command && event.key === "k") { event.preventDefault(); document.body.classList.add("show-side"); $("search").focus(); }
    else if (command && event.key === ",") { event.preventDefault(); settings.openSettings(); }
    else if (command && event.key === ".") { event.preventDefault(); document.body.classList.toggle("hide-cache"); }
    else if (event.key === "Escape" && !$("dialog").open) {
      if (chat.isRunning()) chat.stop();
      document.body.classList.remove("show-side", "show-cache");
    }
  });
}

function buttons() {
  $("new").addEventListener("click", start);
  $("search").addEventListener("input", drawList);
  $("export").addEventListener("click", () => save(store.dump(conversations.filter((each) => each.leaf !== null)), "conversations.json"));
  $("import").addEventListener("click", () => choose(".json,application/json", false, async ([file]) => importText(await file.text())));
  $("settings-open").addEventListener("click", settings.openSettings);
  const toggle = (name) => () => matchMedia("(max-width: 900px)").matches || name === "show-side" ? document.body.classList.toggle(name) : document.body.classList.toggle("hide-cache");
  $("side-toggle").addEventListener("click", toggle("show-side"));
  $("cache-toggle").addEventListener("click", toggle("show-cache"));
  $("shade").addEventListener("click", () => document.body.classList.remove("show-side", "show-cache"));
  document.addEventListener("click", (event) => {
    if (!event.target.matches?.("button.copy")) return;
    chat.copy(event.target.closest(".code").querySelector("code").textContent);
    event.target.textContent = "Copied";
    setTimeout(() => (event.target.textContent = "Copy"), 1200);
  });
}

async function props() {
  try {
    const body = await api.get("props");
    settings.setDefaults(body);
    $("model").textContent = body.model_alias || body.model_path?.split("/").at(-1) || "";
    $("model").title = body.model_path ?? "";
    $("context").dataset.size = body.default_generation_settings?.n_ctx ?? 0;
  } catch (error) { say(error.message); }
}

function drawContext() {
  const stats = store.path(chat.current()).findLast((each) => each.stats)?.stats, all = +$("context").dataset.size;
  const n = stats ? stats.cache_n + stats.prompt_n + stats.predicted_n : 0;
  $("context").textContent = n && all ? `${count(n)} of ${count(all)} tokens` : "";
}

async function main() {
  settings.applyTheme();
  settings.drawPresets();
  api.onKey(settings.askForKey);
  chat.connect({
    changed: () => { drawList(); drawContext(); },
    path: (ids) => { cache.markPath(ids); drawContext(); },
    replied: (used) => cache.replied(used, store.path(chat.current()).at(-1)?.stats),
  });
  composer();
  keys();
  buttons();
  chat.watchScroll();
  await store.open();
  conversations = await store.all();
  const last = conversations.find((each) => each.id === sessionStorage.getItem("open"));
  if (last) open(last);
  else start();
  await props();
  cache.start(() => cache.warm(chat.messagesOf(store.path(chat.current()), chat.current().system)));
  drawContext();
  document.body.dataset.ready = "1";
}

main();
