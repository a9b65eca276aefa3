// A session of Anthropic's SDK for Node.js: its requests and replies, as one line of JSON.
// Usage: node anthropic_session.mjs SDK_FOLDER URL KEY
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, baseURL, apiKey] = process.argv.slice(2);
const load = (file) => import(pathToFileURL(join(folder, file)).href);
const { default: Anthropic } = await load('index.mjs');
const { betaTool } = await load('helpers/beta/json-schema.mjs');

const threads = []; // the thread type of each request, and its roles
const client = new Anthropic({
  baseURL,
  apiKey,
  maxRetries: 0,
  fetch: async (url, init) => {
    const body = JSON.parse(init.body);
    threads.push([body.thread?.type ?? '', body.messages.map((message) => message.role).join()]);
    return fetch(url, init);
  },
});
const shared = { model: 'tiny', max_tokens: 256, system: 'You answer at length. '.repeat(12), temperature: 0 };
const user = (content) => ({ role: 'user', content });

const look = betaTool({
  name: 'look',
  description: 'Look at a thing.',
  inputSchema: {
    additionalProperties: false,
    properties: { at: { const: 'door', title: 'At', type: 'string' } },
    required: ['at'],
    type: 'object',
  },
  run: ({ at }) => `${at} is red`,
});
const runner = client.beta.messages.toolRunner({
  ...shared,
  messages: [user('What colour is the door?')],
  tools: [look],
  tool_choice: { type: 'tool', name: 'look' },
  max_iterations: 2,
});
const stops = [];
for await (const message of runner) stops.push(message.stop_reason);

const unsupportedRequestBehavior = 'continue_unthreaded'; // where a server refuses threads
const thread = client.beta.messages.thread({ ...shared, max_tokens: 4, unsupportedRequestBehavior });
const first = await thread.send(user('Tell me more'));
const second = await thread.send(user('Why?'));

const filled = await client.beta.messages.create({ ...shared, max_tokens: 0, messages: [user('Hello')] });
const changed = await client.beta.messages.create({
  ...shared,
  max_tokens: 1,
  messages: [user('A long question. '.repeat(200))],
  diagnostics: { previous_message_id: null },
});
const other = await client.beta.messages.create({
  ...shared,
  max_tokens: 1,
  messages: [user('Another question.')],
  diagnostics: { previous_message_id: changed.id },
});

console.log(
  JSON.stringify({
    threads,
    first_stop: stops[0],
    continued: second.usage.cache_read_input_tokens > 0 && second.id !== first.id,
    filled: [filled.content.length, filled.stop_reason, filled.usage.output_tokens],
    diagnosed: [changed.diagnostics, other.diagnostics.cache_miss_reason.type],
  }),
);
