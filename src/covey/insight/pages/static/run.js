// One run: what it came to, what stands out, its curves while it writes, and the way into its steps.

import { ask, failure, fmt, h, hintOf, holds, isStatic, pageLink, percent, seconds, term, trail, withToken, written } from "./dom.js";
import { curves } from "./curves.js";
import { csvButton, metricButtons, rowsOf } from "./download.js";
import { completion, counted, prompt } from "./step.js";

const WORDS = { learned: "good", "did not learn": "bad", "got worse": "bad", "cannot tell": "unsure" };

const MEANINGS = {
  training: "Its process is running.",
  finished: "It has trained all its steps, or has reached train.stop_at.",
  stopped: "A guard ended it, for the reason given below. It needs a changed setting before it can continue.",
  interrupted: "It ended before its last step. covey resume continues it from its last checkpoint.",
  learned: "Held-out problems show a gain beyond chance: the interval of the change is above 0.",
  "did not learn": "Held-out problems show no gain that matters: the intervals of the change are close to 0.",
  "got worse": "Held-out problems show a loss beyond chance: the interval of the change is below 0.",
  "cannot tell": "The change on held-out problems may be chance, or its signs contradict each other.",
};

// `opens`: the meaning opens by a tap or a key as well; in a list the whole row is a link.
// `count`: of how many seeds it is true, if not of all.
const pill = (tone, word, opens, count) => h("span", { class: `pill ${tone}`, title: MEANINGS[word] }, count, opens ? term(word, MEANINGS[word]) : word);
export const conclusionPill = (conclusion, opens = false, count = "") => (conclusion ? pill(WORDS[conclusion.word], conclusion.word, opens, count) : null);
export const statePill = (state, opens = false, count = "") => pill(`state ${state}`, state, opens, count);

