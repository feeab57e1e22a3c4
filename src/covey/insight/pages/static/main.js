// The site: all runs, their pages, and the lab.

import { compare } from "./compare.js";
import { lab } from "./lab.js";
import { pageOfRun } from "./routes.js";
import { runList } from "./runs.js";
import { start } from "./site.js";

function pageOfSite(parts) {
  const [first, ...rest] = parts;
  if (!first) return runList();
  if (first === "lab") return lab(rest);
  if (first === "compare") return compare(...rest);
  if (first === "run" && rest.length) return pageOfRun(rest);
  throw new Error("There is no such page.");
}

start(pageOfSite, { runs: "Runs", lab: "Lab" });
