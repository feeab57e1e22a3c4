// All runs: found, ordered and bundled; chosen ones are compared, tagged, or moved to the trash.

import { bundles } from "./bands.js";
import { heldOut } from "./compare.js";
import { asked } from "./dialogs.js";
import { ask, at, chooser, dateOf, failure, h, hintOf, label, link, seconds, send, term, written } from "./dom.js";
import { spark } from "./plot.js";
import { shortModel, statePill, conclusionPill } from "./run.js";

const TOGETHER = [["seeds", "seeds together"], ["folder", "by folder"], ["tag", "by tag"], ["none", "one by one"]];
const ORDERS = [["new", "newest first"], ["held", "best held-out first"], ["name", "by name"]];

export async function runList() {
  let found = await ask("runs");
  const chosen = new Set();
  const find = h("input", { type: "search", placeholder: "Name, model, method, tag", "aria-label": "Find runs" });
  const by = chooser("Runs together", TOGETHER), order = chooser("Order of the runs", ORDERS);
  const list = h("div", { class: "lists" }), count = h("span", { class: "muted", role: "status" }), told = h("div", { role: "status" });
  const many = h("b"), compare = h("button", { type: "button", class: "primary", onclick: () => { location.hash = at("compare", ...chosen).slice(1); } }, "Compare");
  const changes = [h("button", { type: "button", onclick: () => changed(tagRuns) }, "Tag"), h("button", { type: "button", onclick: () => changed(deleteRuns) }, "Delete")];
  const actions = h("div", { class: "actions", hidden: true }, many, compare, found.writable ? changes : null, h("button", { type: "button", class: "plain", onclick: () => { chosen.clear(); draw(); } }, "Clear"));

  function pick(names, on) {
    for (const name of names) if (on) chosen.add(name); else chosen.delete(name);
    for (const box of list.querySelectorAll("input[data-run]")) box.checked = chosen.has(box.dataset.run);
    for (const box of list.querySelectorAll("input[data-runs]")) box.checked = JSON.parse(box.dataset.runs).every((name) => chosen.has(name));
    actions.hidden = !chosen.size;
    many.textContent = `${chosen.size} chosen`;
    compare.disabled = chosen.size < 2;
  }

  function draw() {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = found.runs.filter((run) => words.every((word) => textOfRun(run).includes(word))).sort(orderBy(order.value));
    count.textContent = words.length ? `${shown.length} of ${found.runs.length}` : "";
    list.replaceChildren(shown.length ? heads(found.hints) : nothing(), ...parts(shown, by.value).map(([title, runs]) => h("section", {}, title ? h("h2", {}, written(title), h("span", { class: "count num" }, runs.length)) : null,
      h("div", { class: "runs" }, by.value === "seeds" ? bundles(runs).map((b) => (b.runs.length > 1 ? bundleRow(b, pick, found.hints) : row(b.runs[0], pick, found.hints))) : runs.map((run) => row(run, pick, found.hints))))));
    pick([], true);
  }

  async function changed(change) {
    try {
      const message = await change(found.runs.filter((run) => chosen.has(run.run)), found.runs, again);
      if (message) { chosen.clear(); await again(message); }
    } catch (error) {
      await again(failure(error));
    }
  }

  async function again(message) {
    found = await ask("runs");
    told.replaceChildren(message);
    draw();
  }

  find.addEventListener("input", draw);
  for (const choice of [by, order]) choice.addEventListener("change", draw);
  const several = found.runs.length > 1;
  const node = h("div", {},
    h("div", { class: "title" }, h("h1", {}, "Runs"), h("span", { class: "muted path" }, written(found.root))), told,
    several ? h("p", { class: "choices" }, find, by, order, count) : null, actions, found.runs.length ? list : empty());
  draw();
  return { title: "Runs", node };
}

const nothing = () => h("p", { class: "muted" }, "No run matches all of these words.");

const empty = () => h("div", { class: "empty" }, h("h2", {}, "No run here yet"),
  h("p", {}, "A run appears here as soon as it begins. ", h("code", {}, "covey demo"), " makes one in a few minutes, without a download."),
  h("p", {}, link("#/lab", "Open the lab"), " to see what GRPO does with a group of completions."));

