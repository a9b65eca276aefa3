// The page: conversations at the left, the open one in the middle, the cache at the right.

import { $, ask, copy, count, el, fit, put, size, sure, tell, time } from "./dom.js";
import * as api from "./api.js";
import * as cache from "./cache.js";
import * as chat from "./chat.js";
import * as files from "./files.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";
import * as tools from "./tools.js";

let conversations = [];
let nContext = 0;
let about = {}; // the body of GET /props, empty while a model of several was never loaded
let offered = []; // several models, as GET /v1/models lists them

const isSmall = () => matchMedia("(max-width: 900px)").matches;
const body = document.body.classList;

// -- conversations ---------------------------------------------------------------------------------------------------

function drawList() {
  conversations.sort((a, b) => b.updated - a.updated);
  sidebar.draw(conversations);
}

// Stored as it is: pinning does not change the conversation, which keeps its day.
async function pin(conversation) {
  conversation.pinned = !conversation.pinned;
  drawList();
  sidebar.focusPin(conversation);
  if (conversation.leaf !== null) await store.save(conversation);
}

function open(conversation) {
  settings.usePreset(conversation.preset);
  chat.open(conversation);
  if (conversation.model !== api.modelName() && named(conversation.model)) use(conversation.model);
  sessionStorage.setItem("open", conversation.id);
  body.remove("show-side");
  drawList();
}

// Open a conversation at the search's match, in the open branch if that has one.
function openFound(conversation) {
  const all = [...store.path(conversation), ...Object.values(conversation.messages)];
  const found = sidebar.isFound(store.titleOf(conversation)) ? null : all.find(sidebar.isFoundIn);
  if (found) store.show(conversation, found.id);
  open(conversation);
  if (found) chat.goTo(found);
}

function start() {
  let made = conversations.find((each) => each.leaf === null);
  if (!made) conversations.push((made = store.create()));
  made.system = null;
  open(made);
  $("text").focus();
}

async function change(conversation) {
  const title = el("input", { name: "title", autofocus: true, value: store.titleOf(conversation) });
  const system = el("textarea", { name: "system", rows: 5, spellcheck: "false" });
  system.value = conversation.system ?? settings.systemPrompt();
  const fields = el("div", { class: "settings" }, el("label", {}, el("span", {}, "Title"), title),
    el("label", {}, el("span", {}, "System prompt (the next reply evaluates everything after it again)"), system));
  const exports = [["Export as Markdown", "md"], ["Export as JSON", "json"]];
  const buttons = [["Save", "save", "primary"], ["Cancel", ""], ...exports];
  const answer = await ask("Conversation", fields, ...buttons);
  const name = store.titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";
  if (answer === "md") return download(store.markdown(conversation), "text/markdown", name + ".md");
  if (answer === "json") return download(store.dump([conversation]), "application/json", name + ".json");
  if (answer !== "save") return;
  conversation.title = title.value.trim();
  if (conversation.leaf !== null || system.value !== settings.systemPrompt()) conversation.system = system.value;
  if (conversation.leaf !== null) await store.save(conversation);
  drawList();
  chat.draw();
}

async function erase(conversation) {
  const text = `“${store.titleOf(conversation)}” is deleted with all its branches. ` +
    "The server's cache keeps its prefixes until it needs the room.";
  if (conversation.leaf !== null && !(await sure("Delete this conversation?", text, "Delete"))) return;
  conversation.gone = true;
  // First: another tab, whose reply `forget` ends, finds it deleted.
  await store.drop(conversation.id);
  forget(conversation);
}

function forget(conversation) {
  conversation.gone = true;
  chat.stop(conversation);
  conversations = conversations.filter((each) => each !== conversation);
  if (chat.current() !== conversation) return drawList();
  if (conversations.length) open(conversations[0]);
  else start();
}

// Another tab has written or deleted a conversation.
async function reread(id) {
  const fresh = await store.read(id), known = conversations.find((each) => each.id === id);
  if (!fresh) return known && known.leaf !== null && forget(known);
  if (known) chat.takeOver(known, fresh);
  else conversations.push(fresh);
  chat.resume([known ?? fresh], true);
  if (known === chat.current()) chat.draw();
  drawList();
}

function download(text, type, name) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function choose(accept, multiple, run) {
  const onchange = () => (run([...field.files]), field.remove());
  const field = el("input", { type: "file", accept, multiple, hidden: true, onchange });
  document.body.append(field);
  field.click();
}

async function load(file) {
  let made;
  try {
    made = store.parse(await file.text(), new Set(conversations.map((each) => each.id)));
    for (const each of made) await store.save(each);
  } catch (error) {
    return tell(`Import failed: ${error.message}`);
  }
  conversations.push(...made);
  if (made.length) open(made[0]);
  tell(made.length === 1 ? "1 conversation imported" : `${count(made.length)} conversations imported`);
}

// -- typed messages ---------------------------------------------------------------------------------------------------

// Whether keys are real: there is a mouse, or no keyboard takes its part of the screen.
const hasKeys = () => !matchMedia("(pointer: coarse)").matches || visualViewport.height > 0.65 * screen.height;

