// The lab's tools: controls on the left of an answer that the library gave.

import { ask, choice, failure, fmt, h, isStatic, latest, num, percent, slider, tone } from "./dom.js";
import { bar, lines } from "./plot.js";

const csv = (text) => (text ?? "").split(",").filter((x) => x.trim()).map(Number);
// The lab's contents, as the library has them: what tools begin with, values of a copy, settings, presets.
let texts = {};
export const useTexts = (given) => { texts = given; };
const says = (name) => [texts.settings[name].says, texts.settings[name].usual && `usual: ${texts.settings[name].usual}`].filter(Boolean).join(" ");

// --- a group ------------------------------------------------------------------------------------------

function groupTool(host, query, { guide, plain, drawn }, face) {
  const begin = face.begin?.() ?? texts.first.group[0];
  const asked = Object.fromEntries(Object.entries(query).filter(([, v]) => v));
  // The lengths that the tool begins with belong to its own rewards.
  const given = { ...begin, ...(asked.rewards ? { lengths: "" } : {}), ...asked };
  const state = { rewards: csv(given.rewards), lengths: csv(given.lengths), ddof: given.ddof, eps: given.eps, max_tokens: given.max_tokens };
  const focus = guide?.focus ?? "group_zscore";
  const top = h("div"), facts = h("div", { class: "facts-row", "aria-live": "polite" }), below = h("div");
  const wanted = () => ({ rewards: state.rewards.map(String).join(","), ...(state.lengths.length ? { lengths: state.lengths.join(",") } : {}), ddof: state.ddof, eps: state.eps, max_tokens: state.max_tokens });
  let paint = () => {}, chosen = 0, shownAnswer = null;
  const receive = latest((answer) => {
    shownAnswer = answer;
    const main = answer.estimators.find((e) => e.name === focus);
    paint(main.advantages, answer);
    facts.replaceChildren(
      ...(answer.dead ? [h("span", { class: "pill tied big" }, "dead group")] : []),
      h("span", {}, "mean ", num(answer.mean)), h("span", {}, "standard deviation ", num(answer.std)),
      ...(plain ? [] : [h("span", { class: "muted" }, `÷ ${state.ddof === "1" ? "(G − 1)" : "G"}, eps ${state.eps}`)]));
    below.replaceChildren(...(plain || face.below === null ? [] : (face.below ?? estimators)(answer, state, focus, () => chosen, (i) => { chosen = i; receive(Promise.resolve(shownAnswer)); })));
    drawn?.(answer, state, wanted());
  }, (error) => facts.replaceChildren(failure(error)));
  const update = () => {
    chosen = Math.min(chosen, state.rewards.length - 1);
    if (face.address && !guide) history.replaceState(null, "", `#/lab/${face.address}?${new URLSearchParams(Object.entries(wanted()).filter(([, v]) => v !== undefined))}`);
    receive(ask("lab/group", wanted()));
  };
  const build = () => { paint = face.build(top, state, update, { guide, rebuild: () => { build(); update(); } }); };
  build();
  host.replaceChildren(top, facts, below);
  update();
}

const cardsFace = {
  build(top, state, update, { guide }) {
    const cards = state.rewards.map((r, i) => {
      const value = h("span", { class: "verdict" }), gain = h("span", { class: "gain" });
      const card = h("button", { type: "button", class: "card", "aria-pressed": "false", onclick: () => { state.rewards[i] = state.rewards[i] > 0.5 ? 0 : 1; update(); } },
        h("span", { class: "muted" }, `answer ${i + 1}`), guide?.cards?.[i] ? h("span", { class: "says" }, guide.cards[i]) : null, value, gain);
      return { card, value, gain };
    });
    top.replaceChildren(h("div", { class: "cards", vars: { "--columns": cards.length % 3 === 0 ? 3 : 4 }, role: "group", "aria-label": "Completions; click one to flip its reward" }, cards.map((c) => c.card)));
    return (advantages) => {
      const largest = Math.max(...advantages.map(Math.abs), 1e-12);
      cards.forEach(({ card, value, gain }, i) => {
        const right = state.rewards[i] > 0.5;
        card.setAttribute("aria-pressed", String(right));
        card.classList.toggle("right", right);
        value.textContent = right ? "✓ correct: 1" : "✗ incorrect: 0";
        gain.replaceChildren(num(advantages[i], 3, true), bar(advantages[i], largest));
      });
    };
  },
};