const textOfRun = (run) => [run.run, run.model, run.method, run.algorithm, run.state, run.conclusion?.word, ...run.tags].join(" ").toLowerCase();
const lastHeld = (run) => run.greedy?.at(-1) ?? -1;
const orderBy = (name) => ({ new: (a, b) => b.changed - a.changed, held: (a, b) => lastHeld(b) - lastHeld(a), name: (a, b) => a.run.localeCompare(b.run, "en", { numeric: true }) })[name];

// Runs in parts with a title. A run with two tags is in both parts.
function parts(runs, by) {
  const keys = { folder: (run) => [run.run.split("/").slice(0, -1).join("/") || "."], tag: (run) => (run.tags.length ? run.tags : ["no tag"]) }[by];
  if (!keys) return [["", runs]];
  const found = new Map();
  for (const run of runs) for (const key of keys(run)) found.set(key, [...(found.get(key) ?? []), run]);
  return [...found];
}

const kindOf = (run) => written([run.algorithm || run.method, shortModel(run.model)].filter(Boolean).join(" · "));
const COURSE = "The course of the reward, or of the loss";
const SEEDS_HELD = "Of several seeds: their mean, with the lowest and the highest at the end.";
const heldHint = (hints) => `${hintOf(hints, "greedy")}\n${SEEDS_HELD}`;

// The names of the columns, once for all rows; where there is no room for columns, each row has its own.
const heads = (hints) => h("div", { class: "heads" }, h("span", { class: "who" }, "run"), h("span", {}, "conclusion"), h("span", {}, term("course", COURSE)),
  h("dl", { class: "facts" }, h("dt", {}, "steps"), h("dt", {}, term("held out", heldHint(hints))), h("dt", {}, term("time", hintOf(hints, "elapsed")))));

// The slowest of several seeds; a record of another trainer may lack the number of steps and the time.
const stepsOf = (runs) => [Math.min(...runs.map((run) => run.done)), runs[0].steps].filter((n) => n !== null).join(" / ");
const timeOf = (runs) => { const spent = runs.reduce((sum, run) => sum + (run.seconds ?? 0), 0); return spent ? seconds(spent) : "–"; };
const fact = (name, hint, value) => h("div", {}, h("dt", {}, term(name, hint)), h("dd", { class: "num", title: name }, value));

function row(run, pick, hints) {
  return h("article", { class: "run" },
    h("input", { type: "checkbox", "data-run": run.run, "aria-label": `Choose ${run.run}`, onchange: (e) => pick([run.run], e.target.checked) }),
    h("div", { class: "who" }, h("a", { class: "cover", href: at("run", run.run) }, written(run.run)), run.tags.map((tag) => h("span", { class: "tag" }, written(tag))),
      h("div", { class: "muted" }, run.error ? written(run.error) : [kindOf(run), ` · ${dateOf(run.changed)}`])),
    h("div", { class: "pills" }, run.state === "finished" ? null : statePill(run.state), conclusionPill(run.conclusion)),
    spark(run.course ?? [], COURSE),
    h("dl", { class: "facts" },
      fact("steps", "", run.error ? "–" : stepsOf([run])), fact("held out", hintOf(hints, "greedy"), heldOut([run])), fact("time", hintOf(hints, "elapsed"), timeOf([run]))),
    run.ended ? h("div", { class: "muted why", title: label(run.ended) }, written(run.ended)) : null);
}

