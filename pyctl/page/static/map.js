// The tree as a map: from left to right the tokens, a line for each branch, a stop for each prefix that can be resumed.

import { count, keyed, short, size, svg } from "./dom.js";

const PAD = 9, MAX_HEIGHT = 230, MAX_ROW = 24, BEND = 20;

// Rows from above: the newest branch goes straight on, the others leave below.
function place(item, row) {
  item.row = row;
  let last = row;
  item.children.forEach((child, i) => (last = place(child, i ? last + 1 : row)));
  return last;
}

// Where a token lies: as far apart as the square root, so that turns stay visible after a long head.
function scale(counts, width) {
  const ns = [...new Set([0, ...counts])].sort((a, b) => a - b), at = new Map([[0, 0]]);
  const gaps = ns.slice(1).map((n, i) => Math.sqrt(n - ns[i]));
  const least = gaps.reduce((a, b) => a + b, 0) / Math.max(gaps.length, 1) / 2;
  let sum = 0;
  gaps.forEach((gap, i) => at.set(ns[i + 1], (sum += gap + least)));
  return (n) => PAD + ((at.get(n) ?? 0) / (sum || 1)) * (width - 2 * PAD);
}

export class TreeMap {
  constructor(pick) {
    this.pick = pick;
    this.groups = ["edges", "trains", "stops", "comets"].map((name) => svg("g", { class: name }));
    this.drawing = svg("svg", { role: "img" }, ...this.groups);
    this.element = this.drawing;
    this.routes = new Map();
  }

  // `roots` as `treeOf` makes them; `sequences` of GET /cache.
  draw(roots, sequences, { used, added }) {
    const width = this.drawing.parentNode?.clientWidth || 340, items = [], live = [];
    let rows = 0;
    for (const root of roots) rows = place(root, rows) + 1;
    const walk = (item, from) => {
      items.push({ item, from });
      item.children.forEach((child) => walk(child, item));
    };
    roots.forEach((root) => walk(root, null));
    const known = new Map(items.map(({ item }) => [item.id, item]));
    for (const seq of sequences) if (known.has(seq.at) && seq.n > known.get(seq.at).n) live.push(seq);
    const x = scale([...items.map(({ item }) => item.n), ...live.map((seq) => seq.n)], width);
    const room = MAX_HEIGHT * (document.body.classList.contains("wide") ? 2 : 1);
    const high = Math.min(MAX_ROW, room / Math.max(rows, 1)), edge = Math.max(high, 10) / 2;
    const y = (row) => edge + row * high, height = Math.ceil(y(rows - 1) + edge + 16);
    const line = (x0, y0, x1, y1) => {
      const bend = Math.min(BEND, (x1 - x0) * 0.7), middle = x0 + bend / 2;
      const way = `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x0 + bend} ${y1}L${x1} ${y1}`;
      return way.replace(/\d+\.\d+/g, (n) => (+n).toFixed(1));
    };
    this.routes.clear();
    for (const { item, from } of items) {
      const row = from ? from.row : item.row;
      item.line = line(from ? x(from.n) : PAD, y(row), x(item.n), y(item.row));
      this.routes.set(item.id, (from ? this.routes.get(from.id) : "") + item.line.replace("M", from ? "L" : "M"));
    }
    const [edges, trains, stops] = this.groups, thin = high < 9 ? " thin" : "";
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.drawing.setAttribute("height", height);
    this.drawing.setAttribute("class", "map" + thin);
    const stored = items.filter(({ item }) => item.node), most = Math.max(0, ...items.map(({ item }) => item.n));
    const words = `${stored.length} prefixes of up to ${count(most)} tokens in ${rows} branches`;
    this.drawing.setAttribute("aria-label", words);
    const lay = (made, d) => {
      made.setAttribute("d", d);
      made.style.setProperty("d", `path("${d}")`); // changes of this one are drawn smoothly
    };
    const order = [...items].sort((a, b) => a.item.onPath - b.item.onPath || b.item.row - a.item.row);
    keyed(edges, order, ({ item }) => item.id, () => svg("path", { pathLength: 1 }), (made, { item }) => {
      const state = [item.tier, item.onPath && "on", added.has(item.id) && "added"];
      made.setAttribute("class", state.filter(Boolean).join(" "));
      lay(made, item.line);
    });
    keyed(trains, live, (seq) => seq.id, () => svg("g", {}, svg("path"), svg("circle", { r: 3 })), (made, seq) => {
      const at = known.get(seq.at), [track, head] = made.children;
      made.setAttribute("class", seq.busy ? "live busy" : "live");
      lay(track, line(x(at.n), y(at.row), x(seq.n), y(at.row)));
      head.style.setProperty("transform", `translate(${x(seq.n)}px,${y(at.row)}px)`);
    });
    const made = ({ item }) => svg("circle", { onclick: () => this.pick(item.id) }, svg("title"));
    keyed(stops, stored, ({ item }) => item.id, made, (stop, { item }) => {
      const state = [item.tier, item.onPath && "on", item.node.pinned && "pinned", item.id === used && "used"];
      stop.setAttribute("class", state.filter(Boolean).join(" "));
      stop.setAttribute("r", thin ? 2 : item.onPath ? 4.5 : 3.6);
      stop.style.setProperty("transform", `translate(${x(item.n)}px,${y(item.row)}px)`);
      stop.firstChild.textContent = `${item.words || ""}\n${count(item.n)} tokens, ${size(item.bytes)}`.trim();
    });
    this.ticks(width, height, most, x);
  }

  ticks(width, height, most, x) {
    this.axis?.remove();
    if (!most) return;
    const text = (at, anchor, words) => svg("text", { x: at, y: height - 2, "text-anchor": anchor }, words);
    const end = text(x(most) + 4, "end", short(most) + " tokens");
    this.axis = svg("g", { class: "axis" }, text(PAD - 4, "start", "0"), end);
    this.drawing.append(this.axis);
  }

  // A light runs from the start to the resumed snapshot.
  travel(id) {
    const route = this.routes.get(id), still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (!route || still || document.hidden) return;
    const way = svg("animateMotion", { path: route, dur: "0.8s", begin: "indefinite", fill: "freeze" });
    const comet = svg("circle", { r: 5 }, way);
    this.groups[3].append(comet);
    way.addEventListener("endEvent", () => comet.remove());
    setTimeout(() => comet.remove(), 1500);
    way.beginElement();
  }

  mark(id) {
    for (const stop of this.groups[2].children) stop.classList.toggle("hot", stop.dataset.key === id);
  }
}
