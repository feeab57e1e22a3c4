// One run: what it came to, what stands out, its curves while it writes, and the way into its steps.

import { ask, at, crumbs, fmt, h, link, num, percent, withToken, written } from "./dom.js";
import { curves } from "./curves.js";
import { statePill, verdictPill } from "./runs.js";

export async function runPage(name) {
  const run = await ask("run", { run: name });
  const charts = curves(run);
  const head = h("div"), tiles = h("div", { class: "tiles" }), found = h("section"), steps = h("section");
  const last = (key) => run.metrics.findLast((m) => typeof m[key] === "number")?.[key];
  const first = (key) => run.metrics.find((m) => typeof m[key] === "number")?.[key];

  function redraw() {
    const total = run.settings.find((s) => s.setting === "train.steps")?.value;
    const done = run.metrics.length ? run.metrics.at(-1).step + 1 : 0;
    head.replaceChildren(
      crumbs(link("#/", "Runs"), h("span", {}, written(name))),
      h("div", { class: "title" }, h("h1", {}, written(name)), statePill(run.state), verdictPill(run.verdict)),
      run.verdict ? h("p", { class: "lead" }, run.state === "training" ? "So far: " : "", written(run.verdict.sentence.replaceAll("->", "→"))) : h("p", { class: "lead muted" }, run.state === "finished" ? "No verdict: held-out problems were not measured before the first step and after the last." : "No verdict yet: held-out problems are measured before the first step and after the last."),
      ...run.notes.map((n) => h("div", { class: "note" }, written(n))));
    const tile = (title, value, from) => (value === undefined ? null : h("div", { class: "tile" }, h("h3", {}, title), h("strong", { class: "num" }, value), from ? h("span", { class: "muted num" }, from) : null));
    const share = (key) => [percent(last(key)), first(key) === undefined ? null : `began at ${percent(first(key))}`];
    tiles.replaceChildren(...[
      tile("step", total ? `${done} / ${total}` : `${done}`, run.duration),
      ...(last("reward/mean") === undefined ? [tile("loss", fmt(last("loss"), 3), `began at ${fmt(first("loss"), 3)}`)] : [
        tile("reward", fmt(last("reward/mean"), 3), `began at ${fmt(first("reward/mean"), 3)}`),
        tile("correct", ...share("accuracy")), tile("dead groups", ...share("groups/dead")), tile("truncated", ...share("length/truncated")),
        tile("entropy", fmt(last("entropy/sampled"), 2), `began at ${fmt(first("entropy/sampled"), 2)} nats`)]),
    ].filter(Boolean));
    found.replaceChildren(...findings(run, name));
    steps.replaceChildren(...stepStrip(run, name));
    charts.draw();
  }

  redraw();
  const settings = h("details", { class: "settings" }, h("summary", {}, `Settings that differ from the defaults (${run.settings.length})`),
    h("div", { class: "wide" }, h("table", {}, h("tbody", {}, run.settings.map((s) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, s.setting)), h("td", {}, h("code", {}, written(s.value))), h("td", { class: "muted" }, s.says)))))));
  const node = h("div", {}, head, tiles, found, steps, h("section", {}, h("h2", {}, "Curves"), charts.node), h("section", {}, settings, h("p", { class: "muted path" }, written(run.folder))));
  const source = follow(run, name, redraw);
  return { title: name, node, shown: charts.draw, leave: () => { charts.leave(); source?.close(); } };
}

function follow(run, name, redraw) {
  const source = new EventSource(`api/live?${withToken({ run: name, ...run.at })}`);
  source.onmessage = (event) => {
    const news = JSON.parse(event.data);
    run.state = news.state;
    for (const stream of ["metrics", "timings", "evals", "events", "findings"]) run[stream].push(...news[stream]);
    run.logged.push(...news.logged);
    redraw();
  };
  source.addEventListener("reset", () => { source.close(); window.dispatchEvent(new Event("hashchange")); });
  return source;
}

const SEVERITY = { severe: "severe", note: "quiet" };

function findings(run, name) {
  const found = run.findings.length ? run.findings : run.remarks;
  if (!found.length && !run.events.length) return [];
  const card = (e) => h("article", { class: `finding ${SEVERITY[e.severity] ?? ""}` }, h("p", {}, written(String(e.sentence ?? e.finding ?? e.event ?? ""))),
    e.remedy || e.advice ? h("p", { class: "remedy" }, h("b", {}, "Try "), e.remedy ? h("code", {}, written(String(e.remedy))) : null, e.remedy && e.advice ? " or " : null, e.advice ? written(String(e.advice)) : null) : null,
    e.step === undefined ? null : h("p", { class: "muted small" }, `step ${e.step + (e.event ? 0 : 1)}`, e.evidence ? evidenceLink(run, name, e) : null));
  const noted = ({ step, event, ...details }) => card({ step, severity: "note", event, advice: "", sentence: [event, ...Object.entries(details).map(([k, v]) => `${k}: ${Array.isArray(v) ? v.join("; ") : typeof v === "string" ? v : typeof v === "number" && !Number.isInteger(v) ? v.toPrecision(3) : JSON.stringify(v)}`)].join(", ") });
  return [h("h2", {}, "What stands out"), h("div", { class: "findings" }, found.map(card), run.events.slice(-6).reverse().map(noted))];
}

// Evidence points to a step, to a group in it, to a completion of that, to a token of that.
function evidenceLink(run, name, { step, evidence }) {
  const place = evidence && typeof evidence === "object" ? evidence : {};
  const of = place.step ?? step;
  if (!run.logged.includes(of)) return null;
  const parts = ["run", name, "step", of];
  const known = (key) => place[key] !== undefined && place[key] !== null;
  if (known("group")) parts.push("group", place.group);
  if (known("group") && known("completion")) parts.push("token", place.completion);
  if (known("group") && known("completion") && known("token")) parts.push("at", place.token);
  return [" · ", link(at(...parts), "look at the evidence")];
}

function stepStrip(run, name) {
  if (!run.logged.length) return [];
  const dead = new Map(run.metrics.map((m) => [m.step, m["groups/dead"]]));
  const every = Math.max(1, Math.ceil(run.logged.length / 240));
  const shown = run.logged.filter((s, i) => i % every === 0 || s === run.logged.at(-1));
  return [h("h2", {}, "Look into a step"),
    h("p", { class: "muted" }, "Each cell is a step; the taller it is filled, the more of its groups had something to teach."),
    h("div", { class: "strip" }, shown.map((s) => {
      const live = 1 - (dead.get(s) ?? 1);
      return h("a", { href: at("run", name, "step", s), title: `step ${s}: ${percent(live)} of the groups teach`, "aria-label": `Step ${s}, ${percent(live)} of the groups teach` }, h("i", { vars: { "--part": live } }));
    }))];
}