const range = (rewards) => { const most = Math.max(1, ...rewards.map(Math.abs)); return most > 10 ? [0, 100, 1] : most > 1 ? [0, 10, 0.5] : [0, 1, isStatic() ? 0.5 : 0.01]; };

const slidersFace = {
  build(top, state, update) {
    const [min, max, step] = range(state.rewards);
    const rows = state.rewards.map((r, i) => {
      const gain = h("span", { class: "gain" });
      return { gain, node: h("div", { class: "row" }, slider({ label: `completion ${i + 1}`, value: r, min, max, step, change: (v) => { state.rewards[i] = v; update(); } }), gain) };
    });
    top.replaceChildren(h("div", { class: `rows ${rows.length > 12 ? "many" : ""}` }, rows.map((r) => r.node)));
    return (advantages) => {
      const largest = Math.max(...advantages.map(Math.abs), 1e-12);
      rows.forEach(({ gain }, i) => gain.replaceChildren(num(advantages[i], 3, true), bar(advantages[i], largest)));
    };
  },
};

const PRESETS = [
  ["one success", () => [1, 0, 0, 0, 0, 0, 0, 0]], ["one failure", () => [0, 1, 1, 1, 1, 1, 1, 1]], ["half", () => [1, 1, 1, 1, 0, 0, 0, 0]],
  ["all equal", () => Array(8).fill(1)], ["nearly tied", () => [0.96, ...Array(7).fill(0.95)]],
];

const benchFace = {
  address: "bench",
  build(top, state, update, { guide, rebuild }) {
    const inner = slidersFace.build;
    const rows = h("div");
    const paint = inner(rows, state, update);
    if (guide || isStatic()) { top.replaceChildren(rows); return paint; }
    const set = (rewards) => { state.rewards = rewards; state.lengths = []; rebuild(); };
    const paste = h("input", { type: "text", inputmode: "decimal", placeholder: "1, 0, 0.5, …", "aria-label": "Paste rewards, separated by commas or spaces", value: state.rewards.join(", ") });
    const problem = h("span", { class: "bad-text", role: "alert" });
    const take = () => {
      const values = paste.value.split(/[\s,;]+/).filter(Boolean).map(Number);
      problem.textContent = values.length < 2 || values.length > 64 || values.some((v) => !Number.isFinite(v)) ? "give 2 to 64 numbers" : "";
      if (!problem.textContent) set(values);
    };
    top.replaceChildren(
      h("form", { class: "tools", onsubmit: (e) => { e.preventDefault(); take(); } }, h("label", {}, "Rewards ", paste), h("button", { type: "submit" }, "Set"),
        h("button", { type: "button", "aria-label": "One completion more", onclick: () => state.rewards.length < 64 && set([...state.rewards, 0]) }, "+"), h("button", { type: "button", "aria-label": "One completion fewer", onclick: () => state.rewards.length > 2 && set(state.rewards.slice(0, -1)) }, "−"), problem),
      h("div", { class: "tools" }, PRESETS.map(([text, make]) => h("button", { type: "button", class: "chip", onclick: () => set(make()) }, text))),
      rows,
      h("div", { class: "tools" }, choice({ label: "Standard deviation", title: says("ddof"), value: state.ddof, options: [["1", "of the sample, G − 1"], ["0", "of the population, G"]], change: (v) => { state.ddof = v; update(); } }),
        choice({ label: "eps", title: says("eps"), value: state.eps, options: ["0", "1e-8", "1e-6", "1e-4"].map((e) => [e, e]), change: (v) => { state.eps = v; update(); } })));
    return paint;
  },
};

