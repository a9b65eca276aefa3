// The timeline of requests: the kind of each, its restored and evaluated tokens, and the reason for repeated work.

import { count, el, put, short, tokens } from "./dom.js";

const TIMELINE = 24;

// The latest requests: their kinds, and which part of each prompt was restored. Bars share one scale.
export function drawTimeline(list, replies) {
  const shown = replies.slice(-TIMELINE).reverse();
  const longest = Math.max(1, ...shown.map((reply) => reply.cache_n + reply.prompt_n));
  put(list, shown.map((reply) => request(reply, longest)));
}

function request({ kind, source, cache_n: restored, prompt_n: evaluated, why }, longest) {
  const part = (n, tier) => n ? el("i", { class: tier, vars: { "--w": Math.max((100 * n) / longest, 0.8) } }) : null;
  const label = `${kind}: ${tokens(restored)} restored, ${count(evaluated)} evaluated`;
  return el("li", { class: "request " + kind.replace(" ", "-") },
    el("span", { class: "kind" }, kind),
    el("span", { class: "bar", role: "img", "aria-label": label, title: label },
      part(restored, source), part(evaluated, "evaluated")),
    el("span", { class: "dim" }, `${short(evaluated)} new`),
    why ? el("p", { class: "why" }, reason(why)) : null);
}

// Why tokens were evaluated again, and how to avoid it.
function reason({ difference, changed, lost, remedy }) {
  const parts = [changed ? `Change in ${difference}: ${tokens(changed)} evaluated again` : null,
    lost ? `${tokens(lost)} had no snapshot any more` : null];
  return `${parts.filter(Boolean).join(", ")}. To avoid it, ${remedy}.`;
}
