// Curves of runs, drawn by uPlot; they follow what comes in.

import { band, bundles } from "./bands.js";
import { CHARTS, known } from "./charts.js";
import { chooser, fmt, h, hintOf, isStatic, label, percent, places, term } from "./dom.js";
import { csvButton } from "./download.js";

// The first charts are large; the others are folded away.
const LARGE = 3;
const AXES = [["step", "by step"], ["hours", "by hours"], ["tokens", "by tokens trained on"]];
const SMOOTHING = [["1", "as measured"], ["5", "mean of 5 points"], ["20", "mean of 20 points"]];
const SEEDS = [["band", "seeds: mean and range"], ["single", "seeds: one curve each"]];
const COLOURS = ["a", "b", "c", "d", "e", "f"];
// The runs of a comparison past the colours have them again, as other lines.
const DASHES = [undefined, [6, 4], [2, 3]];
// The metrics of a comparison that come first.
const LEADING = ["reward/mean", "held-out:greedy", "groups/dead"];

function columns(run) {
  const found = new Map();
  const put = (name, x, value) => {
    if (typeof value !== "number") return;
    if (!found.has(name)) found.set(name, new Map());
    found.get(name).set(x, value);
  };
  for (const m of run.metrics) for (const [name, value] of Object.entries(m)) put(name, m.step, value);
  for (const t of run.timings ?? []) for (const [name, value] of Object.entries(t)) put(`time:${name}`, t.step, value);
  for (const e of run.evals) for (const [name, value] of Object.entries(e)) put(`held-out:${name}`, e.step, value);
  return found;
}

// How a place on each axis is written.
const AT = {
  step: (v) => (Number.isInteger(v) ? fmt(v, 0) : ""),
  hours: (v, step) => fmt(v, places(step)),
  tokens: (v) => v.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 }),
};

// The record of a step -> what the run had come to by its end, along an axis other than the step.
const COME_TO = { hours: (t) => t.elapsed / 3600, tokens: (t) => t.tokens };

// A function from a step to hours or tokens, on straight lines between the steps that are known.
function along(axis, run) {
  const steps = [[0, 0], ...(run.timings ?? []).map((t) => [t.step, COME_TO[axis](t)]).filter(([, v]) => Number.isFinite(v))];
  return (step) => {
    const i = steps.findIndex(([s]) => s >= step);
    if (i <= 0) return steps.at(i)[1];
    const [[s0, v0], [s1, v1]] = [steps[i - 1], steps[i]];
    return v0 + ((step - s0) / (s1 - s0)) * (v1 - v0);
  };
}

// Each point as the mean of it and of those before it, ``most`` in all.
function smoothed(points, most) {
  const at = [...points].sort(([p], [q]) => p - q);
  const mean = (list) => list.reduce((sum, [, v]) => sum + v, 0) / list.length;
  return new Map(at.map(([x], i) => [x, mean(at.slice(Math.max(0, i + 1 - most), i + 1))]));
}

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

