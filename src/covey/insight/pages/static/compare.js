// Runs side by side: two with what differs and the problems of both, more by their settings and curves.

import { bundles } from "./bands.js";
import { curves } from "./curves.js";
import { ask, at, crumbs, fmt, h, hintOf, link, num, percent, term, written } from "./dom.js";
import { csvButton, rowsOf } from "./download.js";

// The held-out accuracy of runs: where they began, and where they ended with the lowest and highest of several.
export function heldOut(runs) {
  const known = runs.map((run) => run.greedy ?? run.evals?.map((e) => e.greedy) ?? []).filter((all) => all.length);
  if (!known.length) return ["–"];
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / values.length, ends = known.map((all) => all.at(-1));
  const range = known.length > 1 ? [" ", h("span", { class: "range" }, `[${fmt(100 * Math.min(...ends), 0)}, ${fmt(100 * Math.max(...ends), 0)}]`)] : "";
  const start = known.some((all) => all.length > 1) ? [percent(mean(known.map((all) => all[0]))), " → "] : "";
  return [start, percent(mean(ends)), range];
}

// The settings in which bundles differ, by the first run of each.
function differing(together) {
  const own = together.map(({ runs }) => new Map(runs[0].settings.map((s) => [s.setting, s])));
  const keys = [...new Set(own.flatMap((settings) => [...settings.keys()]))].filter((key) => key !== "output" && !(key === "seed" && together.some(({ runs }) => runs.length > 1)));
  const value = (settings, key) => settings.get(key)?.value ?? "–";
  return keys.filter((key) => new Set(own.map((settings) => value(settings, key))).size > 1).map((key) => ({ key, says: own.find((s) => s.has(key)).get(key).says, values: own.map((settings) => value(settings, key)) }));
}

const asSentence = (reason) => `${reason[0].toUpperCase()}${reason.slice(1)}${reason.endsWith(".") ? "" : "."}`;

async function severalRuns(names) {
  const [{ runs }, ...pages] = await Promise.all([ask("runs"), ...names.map((run) => ask("run", { run }))]);
  const found = pages.map((page) => ({ ...runs.find((row) => row.run === page.run), ...page }));
  const together = bundles(found), differ = differing(together), charts = curves({ compare: found });
  const seeds = (own) => own.map((run, i) => [i ? " · " : "", link(at("run", run.run), written(own.length > 1 ? `seed ${run.seed}` : run.run))]);
  const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "run"), h("th", {}, term("held out", hintOf(found[0].hints, "greedy"))), differ.map(({ key, says }) => h("th", {}, term(h("code", {}, written(key)), says))))),
    h("tbody", {}, together.map((bundle, i) => h("tr", {}, h("th", { scope: "row" }, bundle.runs.length > 1 ? [written(bundle.name), h("div", { class: "small" }, seeds(bundle.runs))] : seeds(bundle.runs)), h("td", { class: "num" }, heldOut(bundle.runs)), differ.map(({ values }) => h("td", {}, h("code", {}, written(values[i]))))))));
  const node = h("div", {}, crumbs(link("#/", "Runs"), "Compared"), h("h1", {}, `${names.length} runs`),
    h("section", {}, h("div", { class: "wide" }, table), h("p", { class: "choices" }, csvButton("runs compared", () => rowsOf(table)))),
    h("section", {}, h("h2", {}, "Curves"), charts.node));
  return { title: "Compared", node, leave: charts.leave, shown: charts.draw };
}

export async function compare(a, b, ...others) {
  if (others.length) return severalRuns([a, b, ...others]);
  const found = await ask("compare", { a, b });
  const charts = curves({ compare: [{ run: a, ...found.a }, { run: b, ...found.b }] });
  const changed = found.settings.length
    ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["setting or file", a, b].map((t) => h("th", {}, written(t))))),
      h("tbody", {}, found.settings.map((s) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, term(written(s.setting), s.says))), h("td", {}, written(s.a ?? "default")), h("td", {}, written(s.b ?? "default")))))))
    : h("p", { class: "muted" }, "Both have the same settings and have read the same files.");
  const held = found.held_out;
  const node = h("div", {},
    crumbs(link("#/", "Runs"), "Compared"),
    h("h1", {}, link(at("run", a), written(a)), " and ", link(at("run", b), written(b))),
    h("section", {}, h("h2", {}, "The same held-out problems", held.length ? [": ", h("bdi", {}, written(b)), " minus ", h("bdi", {}, written(a))] : null),
      held.length ? h("div", { class: "tiles" }, held.map((e) => h("div", { class: "tile" }, h("h3", {}, term(e.name, hintOf(found.b.hints, e.name === "sampled" ? "pass@1" : e.name))), h("strong", { class: "num", "data-value": e.value }, e.is_fraction ? `${fmt(100 * e.value, 0, true)} points` : fmt(e.value, 3, true)),
        h("span", { class: "muted num" }, e.is_fraction ? `95 %: ${fmt(100 * e.low, 0, true)} to ${fmt(100 * e.high, 0, true)}` : `95 %: ${fmt(e.low, 3, true)} to ${fmt(e.high, 3, true)}`)))) : null,
      found.why_not ? h("p", { class: "muted" }, asSentence(found.why_not)) : null),
    h("section", {}, h("h2", {}, "What differs"), changed),
    h("section", {}, h("h2", {}, "Curves"), charts.node),
    h("section", {}, h("h2", {}, "The same problems in both", h("span", { class: "count num" }, found.problems.length || "")), found.problems.length
      ? h("div", { class: "wide scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["problem", `mean reward, ${a}`, `mean reward, ${b}`].map((t) => h("th", {}, written(t))))),
        h("tbody", {}, found.problems.map((p) => h("tr", {}, h("th", { scope: "row" }, written(p.problem)), ["a", "b"].map((k) => h("td", {}, link(at("run", k === "a" ? a : b, "step", p[k].step, "group", p[k].group), num(p[k].mean)), h("span", { class: "muted" }, `  step ${p[k].step}`))))))))
      : h("p", { class: "muted" }, "No problem was sampled in both.")));
  return { title: "Compared", node, leave: charts.leave, shown: charts.draw };
}
