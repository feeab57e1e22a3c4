// The lab: its table of contents, its first page, and guided pages that walk a tool through an example.

import { ask, failure, h, isStatic, num, percent } from "./dom.js";
import { models, ways } from "./drawings.js";
import { useTexts, VIEWS } from "./tools.js";

const TOOLS = [
  ["", "Dead groups in a minute"],
  ["bench", "A group of completions"],
  ["weights", "Where the gradient goes"],
  ["gate", "The clip"],
  ["kl", "The KL penalty"],
  ["odds", "Odds of a dead group"],
  ["toy", "A toy policy"],
  ["models", "PPO and GRPO"],
  ["ways", "Three ways to train"],
];
const INTRO = {
  bench: ["A group of completions", "Set the rewards of 2 to 64 completions. Every estimator that covey knows answers at once, with your numbers in its formula."],
  weights: ["Where the gradient goes", "An advantage is shared by the tokens of its completion. How much each of them gets is the reduction's choice."],
  gate: ["The clip", "The weight of a token's gradient, as the token becomes likelier or less likely than when it was sampled."],
  kl: ["The KL penalty", "Estimators of the divergence from the reference, for a choice between two tokens."],
  odds: ["Odds of a dead group", "How often all G completions of a group tie, if each of them is correct with probability p."],
  toy: ["A toy policy", "A handful of answers, one of them correct, trained by the same loss as a language model."],
};
let held = null;

export async function lab(parts) {
  held ??= await ask("lab");
  useTexts(held);
  const [page = "", id] = parts;
  const query = Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? ""));
  const guide = page === "guide" ? held.guides.find((g) => g.id === id) : null;
  if (page === "guide" && !guide) throw new Error("There is no such example.");
  let body;
  if (guide) body = guided(guide);
  else if (page === "models") body = models(held.algorithms);
  else if (page === "ways") body = ways(held.ways, held.algorithms, held.dpo);
  else if (page === "") body = first();
  else if (VIEWS[page]) body = tool(page, query);
  else throw new Error("There is no such page in the lab.");
  return { title: guide?.title ?? TOOLS.find(([k]) => k === page)?.[1] ?? "Lab", node: h("div", { class: "lab" }, contents(page === "guide" ? `guide/${id}` : page), h("div", { class: "bench" }, body)) };
}

function contents(now) {
  const entry = (key, text) => h("li", {}, h("a", { href: key ? `#/lab/${key}` : "#/lab", "aria-current": key === now ? "page" : null }, text));
  const all = [...TOOLS, ...held.guides.map((g) => [`guide/${g.id}`, g.title])];
  return h("nav", { class: "contents", "aria-label": "The lab" },
    h("select", { "aria-label": "Pages of the lab", onchange: (e) => { location.hash = e.target.value ? `/lab/${e.target.value}` : "/lab"; } }, all.map(([key, text]) => h("option", { value: key, selected: key === now }, text))),
    h("h2", {}, "Try"), h("ul", {}, TOOLS.map(([k, t]) => entry(k, t))),
    h("h2", {}, "Worked examples"), h("ul", {}, held.guides.map((g) => entry(`guide/${g.id}`, g.title))));
}

// --- the first page: what a dead group is, in a minute -----------------------------------------------