function estimators(answer, state, focus, chosen, choose) {
  const i = chosen(), shown = answer.estimators;
  const largest = Math.max(...shown.filter((e) => e.name !== "reward").flatMap((e) => e.advantages.map(Math.abs)), 1e-12);
  const few = state.rewards.length <= 12;
  const table = h("div", { class: "wide" }, h("table", { class: "estimators" },
    h("thead", {}, h("tr", {}, h("th", {}, "estimator"), few ? state.rewards.map((r, j) => h("th", { class: j === i ? "now" : "" }, h("button", { type: "button", class: "plain", "aria-pressed": String(j === i), title: "Put this completion's numbers into the formulas", onclick: () => choose(j) }, `${j + 1}: r = ${fmt(r, 2)}`))) : h("th", {}, "advantages, first to last"))),
    h("tbody", {}, shown.map((e) => h("tr", { class: e.name === focus ? "now" : "" }, h("th", { scope: "row" }, texts.presets[e.name] ?? "", h("code", {}, e.name)),
      few ? e.advantages.map((a, j) => h("td", { class: j === i ? "now" : "" }, num(a, 3, true), bar(a, largest))) : spread(e.advantages))))));
  const formulas = shown.filter((e) => e.formula).map((e) => h("div", { class: "formula" }, h("b", {}, texts.presets[e.name] ?? e.name),
    h("code", {}, e.formula), h("code", { class: "with" }, substituted(e, i), " = ", num(e.advantages[i], 4, true))));
  return [h("h2", {}, "Every estimator on this group"), table, h("h2", {}, `The formulas, with the numbers of completion ${i + 1}`), h("div", { class: "formulas" }, formulas)];
}

// Too many for a column each: bars to their own scale, and from where to where they go.
function spread(advantages) {
  const low = Math.min(...advantages), high = Math.max(...advantages), largest = Math.max(-low, high, 1e-12);
  return h("td", {}, h("div", { class: "histogram" }, advantages.map((a) => h("i", { class: tone(a), vars: { "--part": Math.abs(a) / largest }, "data-value": a }))),
    h("span", { class: "small" }, num(low, 3, true), " to ", num(high, 3, true)));
}

function substituted(estimator, i) {
  let text = estimator.formula;
  for (const [symbol, value] of Object.entries(estimator.numbers[i])) text = text.replaceAll(symbol, value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential() : fmt(value, 4));
  return text;
}

const weightsFace = {
  address: "weights",
  begin: () => texts.first.group[1],
  below: (answer, state, focus) => weights(answer, state, focus),
  build(top, state, update) {
    if (!state.lengths.length) state.lengths = state.rewards.map(() => 100);
    const rows = state.rewards.map((r, i) => {
      const gain = h("span", { class: "gain" });
      const node = h("div", { class: "row" }, h("button", { type: "button", class: "chip", disabled: isStatic(), onclick: () => { state.rewards[i] = state.rewards[i] > 0.5 ? 0 : 1; update(); } }, ""),
        isStatic() ? h("span", {}, `${state.lengths[i]} tokens`) : slider({ label: "tokens", value: state.lengths[i], min: 1, max: 256, step: 1, show: (v) => `${v}`, change: (v) => { state.lengths[i] = v; update(); } }), gain);
      return { gain, node };
    });
    top.replaceChildren(h("div", { class: "rows" }, rows.map((r) => r.node)));
    return (advantages) => rows.forEach(({ gain, node }, i) => {
      node.querySelector("button").textContent = state.rewards[i] > 0.5 ? "✓ correct" : "✗ incorrect";
      gain.replaceChildren(num(advantages[i], 3, true));
    });
  },
};

function weights(answer, state, focus) {
  const advantages = answer.estimators.find((e) => e.name === focus).advantages;
  const longest = Math.max(...state.lengths);
  return [h("h2", {}, "The push on each token, under each reduction"),
    h("p", { class: "muted" }, "A strip is a completion, as long as it has tokens. Its height is advantage times weight: how much each of its tokens changes."),
    h("div", { class: "reductions" }, answer.reductions.map((r) => {
      const pushes = advantages.map((a, i) => a * r.weights[i]), most = Math.max(...pushes.map(Math.abs), 1e-300);
      return h("figure", { class: "reduction" }, h("figcaption", {}, h("b", {}, r.name), h("span", { class: "muted" }, r.says.split(". ")[0])),
        pushes.map((p, i) => h("div", { class: "strip-row" }, h("span", { class: "token-strip", "aria-hidden": "true" }, h("i", { class: tone(p), vars: { "--long": state.lengths[i] / longest, "--part": Math.abs(p) / most } })), num(p, 5, true))));
    }))];
}

// --- tools with sliders and a drawing ---------------------------------------------------------------

