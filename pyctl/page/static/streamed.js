// A reply as it comes: finished blocks are rendered once, the last one again and again.

import { el, put } from "./dom.js";
import * as api from "./api.js";
import { FAILED_MS, drawCalls, drawStats, drawThought } from "./message.js";

const MIN_MS = 150, LATE_MS = 1000;
const SHARE = 10; // the server renders for this page a tenth of the time at most

export class Streamed {
  constructor(message) {
    this.message = message;
    this.rest = el("span", { class: "plain" }); // text not rendered yet, if that takes long
    this.begin(0);
  }

  // The last block starts at a place of the text, which is rendered up to `shown`.
  begin(at) {
    this.tail = el("div", { class: "tail", "data-end": "" });
    this.done = this.shown = this.asked = at;
    this.since = performance.now();
  }

  draw(made, run) {
    const { message } = this, body = made.box("body");
    made.filled = null;
    drawThought(made.box("think"), message);
    drawCalls(made.box("calls"), message);
    drawStats(made.box("stats"), message, run);
    if (this.tail.parentNode !== body) {
      this.begin(0);
      this.tail.append(...body.childNodes); // of a reply that goes on
      put(body, this.tail);
    }
    const end = finished(message.content, this.done);
    if (end > this.done) this.finish(message.content.slice(this.done, end), end);
    this.drawRest();
    this.render();
  }

  finish(text, end) {
    const block = this.tail, asIs = () => put(block, el("div", { class: "plain" }, text.trim()));
    block.className = "block";
    if (!block.firstChild) asIs();
    this.begin(end);
    block.after(this.tail);
    api.render(text).then((html) => renew(block, html), asIs);
  }

  async render() {
    if (this.isAsking) return;
    this.isAsking = true;
    let wait = 0, before = 0;
    while (wait !== FAILED_MS && this.asked < this.message.content.length && this.tail.isConnected) {
      const { tail, done, message } = this, began = performance.now();
      const [text, marks] = closed(message.content.slice(done));
      this.asked = message.content.length;
      setTimeout(() => this.drawRest(), LATE_MS);
      try {
        const html = await api.render(text + marks);
        const took = performance.now() - began;
        wait = Math.max(MIN_MS, SHARE * Math.min(took, before)); // the first may start the process that renders
        before = took;
        if (tail === this.tail) {
          this.rest.remove();
          renew(tail, html);
          this.shown = done + text.length;
          this.since = performance.now();
        }
      } catch {
        this.showAll();
        wait = FAILED_MS;
      }
      this.drawRest();
      await new Promise((go) => setTimeout(go, wait));
    }
    this.isAsking = false;
  }

  // No renderer answers: the rest shows as it is.
  showAll() {
    this.since = -LATE_MS;
    this.drawRest();
  }

  drawRest() {
    const text = this.message.content.slice(this.shown), end = this.tail.querySelector("[data-end]") ?? this.tail;
    this.rest.textContent = this.shown > this.done ? text : text.trimStart();
    if (performance.now() - this.since >= LATE_MS) end.append(this.rest);
    else this.rest.remove();
  }
}

// A text that ends anywhere, without a mark that is half written, and the mark that closes what stands in marks.
function closed(text) {
  if (text.match(/^ *(\x60{3}|~~~)/gm)?.length % 2) return [text.trimEnd(), ""];
  const cut = text.slice(0, -40) + text.slice(-40).replace(/\n[-=#+>|\d. ]*$|[*_\x60 ]+$/, "");
  const line = cut.slice(cut.lastIndexOf("\n") + 1);
  return [cut, ["\x60", "**"].find((mark) => line.split(mark).length % 2 === 0) ?? ""];
}

const BLOCKS = "p,ul,ol,li,blockquote,.code,pre,pre>code,.table,.table :not(td *,th *),h1,h2,h3,h4";

// Make the children of `old` match `made`: equal ones stay, selected and scrolled.
function alike(old, made) {
  const kids = [...made.childNodes];
  kids.forEach((kid, i) => {
    const known = old.childNodes[i];
    if (!known) old.append(kid);
    else if (known.isEqualNode(kid)) return;
    else if (known.cloneNode().isEqualNode(kid.cloneNode())) alike(known, kid);
    else known.replaceWith(kid);
  });
  while (old.childNodes.length > kids.length) old.lastChild.remove();
}

function renew(old, html) {
  const made = el("div");
  made.innerHTML = html.replaceAll("\n</code></pre>", "</code></pre>");
  (old.querySelector("[data-end]") ?? old).removeAttribute("data-end");
  alike(old, made);
  let end = old;
  while (end.lastElementChild?.matches(BLOCKS)) end = end.lastElementChild;
  end.dataset.end = ""; // where the text goes on
}

// Where the last finished block of a text ends: before a line that starts a new one, and in no fence and no formula.
export function finished(text, from) {
  let fence = "", end = from, at = from;
  for (let stop; (stop = text.indexOf("\n", at)) >= 0; at = stop + 1) {
    const line = text.slice(at, stop).trim(), next = text[stop + 1];
    const [mark] = /^(\x60{3,}|~{3,}|\$\$$|\\\[$|\\\]$)/.exec(line) ?? [""];
    if (fence) {
      if (mark === fence || (mark[0] === fence[0] && mark.length > fence.length && mark[0] !== "\\")) {
        fence = "";
        end = stop + 1;
      }
    } else if (mark) fence = mark === "\\[" ? "\\]" : mark;
    else if (!line && next !== undefined && !/[\s\d*+>|-]/.test(next)) end = stop + 1;
  }
  return end;
}
