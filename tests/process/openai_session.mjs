// A session of OpenAI's SDK for Node.js with the options of a prompt cache: its replies, as one line of JSON.
// Usage: node openai_session.mjs SDK_FOLDER URL KEY
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, url, apiKey] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(join(folder, 'index.mjs')).href);

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const model = 'tiny';
const text = 'Ada waters the garden behind the house on Mondays and Fridays. '.repeat(8);
const system = 'You know the town and its people. '.repeat(100);

async function prewarm() {
  const fields = { model, instructions: 'Be brief. '.repeat(200), input: text };
  const options = { prewarm: true, ttl: '12h' };
  const limit = { max_output_tokens: 4, temperature: 0 };
  const warmed = await client.responses.create({ ...fields, ...limit, prompt_cache_options: options });
  const reply = await client.responses.create({ ...fields, ...limit });
  const stream = await client.responses.create({
    model,
    ...limit,
    input: text,
    prompt_cache_options: options,
    stream: true,
  });
  const events = [];
  for await (const event of stream) events.push(event.type);
  return {
    status: warmed.status,
    n_items: warmed.output.length,
    usage: warmed.usage,
    next_usage: reply.usage,
    events,
  };
}

async function diagnosis() {
  const ask = (instructions, comparison_response_id) =>
    client.responses.create({
      model,
      input: text,
      instructions,
      max_output_tokens: 4,
      prompt_cache_key: 'mine',
      prompt_cache_options: { comparison_response_id },
    });
  const first = await ask(system, null);
  const hit = await ask(system, first.id);
  const missed = await ask(`Now another one. ${system}`, first.id);
  const unknown = await ask(system, 'resp_none');
  return {
    first: first.prompt_cache_diagnostics ?? null,
    hit: hit.prompt_cache_diagnostics ?? null,
    missed: missed.prompt_cache_diagnostics ?? null,
    unknown: unknown.prompt_cache_diagnostics ?? null,
    is_compared: hit.prompt_cache_options?.comparison_response_id === first.id,
    key: hit.prompt_cache_key ?? null,
  };
}

async function breakpoints() {
  const ask = (mode) =>
    client.chat.completions.create({
      model,
      max_tokens: 4,
      temperature: 0,
      prompt_cache_key: 'mine',
      prompt_cache_options: { mode: 'explicit', ttl: '30m' },
      messages: [
        {
          role: 'system',
          content: [{ type: 'text', text: `Marked. ${text}`, prompt_cache_breakpoint: { mode } }],
        },
        { role: 'user', content: text },
      ],
    });
  const first = await ask('explicit');
  const again = await ask('explicit');
  const refusal = await ask('implicit').then(
    () => null,
    (error) => ({ status: error.status, message: error.message }),
  );
  return { usage: first.usage, next_usage: again.usage, refusal };
}

async function prediction() {
  const fields = {
    model,
    max_tokens: 60,
    temperature: 0,
    messages: [{ role: 'user', content: text }],
  };
  const plain = await client.chat.completions.create(fields);
  const content = plain.choices[0].message.content;
  const stream = await client.chat.completions.create({
    ...fields,
    prediction: { type: 'content', content: [{ type: 'text', text: content }] },
    stream: true,
    stream_options: { include_usage: true },
  });
  let streamed = '';
  let usage = null;
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta.content ?? '';
    usage = chunk.usage ?? usage;
  }
  return { is_equal: streamed === content, plain_usage: plain.usage, usage };
}

const result = {
  prewarm: await prewarm(),
  diagnosis: await diagnosis(),
  breakpoints: await breakpoints(),
  prediction: await prediction(),
};
console.log(JSON.stringify(result));
