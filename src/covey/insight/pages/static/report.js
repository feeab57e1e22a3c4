// A report: the page of a run, or those of a pipeline's stages in their order, and what is held below them.

import { ask, h, written } from "./dom.js";
import { pageOfRun } from "./routes.js";
import { runPage } from "./run.js";
import { start } from "./site.js";

async function report(parts) {
  if (parts[0] === "run") return pageOfRun(parts.slice(1));
  const { name, runs } = await ask("report");
  const stages = await Promise.all(runs.map((run) => runPage(run, runs.length > 1)));
  const all = (act) => () => { for (const stage of stages) stage[act](); };
  const title = runs.length > 1 ? h("h1", {}, written(name)) : null;
  return { title: name, node: h("div", {}, title, stages.map((s) => s.node)), shown: all("shown"), leave: all("leave") };
}

start(report, {});
