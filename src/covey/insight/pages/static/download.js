// What is shown as a file: a chart or a table as CSV.

import { h } from "./dom.js";

const cell = (value) => {
  const text = String(value ?? "");
  // A spreadsheet would take a text that begins so for a formula.
  const inert = typeof value === "string" && /^[=+@\t\r-]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(inert) ? `"${inert.replaceAll('"', '""')}"` : inert;
};

export const csv = (rows) => rows.map((row) => row.map(cell).join(",")).join("\n");

// `rows`: a function, since what is shown changes.
export function csvButton(name, rows) {
  return h("button", { class: "plain csv", type: "button", title: `Download "${name}" as CSV`, "aria-label": `Download "${name}" as CSV`, onclick: () => {
    const url = URL.createObjectURL(new Blob([csv(rows())], { type: "text/csv" }));
    const file = `${name.replace(/[^\p{L}\p{N}.]+/gu, "_").replace(/^_|_$/g, "")}.csv`;
    h("a", { href: url, download: file }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  } }, "CSV");
}

// The rows of a table element; numbers as they are, not as they are rounded.
export const rowsOf = (table) => [...table.rows].map((row) => [...row.cells].map((one) => {
  const exact = one.querySelectorAll("[data-value]");
  const word = one.querySelector(".term");
  return exact.length === 1 && exact[0].textContent === one.textContent ? Number(exact[0].dataset.value) : (word ?? one).textContent.trim();
}));