// The series of a chart by their names; those of a pattern are the metrics that it matches.
const PARTS = [[/^time:/, ""], [/^gradient_share\/pass_rate_(.*)_(.*)/, "$1 to $2"], [/^reward\/(.*)\/mean$/, "$1"], [/^(seconds|tokens_per_second)\//, ""]];
const shortName = (name) => PARTS.reduce((text, [pattern, by]) => text.replace(pattern, by), name);
const seriesOf = (series, names) => (series instanceof RegExp ? names.filter((n) => series.test(n)).sort().map((n) => known(n, shortName(n))) : series.filter(([n]) => names.includes(n)));

// In a comparison each colour is a run, so that a chart has room for one metric only.
function oneMetricEach(list) {
  const rank = ([, [[name]]]) => (LEADING.includes(name) ? LEADING.indexOf(name) : LEADING.length);
  return list.flatMap(([title, series, show]) => series.map((one) => [series.length > 1 ? `${title}: ${one[1]}` : title, [one], show])).sort((a, b) => rank(a) - rank(b));
}

// `source`: the page of a run, or {compare: pages of runs}.
export function curves(source) {
  const runs = source.compare ?? [source], together = bundles(runs), several = together.length < runs.length;
  const large = h("div", { class: "charts large" }), grid = h("div", { class: "charts" });
  const count = h("summary"), rest = h("details", { open: isStatic() }, count, grid);
  const across = chooser("Axis of the curves", AXES), mean = chooser("Smoothing of the curves", SMOOTHING), seeds = chooser("Runs of several seeds", SEEDS);
  const zero = h("p", { class: "muted small" }), more = h("select", { "aria-label": "Any other metric" });
  const said = h("p", { class: "muted small" }, "Each line is the mean over the seeds of a setting that have reached the step. Its band spans their lowest and highest values.");
  let plots = [], extra = null, drawn = "";
  const sync = window.uPlot?.sync(source.run ?? "two runs");
  // Two runs are compared with each other, even if only their seeds differ.
  if (!several || runs.length === 2) seeds.value = "single";

  function wanted(data) {
    const names = [...new Set(data.flatMap((d) => [...d.keys()]))];
    const list = CHARTS.map(([title, series, show]) => [title, seriesOf(series, names), show]).filter(([, series]) => series.length && series.length <= 12);
    const nothing = ([, series]) => series.every(([n]) => data.every((d) => [...(d.get(n)?.values() ?? [])].every((v) => v === 0)));
    const silent = list.filter(nothing).map(([title]) => title);
    const moved = list.filter((c) => !nothing(c) && !(source.compare && /function|Seconds|Tokens per second|Gradient by/.test(c[0])));
    const chosen = source.compare ? oneMetricEach(moved).filter((c) => !nothing(c)) : moved;
    zero.textContent = silent.length && !source.compare ? `Zero so far: ${silent.join(" · ")}.` : "";
    if (extra && names.includes(extra)) chosen.unshift([extra, [known(extra, extra)]]);
    return { chosen, names: names.filter((n) => n !== "step" && !/\/(low|high)$/.test(n)).sort() };
  }

  function draw() {
    if (!large.isConnected || !window.uPlot) return;
    const data = runs.map(columns), colours = palette(large), { chosen: all, names } = wanted(data);
    const chosen = rest.open ? all : all.slice(0, LARGE);
    const tables = chosen.map(([, series, show]) => table(data, series, colours, show));
    rest.hidden = all.length <= LARGE;
    said.hidden = seeds.value === "single";
    count.textContent = `${all.length - LARGE} more ${all.length === LARGE + 1 ? "chart" : "charts"}`;
    const shape = JSON.stringify([chosen.map(([title], i) => [title, tables[i].values.length]), colours.ink, large.clientWidth, across.value, mean.value, seeds.value]);
    if (shape === drawn) {
      tables.forEach(({ values }, i) => plots[i].setData(values));
      return;
    }
    drawn = shape;
    for (const p of plots) p.destroy();
    more.replaceChildren(h("option", { value: "" }, "any other metric …"), ...names.map((n) => h("option", { value: n }, label(n))));
    more.value = extra ?? "";
    // All figures stand in the grid before one is measured: columns follow from their number and captions.
    const hosts = chosen.map(([title, series], i) => h("figure", { class: "chart" }, h("figcaption", {}, term(label(title), hintsOf(series)), csvButton(title, () => rowsOfPlot(plots[i])))));
    large.replaceChildren(...hosts.slice(0, LARGE));
    grid.replaceChildren(...hosts.slice(LARGE));
    plots = chosen.map(([, , show], i) => plot(hosts[i], tables[i], colours, show, i < LARGE ? 240 : 176));
  }

  function hintsOf(series) {
    const hints = Object.assign({}, ...runs.map((run) => run.hints));
    return series.map(([name, text]) => [text, hintOf(hints, name)]).filter(([, hint]) => hint).map(([text, hint]) => `${label(text)}: ${hint}`).join("\n");
  }

  const rowsOfPlot = ({ data, series }) => [series.map((s) => s.label), ...data[0].map((_, i) => data.map((column) => column[i]))];

  function plot(host, { values, made, bands }, colours, show, height) {
    const number = show ? (v, step) => percent(v, places(100 * step)) : (v, step) => fmt(v, places(step));
    const place = AT[across.value];
    return new window.uPlot({
      width: host.clientWidth - 2, height, cursor: { sync: { key: sync.key }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (_, low, high) => window.uPlot.rangeNum(...spread(low ?? 0, high ?? low ?? 0), 0.06, true) } }, legend: { live: true, markers: { dash: (u, k) => (u.series[k].dash ? "dashed" : "solid") } },
      axes: [axis(colours, place, 30), axis(colours, number, 56)],
      series: [{ label: across.value }, ...made], bands,
    }, values, host);
  }

  // The points of a metric of a run as the reader wants them. Held-out points are few, and have intervals of their own.
  function shaped(points, r, name) {
    const smooth = mean.value !== "1" && !name.startsWith("held-out:") ? smoothed(points, Number(mean.value)) : points;
    if (across.value === "step") return smooth;
    const place = along(across.value, runs[r]);
    return new Map([...smooth].map(([step, v]) => [place(step), v]));
  }

  function table(data, series, colours, show) {
    const lines = [], made = [], bands = [];
    const single = seeds.value === "single", shown = single ? runs.map((run) => ({ name: run.run, runs: [run] })) : together;
    const hue = (bundle, b) => (!single || together.length === 1 || runs.length <= COLOURS.length ? b : together.findIndex((t) => t.runs.includes(bundle.runs[0])));
    // The ends of an interval are lines that are not seen, with a band between them.
    const between = (low, high, name, colour) => {
      bands.push({ series: [made.length + 2, made.length + 1], fill: `color-mix(in srgb, ${colour} 14%, transparent)` });
      for (const [points, end] of [[low, "lowest"], [high, "highest"]]) {
        made.push({ class: "end", label: `${name}, ${end}`, width: 0, spanGaps: true, points: { show: false } });
        lines.push(points);
      }
    };
    shown.forEach((bundle, b) => series.forEach(([name, text], k) => {
      const own = bundle.runs.map((run) => runs.indexOf(run)).filter((r) => data[r].has(name)).map((r) => shaped(data[r].get(name), r, name));
      if (!own.length) return;
      const spanned = own.length > 1 ? band(own) : null, points = spanned?.mean ?? own[0];
      const line = source.compare ? hue(bundle, b) : k, colour = colours.lines[line % COLOURS.length], words = label(source.compare ? bundle.name : text);
      made.push({
        label: words, stroke: colour, width: 1.75, spanGaps: true,
        dash: DASHES[Math.floor(line / COLOURS.length) % DASHES.length], points: { show: name.startsWith("held-out:") || points.size < 2, size: 6 },
        value: (_, v) => (v === null || v === undefined ? "" : (show ?? ((x) => fmt(x, 3)))(v)),
      });
      lines.push(points);
      if (spanned) between(spanned.low, spanned.high, words, colour);
      const [low, high] = ["low", "high"].map((end) => data[0].get(`${name}/${end}`));
      if (!source.compare && low && high) between(shaped(low, 0, name), shaped(high, 0, name), words, colour);
    }));
    const xs = [...new Set(lines.flatMap((points) => [...points.keys()]))].sort((p, q) => p - q);
    return { values: [xs, ...lines.map((points) => xs.map((x) => points.get(x) ?? null))], made, bands };
  }

  const again = () => { drawn = ""; draw(); };
  const watch = new ResizeObserver(() => draw());
  more.addEventListener("change", () => { extra = more.value; again(); });
  for (const choice of [across, mean, seeds]) choice.addEventListener("change", again);
  rest.addEventListener("toggle", again);
  window.addEventListener("covey-theme", again);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", again);
  return {
    node: h("div", {}, h("p", { class: "choices" }, across, mean, several ? seeds : null, more), said, large, rest, zero),
    draw: () => { watch.observe(large); draw(); },
    leave: () => { watch.disconnect(); window.removeEventListener("covey-theme", again); scheme.removeEventListener("change", again); for (const p of plots) p.destroy(); },
  };
}

const axis = (colours, show, size = 36) => ({
  stroke: colours.ink, size, font: "12px system-ui", grid: { stroke: colours.rule, width: 1 }, ticks: { show: false },
  values: (_, splits, of, room, step) => splits.map((v) => show(v, step)),
});
