// The files of the next message: texts, and pictures where the server looks at them.

import { $, count, el, icon, put, size, tell } from "./dom.js";
import { pdfText } from "./api.js";

const MAX_TEXT_BYTES = 4 << 20;
const MAX_PDF_BYTES = 32 << 20;
const MAX_IMAGE_BYTES = 8 << 20;
const MAX_PIXELS = 2048; // on the longer side; models look at less
const MAX_PASTED = 6000;
const TEXTS = "text/*,.md,.py,.js,.ts,.json,.yaml,.toml,.c,.h,.cpp,.rs,.go,.java,.sh,.csv,.log,.pdf";

let files = [];
let reading = null; // ends when all that was attached has been read
let sees = false;

// Whether the model has vision; earlier attachments stay.
export function allowImages(yes) {
  sees = yes;
  const kinds = yes ? "text, PDF or image" : "text or PDF";
  $("attach").setAttribute("aria-label", `Attach ${kinds} files`);
}

export const accepted = () => (sees ? "image/*," : "") + TEXTS;

// Wait for files being read: false if some cannot be sent.
export const ready = async () => (await reading) ?? true;

// All of them, and start anew.
export function take() {
  const taken = files;
  files = [];
  draw();
  return taken;
}

export function attach(given) {
  const own = read(given, reading).finally(() => {
    if (reading === own) reading = null;
  });
  return (reading = own);
}

// Whether all of `given`, and the attachments just before it, could be read.
async function read(given, before) {
  let all = (await before) ?? true;
  for (const file of given) {
    try {
      const isPdf = file.type === "application/pdf" || /\.pdf$/i.test(file.name);
      const made = await (isPdf ? pdf(file) : file.type.startsWith("image/") ? picture(file) : text(file));
      files.push(made);
    } catch (error) {
      all = false;
      tell(`${file.name}: ${error.message}`);
    }
    draw();
  }
  return all;
}

// A long text becomes a file.
export function paste(event) {
  const { files: given } = event.clipboardData, words = event.clipboardData.getData("text/plain");
  if (!given.length && words.length <= MAX_PASTED) return;
  event.preventDefault();
  attach(given.length ? [...given] : [new File([words], "pasted.txt", { type: "text/plain" })]);
}

async function pdf(file) {
  if (file.size > MAX_PDF_BYTES) throw new Error(`larger than ${size(MAX_PDF_BYTES)}`);
  return { name: file.name, text: await pdfText(file) };
}

async function text(file) {
  if (file.size > MAX_TEXT_BYTES) throw new Error(`larger than ${size(MAX_TEXT_BYTES)}`);
  const found = await file.text();
  if (found.includes("\0")) throw new Error("not a text, PDF or image file");
  return { name: file.name, text: found };
}

// As it is where the server can read that, else drawn anew; always the same bytes from then on.
async function picture(file) {
  if (!sees) throw new Error("this model cannot read images: it has no image encoder (--mmproj)");
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error("the browser cannot read this image");
  const most = Math.max(bitmap.width, bitmap.height);
  let blob = file;
  if (!["image/png", "image/jpeg"].includes(file.type) || most > MAX_PIXELS || file.size > MAX_IMAGE_BYTES) {
    const scale = Math.min(1, MAX_PIXELS / most);
    const canvas = new OffscreenCanvas(Math.max(1, bitmap.width * scale), Math.max(1, bitmap.height * scale));
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    blob = await canvas.convertToBlob(file.type === "image/jpeg" ? { type: file.type, quality: 0.92 } : {});
  }
  const reader = new FileReader();
  reader.readAsDataURL(blob);
  await new Promise((go) => (reader.onloadend = go));
  return { name: file.name, image: reader.result };
}

function draw() {
  const drop = (file) => {
    files = files.filter((each) => each !== file);
    draw();
    $("text").focus();
  };
  put($("files"), files.map((file) => el("span", { class: "chip" },
    file.image ? el("img", { src: file.image, alt: "" }) : null,
    file.image ? file.name : `${file.name} · ${count(file.text.length)} characters`,
    icon("✕", "Remove " + file.name, () => drop(file)))));
}