// The values that a slider stops at: those of the control, or in a copy without a server those that it holds.
function control(tool, c, value, change) {
  const held = isStatic() ? texts.grids[tool]?.[c.key] : null;
  if (held?.length === 1) return null;
  const title = texts.settings[c.key] ? says(c.key) : "";
  if (c.options) return choice({ ...c, title, value, options: c.options().filter(([k]) => !held || held.includes(k)), change });
  const stops = held ?? c.stops?.();
  if (!stops) return slider({ ...c, title, value: Number(value), change: (v) => change(String(v)) });
  const near = stops.reduce((best, s, i) => (Math.abs(s - value) < Math.abs(stops[best] - value) ? i : best), 0);
  return slider({ label: c.label, title, value: near, min: 0, max: stops.length - 1, step: 1, show: (i) => (c.show ?? ((v) => fmt(v, 2)))(Number(stops[i])), change: (i) => change(stops[i]) });
}

function simple(tool, controls, paint) {
  return (host, query, { guide, plain, drawn }) => {
    const state = { ...Object.fromEntries(controls.map((c) => [c.key, c.value ?? String(texts.settings[c.key].default)])), ...query };
    const out = h("div", { class: "answer" });
    const receive = latest((answer) => { out.replaceChildren(...paint(answer, state, plain)); drawn?.(answer, state, state); }, (error) => out.replaceChildren(failure(error)));
    const update = () => {
      if (!guide && !plain) history.replaceState(null, "", `#/lab/${tool}?${new URLSearchParams(state)}`);
      receive(ask(`lab/${tool}`, state));
    };
    host.replaceChildren(h("div", { class: "controls" }, controls.map((c) => control(tool, c, state[c.key], (v) => { state[c.key] = v; update(); }))), out);
    update();
  };
}

const odds = simple("odds", [
  { key: "p", label: "solved with probability p", value: "0.2", stops: () => texts.grids.odds.p, show: (v) => percent(v) },
  { key: "size", label: "completions in a group, G", value: "8", stops: () => texts.grids.odds.size, show: String },
], (a, state, plain) => [
  h("div", { class: "tiles" },
    h("div", { class: "tile" }, h("h3", {}, "dead groups"), h("strong", { class: "num", "data-value": a.dead }, percent(a.dead, 1)), h("span", { class: "muted" }, "p^G + (1 − p)^G")),
    h("div", { class: "tile" }, h("h3", {}, "of 64 groups, live"), h("strong", { class: "num", "data-value": a.live }, fmt(a.live, 1)), h("span", { class: "muted" }, "the others are sampled for nothing")),
    h("div", { class: "tile" }, h("h3", {}, "cost of a live group"), h("strong", { class: "num", "data-value": a.cost ?? "" }, a.cost === null ? "∞" : `× ${fmt(a.cost, 2)}`), h("span", { class: "muted" }, "if dead ones are replaced"))),
  lines({ label: "Chance of a dead group over p", series: [{ name: `G = ${state.size}`, tone: "a", xs: a.rates, ys: a.curve }], marks: [{ x: Number(state.p), y: a.dead, tone: "a" }], x: "p, how often the model solves the problem", y: "chance of a dead group", yRange: [0, 1], show: (v) => percent(v) }),
  ...(plain ? [] : [h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "G"), a.by_size.map((s) => h("th", {}, String(s.size))))), h("tbody", {}, h("tr", {}, h("th", { scope: "row" }, "dead"), a.by_size.map((s) => h("td", {}, h("span", { class: "num", "data-value": s.dead }, percent(s.dead, 1))))))))]),
]);

