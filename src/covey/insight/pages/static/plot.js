// Small drawings as SVG: lines over an axis, bars around zero.

import { fmt, h, places, svg } from "./dom.js";

function ticks(low, high, count = 5) {
  const span = high - low || 1;
  const unit = 10 ** Math.floor(Math.log10(span / count));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => span / s <= count) ?? span;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return found;
}

// series: [{name, tone, xs, ys, dash}]; marks: [{x, y, tone}]
export function lines({ label, series, marks = [], x: xLabel = "", y: yLabel = "", xRange, yRange, width: widest = 720, height = 260, show }) {
  const width = Math.max(300, Math.min(widest, document.documentElement.clientWidth - 40));
  const xs = series.flatMap((s) => s.xs), ys = series.flatMap((s) => s.ys).filter((v) => v !== null);
  const [x0, x1] = xRange ?? [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = yRange ?? [Math.min(...ys, 0), Math.max(...ys, 0)];
  if (!(y1 > y0)) y1 = y0 + 1;
  const rows = ticks(y0, y1), digits = places(rows[1] - rows[0] || 1);
  const said = show ?? ((v) => fmt(v, digits));
  const room = Math.max(...rows.map((v) => said(v).length));
  const pad = { left: Math.max(48, 7 * room + 12), right: 14, top: yLabel ? 28 : 12, bottom: xLabel ? 40 : 24 };
  const X = (v) => pad.left + ((v - x0) / (x1 - x0 || 1)) * (width - pad.left - pad.right);
  const Y = (v) => height - pad.bottom - ((Math.min(Math.max(v, y0), y1) - y0) / (y1 - y0)) * (height - pad.top - pad.bottom);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "plot" });
  node.style.maxWidth = `${width}px`;
  for (const v of rows) {
    node.append(svg("line", { class: v === 0 ? "axis" : "rule", x1: pad.left, x2: width - pad.right, y1: Y(v), y2: Y(v) }),
      svg("text", { x: pad.left - 8, y: Y(v) + 4, "text-anchor": "end" }, said(v)));
  }
  for (const v of ticks(x0, x1, 6)) node.append(svg("text", { x: X(v), y: height - pad.bottom + 18, "text-anchor": "middle" }, fmt(v, Number.isInteger(v) ? 0 : 2)));
  node.append(svg("text", { class: "of", x: (pad.left + width - pad.right) / 2, y: height - 3, "text-anchor": "middle" }, xLabel));
  if (yLabel) node.append(svg("text", { class: "of", x: 0, y: 12 }, yLabel));
  for (const s of series) {
    let path = "", pen = false;
    s.xs.forEach((v, i) => {
      if (s.ys[i] === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${X(v).toFixed(1)} ${Y(s.ys[i]).toFixed(1)}`;
      pen = true;
    });
    node.append(svg("path", { d: path, class: `line ${s.tone}`, ...(s.dash ? { "stroke-dasharray": s.dash } : {}) }));
  }
  for (const m of marks) node.append(svg("line", { class: "mark", x1: X(m.x), x2: X(m.x), y1: pad.top, y2: height - pad.bottom }), svg("circle", { cx: X(m.x), cy: Y(m.y), r: 5, class: `dot ${m.tone}` }));
  const key = series.filter((s) => s.name).map((s) => h("span", { class: `key ${s.tone}` }, s.name));
  return h("figure", { class: "drawing" }, node, key.length > 1 ? h("figcaption", {}, key) : null);
}

// A value as a bar from the middle, to the right where it is positive.
export function bar(value, largest) {
  const part = largest ? Math.min(Math.abs(value) / largest, 1) : 0;
  return h("span", { class: `bar ${value > 0 ? "up" : value < 0 ? "down" : ""}`, "aria-hidden": "true", vars: { "--part": part } }, h("i"));
}

export function spark(values, label) {
  const known = values.filter((v) => v !== null && v !== undefined);
  if (known.length < 2) return h("span", { class: "spark" });
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  const points = values.map((v, i) => (v === null || v === undefined ? null : `${((i / (values.length - 1)) * 118 + 1).toFixed(1)},${(27 - ((v - low) / span) * 24).toFixed(1)}`)).filter(Boolean);
  return h("span", { class: "spark" }, svg("svg", { viewBox: "0 0 120 30", role: "img", "aria-label": label }, svg("polyline", { points: points.join(" "), class: "line a" })));
}
