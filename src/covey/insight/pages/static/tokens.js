// One completion, token by token: each coloured by a quantity, every number at hand by mouse and by keyboard.

import { ask, choice, fmt, h, num, pageLink, prose, trail, written } from "./dom.js";
import { lines } from "./plot.js";
import { prompt } from "./step.js";

const NAMES = { applied: "gradient", advantage: "advantage", logprob: "log-prob", ratio: "ratio", kl: "KL", entropy: "entropy", critic: "critic", value: "value", clip: "clip" };
const SIGNED = new Set(["applied", "advantage"]);
const STATES = { kept: "trained", silent: "silenced: it has an advantage, but no gradient", still: "no advantage, so no gradient", unseen: "no update saw it" };

// What the clip (or a mask) did with a token follows from what was applied to it.
function clipStates(values) {
  if (!values.applied) return null;
  return values.applied.map((a, t) => (a === null ? "unseen" : a !== 0 ? "kept" : values.advantage[t] === 0 ? "still" : "silent"));
}

export async function tokenPage(run, step, group, sample, focus) {
  const found = await ask("tokens", { run, step, group, sample });
  const { ids, pieces, values, row } = found;
  const clip = clipStates(values);
  const shown = { ...found.quantities, ...(clip ? { clip: "what the clip rule, a mask or a token weight did" } : {}) };
  let quantity = ["applied", "advantage"].find((q) => values[q]?.some((v) => v)) ?? (values.logprob ? "logprob" : Object.keys(shown)[0]);
  let current = Math.min(Number(focus) || 0, Math.max(ids.length - 1, 0));
  const inserted = new Set(found.inserted);
  const starts = new Set(Object.values(row.steps ?? {}).flat().map(([a]) => a));
  const spans = ids.map((id, t) => h("span", { class: `tok ${starts.has(t) ? "begins" : ""} ${inserted.has(t) ? "inserted" : ""}`, "data-t": t, role: "option", id: `t${t}` }, piece(t)));
  const text = h("div", { class: "tokens", tabindex: "0", role: "listbox", "aria-label": "The tokens of this completion; arrows move", onkeydown: key, onclick: (e) => move(e.target.closest(".tok")), onpointerover: (e) => move(e.target.closest(".tok"), false) }, spans);
  const panel = h("aside", { class: "panel", "aria-live": "polite" }), legend = h("div", { class: "legend" }), drawing = h("div", { class: "along" });

  function piece(t) {
    if (!pieces) return `#${ids[t]} `;
    return pieces[t] === "" ? "·" : written(pieces[t]);
  }

  function scale(q) {
    const known = (values[q] ?? []).filter((v) => v !== null);
    if (SIGNED.has(q)) return { low: -Math.max(...known.map(Math.abs), 1e-12), high: Math.max(...known.map(Math.abs), 1e-12) };
    if (q === "ratio") { const far = Math.max(...known.map((v) => Math.abs(v - 1)), 1e-6); return { low: 1 - far, high: 1 + far }; }
    const low = Math.min(...known, ["logprob", "value", "critic"].includes(q) ? Infinity : 0), high = Math.max(...known, q === "logprob" ? 0 : -Infinity);
    return { low, high: high > low ? high : low + 1 };
  }

  function paint() {
    const { low, high } = quantity === "clip" ? {} : scale(quantity);
    const twoSided = SIGNED.has(quantity) || quantity === "ratio";
    spans.forEach((span, t) => {
      span.classList.remove("up", "down", "one", "none", "silent");
      const v = inserted.has(t) ? null : quantity === "clip" ? clip[t] : values[quantity][t];
      if (v === null || v === "unseen") { span.classList.add("none"); span.style.removeProperty("--part"); return; }
      if (quantity === "clip") { span.classList.add(v === "silent" ? "silent" : "one"); span.style.setProperty("--part", v === "kept" ? 0.35 : 0); return; }
      const middle = (low + high) / 2;
      const part = twoSided ? Math.abs(v - middle) / ((high - low) / 2) : quantity === "logprob" ? (high - v) / (high - low) : (v - low) / (high - low);
      span.classList.add(twoSided ? (v >= middle ? "up" : "down") : "one");
      span.style.setProperty("--part", part.toFixed(3));
    });
    const said = inserted.size ? [h("span", { class: "tok inserted" }, "said by a tool: read, not trained")] : [];
    legend.replaceChildren(...said, ...(quantity === "clip"
      ? [h("span", { class: "tok one", vars: { "--part": 0.35 } }, "trained"), h("span", { class: "tok silent" }, "silenced"), h("span", { class: "tok none" }, "no update saw it")]
      : [h("span", { class: "num" }, fmt(low, near(low), SIGNED.has(quantity))), h("span", { class: `ramp ${twoSided ? "two" : quantity === "logprob" ? "back" : "one"}` }), h("span", { class: "num" }, fmt(high, near(high), SIGNED.has(quantity))), ...(values[quantity].some((v, t) => v === null && !inserted.has(t)) ? [h("span", { class: "tok none" }, "no update saw it")] : [])]),
    h("span", { class: "muted" }, shown[quantity]));
    const xs = ids.map((_, t) => t);
    drawing.replaceChildren(quantity === "clip" || ids.length < 2 ? "" : lines({ label: `${NAMES[quantity]} along the completion`, series: [{ name: NAMES[quantity], tone: "a", xs, ys: values[quantity] }], x: "token", width: 1100, height: 140, ...(quantity === "ratio" ? { yRange: [low, high] } : {}) }));
  }

  const near = (v) => (Math.abs(v) < 0.1 ? 5 : 3);

  function tell() {
    text.setAttribute("aria-activedescendant", `t${current}`);
    spans.forEach((s, t) => s.classList.toggle("at", t === current));
    const one = (name, value) => h("tr", { class: name === quantity ? "now" : "" }, h("th", { scope: "row", title: shown[name] }, NAMES[name] ?? name), h("td", {}, typeof value === "number" || value === null ? num(value, near(value ?? 1), SIGNED.has(name)) : value));
    panel.replaceChildren(h("h3", {}, `Token ${current}`, h("span", { class: "muted num" }, ` of ${ids.length}`)), h("p", { class: "piece" }, h("code", {}, pieces ? (pieces[current] === "" ? "part of a character" : written(JSON.stringify(pieces[current]))) : "no tokenizer at hand")),
      h("table", {}, h("tbody", {}, one("id", String(ids[current])), Object.keys(found.quantities).map((q) => one(q, values[q][current])), clip ? one("clip", inserted.has(current) ? "a tool said it: read, not trained" : STATES[clip[current]]) : null)));
  }

  function move(span, force = true) {
    if (!span || !text.contains(span)) return;
    if (force || !text.matches(":focus")) { current = Number(span.dataset.t); tell(); }
  }

  function key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -ids.length, End: ids.length }[event.key];
    if (!by) return;
    event.preventDefault();
    current = Math.min(Math.max(current + by, 0), ids.length - 1);
    tell();
    spans[current].scrollIntoView({ block: "nearest" });
  }

  const go = (to, words) => (to < 0 || to >= found.siblings ? h("span", { class: "muted" }, words) : pageLink({ run, step, group, sample: to }, {}, words));
  const node = h("div", {},
    trail({ run, step, group, sample }),
    h("div", { class: "title" }, h("h1", {}, `Completion ${sample}`), h("span", { class: "space" }), h("span", { class: "pager" }, go(sample - 1, "‹ previous"), go(sample + 1, "next ›"))),
    h("p", { class: "lead" }, "Reward ", num(row.reward, 2), ", advantage ", num(row.advantage, 3, true), row.tokens === null ? "." : `, ${row.tokens} tokens${row.inserted ? ` (${row.inserted} inserted)` : ""}.`, row.ended ? [" Ended by: ", written(row.ended), "."] : ""),
    h("details", {}, h("summary", {}, "Prompt"), prompt(found.prompt)),
    pieces || !ids.length ? null : h("p", { class: "note" }, "No tokenizer of this run is on this machine yet, so tokens are shown by number. A checkpoint brings one."),
    row.lacks ? h("p", { class: "note" }, written(row.lacks)) : null,
    ids.length && quantity ? [choice({ label: "Colour by", value: quantity, options: Object.keys(shown).map((q) => [q, NAMES[q], shown[q]]), change: (q) => { quantity = q; paint(); tell(); } }), legend,
      h("div", { class: "coloured" }, drawing, h("div", { class: "reading" }, text, panel))] : row.lacks ? prose(row.completion, { class: "text" }) : h("p", { class: "note" }, "This completion is empty."));
  if (ids.length && quantity) { paint(); tell(); }
  return { title: `${run}, step ${step}, completion ${sample}`, node, shown: () => { if (focus !== undefined && ids.length) spans[current].scrollIntoView({ block: "center" }); } };
}
