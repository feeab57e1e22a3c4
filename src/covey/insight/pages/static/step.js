// A step as a grid of its groups, and a group as its completions side by side.

import { differingParts } from "./diff.js";
import { ask, failure, fmt, h, holds, isStatic, latest, num, pageLink, prose, term, trail, written } from "./dom.js";
import { bar } from "./plot.js";

const REWARD = "The sum of the rewards below, with their weights and gates.";
const ADVANTAGE = "What the algorithm makes of the reward within its group. A completion with an advantage above 0 becomes more likely, one below 0 less likely.";
const SPREAD = "The standard deviation of the group's rewards.";
const DEAD = "All rewards of a dead group are equal, so that it has no advantage: nothing is learned from it.";

const tie = (g) => (g.rewards.every((r) => r === null) ? "nothing scored" : `all ${fmt(g.mean, 2)}`);
export const why = (g) => (g.texts === 1 ? "the same text every time" : `${g.texts} different texts, the same reward`);

function place(run, step, all) {
  const logged = all.filter((s) => holds({ run, step: s })), i = logged.indexOf(step);
  const go = (to, text, label) => (to === undefined ? h("span", { class: "muted" }, text) : pageLink({ run, step: to }, { "aria-label": label }, text));
  return h("span", { class: "pager" }, go(logged[i - 1], "‹ previous", "The previous step"), go(logged[i + 1], "next ›", "The next step"));
}

export async function stepPage(run, number) {
  const { groups, of, logged, advantage_reason: advantageReason } = await ask("step", { run, step: number });
  const rewards = groups.flatMap((g) => g.rewards).filter((r) => r !== null);
  const low = Math.min(...rewards, 0), high = Math.max(...rewards, 1);
  const mixed = groups.filter((g) => !g.dead && g.trained), tied = groups.filter((g) => g.dead), left = groups.filter((g) => !g.dead && !g.trained);
  const part = (title, says, list) => (list.length ? h("section", { class: "groups-of" }, h("h2", {}, title, h("span", { class: "count num" }, list.length)), h("p", { class: "muted" }, says),
    h("div", { class: "groups" }, list.map((g) => tile(run, number, g, low, high)))) : null);
  const node = h("div", {},
    trail({ run, step: number }),
    h("div", { class: "title" }, h("h1", {}, `Step ${number}`), h("span", { class: "space" }), place(run, number, logged)),
    h("p", { class: "lead" }, `${of > groups.length ? `${groups.length} of ${of}` : of} groups: ${mixed.length} teach, ${tied.length} ${tied.length === 1 ? "is" : "are"} dead${left.length ? `, ${left.length} left out by the filter` : ""}.`),
    groups.length > 1 && !isStatic() ? search(run, number) : null,
    part("Groups that teach", "The widest spread of rewards first.", mixed),
    part("Dead groups", advantageReason ? `Their rewards are equal. ${advantageReason}` : "Their rewards are equal, so every advantage is 0: nothing was learned from these.", tied),
    part("Left out by the filter", "They have a signal, but the algorithm did not train on them.", left));
  return { title: `${run}, step ${number}`, node };
}

export const counted = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// Words in a prompt or a completion -> only the groups that have them stay.
function search(run, step) {
  const find = h("input", { type: "search", placeholder: "Words in a prompt or completion", "aria-label": "Words in a prompt or completion" });
  const count = h("span", { class: "muted", role: "status" });
  const show = latest((answer) => {
    const found = answer && new Map(answer.groups.map((g) => [String(g.group), g.completions]));
    for (const node of document.querySelectorAll(".group[data-group]")) node.hidden = found !== null && !found.has(node.dataset.group);
    for (const section of document.querySelectorAll(".groups-of")) section.hidden = !section.querySelector(".group:not([hidden])");
    const completions = found ? [...found.values()].reduce((sum, n) => sum + n, 0) : 0;
    count.textContent = found ? `${counted(completions, "completion")} in ${counted(found.size, "group")}` : "";
  }, (error) => count.replaceChildren(failure(error)));
  find.addEventListener("input", () => show(find.value ? ask("search", { run, step, words: find.value }) : Promise.resolve(null)));
  return h("p", { class: "choices" }, find, " ", count);
}