const gate = simple("gate", [
  { key: "ratio", label: "ratio", value: "1", min: 0.1, max: 2.5, step: 0.05 },
  { key: "advantage", label: "advantage", value: "1", options: () => [["1", "+1, a good token"], ["-1", "−1, a bad token"]] },
  { key: "clip_low", label: "clip_low", min: 0.05, max: 0.5, step: 0.05 },
  { key: "clip_high", label: "clip_high", min: 0.05, max: 0.5, step: 0.01 },
], (a, state) => {
  const clip = a.rules.find((r) => r.name === "clip"), ratio = Number(state.ratio);
  return [
    h("p", { class: "lead" }, "The clip pushes this token with ", num(clip.push, 3, true), ". ", clip.push === 0 ? h("span", { class: "pill tied" }, "clipped: no gradient") : h("span", { class: "pill good" }, "its gradient passes")),
    h("div", { class: "two" },
      lines({ label: "What the token adds to the objective", series: [{ name: "", tone: "a", xs: a.ratios, ys: clip.gains }], marks: [{ x: ratio, y: clip.gain, tone: "a" }], x: "ratio", y: "gain", width: 420 }),
      lines({ label: "Weight of the token", series: [{ name: "", tone: "b", xs: a.ratios, ys: clip.pushes }], marks: [{ x: ratio, y: clip.push, tone: "b" }], x: "ratio", y: "push, the derivative by log π", width: 420 })),
    h("h2", {}, "Every clip rule at this ratio"),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["rule", "push", ""].map((t) => h("th", {}, t)))), h("tbody", {}, a.rules.map((r) => h("tr", { class: r.name === "clip" ? "now" : "" }, h("th", { scope: "row" }, h("code", {}, r.name)), h("td", {}, num(r.push, 3, true)), h("td", { class: "muted small" }, r.says))))))];
});

const kl = simple("kl", [
  { key: "p", label: "policy gives the first token p", value: "0.5", min: 0.05, max: 0.95, step: 0.05 },
  { key: "q", label: "reference gives it q", value: "0.3", min: 0.05, max: 0.95, step: 0.05 },
], (a) => [
  h("p", { class: "lead" }, "The exact divergence is ", num(a.exact, 4), " nats. Sampled, each estimator sees one of two tokens:"),
  h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["estimator", "first token", "second token", "expected", "error"].map((t) => h("th", {}, t)))),
    h("tbody", {}, a.estimators.map((e) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, e.name)), e.by_token.map((v) => h("td", {}, num(v, 4))), h("td", {}, num(e.expected, 4)), h("td", {}, num(e.expected - a.exact, 4, true))))))),
  lines({ label: "The estimators over the log-ratio", series: a.estimators.map((e, i) => ({ name: e.name, tone: "abcd"[i], xs: a.grid, ys: e.curve })), x: "log π − log π_ref of the sampled token", y: "nats", yRange: [-2, 4] }),
]);

const toy = simple("toy", [
  { key: "estimator", label: "Estimator", value: "group_zscore", options: () => texts.grids.toy.estimator.map((n) => [n, texts.presets[n], n]) },
  { key: "size", label: "group size", value: "8", stops: () => texts.grids.odds.size, show: String },
  { key: "start", label: "correct at the start", value: "0.1", stops: () => ["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"], show: (v) => percent(v) },
  { key: "lr", label: "learning rate", value: "0.5", stops: () => ["0.05", "0.1", "0.2", "0.5", "1", "2"], show: String },
  { key: "updates", label: "Steps", value: "50", options: () => [["1", "one"], ["10", "ten"], ["50", "fifty"], ["200", "two hundred"]] },
  { key: "seed", label: "luck", value: "0", min: 0, max: 20, step: 1, show: String },
], (a) => {
  const xs = a.course.map((_, i) => i), n = a.course[0].length, dead = a.dead.filter(Boolean).length;
  const series = Array.from({ length: n }, (_, k) => ({ name: k === 0 ? "the correct answer" : k === 1 ? "the others" : "", tone: k === 0 ? "a" : "faint", xs, ys: a.course.map((row) => row[k]) })).reverse();
  return [
    h("p", { class: "lead" }, "Correct at first ", h("span", { class: "num", "data-value": a.course[0][0] }, percent(a.course[0][0], 1)), ", in the end ", h("span", { class: "num", "data-value": a.course.at(-1)[0] }, percent(a.course.at(-1)[0], 1)), `. ${dead} of ${a.dead.length} groups were dead.`),
    lines({ label: "Probability of each answer over the steps", series, x: "step", y: "probability", yRange: [0, 1], show: (v) => percent(v) }),
    h("div", { class: "ticks", role: "img", "aria-label": `${dead} of ${a.dead.length} groups were dead` }, a.dead.map((d, i) => h("i", { class: d ? "dead" : "live", title: `step ${i + 1}: ${a.drawn[i].filter((k) => k === 0).length} of ${a.drawn[i].length} correct` }))),
    h("p", { class: "muted" }, h("i", { class: "swatch live" }), " a group that teaches  ", h("i", { class: "swatch dead" }), " a dead group"),
    lines({ label: "Entropy over the steps", series: [{ name: "", tone: "b", xs, ys: a.entropy }], x: "step", y: "entropy, nats", height: 160 })];
});