function composer() {
  const field = $("text");
  field.addEventListener("input", () => fit(field));
  field.addEventListener("keydown", (event) => {
    const isEnter = event.key === "Enter" && !event.shiftKey && !event.isComposing;
    if (isEnter && (event.ctrlKey || event.metaKey || hasKeys())) {
      event.preventDefault();
      if (!chat.runOf(chat.current())) $("ask").requestSubmit();
    } else if (event.key === "ArrowUp" && !field.value) {
      event.preventDefault();
      chat.editLast();
    }
  });
  field.addEventListener("paste", files.paste);
  $("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    const own = chat.current();
    if (chat.runOf(own)) return chat.stop();
    if (!(await files.ready()) || chat.current() !== own || chat.runOf(own)) return;
    const given = files.take();
    if (chat.send(field.value, given)) field.value = "";
    fit(field);
  });
  $("attach").addEventListener("click", () => choose(files.accepted(), true, files.attach));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    files.attach([...event.dataTransfer.files]);
  });
}

const KEYS = {
  j: start,
  k: () => {
    body.add("show-side");
    $("search").focus();
  },
  ",": settings.openSettings,
  ".": () => toggle("cache"),
};

const KEY_HELP = [["Ctrl J", "New chat"], ["Ctrl K", "Search conversations"], ["Ctrl .", "Show or hide the cache"],
  ["Ctrl ,", "Settings"], ["Enter", "Send"], ["Shift Enter", "New line"], ["↑", "Edit the last message"],
  ["Ctrl Enter", "Send an edited message"], ["Esc", "Stop the reply, or close"], ["?", "This list"]];

const pairs = (given) =>
  el("dl", { class: "pairs" }, given.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));

const showKeys = () => ask("Keys", pairs(KEY_HELP.map(([key, text]) => [el("kbd", {}, key), text])));

function keys() {
  addEventListener("keydown", (event) => {
    if ($("dialog").open) return;
    const { target } = event, isField = target.matches?.("input, select, textarea");
    if (event.key === "?" && !(isField && (target.id !== "text" || target.value))) {
      event.preventDefault();
      return showKeys();
    }
    if ((event.ctrlKey || event.metaKey) && !event.altKey && KEYS[event.key]) {
      event.preventDefault();
      KEYS[event.key]();
    } else if (event.key === "Escape") {
      const shown = body.contains("show-side") || body.contains("show-cache");
      if (isSmall() && shown) body.remove("show-side", "show-cache");
      else chat.stop();
    }
  });
}

function toggle(name) {
  const open = isSmall() || name === "side" ? body.toggle("show-" + name) : !body.toggle("hide-" + name);
  if (name === "cache") localStorage.setItem("hide-cache", body.contains("hide-cache") ? "1" : "");
  if (open && name === "cache") cache.refresh();
}

function buttons() {
  const on = (id, run, kind = "click") => $(id).addEventListener(kind, run);
  on("new", start);
  on("search", drawList, "input");
  on("export", () => {
    const text = store.dump(conversations.filter((each) => each.leaf !== null));
    download(text, "application/json", `conversations-${new Date().toISOString().slice(0, 10)}.json`);
  });
  on("model", describe);
  on("import", () => choose(".json,application/json", false, ([file]) => load(file)));
  on("settings-open", async () => {
    await settings.openSettings();
    chat.draw();
  });
  on("look", settings.toggleTheme);
  on("preset", chat.draw, "change");
  on("tools", tools.open);
  on("models", ({ target }) => use(target.value), "change");
  on("side-toggle", () => toggle("side"));
  on("cache-toggle", () => toggle("cache"));
  on("shade", () => body.remove("show-side", "show-cache"));
  document.addEventListener("click", ({ target }) => {
    if (target.matches?.("button.copy")) copy(target.closest(".code").querySelector("code").textContent, target);
  });
}

// -- the server ------------------------------------------------------------------------------------------------------

const WAITS = { 0: "No answer from the server; retrying.", 503: "Loading the model." };
let connecting = null;

function notice(text, ...more) {
  $("notice").hidden = !text;
  put($("notice"), text, more);
}

const named = (name) => offered.find(({ id }) => id === name);
const wasLoaded = ({ status, load_seconds: seconds }) => status.value === "loaded" || seconds > 0;

// Requests name this model from now on; one that was never loaded is loaded by its first message.
async function use(name) {
  api.setModel(name);
  localStorage.setItem("model", name);
  await connecting;
  await connect(true);
  cache.reset();
}

// The model that requests name, where the server has several; whether it can be asked without loading it.
async function chooseModel(quiet) {
  const { data = [] } = await api.get("v1/models", { quiet });
  offered = data.filter(({ status }) => status);
  const wanted = [api.modelName(), chat.current()?.model, localStorage.getItem("model")].find(named);
  const found = named(wanted) ?? offered.find(({ status }) => status.value === "loaded") ?? offered[0];
  api.setModel(found?.id ?? "");
  $("models").hidden = !found;
  const label = (each) => each.id + (each.status.value === "loaded" ? "" :
    each.load_seconds ? ` (loads in ${time(each.load_seconds * 1000)})` : " (not loaded)");
  put($("models"), offered.map((each) => el("option", { value: each.id }, label(each))));
  if (found) $("models").value = found.id;
  return !found || wasLoaded(found);
}