function tile(run, step, g, low, high) {
  return h("article", { class: `group ${g.dead ? "dead" : ""}`, "data-group": g.group },
    pageLink({ run, step, group: g.group }, { class: "cover", "aria-label": `Group ${g.group}, ${g.dead ? "dead" : `mean reward ${fmt(g.mean, 2)}`}` }, h("bdi", {}, written(lastLine(g.prompt)))),
    h("div", { class: "cells", "aria-hidden": "true" }, g.rewards.map((r) => h("i", { class: r === null ? "none" : "", title: r === null ? "not scored" : fmt(r, 2), vars: { "--part": r === null ? 0 : (r - low) / (high - low || 1) } }))),
    h("footer", {}, g.dead ? h("span", { class: "pill tied" }, tie(g)) : h("span", {}, "mean ", num(g.mean, 2), " ± ", num(g.spread, 2)),
      h("span", { class: "muted" }, g.dead ? why(g) : [g.truncated ? `${g.truncated} truncated` : "", g.texts < g.rewards.length ? `${g.texts} texts` : ""].filter(Boolean).join(", "))));
}

const lastLine = (text) => {
  const lines = text.split("\n").filter((l) => l.trim());
  const found = lines.at(-1) ?? "";
  return found.length > 160 ? `${found.slice(0, 160)}…` : found;
};

export async function groupPage(run, step, number) {
  const g = await ask("group", { run, step, group: number });
  const order = g.order.filter((n) => holds({ run, step, group: n })), i = order.indexOf(number);
  const go = (to, text, label) => (to === undefined ? h("span", { class: "muted" }, text) : pageLink({ run, step, group: to }, { "aria-label": label }, text));
  const bench = `#/lab/bench?rewards=${g.rewards.map((r) => r ?? 0).join(",")}&lengths=${g.lengths.map((n) => Math.max(n, 1)).join(",")}`;
  const node = h("div", {},
    trail({ run, step, group: number }),
    h("div", { class: "title" }, h("h1", {}, h("bdi", {}, written(g.problem))), h("span", { class: "space" }), h("span", { class: "pager" }, go(order[i - 1], "‹ previous", "The previous group"), go(order[i + 1], "next ›", "The next group"))),
    g.dead ? h("div", { class: "note" }, h("b", {}, "A ", term("dead group", DEAD), ". "), `Every reward is ${g.mean === null ? "missing" : fmt(g.mean, 2)} (${why(g)})${g.advantage_reason ? `. ${g.advantage_reason}` : ", so every advantage is 0."}`)
      : h("p", { class: "lead" }, "Mean reward ", num(g.mean), ", ", term("spread", SPREAD), " ", num(g.spread), g.trained ? "." : "; the filter left this group out."),
    h("section", {}, h("h2", {}, "Prompt"), prompt(g.prompt)),
    h("section", {}, h("div", { class: "title" }, h("h2", {}, "Completions", h("span", { class: "count num" }, g.completions.length < g.rewards.length ? `${g.completions.length} of ${g.rewards.length}` : g.rewards.length)), h("span", { class: "space" }), g.rewards.length > 1 && g.rewards.length <= 64 && !isStatic() ? h("a", { href: bench }, "Open this group in the lab") : null),
      g.completions.length > 2 && !isStatic() ? sieve(g) : null,
      h("div", { class: "completions" }, g.completions.map((c) => completion(run, step, g, c)))));
  return { title: `${run}, step ${step}, group ${number}`, node };
}

const textOf = (c) => (c.turns ? c.turns.map((m) => (typeof m.content === "string" ? m.content : JSON.stringify(m.content))).join("\n") : c.completion);

// The elements of a difference; a screen reader says which words are added or missing.
const MARKS = { same: "span", differs: "ins", missing: "del" };