function first() {
  const cards = held.guides.find((g) => g.id === "cards"), given = cards.looks[0].ask;
  const said = h("p", { class: "lead live", "aria-live": "polite" });
  const host = h("div");
  const drawn = (a, state) => {
    const right = state.rewards.filter((r) => r > 0.5).length, of = state.rewards.length;
    const z = a.estimators.find((e) => e.name === "group_zscore").advantages;
    said.replaceChildren(...(a.dead
      ? [h("b", {}, right ? "All correct. " : "All incorrect. "), "Nobody did better than the others, so every advantage is 0: a ", h("b", {}, "dead group"), "."]
      : [`${right} of ${of} are correct. Compared with their siblings, the correct ones get `, num(Math.max(...z), 2, true), " and become likelier, the incorrect ones get ", num(Math.min(...z), 2, true), " and become less likely."]));
  };
  const show = (rewards) => VIEWS.cards(host, { ...given, rewards }, { guide: cards, plain: true, drawn });
  const set = (text, rewards) => h("button", { type: "button", onclick: () => show(rewards) }, text);
  const odds = h("div");
  show(given.rewards);
  VIEWS.odds(odds, { p: "0.2", size: "8" }, { plain: true });
  return h("div", {},
    h("h1", {}, "Dead groups in a minute"),
    h("p", { class: "lead" }, "GRPO trains a language model by comparison. It samples a group of answers to one question, lets a program check each of them, and makes those likelier that did better than their siblings."),
    h("ol", { class: "minute" },
      h("li", {}, h("h2", {}, "One question, six answers"), h("blockquote", {}, cards.prompt),
        h("p", {}, "The large number on a card is the answer's ", h("b", {}, "advantage"), ": how far its reward lies above the group's mean or below it, in standard deviations. Blue becomes likelier, orange less likely. Click a card to flip its answer."),
        host, said),
      h("li", {}, h("h2", {}, "Now make them all alike"),
        h("div", { class: "tools" }, set("All correct", "1,1,1,1,1,1"), set("All incorrect", "0,0,0,0,0,0"), set("Four of six", given.rewards)),
        h("p", {}, "The bars vanish. Without a difference inside the group there is nothing to learn, and its answers were sampled for nothing: on a problem that is too easy as on one that is too hard.")),
      h("li", {}, h("h2", {}, "How often that happens"),
        h("p", {}, "It depends on how often the model solves the problem, and on how many answers a group has. Problems that it solves about half of the time teach the most."), odds,
        h("p", { class: "muted" }, "Before a run, ", h("code", {}, "covey preview"), " measures it on your model and your problems, and says which group size, temperature or data would help."))),
    h("p", { class: "next" }, h("a", { class: "button", href: "#/lab/guide/tickets" }, "Walk through an example"), " ", isStatic() ? null : h("a", { href: "#/lab/bench" }, "or set your own rewards")));
}

function tool(name, query) {
  const [title, intro] = INTRO[name] ?? [name, ""];
  const host = h("div");
  VIEWS[name](host, query, {});
  return h("div", {}, h("h1", {}, title), h("p", { class: "lead" }, intro), host);
}

// --- guided pages ----------------------------------------------------------------------------------

function guided(guide) {
  let now = 0;
  const host = h("div"), say = h("p", { class: "say", "aria-live": "polite" }), dots = h("div", { class: "dots", role: "group", "aria-label": "States of this example" });
  const back = h("button", { type: "button", onclick: () => look(now - 1) }, "Back");
  const on = h("button", { type: "button", class: "primary", onclick: () => (now + 1 < guide.looks.length ? look(now + 1) : after()) }, "Next");
  const following = held.guides[held.guides.indexOf(guide) + 1];
  const after = () => { location.hash = following ? `/lab/guide/${following.id}` : "/lab"; };

  function look(to) {
    now = to;
    const asked = guide.looks[now].ask;
    dots.replaceChildren(...guide.looks.map((_, i) => h("button", { type: "button", "aria-label": `State ${i + 1} of ${guide.looks.length}`, "aria-current": i === now ? "step" : null, onclick: () => look(i) })));
    back.disabled = now === 0;
    on.textContent = now + 1 < guide.looks.length ? "Next" : following ? `On: ${following.title}` : "To the beginning";
    host.replaceChildren();
    say.replaceChildren("…");
    // An answer may come late, when the reader is at another state.
    const tell = (...parts) => { if (now === to) say.replaceChildren(...parts); };
    VIEWS[guide.view](host, { ...asked }, { guide, drawn: (answer, _, query) => tell(...(same(query, asked) ? filled(guide.looks[to].say, answer) : ["You changed it. ", h("button", { type: "button", class: "plain", onclick: () => look(to) }, "Back to the example")])) });
    ask(`lab/${guide.tool}`, asked).then((answer) => tell(...filled(guide.looks[to].say, answer)), (error) => tell(failure(error)));
  }

  look(0);
  return h("div", { class: "guide" }, h("h1", {}, guide.title), h("p", { class: "lead" }, guide.intro), guide.prompt ? h("blockquote", {}, guide.prompt) : null,
    h("div", { class: "telling" }, say, h("div", { class: "steps-of" }, back, dots, on)), host);
}

const same = (a, b) => Object.entries(b).every(([k, v]) => String(a[k] ?? "") === v);

// `{path:digits}` in a sentence is a number of the answer.
export function filled(text, answer) {
  return text.split(/(\{[^{}]+\})/).map((part) => {
    const found = /^\{([^:]+):([+%]?)(\d)\}$/.exec(part);
    if (!found) return part;
    const value = found[1].split(".").reduce((at, k) => (Array.isArray(at) && Number.isNaN(Number(k)) ? at.find((x) => x.name === k) : at?.[k]), answer);
    if (found[2] === "%") return h("span", { class: "num", "data-value": value }, percent(value, Number(found[3])));
    return num(value, Number(found[3]), found[2] === "+");
  });
}
