// What every page is made of: elements, numbers, text nobody can trust, questions to the server.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "vars") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export const svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat(Infinity));
  return node;
};

// --- numbers ---------------------------------------------------------------------------------------

export function fmt(value, digits = 3, sign = false) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size >= 1e6 || (digits > 1 && size > 1e-12 && size < 0.5 * 10 ** -digits)) text = size.toExponential(2);
  else if (size >= 1000) text = size.toLocaleString("en", { maximumFractionDigits: 0 });
  else text = size.toFixed(Number.isInteger(size) && !sign ? 0 : digits);
  const nothing = Number(text) === 0;
  return (value < 0 && !nothing ? "−" : sign && !nothing ? "+" : "") + text;
}

export const percent = (value, digits = 0) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;

// The digits after the point that numbers so far apart need to be told from each other.
export function places(step) {
  let digits = 0;
  while (digits < 9 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return digits;
}

// The whole number travels along, so that a test or a reader's script can compare it.
export const num = (value, digits = 3, sign = false) =>
  h("span", { class: `num ${tone(sign ? value : 0)}`, "data-value": value ?? "" }, fmt(value, digits, sign));

export const tone = (value) => (value > 1e-12 ? "up" : value < -1e-12 ? "down" : "");

export function seconds(total) {
  const s = Math.round(total);
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// The reader's own time zone; the year only if it is another one.
export function dateOf(epochSeconds) {
  const date = new Date(epochSeconds * 1000);
  const year = date.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" };
  return date.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", ...year });
}

// --- text that a model wrote ------------------------------------------------------------------------

// oxlint-disable-next-line no-control-regex -- these are what it finds
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

// Text nodes only; what would act or hide (escapes, marks of direction, no-width characters) is shown by number.
export function written(text) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > last) parts.push(text.slice(last, found.index));
    const code = found[0].codePointAt(0);
    const shown = code < 32 ? String.fromCodePoint(0x2400 + code) : code === 127 ? "␡" : code.toString(16).toUpperCase().padStart(4, "0");
    parts.push(h("span", { class: "hidden-char", title: `U+${code.toString(16).toUpperCase().padStart(4, "0")}` }, shown));
    last = found.index + found[0].length;
  }
  parts.push(text.slice(last));
  return parts;
}

// The same where elements cannot be: in the labels of curves and the options of a list.
export const label = (text) => written(text).map((part) => (typeof part === "string" ? part : `[${part.title}]`)).join("");

export const prose = (text, attributes = {}) => h("div", { dir: "auto", ...attributes, class: `prose ${attributes.class ?? ""}` }, written(text));

// --- questions --------------------------------------------------------------------------------------

const answers = () => document.getElementById("answers");
export const isStatic = () => answers() !== null;
let stored = null;
const storedAnswers = () => (stored ??= JSON.parse(answers().textContent));

export const keyOf = (path, query = {}) =>
  `${path}?${Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => `${k}=${v}`).sort().join("&")}`;

// The address that covey prints carries the token once. It is kept where only pages of this address, its port
// included, can read it, and leaves the address bar.
let secret = "";
function keepToken() {
  if (typeof location === "undefined" || isStatic()) return;
  const given = new URLSearchParams(location.search).get("token");
  try {
    if (given) localStorage.setItem("covey-token", given);
    secret = given ?? localStorage.getItem("covey-token") ?? "";
  } catch { secret = given ?? secret; /* a private window: for this tab only */ }
  if (given) history.replaceState(null, "", location.pathname + location.hash);
}
keepToken();
export const withToken = (query) => new URLSearchParams({ ...query, token: secret });

export async function ask(path, query = {}) {
  if (isStatic()) {
    const found = storedAnswers()[keyOf(path, query)];
    if (found === undefined) throw new Error(answers().dataset.refusal);
    return structuredClone(found); // a page may change what it shows
  }
  const kept = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const response = await fetch(`api/${path}?${new URLSearchParams(kept)}`, { headers: { accept: "application/json", "x-covey-token": secret } });
  const body = response.headers.get("content-type")?.startsWith("application/json") ? await response.json() : { error: await response.text() };
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body;
}