// --- credit finer than the completion -------------------------------------------------------------------

const HOW = { own_step: "its own step", sum_to_go: "the sum to the end, as DeepSeekMath prints it", min_form: "the worst step (PURE)" };

function steps(host, query, { drawn }) {
  const state = { rewards: query.rewards ?? texts.first.steps[0].rewards };
  const rows = () => state.rewards.split(";").map(csv);
  const grid = h("div", { class: "step-grid" }), out = h("div", { class: "answer" });
  const receive = latest((a) => {
    const most = Math.max(...Object.values(a.credits).flat(2).map(Math.abs), 1e-12);
    out.replaceChildren(h("p", {}, "mean of all steps ", num(a.mean), ", standard deviation ", num(a.std)),
      ...Object.entries(HOW).map(([how, text]) => h("section", {}, h("h3", {}, "Credited by ", text), h("div", { class: "wide" }, h("table", {}, h("tbody", {}, a.credits[how].map((row, i) => h("tr", {}, h("th", { scope: "row" }, `completion ${i + 1}`), row.map((v) => h("td", {}, num(v, 2, true), bar(v, most)))))))))));
    drawn?.(a, state, state);
  }, (error) => out.replaceChildren(failure(error)));
  const update = () => {
    grid.replaceChildren(...rows().map((row, i) => h("div", { class: "row" }, h("span", {}, `completion ${i + 1}`), row.map((v, j) => h("button", { type: "button", class: `chip ${v > 0 ? "right" : "wrong"}`, "aria-label": `Step ${j + 1} of completion ${i + 1}: ${v > 0 ? "right" : "wrong"}`, onclick: () => { const all = rows(); all[i][j] = v > 0 ? -1 : 1; state.rewards = all.map((r) => r.join(",")).join(";"); update(); } }, v > 0 ? `✓ step ${j + 1}` : `✗ step ${j + 1}`)))));
    receive(ask("lab/steps", state));
  };
  host.replaceChildren(grid, out);
  update();
}

function prefixes(host, query, { drawn }) {
  const state = { rewards: query.rewards, texts: query.texts };
  const out = h("div", { class: "answer" });
  const receive = latest((a) => {
    const rewards = csv(state.rewards);
    const painted = (kind, value, signed = true) => h("section", {}, h("h3", {}, kind), h("div", { class: "phrases" }, a.words.map((words, i) => h("p", {},
      h("button", { type: "button", class: `chip ${rewards[i] > 0.5 ? "right" : "wrong"}`, onclick: () => { const all = [...rewards]; all[i] = rewards[i] > 0.5 ? 0 : 1; state.rewards = all.join(","); update(); } }, rewards[i] > 0.5 ? "✓ safe" : "✗ unsafe"),
      words.map((w, t) => { const v = value(i, t); return h("span", { class: `word ${v >= 0 ? "up" : "down"}`, vars: { "--part": Math.min(Math.abs(v), 1) } }, w, h("small", {}, num(v, 2, signed))); })))));
    out.replaceChildren(
      painted("What plain GRPO gives each word: one number for the completion", (i) => a.outcome[i]),
      painted("The value of the text up to each word: mean reward of those who share it", (i, t) => a.values[i][t + 1], false),
      painted("Credit by prefix: the change of that value", (i, t) => a.credit[i][t]),
      painted("What PPO gives with a critic that knows these values", (i, t) => a.critic[i][t]));
    drawn?.(a, state, state);
  }, (error) => out.replaceChildren(failure(error)));
  const update = () => receive(ask("lab/prefixes", state));
  host.replaceChildren(out);
  update();
}

export const VIEWS = {
  cards: (host, query, options) => groupTool(host, query, options, cardsFace),
  sliders: (host, query, options) => groupTool(host, query, options, slidersFace),
  bench: (host, query, options) => groupTool(host, query, options, benchFace),
  weights: (host, query, options) => groupTool(host, query, options, weightsFace),
  gate, kl, odds, toy, steps, prefixes,
};
