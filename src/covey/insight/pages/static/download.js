// What is shown as a file: a chart or a table as CSV, all metrics of a run as CSV or JSON.

import { ask, failure, h } from "./dom.js";

const cell = (value) => {
  const text = String(value ?? "");
  // A spreadsheet would take a text that begins so for a formula.
  const inert = typeof value === "string" && /^[=+@\t\r-]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
};

export const csv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\n");
const TYPES = { csv: "text/csv", json: "application/json" };

// `content`: a function, since what is shown changes; it may ask the server first.
function fileButton(name, kind, content) {
  const word = kind.toUpperCase(), says = `Download "${name}" as ${word}`;
  const button = h("button", { class: "plain csv", type: "button", title: says, "aria-label": says, onclick: async () => {
    try {
      const url = URL.createObjectURL(new Blob([await content()], { type: TYPES[kind] }));
      const file = `${name.replace(/[^\p{L}\p{N}.]+/gu, "_").replace(/^_|_$/g, "")}.${kind}`;
      h("a", { href: url, download: file }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    } catch (error) {
      button.after(failure(error));
    }
  } }, word);
  return button;
}

export const csvButton = (name, rows) => fileButton(name, "csv", () => csv(rows()));

// A row for each step, with its metrics and times, none of them thinned.
function byStep({ metrics, timings }) {
  const steps = new Map();
  for (const record of [...metrics, ...timings]) steps.set(record.step, { ...steps.get(record.step), ...record });
  const names = [...new Set([...steps.values()].flatMap(Object.keys))].filter((name) => name !== "step").sort();
  const rows = [...steps.keys()].sort((p, q) => p - q).map((step) => steps.get(step));
  return [["step", ...names], ...rows.map((row) => [row.step, ...names.map((name) => row[name])])];
}

export const metricButtons = (run) => [
  fileButton(`${run} metrics`, "csv", async () => csv(byStep(await ask("metrics", { run })))),
  fileButton(`${run} metrics`, "json", async () => JSON.stringify(await ask("metrics", { run }), null, 1)),
];

// The rows of a table element; numbers as they are, not as they are rounded.
export const rowsOf = (table) => [...table.rows].map((row) => [...row.cells].map((one) => {
  const exact = one.querySelectorAll("[data-value]");
  const word = one.querySelector(".term");
  return exact.length === 1 && exact[0].textContent === one.textContent ? Number(exact[0].dataset.value) : (word ?? one).textContent.trim();
}));
