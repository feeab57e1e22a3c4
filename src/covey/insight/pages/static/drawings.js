// Drawn from presets and from the methods of `covey recommend`: models under PPO and GRPO, ways to train.

import { fmt, h } from "./dom.js";

const AXES = { advantage: "advantage", ratio: "off-policy correction", surrogate: "trust region", kl: "anchor", reduce: "average" };
const times = (multiple) => (multiple ? `${fmt(multiple, 1)} ×` : "–");

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

export function models(algorithms) {
  const [ppo, grpo] = ["ppo", "grpo"].map((n) => algorithms.find((a) => a.name === n));
  const side = (a, title, credit) => h("article", { class: "side" }, h("h2", {}, title),
    h("ul", { class: "roles" }, a.roles.map((r) => h("li", { class: r.kept ? "" : "gone" }, h("b", {}, r.role), h("span", { class: "muted" }, r.kept ? r.says : "not there"), h("span", { class: "num" }, r.kept ? times(r.times) : "")))),
    h("p", {}, h("b", {}, "Advantage: "), credit),
    h("p", { class: "total" }, "together ", h("b", { class: "num" }, times(a.total))));
  const kept = Object.keys(AXES);
  return h("div", {}, h("h1", {}, "PPO and GRPO"), h("p", { class: "lead" }, "GRPO is PPO without the critic. The group's mean takes its place, so one model fewer is trained, and every token of a completion gets the same advantage."),
    h("div", { class: "sides" }, side(ppo, "PPO", "from the critic's values, a number for each token"), h("div", { class: "arrow", "aria-hidden": "true" }, "→"), side(grpo, "GRPO", "from the group, a number for each completion")),
    h("p", { class: "muted small" }, "Memory in multiples of the policy's weights, measured in runs with float32 weights; PPO's rewards came from a model, GRPO's from a program. Activations and sampling come on top, of each alike. Dropping the KL penalty drops the reference as well, as DAPO does."),
    h("h2", {}, "Part by part"),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "part"), algorithms.map((a) => h("th", {}, a.name)))),
      h("tbody", {}, kept.map((axis) => h("tr", {}, h("th", { scope: "row" }, AXES[axis]), algorithms.map((a) => h("td", { title: a.axes[axis].says }, h("code", {}, a.axes[axis].name), h("span", { class: "muted small" }, Object.entries(a.axes[axis].settings).filter(([, v]) => v !== null).map(([k, v]) => ` ${k} ${v}`).join(","))))))))),
    h("p", { class: "muted" }, "The table is read from the presets: ", h("code", {}, "covey algorithms"), " prints the same."));
}

export function ways(list, algorithms, dpo) {
  const memory = (name) => times(algorithms.find((a) => a.name === name).total);
  return h("div", {}, h("h1", {}, "Three ways to train"), h("p", { class: "lead" }, "What you have decides which."),
    h("div", { class: "ways" }, list.map((w) => h("article", { class: "way" }, h("p", { class: "have" }, "you have"), h("h3", {}, w.needs), h("div", { class: "down-arrow", "aria-hidden": "true" }, "↓"), h("h2", {}, w.title), h("p", {}, sentence(w.because)), h("pre", {}, h("code", {}, w.config))))),
    h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "GRPO", "PPO", "DPO"].map((t) => h("th", {}, t)))), h("tbody", {}, [
      ["reward model", "none, if a program can check", "usually", "none"], ["critic", "none", "yes, trained", "none"], ["samples while it trains", "yes", "yes", "no"],
      ["explores beyond the data", "yes", "yes", "no"], ["best reward", "verifiable", "learned", "preference pairs"], ["memory, times the policy's weights, measured", memory("grpo"), memory("ppo"), times(dpo)], ["effort", "moderate", "most moving parts", "least"]].map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((c) => h("td", {}, c))))))));
}
