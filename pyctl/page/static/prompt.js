// The messages of a request, and why they may be too long.

import { count } from "./dom.js";
import * as store from "./store.js";

function contentOf({ content, files = [] }) {
  const texts = files.filter((file) => !file.image).map((file) => `\n\n${file.name}:\n\`\`\`\n${file.text}\n\`\`\``);
  const text = content + texts.join(""), images = files.filter((file) => file.image);
  if (!images.length) return text;
  const parts = images.map((file) => ({ type: "image_url", image_url: { url: file.image } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

export function messagesOf(path, system) {
  const said = path.map((message) => {
    const made = { role: message.role, content: contentOf(message) };
    if (message.reasoning) made.reasoning_content = message.reasoning;
    if (message.call) made.tool_call_id = message.call;
    if (message.calls)
      made.tool_calls = message.calls.map(({ id, name, arguments: given }) =>
        ({ id, type: "function", function: { name, arguments: given } }));
    return made;
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

// Why a context is full, and what would help.
export function tooLong(own, { n_prompt_tokens: n, n_ctx: most }) {
  const texts = store.path(own).flatMap(({ content, files = [] }) => [[`“${content.slice(0, 30)}…”`, content],
    ...files.filter(({ text }) => text).map(({ name, text }) => [name, text])]);
  const parts = [...texts, ["the system prompt", own.system ?? ""]].sort((a, b) => b[1].length - a[1].length);
  const all = parts.reduce((sum, [, text]) => sum + text.length, 0), [name, text] = parts[0];
  let wanted = 4096;
  while (wanted < 1.1 * n) wanted *= 2;
  return `This prompt has ${count(n)} tokens, but the context holds ${count(most)}. The largest part is ${name}, ` +
    `${Math.round((100 * text.length) / all)} % of the text. Leave it out, or start the server with -c ${wanted}.`;
}
