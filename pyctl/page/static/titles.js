// Titles of conversations: the model's own words, asked for when it has nothing else to do.

import * as api from "./api.js";
import * as settings from "./settings.js";

const WISH = "Write a title for this conversation, of at most six words. Reply with the title alone.";
const MAX_TOKENS = 24;
let asking = null;

// The next question does not wait for a title.
export const stop = () => asking?.abort();

// The model's title for a conversation of these messages; "" if it is busy or gives no title. The prompt goes on
// where the reply ended, so it evaluates little more than the wish.
export async function titleFor(messages) {
  if (!settings.givesTitles()) return "";
  const controller = (asking = new AbortController());
  const body = {
    ...settings.requestOf(), messages: [...messages, { role: "user", content: WISH }], max_tokens: MAX_TOKENS,
    chat_template_kwargs: { enable_thinking: false },
  };
  try {
    const slots = await api.get("slots", { quiet: true });
    if (controller.signal.aborted || slots.some((each) => each.is_processing)) return "";
    const { choices } = await api.post("v1/chat/completions", body, { quiet: true, signal: controller.signal });
    return plain(choices[0].message.content ?? "");
  } catch {
    return "";
  }
}

const plain = (text) =>
  text.trim().split("\n")[0].replace(/^(title: *)?[\s"'*#“]+|[\s"'*.”]+$/gi, "").slice(0, 80);