// Controls over the completions of a group: which are shown, and what of them.
function sieve(g) {
  const find = h("input", { type: "search", placeholder: "Text in a completion", "aria-label": "Text in a completion" });
  const kind = h("select", { "aria-label": "Completions shown" }, [["", "all completions"], ["paid", "above the mean"], ["unpaid", "at or below the mean"], ["length", "truncated"]].map(([value, text]) => h("option", { value }, text)));
  const differ = h("input", { type: "checkbox" });
  const wanted = { "": () => true, paid: (c) => c.reward > g.mean, unpaid: (c) => c.reward !== null && c.reward <= g.mean, length: (c) => c.finish === "length" };
  const count = h("span", { class: "muted", role: "status" });
  const apply = () => {
    const nodes = [...document.querySelectorAll(".completions > .completion")];
    const held = g.completions.map((c) => wanted[kind.value](c) && textOf(c).toLowerCase().includes(find.value.toLowerCase()));
    nodes.forEach((node, i) => { node.hidden = !held[i]; });
    count.textContent = held.every(Boolean) ? "" : `${held.filter(Boolean).length} of ${held.length}`;
    const first = held.indexOf(true);
    nodes.forEach((node, i) => {
      const text = node.querySelector(":scope > .text"), c = g.completions[i];
      if (!text) return;
      const parts = differ.checked && i !== first && first >= 0 ? differingParts(c.completion, g.completions[first].completion) : [["", c.completion]];
      text.replaceChildren(...parts.flatMap(([mark, words]) => (mark ? [h(MARKS[mark], { class: mark }, written(words))] : written(words))));
    });
  };
  find.addEventListener("input", apply);
  for (const control of [kind, differ]) control.addEventListener("change", apply);
  return h("p", { class: "choices" }, find, " ", kind, " ", h("label", {}, differ, " mark the changes from the first"), " ", count);
}

export const prompt = (given) => (typeof given === "string" ? prose(given, { class: "prompt" })
  : h("div", { class: "chat" }, given.map((m) => h("div", { class: "message" }, h("span", { class: "role" }, written(String(m.role))), prose(typeof m.content === "string" ? m.content : JSON.stringify(m.content))))));

export function completion(run, step, g, c) {
  const largest = Math.max(...g.completions.map((x) => Math.abs(x.advantage)), 1e-12);
  const components = Object.entries(c.components);
  return h("article", { class: "completion" },
    h("header", {}, pageLink({ run, step, group: g.group, sample: c.sample }, {}, `Completion ${c.sample}`),
      h("span", { class: "muted num" }, c.tokens === null ? "" : `${c.tokens} tokens${c.inserted ? ` (${c.inserted} inserted)` : ""}`), c.finish === "length" ? h("span", { class: "pill bad" }, "truncated") : null, c.ended ? h("p", { class: "muted small end-of" }, "Ended by: ", written(c.ended)) : null),
    h("div", { class: "score" }, h("div", {}, h("span", { class: "label" }, term("reward", REWARD)), c.reward === null ? h("strong", {}, "not scored") : h("strong", {}, num(c.reward, 2))),
      h("div", {}, h("span", { class: "label" }, term("advantage", ADVANTAGE)), h("strong", {}, num(c.advantage, 3, true)), bar(c.advantage, largest))),
    components.length ? h("table", { class: "parts" }, h("caption", { class: "sr" }, "Rewards by function"), h("tbody", {}, components.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, term(written(name), g.hints?.[name])), h("td", {}, num(value, 2)),
      h("td", { class: "muted" }, g.weights[name] === undefined ? "" : ["× ", fmt(g.weights[name], 2)]),
      h("td", { class: "muted" }, written([c.status?.[name] && c.status[name] !== "ok" ? c.status[name] : "", c.extracted?.[name] ? `read ${c.extracted[name]}` : "", ...Object.entries(c.extra?.[name] ?? {}).map(([column, text]) => `${column} ${text}`)].filter(Boolean).join(", "))))))) : null,
    Object.entries(c.steps ?? {}).filter(([, steps]) => steps.length).map(([name, steps]) => h("p", { class: "steps" }, h("span", { class: "label" }, `steps, ${name}`), steps.map(([a, b, v]) => h("span", { class: "chip", title: `tokens ${a} to ${b - 1}` }, num(v, 2, true))))),
    c.turns ? prompt(c.turns) : prose(c.completion, { class: "text" }),
    c.environment ? h("p", { class: "steps" }, h("span", { class: "label" }, "environment"), Object.entries(c.environment).map(([name, value]) => h("span", { class: "chip" }, `${written(name)} ${written(JSON.stringify(value))}`))) : null);
}
