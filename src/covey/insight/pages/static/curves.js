// Curves of runs, drawn by uPlot; they follow what comes in.

import { fmt, h, isStatic, label, percent, places } from "./dom.js";

// The first charts are large; the others are folded away.
const LARGE = 3;
const AXES = [["step", "by step"], ["hours", "by hours"]];
const SMOOTHING = [["1", "as measured"], ["5", "mean of 5 points"], ["20", "mean of 20 points"]];
const COLOURS = ["a", "b", "c", "d", "e", "f"];
const known = (name, text) => [name, text];
const CHARTS = [
  ["Reward", [known("reward/mean", "training"), known("held-out:reward", "held-out")]],
  ["Accuracy", [known("accuracy", "training"), known("held-out:greedy", "held-out, greedy"), known("held-out:pass@1", "held-out, sampled")], percent],
  ["Pairs with the chosen above the rejected", [known("preference/accuracy", "training"), known("reward_model/accuracy", "training"), known("held_out/preference/accuracy", "held-out"), known("held_out/reward_model/accuracy", "held-out")], percent],
  ["Margin of the chosen", [known("preference/margin", "training"), known("reward_model/margin", "training"), known("held_out/preference/margin", "held-out"), known("held_out/reward_model/margin", "held-out")]],
  ["Dead groups", [known("groups/dead_incorrect", "all incorrect"), known("groups/dead_correct", "all correct"), known("groups/dead", "all")], percent],
  ["Rewards by function", /^reward\/[^/]+\/mean$/],
  ["Length of completions, tokens", [known("length/correct", "correct"), known("length/incorrect", "incorrect")]],
  ["Truncated completions", [known("length/truncated", "truncated")], percent],
  ["Entropy, nats per token", [known("entropy/sampled", "sampled"), known("entropy", "in the update")]],
  ["KL to the reference, nats per token", [known("kl/token_k3", "k3"), known("kl/token_k1", "k1")]],
  ["Tokens that the clip silenced", [known("clip/low", "at the lower bound"), known("clip/high", "at the upper bound"), known("clip/zero_gradient", "no gradient at all")], (v) => percent(v, 1)],
  ["Importance ratio", [known("ratio/q01", "1 %"), known("ratio/q50", "median"), known("ratio/q99", "99 %")]],
  ["Gradient by pass rate of the problem", /^gradient_share\/pass_rate_/, percent],
  ["Gradient moved elsewhere", [known("gradient_share/overweight", "to very easy or hard prompts, by the std"), known("gradient_share/shared_prefix", "blame on what good siblings say too")], percent],
  ["KL to the reference, nats per completion", [known("kl/completion_k1", "k1")]],
  ["Problems by pass rate", [known("difficulty/hard", "below 20 %"), known("difficulty/frontier", "20 to 80 %"), known("difficulty/easy", "above 80 %")], percent],
  ["Problems", [known("difficulty/tried", "tried"), known("difficulty/solved", "solved")], percent],
  ["Gradient norm", [known("optimizer/grad_norm", "norm")]],
  ["Tools, per completion", [known("tools/turns", "turns answered"), known("tools/used", "completions that used any")]],
  ["Answers of tools that report an error", [known("tools/failed", "of all answers")], percent],
  ["Signs of reflection per completion", [known("text/reflection/correct", "correct"), known("text/reflection/incorrect", "incorrect")]],
  ["How it writes", [known("text/duplicates", "copies"), known("text/repetition", "repetition"), known("text/mixed_scripts", "mixed scripts")], percent],
  ["Sampler against trainer, nats", [known("mismatch/mean", "mean"), known("mismatch/max", "largest")]],
  ["Loss", [known("loss", "loss")]],
  ["Seconds of a step", /^time:seconds\//],
  ["Tokens per second", /^time:tokens_per_second\//],
];

function columns(run) {
  const found = new Map();
  const put = (name, x, value) => {
    if (typeof value !== "number") return;
    if (!found.has(name)) found.set(name, new Map());
    found.get(name).set(x, value);
  };
  for (const m of run.metrics) for (const [name, value] of Object.entries(m)) put(name, m.step + 1, value);
  for (const t of run.timings ?? []) for (const [name, value] of Object.entries(t)) put(`time:${name}`, t.step + 1, value);
  for (const e of run.evals) for (const [name, value] of Object.entries(e)) put(`held-out:${name}`, e.step, value);
  return found;
}

// A function from a step to the hours of the run by then, on straight lines between the steps that are known.
function clock(run) {
  const times = [[0, 0], ...(run.timings ?? []).filter((t) => typeof t.elapsed === "number").map((t) => [t.step + 1, t.elapsed / 3600])];
  return (step) => {
    const i = times.findIndex(([s]) => s >= step);
    if (i <= 0) return times.at(i)[1];
    const [[s0, h0], [s1, h1]] = [times[i - 1], times[i]];
    return h0 + ((step - s0) / (s1 - s0)) * (h1 - h0);
  };
}

// Each point as the mean of it and of those before it, ``most`` in all.
function smoothed(points, most) {
  const at = [...points].sort(([p], [q]) => p - q);
  const mean = (list) => list.reduce((sum, [, v]) => sum + v, 0) / list.length;
  return new Map(at.map(([x], i) => [x, mean(at.slice(Math.max(0, i + 1 - most), i + 1))]));
}

const options = (title, list) => h("select", { "aria-label": title }, list.map(([value, text]) => h("option", { value }, text)));

// Colours as the page has them now, light or dark.
function palette(host) {
  const probe = h("span", { class: "probe" });
  host.append(probe);
  const of = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const found = { ink: of("muted"), rule: of("line"), lines: COLOURS.map((c) => of(`series-${c}`)) };
  probe.remove();
  return found;
}

// A curve that never moved is drawn from 0, so that the axis of a share does not end at 200 %.
const spread = (low, high) => (low < high ? [low, high] : [Math.min(low, 0), Math.max(low, 0) || (low ? 0 : 1)]);

export function curves(source) {
  const runs = source.compare ?? [source];
  const large = h("div", { class: "charts large" }), grid = h("div", { class: "charts" });
  const count = h("summary"), rest = h("details", { open: isStatic() || Boolean(source.compare) }, count, grid);
  const across = options("Axis of the curves", AXES), mean = options("Smoothing of the curves", SMOOTHING);
  const zero = h("p", { class: "muted small" }), more = h("select", { "aria-label": "Any other metric" });
  let plots = [], extra = null, drawn = "";
  const sync = window.uPlot?.sync(source.run ?? "two runs");

  function wanted(data) {
    const names = [...new Set(data.flatMap((d) => [...d.keys()]))];
    const has = (name) => data.some((d) => d.has(name));
    const list = CHARTS.map(([title, series, show]) => [title, series instanceof RegExp
      ? names.filter((n) => series.test(n)).sort().map((n) => known(n, n.replace(/^time:/, "").replace(/^gradient_share\/pass_rate_(.*)_(.*)/, "$1 to $2").replace(/^reward\/(.*)\/mean$/, "$1").replace(/^(seconds|tokens_per_second)\//, "")))
      : series.filter(([n]) => has(n)), show]).filter(([, series]) => series.length && series.length <= 12);
    const nothing = ([, series]) => series.every(([n]) => data.every((d) => [...(d.get(n)?.values() ?? [])].every((v) => v === 0)));
    const silent = list.filter(nothing).map(([t]) => t);
    const chosen = list.filter((c) => !nothing(c) && !(source.compare && /function|Seconds|Tokens per second|Gradient by/.test(c[0])));
    zero.textContent = silent.length && !source.compare ? `Zero so far: ${silent.join(" · ")}.` : "";
    if (extra && has(extra)) chosen.push([extra, [known(extra, extra)]]);
    return { chosen, names: names.filter((n) => n !== "step" && !/\/(low|high)$/.test(n)).sort() };
  }

  function draw() {
    if (!large.isConnected || !window.uPlot) return;
    const data = runs.map(columns);
    const { chosen: all, names } = wanted(data);
    const chosen = rest.open ? all : all.slice(0, LARGE);
    const colours = palette(large);
    rest.hidden = all.length <= LARGE;
    count.textContent = `${all.length - LARGE} more charts`;
    const shape = JSON.stringify([chosen.map(([t, s]) => [t, s.length]), colours.ink, large.clientWidth, across.value, mean.value]);
    if (shape !== drawn) {
      for (const p of plots) p.destroy();
      plots = [];
      large.replaceChildren();
      grid.replaceChildren();
      more.replaceChildren(h("option", { value: "" }, "Any other metric …"), ...names.map((n) => h("option", { value: n }, label(n))));
    }
    // All figures stand in the grid before one is measured: columns follow from their number and captions.
    const hosts = shape === drawn ? [] : chosen.map(([title]) => h("figure", { class: "chart" }, h("figcaption", {}, label(title))));
    large.append(...hosts.slice(0, LARGE));
    grid.append(...hosts.slice(LARGE));
    chosen.forEach(([, series, show], i) => {
      const { values, made, bands } = table(data, series, colours, show);
      if (shape === drawn) { plots[i].setData(values); return; }
      const host = hosts[i];
      plots.push(new window.uPlot({
        width: host.clientWidth - 2, height: i < LARGE ? 240 : 176, cursor: { sync: { key: sync.key }, y: false, points: { size: 6 } },
        scales: { x: { time: false }, y: { range: (_, low, high) => window.uPlot.rangeNum(...spread(low ?? 0, high ?? low ?? 0), 0.06, true) } }, legend: { live: true, markers: { dash: (u, k) => (u.series[k].dash ? "dashed" : "solid") } },
        axes: [axis(colours, across.value === "hours" ? (v, step) => fmt(v, places(step)) : (v) => (Number.isInteger(v) ? fmt(v, 0) : ""), 30), axis(colours, show ? (v, step) => percent(v, places(100 * step)) : (v, step) => fmt(v, places(step)), 56)],
        series: [{ label: across.value }, ...made], bands,
      }, values, host));
    });
    drawn = shape;
  }

  function table(data, series, colours, show) {
    const lines = data.flatMap((d, r) => series.map(([name, text], k) => ({ points: d.get(name) ?? new Map(), name, text: source.compare ? `${runs[r].name}: ${text}` : text, r, k }))).filter((l) => l.points.size || !source.compare);
    const colour = (l, i) => colours.lines[(source.compare ? l.r : i) % COLOURS.length];
    const made = lines.map((l, i) => ({
      label: label(l.text), stroke: colour(l, i), width: 1.75, spanGaps: true,
      dash: source.compare && l.k ? [5, 4] : undefined, points: { show: l.name.startsWith("held-out:") || l.points.size < 2, size: 6 },
      value: (_, v) => (v === null || v === undefined ? "" : (show ?? ((x) => fmt(x, 3)))(v)),
    }));
    // The ends of an estimate's interval are lines that are not seen, with a band between them.
    const bands = [];
    lines.forEach((l, i) => {
      const [low, high] = ["low", "high"].map((end) => data[l.r].get(`${l.name}/${end}`));
      if (source.compare || !low || !high) return;
      bands.push({ series: [made.length + 2, made.length + 1], fill: `color-mix(in srgb, ${colour(l, i)} 14%, transparent)` });
      for (const points of [low, high]) {
        made.push({ class: "end", width: 0, spanGaps: true, points: { show: false } });
        lines.push({ points, r: l.r });
      }
    });
    for (const l of lines) {
      // Held-out points are few, and have intervals of their own.
      if (mean.value !== "1" && l.name && !l.name.startsWith("held-out:")) l.points = smoothed(l.points, Number(mean.value));
      const hours = clock(runs[l.r]);
      if (across.value === "hours") l.points = new Map([...l.points].map(([step, v]) => [hours(step), v]));
    }
    const xs = [...new Set(lines.flatMap((l) => [...l.points.keys()]))].sort((p, q) => p - q);
    return { values: [xs, ...lines.map((l) => xs.map((x) => l.points.get(x) ?? null))], made, bands };
  }

  const again = () => { drawn = ""; draw(); };
  const watch = new ResizeObserver(() => draw());
  more.addEventListener("change", () => { extra = more.value; rest.open = true; again(); });
  for (const choice of [across, mean]) choice.addEventListener("change", again);
  rest.addEventListener("toggle", again);
  window.addEventListener("covey-theme", again);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", again);
  return {
    node: h("div", {}, h("p", { class: "choices" }, across, " ", mean), large, rest, zero, h("p", {}, more)),
    draw: () => { watch.observe(large); draw(); },
    leave: () => { watch.disconnect(); window.removeEventListener("covey-theme", again); scheme.removeEventListener("change", again); for (const p of plots) p.destroy(); },
  };
}

const axis = (colours, show, size = 36) => ({
  stroke: colours.ink, size, font: "12px system-ui", grid: { stroke: colours.rule, width: 1 }, ticks: { show: false },
  values: (_, splits, of, room, step) => splits.map((v) => show(v, step)),
});