// The sentence of a conclusion without its word, which is beside the title; a number stays with its sign and its unit.
const evidenceOf = ({ word, sentence }) => sentence.replace(`${word}: `, "").replaceAll("->", "→").replace(/(?<=[[ ])-(?=\d)/g, "−").replace(/(?<=\d) (?=%)/g, "\u00a0");

const hintsIn = (...nodes) => nodes.flatMap((node) => [...node.querySelectorAll(".hint")]);

// `part`: whether the page is one of several in a document.
export async function runPage(name, part = false) {
  const run = await ask("run", { run: name });
  const charts = curves(run);
  const head = h("div"), tiles = h("div", { class: "tiles" }), found = h("section"), held = h("section"), steps = h("section"), shown = h("section"), noted = h("section");
  const last = (key) => run.metrics.findLast((m) => typeof m[key] === "number")?.[key];
  const first = (key) => run.metrics.find((m) => typeof m[key] === "number")?.[key];
  const setting = (key) => run.settings.find((s) => s.setting === key)?.value;

  function redraw() {
    // A hint that is open stays open while the run writes.
    const open = hintsIn(head, tiles).filter((hint) => !hint.hidden).map((hint) => hint.textContent);
    const total = setting("train.steps");
    const done = run.metrics.length ? run.metrics.at(-1).step : 0;
    const lead = run.conclusion ? h("p", { class: "lead" }, run.state === "training" ? "So far: " : "", written(evidenceOf(run.conclusion))) : h("p", { class: "lead muted" }, run.state === "finished" ? "No conclusion: held-out problems were not measured before the first step and after the last." : "No conclusion yet: held-out problems are measured before the first step and after the last.");
    const stages = run.stages?.length > 1 ? h("p", { class: "stages" }, h("span", { class: "muted" }, "Stages: "), run.stages.map((s) => [s === name ? h("b", {}, written(lastPart(s))) : pageLink({ run: s }, {}, written(lastPart(s))), " "])) : null;
    const notes = run.notes.map((n) => h("div", { class: "note" }, written(n)));
    // Without a conclusion, why the run ended comes first.
    head.replaceChildren(...[
      part ? null : trail({ run: name }),
      h("div", { class: "title" }, h(part ? "h2" : "h1", {}, written(name)), statePill(run.state, true), conclusionPill(run.conclusion, true), h("span", { class: "muted" }, written([setting("algorithm.name") ?? setting("method"), shortModel(setting("model") ?? "")].filter(Boolean).join(" · ")))),
      ...(run.conclusion ? [lead, stages, ...notes] : [...notes, lead, stages])].filter(Boolean));
    const tile = (title, metric, value, from) => (value === undefined ? null : h("div", { class: "tile" }, h("h3", {}, term(title, hintOf(run.hints, metric))), h("strong", { class: "num" }, value), from ? h("span", { class: "muted num" }, from) : null));
    const share = (key) => (last(key) === undefined ? [] : [percent(last(key)), `from ${percent(first(key))}`]);
    tiles.replaceChildren(...[
      tile("step", "elapsed", total ? `${done} / ${total}` : `${done}`, run.duration),
      ...(!run.metrics.length ? [] : last("reward/mean") === undefined ? [tile("loss", "loss", fmt(last("loss"), 3), `from ${fmt(first("loss"), 3)}`)] : [
        tile("reward", "reward/mean", fmt(last("reward/mean"), 3), `from ${fmt(first("reward/mean"), 3)}`),
        tile("correct", "accuracy", ...share("accuracy")), tile("dead groups", "groups/dead", ...share("groups/dead")), tile("truncated", "length/truncated", ...share("length/truncated")),
        tile("entropy", "entropy/sampled", last("entropy/sampled") === undefined ? undefined : fmt(last("entropy/sampled"), 2), `from ${fmt(first("entropy/sampled"), 2)} nats`)]),
    ].filter(Boolean));
    for (const hint of hintsIn(head, tiles)) if (open.includes(hint.textContent)) hint.previousElementSibling.click();
    found.replaceChildren(...findings(run, name));
    held.replaceChildren(...evaluations(run, held.querySelector("details")?.open));
    steps.replaceChildren(...stepStrip(run, name));
    noted.replaceChildren(...events(run, noted.querySelector("details")?.open));
    node.classList.toggle("unbegun", !run.metrics.length && !run.evals.length);
    charts.draw();
  }

  const unbegun = h("p", { class: "muted no-step" }, "No step has ended yet. Curves begin with the first one.");
  const node = h("div", { class: part ? "stage" : "" }, head, tiles, found, unbegun, h("section", { class: "curves" }, h("h2", {}, "Curves"), charts.node, isStatic() ? null : h("p", { class: "choices muted small" }, "All metrics and times of every step: ", metricButtons(name))), steps, shown, held, noted,
    h("section", { class: "facts-of" }, facts(run), h("p", { class: "muted path" }, written(run.folder)), run.report ? h("p", { class: "muted" }, run.report) : null));
  redraw();
  examples(run, name).then((nodes) => shown.replaceChildren(...nodes));
  const source = isStatic() ? null : follow(run, name, redraw);
  return { title: name, node, shown: charts.draw, leave: () => { charts.leave(); source?.close(); } };
}

const lastPart = (name) => name.split("/").at(-1);
export const shortModel = (model) => model.split("/").slice(-2).filter((part) => part !== "..").join("/");

function table(name, heads, rows, rest = "") {
  const node = h("table", {}, heads.length ? h("thead", {}, h("tr", {}, heads.map((t) => h("th", {}, t)))) : null, h("tbody", {}, rows));
  return [h("div", { class: `wide ${rest}` }, node), h("p", { class: "choices" }, csvButton(name, () => rowsOf(node)))];
}

// Every estimate with its 95 % interval: a record has its ends under /low and /high.
function evaluations({ evals, hints }, open) {
  const names = [...new Set(evals.flatMap((e) => Object.keys(e)))].filter((n) => evals.some((e) => `${n}/low` in e));
  if (!names.length) return [];
  const said = (e, name) => {
    const [value, low, high] = ["", "/low", "/high"].map((end) => e[name + end]);
    if (typeof value !== "number") return "–";
    const show = name === "reward" ? (v) => fmt(v, 3) : (v) => fmt(100 * v, 0);
    return `${show(value)}${name === "reward" ? "" : " %"} [${show(low)}, ${show(high)}]`;
  };
  return [h("details", { open }, h("summary", {}, `Held-out evaluations (${evals.length})`), h("p", { class: "muted" }, `On ${evals.at(-1).problems ?? "some"} problems, with ${counted(evals.at(-1).samples ?? "some", "sample")} of each and 95 % intervals; the newest first.`),
    table("held-out problems", ["step", ...names.map((n) => term(written(n), hintOf(hints, n)))], [...evals].reverse().map((e) => h("tr", {}, h("th", { scope: "row", class: "num" }, fmt(e.step, 0)), names.map((n) => h("td", { class: "num" }, said(e, n))))), "scroll"))];
}

// Of the first and of the last step the group that teaches most: its best and its worst completion.
async function examples(run, name) {
  const steps = [...new Set([run.logged[0], run.logged.at(-1)])].filter((s) => s !== undefined && holds({ run: name, step: s }));
  const nodes = await Promise.all(steps.map(async (step) => {
    try {
      const { groups } = await ask("step", { run: name, step });
      const g = await ask("group", { run: name, step, group: groups[0].group });
      const order = g.completions.filter((c) => c.reward !== null).sort((a, b) => b.reward - a.reward);
      const two = [...order.slice(0, 1), ...order.slice(1).slice(-1)];
      return h("article", { class: "example" }, h("h3", {}, pageLink({ run: name, step, group: g.group }, {}, `Step ${step}, group ${g.group}`)), prompt(g.prompt), h("div", { class: "completions" }, two.map((c) => completion(name, step, g, c))));
    } catch (error) {
      return failure(error);
    }
  }));
  return nodes.length ? [h("h2", {}, "Best and worst completions"), ...nodes] : [];
}

function facts(run) {
  const part = (title, ...body) => h("details", {}, h("summary", {}, title), body);
  const pair = (key, value, says = "", hint = "") => h("tr", {}, h("th", { scope: "row" }, h("code", {}, term(written(key), hint))), h("td", {}, h("code", {}, written(value))), says ? h("td", { class: "muted" }, says) : null);
  const differing = run.settings.filter((s) => s.differs), others = run.settings.filter((s) => !s.differs);
  const phases = Object.keys(run.spent).filter((name) => name.startsWith("seconds/")).map((name) => [name.slice(8), run.spent[name]]);
  const whole = phases.reduce((sum, [, s]) => sum + s, 0), most = Math.max(...run.timings.map((t) => t["memory/peak_mib"] ?? 0));
  const spent = phases.sort(([, a], [, b]) => b - a).map(([phase, s]) => {
    const tokens = run.spent[`tokens/${phase}`];
    return h("tr", {}, h("th", { scope: "row" }, term(written(phase), hintOf(run.hints, `seconds/${phase}`))), [s < 60 ? `${fmt(s, 1)} s` : seconds(s), percent(whole ? s / whole : 0), tokens ? fmt(Math.round(tokens), 0) : "–", tokens ? fmt(Math.round(tokens / s), 0) : "–"].map((t) => h("td", { class: "num" }, t)));
  });
  return [
    !differing.length ? null : part(`Settings that differ from the defaults (${differing.length})`, table("settings that differ", [], differing.map((s) => pair(s.setting, s.value, s.says)))),
    !others.length ? null : part(`All other settings (${others.length})`, table("other settings", [], others.map((s) => pair(s.setting, s.value, "", s.says)), "scroll")),
    spent.length ? part("Time and memory", table("time by phase", ["phase", "time", "of all", "tokens", "tokens per second"], spent), h("p", { class: "muted" }, `The process took ${fmt(Math.round(most), 0)} MiB at most.`)) : null,
    run.environment.length ? part("Environment: versions, machine, files", table("environment", [], run.environment.map(([key, value]) => pair(key, value)), "scroll")) : null,
  ];
}

function follow(run, name, redraw) {
  const source = new EventSource(`api/live?${withToken({ run: name, ...run.at })}`);
  source.onmessage = (event) => {
    const news = JSON.parse(event.data);
    run.state = news.state;
    Object.assign(run.hints, news.hints);
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
  const card = (e) => h("article", { class: `finding ${SEVERITY[e.severity] ?? ""}` }, h("p", {}, written(String(e.sentence ?? e.finding ?? ""))),
    e.remedy || e.advice ? h("p", { class: "remedy" }, h("b", {}, "Try "), e.remedy ? h("code", {}, written(String(e.remedy))) : null, e.remedy && e.advice ? " or " : null, e.advice ? written(String(e.advice)) : null) : null,
    e.step ? h("p", { class: "muted small" }, `step ${e.step}`, e.evidence ? evidenceLink(run, name, e) : null) : null);
  return found.length ? [h("h2", {}, "What stands out"), h("div", { class: "findings" }, found.map(card))] : [];
}

// What the run noted of itself, the newest first.
function events(run, open) {
  if (!run.events.length) return [];
  const said = (v) => (Array.isArray(v) ? v.join("; ") : typeof v === "string" ? v : typeof v === "number" && !Number.isInteger(v) ? v.toPrecision(3) : JSON.stringify(v));
  const row = ({ step, event, ...details }) => h("tr", {}, h("td", { class: "num" }, step === undefined ? "–" : fmt(step, 0)), h("th", { scope: "row" }, written(String(event ?? ""))),
    h("td", {}, written(Object.entries(details).filter(([key]) => key !== "sha256").map(([key, v]) => `${key}: ${said(v)}`).join(", "))));
  return [h("details", { open }, h("summary", {}, `Events (${run.events.length})`), table("events", ["step", "event", ""], [...run.events].reverse().map(row), "scroll"))];
}

// Evidence points to a step, to a group in it, to a completion of that, to a token of that.
function evidenceLink(run, name, { step, evidence }) {
  const { completion: sample, ...place } = evidence && typeof evidence === "object" ? evidence : {};
  const page = { step, ...place, run: name, sample };
  const held = [page, { ...page, sample: null }, { ...page, group: null }].find(holds);
  return run.logged.includes(page.step) && held ? [" · ", pageLink(held, {}, "look at the evidence")] : null;
}

function stepStrip(run, name) {
  if (!run.logged.length) return [];
  if (isStatic()) return [h("h2", {}, "Look into a step"), h("p", {}, run.logged.filter((s) => holds({ run: name, step: s })).map((s, i) => [i ? " · " : "", pageLink({ run: name, step: s }, {}, `Step ${s}`)]))];
  const dead = new Map(run.metrics.map((m) => [m.step, m["groups/dead"]]));
  const every = Math.max(1, Math.ceil(run.logged.length / 240));
  const shown = run.logged.filter((s, i) => i % every === 0 || s === run.logged.at(-1));
  return [h("h2", {}, "Look into a step"),
    h("p", { class: "muted" }, `Each cell is a step, from ${run.logged[0]} to ${run.logged.at(-1)}; the taller it is filled, the more of its groups had something to teach.`),
    h("div", { class: "strip" }, shown.map((s) => {
      const live = 1 - (dead.get(s) ?? 1);
      return pageLink({ run: name, step: s }, { title: `step ${s}: ${percent(live)} of the groups teach`, "aria-label": `Step ${s}, ${percent(live)} of the groups teach` }, h("i", { vars: { "--part": live } }));
    }))];
}