// Retry until it answers; its properties may have changed.
async function meet(quiet) {
  for (;;) {
    try {
      const isLoaded = await chooseModel(quiet), known = await api.get("props", { quiet, bare: !isLoaded });
      const props = isLoaded ? known : { model_alias: api.modelName(), tools: known.tools };
      about = props;
      await tools.learn(props);
      settings.setDefaults(props);
      files.allowImages(props.modalities?.vision === true);
      $("model").textContent = props.model_alias || props.model_path?.split("/").at(-1) || "";
      $("model-name").textContent = $("model").textContent;
      $("model").setAttribute("aria-label", `About the model ${$("model").textContent}`);
      nContext = props.default_generation_settings?.n_ctx ?? 0;
      notice("");
      chat.draw(); // with what could not be rendered
      return;
    } catch (error) {
      document.body.dataset.ready = "1";
      if (error.status === 401) {
        const enter = el("button", { type: "button", onclick: () => connect(false) }, "Enter the key");
        return notice("This server requires an API key. ", enter);
      }
      notice(WAITS[error.status] ?? error.message);
      await new Promise((go) => setTimeout(go, 1000));
    }
  }
}

function connect(quiet) {
  connecting ??= meet(quiet).then(() => {
    connecting = null;
    document.body.dataset.ready = "1";
    if ($("notice").hidden && about.model_path) cache.start({
      ready: () => Boolean(about.model_path),
      lost: () => connect(true), messages: chat.asked, names: () => store.namesOf(conversations),
      waits: () => store.waits(conversations, new Date().setHours(0, 0, 0, 0)),
    });
  });
  return connecting;
}

// The server's description of its model.
async function describe() {
  const listed = await api.get("v1/models", { quiet: true }).catch(() => ({}));
  const { meta = {}, id } = listed.data?.find(({ id }) => id === api.modelName()) ?? listed.data?.[0] ?? {};
  const file = about.model_path?.split("/").at(-1);
  const { cache_type_k: k, cache_type_v: v, n_layers: layers, n_gpu_layers: onGpu } = about;
  const rules = onGpu ? about.n_placement_rules : 0, named = rules === 1 ? "1 rule" : `${rules} rules`;
  const placed = rules ? `, but for tensors by ${named} of -ot` : "";
  const drafts = about.default_generation_settings?.params?.["speculative.types"];
  const facts = [
    ["Name", about.model_alias || id], ["File", file],
    ["Parameters", meta.n_params && `${(meta.n_params / 1e9).toPrecision(3)} billion, ${size(meta.size)}`],
    ["Quantization", about.model_ftype || meta.ftype],
    ["Context", nContext && `${count(nContext)} tokens`],
    ["Trained for", meta.n_ctx_train && `${count(meta.n_ctx_train)} tokens`],
    ["K and V types", k && (k === v ? k : `K ${k}, V ${v}`)],
    ["Layers on the GPU", layers && `${onGpu} of ${layers}${placed}`],
    ["Drafts", drafts && drafts.replaceAll(",", ", ")],
    ["Memory", about.model_memory],
    ["Requests at a time", about.total_slots],
    ["Images", about.modalities?.vision ? "yes" : "no"], ["Build", about.build_info],
  ];
  await ask("Model", pairs(facts.filter(([, value]) => value)));
}

function drawContext() {
  const stats = store.path(chat.current()).findLast((each) => each.stats)?.stats;
  const n = stats ? stats.cache_n + stats.prompt_n + stats.predicted_n : 0;
  const share = nContext ? n / nContext : 0, box = $("context"), more = share > 0.9 ? ": nearly full" : "";
  box.textContent = share ? `${count(n)} of ${count(nContext)} tokens${more}` : "";
  box.classList.toggle("full", share > 0.9);
}

async function main() {
  settings.applyTheme();
  settings.drawPresets();
  sidebar.connect({
    find: (id) => conversations.find((each) => each.id === id), open: openFound, change, pin, erase,
    isOpen: (each) => each === chat.current(), isBusy: (each) => chat.runOf(each) !== null,
  });
  body.toggle("hide-cache", localStorage.getItem("hide-cache") === "1");
  api.onKey(settings.askForKey);
  chat.connect({
    changed: drawList,
    lost: ({ id }) => reread(id),
    again: () => connect(true),
    replied: async (found) => {
      if (offered.length) await connect(true); // another model may have been unloaded for it
      if (about.model_path) await cache.replied(found);
    },
    drawn: (path) => {
      const ids = path.flatMap(({ stats }) => [stats?.cache?.restored, ...(stats?.cache?.saved ?? [])]);
      cache.markPath(ids.filter(Boolean));
      drawContext();
    },
  });
  composer();
  keys();
  buttons();
  await store.open();
  conversations = await store.all();
  store.onOthers(reread);
  const last = conversations.find((each) => each.id === sessionStorage.getItem("open"));
  if (last) open(last);
  else start();
  connect(false).then(() => chat.resume(conversations));
}

main();
