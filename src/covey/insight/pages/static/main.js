// Which page an address means.

import { lab } from "./lab.js";
import { runPage } from "./run.js";
import { compare, runList } from "./runs.js";
import { start } from "./site.js";
import { groupPage, stepPage } from "./step.js";
import { tokenPage } from "./tokens.js";

function page(parts) {
  const [first, run, ...rest] = parts;
  if (!first) return runList();
  if (first === "lab") return lab(parts.slice(1));
  if (first === "compare") return compare(run, rest[0]);
  if (first === "run" && run) {
    const [, step, , group, , sample] = rest;
    if (sample !== undefined) return tokenPage(run, Number(step), Number(group), Number(sample), rest[7]);
    if (group !== undefined) return groupPage(run, Number(step), Number(group));
    if (step !== undefined) return stepPage(run, Number(step));
    return runPage(run);
  }
  throw new Error("There is no such page.");
}

start(page);
