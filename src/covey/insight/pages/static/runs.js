// All runs, and several of them side by side.

import { ask, at, crumbs, fmt, h, link, num, percent, seconds, written } from "./dom.js";
import { curves } from "./curves.js";
import { spark } from "./plot.js";
import { statePill, verdictPill } from "./run.js";

export async function runList() {
  const { root, runs } = await ask("runs");
  const chosen = [];
  const go = h("button", { type: "button", disabled: true, onclick: () => { location.hash = at("compare", ...chosen).slice(1); } }, "Compare");
  const pick = (run, on) => {
    if (on) chosen.push(run); else chosen.splice(chosen.indexOf(run), 1);
    go.disabled = chosen.length < 2;
  };
  const node = h("div", {},
    h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "muted path" }, written(root)), h("span", { class: "space" }), runs.length > 1 ? go : null),
    runs.length ? h("div", { class: "runs" }, runs.map((run) => row(run, pick))) : empty());
  return { title: "Runs", node };
}

const empty = () => h("div", { class: "empty" }, h("h2", {}, "No run here yet"),
  h("p", {}, "A run appears here as soon as it begins. ", h("code", {}, "covey demo"), " makes one in a few minutes, without a download."),
  h("p", {}, link("#/lab", "Open the lab"), " to see what GRPO does with a group of completions."));

function row(run, pick) {
  const greedy = run.greedy ?? [];
  const held = greedy.length ? [percent(greedy[0]), " → ", percent(greedy.at(-1))] : ["–"];
  return h("article", { class: "run" },
    h("input", { type: "checkbox", "data-run": run.run, "aria-label": `Compare ${run.run}`, onchange: (e) => pick(run.run, e.target.checked) }),
    h("div", { class: "who" }, h("a", { class: "cover", href: at("run", run.run) }, written(run.run)),
      h("div", { class: "muted" }, run.error ? written(run.error) : written([run.algorithm || run.method, run.model.split("/").slice(-2).join("/")].join(" · ")))),
    h("div", { class: "pills" }, run.state === "finished" ? null : statePill(run.state), verdictPill(run.verdict)),
    spark(run.course ?? [], "The course of the reward, or of the loss"),
    h("dl", { class: "facts" },
      fact("steps", run.error ? "–" : `${run.done} / ${run.steps}`), fact("held out", held), fact("time", run.error ? "–" : seconds(run.seconds))));
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, value));

// Of more than two runs the curves alone, each run in a colour of its own.
async function curvesOf(names) {
  const found = await Promise.all(names.map(async (name) => ({ name, ...(await ask("run", { run: name })) })));
  const charts = curves({ compare: found });
  const node = h("div", {}, crumbs(link("#/", "Runs"), "Compared"), h("h1", {}, `${names.length} runs`),
    h("p", {}, names.map((name, i) => [i ? " · " : "", link(at("run", name), written(name))])), h("section", {}, h("h2", {}, "Curves"), charts.node));
  return { title: "Compared", node, leave: charts.leave, shown: charts.draw };
}

export async function compare(a, b, ...others) {
  if (others.length) return curvesOf([a, b, ...others]);
  const found = await ask("compare", { a, b });
  const charts = curves({ compare: [{ name: a, ...found.a }, { name: b, ...found.b }] });
  const changed = found.settings.length
    ? h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["setting or file", a, b].map((t) => h("th", {}, written(t))))),
      h("tbody", {}, found.settings.map((s) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, s.setting)), h("td", {}, written(s.a ?? "default")), h("td", {}, written(s.b ?? "default")))))))
    : h("p", { class: "muted" }, "Both have the same settings and have read the same files.");
  const held = found.held_out;
  const node = h("div", {},
    crumbs(link("#/", "Runs"), "Compared"),
    h("h1", {}, link(at("run", a), written(a)), " and ", link(at("run", b), written(b))),
    h("section", {}, h("h2", {}, "The same held-out problems"),
      held.length ? h("div", { class: "tiles" }, held.map((e) => h("div", { class: "tile" }, h("h3", {}, e.name), h("strong", { class: "num", "data-value": e.value }, e.share ? `${fmt(100 * e.value, 0, true)} points` : fmt(e.value, 3, true)),
        h("span", { class: "muted num" }, e.share ? `95 %: ${fmt(100 * e.low, 0, true)} to ${fmt(100 * e.high, 0, true)}` : `95 %: ${fmt(e.low, 3, true)} to ${fmt(e.high, 3, true)}`)))) : null,
      found.why_not ? h("p", { class: "muted" }, found.why_not) : null),
    h("section", {}, h("h2", {}, "What differs"), changed),
    h("section", {}, h("h2", {}, "Curves"), charts.node),
    h("section", {}, h("h2", {}, "The same problems in both", h("span", { class: "count num" }, found.problems.length || "")), found.problems.length
      ? h("div", { class: "wide scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["problem", `mean reward, ${a}`, `mean reward, ${b}`].map((t) => h("th", {}, written(t))))),
        h("tbody", {}, found.problems.map((p) => h("tr", {}, h("th", { scope: "row" }, written(p.problem)), ["a", "b"].map((k) => h("td", {}, link(at("run", k === "a" ? a : b, "step", p[k].step, "group", p[k].group), num(p[k].mean)), h("span", { class: "muted" }, `  step ${p[k].step}`))))))))
      : h("p", { class: "muted" }, "No problem was sampled in both.")));
  return { title: "Compared", node, leave: charts.leave, shown: charts.draw };
}