// Runs of several seeds as one row, which opens to a row for each.
function bundleRow({ name, runs }, pick, hints) {
  const names = runs.map((run) => run.run), words = [...new Set(runs.map((run) => run.conclusion?.word))].filter(Boolean), states = [...new Set(runs.map((run) => run.state))].filter((s) => s !== "finished");
  const times = (kind, word) => { const n = runs.filter((run) => kind(run) === word).length; return n < runs.length ? `${n} ` : ""; };
  const shortest = Math.min(...runs.map((run) => run.course?.length ?? 0)), at0 = (i) => runs.map((run) => run.course[i]).filter((v) => typeof v === "number");
  const course = Array.from({ length: shortest }, (_, i) => (at0(i).length ? at0(i).reduce((sum, v) => sum + v, 0) / at0(i).length : null));
  return h("details", { class: "bundle" },
    h("summary", { class: "run" },
      h("input", { type: "checkbox", "data-runs": JSON.stringify(names), "aria-label": `Choose all seeds of ${name}`, onchange: (e) => pick(names, e.target.checked) }),
      h("div", { class: "who" }, h("b", { class: "opens" }, written(name)), h("div", { class: "muted" }, kindOf(runs[0]), ` · ${runs.length} seeds · `, link(at("compare", ...names), "curves"))),
      h("div", { class: "pills" }, states.map((s) => statePill(s, false, times((run) => run.state, s))), words.map((word) => conclusionPill({ word }, false, times((run) => run.conclusion?.word, word)))),
      spark(course, `${COURSE}: the mean over the seeds`),
      h("dl", { class: "facts" },
        fact("steps", "", stepsOf(runs)), fact("held out", heldHint(hints), heldOut(runs)), fact("time", hintOf(hints, "elapsed"), timeOf(runs)))),
    h("div", { class: "runs inside" }, runs.map((run) => row(run, pick, hints))));
}

// Tags that all chosen runs have are edited together; each keeps its others.
async function tagRuns(runs) {
  const common = runs[0].tags.filter((tag) => runs.every((run) => run.tags.includes(tag)));
  const input = h("input", { type: "text", value: common.join(", "), "aria-label": "Tags", autofocus: true });
  if (!await asked(runs.length > 1 ? `Tags of ${runs.length} runs` : `Tags of ${runs[0].run}`, "Save", [h("p", { class: "muted" }, "Words with commas between them, written to tags.json of the run's folder."), input])) return null;
  const wanted = input.value.split(",").map((tag) => tag.trim()).filter(Boolean);
  for (const run of runs) await send("tag", { run: run.run, tags: [...run.tags.filter((tag) => !common.includes(tag)), ...wanted] });
  return h("div");
}

// A stage goes with its whole pipeline, whose folder lies around those of its stages.
const homeOf = (run) => (/^\d+-/.test(run.run.split("/").at(-1)) && run.run.includes("/") ? run.run.split("/").slice(0, -1).join("/") : run.run);

// Nobody here can see whether a process of another host has ended; the reader has to know.
const endedElsewhere = (hosts, runs) => asked(`Has training ended on ${hosts.join(", ")}?`, "It has ended: delete", [
  h("ul", {}, runs.map((run) => h("li", {}, written(run.run), " · ", written(run.elsewhere)))),
  h("p", {}, "The lock names a process on another host, and this machine cannot see whether it still runs. If it does, the move takes its files away: it ends with an error at its next write, and the steps since its last checkpoint are lost."),
  h("p", { class: "muted" }, "Look there first. If that host is gone, nothing is at work.")], true);

async function deleteRuns(runs, all, again) {
  const homes = [...new Set(runs.map(homeOf))], first = homes.map((home) => runs.find((run) => homeOf(run) === home));
  const moved = all.filter((run) => homes.includes(homeOf(run)));
  const body = [h("ul", {}, moved.map((run) => h("li", {}, written(run.run)))), h("p", { class: "muted" }, "Their folders move to .trash next to them, where you can remove them.")];
  if (!await asked(`Delete ${moved.length === 1 ? "this run" : `these ${moved.length} runs`}?`, "Move to the trash", body, true)) return null;
  const hosts = [...new Set(moved.map((run) => run.elsewhere).filter(Boolean))];
  if (hosts.length && !await endedElsewhere(hosts, moved.filter((run) => run.elsewhere))) return null;
  const places = [];
  for (const run of first) places.push((await send("trash", { run: run.run, ended_on: hosts })).place);
  const undo = async () => {
    try {
      for (const run of first) await send("restore", { run: run.run });
      await again(h("div"));
    } catch (error) {
      await again(failure(error));
    }
  };
  return h("div", { class: "note" }, "In the trash: ", places.map((place, i) => [i ? ", " : "", h("code", { class: "path" }, written(place))]), " ", h("button", { type: "button", class: "plain", onclick: undo }, "Undo"));
}
