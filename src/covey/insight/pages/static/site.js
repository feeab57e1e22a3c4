// The frame of every page: its bar, its theme, and what an address leads to.

import { crumbs, failure, h, isStatic, link, svg } from "./dom.js";

const main = document.getElementById("main");
let page = null, leave = null, turn = 0;

async function show() {
  const mine = ++turn;
  const parts = location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean).map(decodeURIComponent);
  for (const a of document.querySelectorAll("#bar a[data-part]")) {
    if (a.dataset.part === (parts[0] === "lab" ? "lab" : "runs")) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  let found;
  const slow = setTimeout(() => { if (!main.childElementCount) main.append(h("p", { class: "muted" }, "Reading …")); }, 300);
  try {
    found = await page(parts);
  } catch (error) {
    found = { title: "covey", node: h("div", {}, crumbs(link("#/", isStatic() ? "Report" : "Runs")), failure(error)) };
  }
  clearTimeout(slow);
  if (mine !== turn) { found.leave?.(); return; }
  leave?.();
  leave = found.leave ?? null;
  const same = document.title === `${found.title} · covey`;
  document.title = `${found.title} · covey`;
  main.replaceChildren(found.node);
  if (!same) window.scrollTo(0, 0);
  found.shown?.();
}

function theme(kind) {
  document.documentElement.dataset.theme = kind;
  try { localStorage.setItem("covey-theme", kind); } catch { /* a private window forgets */ }
  window.dispatchEvent(new Event("covey-theme"));
}

function siteBar(parts) {
  const mark = svg("svg", { viewBox: "0 0 32 20", width: 32, height: 20, "aria-hidden": "true", class: "birds" },
    svg("path", { d: "M2 12 q4 -5 7 0 q3 -5 7 0" }), svg("path", { d: "M15 6 q3 -4 5.5 0 q2.500 -4 5.500 0" }), svg("path", { d: "M19 16 q3 -4 5.500 0 q2.500 -4 5.500 0" }));
  const dark = () => {
    const now = document.documentElement.dataset.theme;
    return now ? now === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  document.getElementById("bar").append(
    h("a", { class: "logo", href: "#/" }, mark, "covey"),
    h("nav", { "aria-label": "Site" }, Object.entries(parts).map(([part, text]) => h("a", { href: part === "lab" ? "#/lab" : "#/", "data-part": part }, text))),
    h("button", { class: "plain", type: "button", title: "Light or dark", onclick: () => theme(dark() ? "light" : "dark") }, "◐", h("span", { class: "sr" }, "Light or dark")),
  );
}

// Paper is light and as wide as it is, and it cannot be opened further: curves are drawn again for it.
function onPaper() {
  let closed = [], before;
  window.addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const d of closed) d.open = true;
    before = document.documentElement.dataset.theme;
    Object.assign(document.documentElement.dataset, { theme: "light", paper: "" });
    window.dispatchEvent(new Event("covey-theme"));
  });
  window.addEventListener("afterprint", () => {
    for (const d of closed) d.open = false;
    const set = document.documentElement.dataset;
    delete set.paper;
    if (before) set.theme = before; else delete set.theme;
    window.dispatchEvent(new Event("covey-theme"));
  });
}

// `parts`: the parts of the site that its bar leads to, with their names.
export function start(pages, parts) {
  page = pages;
  try {
    const kept = localStorage.getItem("covey-theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch { /* nothing kept */ }
  siteBar(parts);
  onPaper();
  window.addEventListener("hashchange", show);
  show();
}