// A change is a POST in JSON, with the token in a header: no page of another site can send one.
export async function send(path, change) {
  const headers = { "content-type": "application/json", "x-covey-token": secret };
  const response = await fetch(`api/${path}`, { method: "POST", headers, body: JSON.stringify(change) });
  const text = await response.text();
  const body = response.headers.get("content-type")?.startsWith("application/json") ? JSON.parse(text) : { error: text };
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body;
}

export const failure = (error) => h("div", { class: "note bad", role: "alert" }, error.message ?? String(error));

// --- small parts --------------------------------------------------------------------------------------

export const link = (href, ...children) => h("a", { href }, ...children);
export const at = (...parts) => `#/${parts.map((p) => encodeURIComponent(p)).join("/")}`;

// Where a page of a run lies: {run, step, group, sample, token}, as far down as it goes.
const LEVELS = [["run", "run"], ["step", "step"], ["group", "group"], ["sample", "token"], ["token", "at"]];
const QUESTIONS = ["run", "step", "group", "tokens"];
const levels = (place) => LEVELS.slice(0, [...LEVELS, [""]].findIndex(([name]) => (place[name] ?? null) === null));
const addressOf = (place) => at(...levels(place).flatMap(([name, word]) => [word, place[name]]));

// Whether a page can be asked for: a report does not have all of them.
export function holds(place) {
  const names = levels({ ...place, token: null }).map(([name]) => name);
  return !isStatic() || keyOf(QUESTIONS[names.length - 1], Object.fromEntries(names.map((n) => [n, place[n]]))) in storedAnswers();
}

export const pageLink = (place, attributes, ...children) => (holds(place) ? h("a", { ...attributes, href: addressOf(place) }, ...children) : h("span", attributes, ...children));

export function trail(place) {
  const words = { run: place.run, step: `step ${place.step}`, group: `group ${place.group}`, sample: `completion ${place.sample}` };
  const way = levels(place).map(([name]) => name);
  const upTo = (i) => Object.fromEntries(way.slice(0, i + 1).map((name) => [name, place[name]]));
  return crumbs(link("#/", isStatic() ? "Report" : "Runs"), ...way.map((name, i) => (i + 1 < way.length ? pageLink(upTo(i), {}, written(words[name])) : h("span", {}, written(words[name])))));
}

export const crumbs = (...parts) =>
  h("nav", { class: "crumbs", "aria-label": "Where you are" }, parts.flatMap((p, i) => (i ? [h("span", { "aria-hidden": "true" }, "›"), p] : [p])));

// A word with a hint: the mouse shows it at once, a tap or a key opens it below the word.
export function term(text, hint) {
  if (!hint) return h("span", {}, text);
  const note = h("span", { class: "hint", role: "note", hidden: true }, hint);
  const word = h("button", { class: "term", type: "button", title: hint, "aria-expanded": "false", onclick: () => {
    note.hidden = !note.hidden;
    word.setAttribute("aria-expanded", String(!note.hidden));
  } }, text);
  return [word, note];
}

// Names of metrics have a prefix here that tells which file they are from.
export const hintOf = (hints, name) => hints?.[name.replace(/^(time|held-out):/, "")] ?? "";

export const chooser = (title, list) => h("select", { "aria-label": title }, list.map(([value, text]) => h("option", { value }, text)));

export function slider({ label: name, title = "", value, min, max, step, show = (v) => fmt(v, 2), change }) {
  const out = h("output", {}, show(value));
  const input = h("input", {
    type: "range", min, max, step, value, "aria-label": name,
    oninput: () => { out.textContent = show(Number(input.value)); change(Number(input.value)); },
  });
  input.value = value;
  return h("label", { class: "slider", title }, h("span", {}, name), input, out);
}

export function choice({ label: legend, title = "", options, value, change }) {
  const name = `c${Math.random().toString(36).slice(2)}`;
  return h("fieldset", { class: "choice", title }, h("legend", {}, legend),
    options.map(([key, text, hint]) => h("label", { title: hint ?? "" },
      h("input", { type: "radio", name, value: key, checked: key === value, onchange: () => change(key) }), h("span", {}, text))));
}

// Only the newest answer of a question that was asked again is drawn.
export function latest(draw, fail) {
  let turn = 0;
  return async (promise) => {
    const mine = ++turn;
    try {
      const value = await promise;
      if (mine === turn) draw(value);
    } catch (error) {
      if (mine === turn) fail(error);
    }
  };
}
