// Runs that differ in nothing but the seed: which ones belong together, and their curves as a mean with a band.

// The number of characters that all texts begin with alike.
function alike(texts) {
  let length = 0;
  while (length < texts[0].length && texts.every((text) => text[length] === texts[0][length])) length += 1;
  return length;
}

// What all names begin with, and the folders below that: `lr=0.1/2-rl` of `lr=0.1,seed=0/2-rl` and the like.
function commonName(names) {
  const start = names[0].slice(0, alike(names)).replace(/[\s,/_.-]*(seed|s)?[\s=_-]*$/i, "");
  const backwards = names.map((name) => [...name].reverse());
  const end = /\/.*$/.exec(names[0].slice(names[0].length - alike(backwards)))?.[0] ?? "";
  return (start + end).replace(/^\//, "") || names[0];
}

// Runs as bundles {name, runs}, in the order of their first runs. A run of unknown settings is alone, and so is
// one that repeats the seed of another.
export function bundles(runs) {
  const found = new Map(), seen = new Map();
  for (const run of runs) {
    const same = `${run.setup} ${run.seed}`, times = seen.get(same) ?? 0;
    seen.set(same, times + 1);
    const key = run.setup ? `${run.setup} ${times}` : run.run;
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(run);
  }
  for (const own of found.values()) own.sort((a, b) => a.seed - b.seed);
  const names = [...found.values()].map((own) => (own.length > 1 ? commonName(own.map((r) => r.run)) : own[0].run));
  // Bundles whose runs begin alike are told from each other by their first runs.
  const name = (own, i) => (own.length === 1 || names.indexOf(names[i]) === names.lastIndexOf(names[i]) ? names[i] : `${own[0].run} and ${own.length - 1} more`);
  return [...found.values()].map((own, i) => ({ name: name(own, i), runs: own }));
}

// A function from x to y on straight lines between the points, null outside of them. Its calls have rising x.
function reader(points) {
  const known = [...points].sort(([p], [q]) => p - q);
  let i = 0;
  return (x) => {
    while (i + 1 < known.length && known[i + 1][0] <= x) i += 1;
    const [x0, y0] = known[i], [x1, y1] = known[i + 1] ?? known[i];
    if (x < x0 || x > x1) return x === x1 ? y1 : null;
    return x1 === x0 ? y0 : y0 + ((x - x0) / (x1 - x0)) * (y1 - y0);
  };
}

// Curves, each a map from x to y -> their mean, lowest and highest value at each x, of those that reach it.
export function band(curves) {
  const readers = curves.filter((points) => points.size).map(reader);
  const xs = [...new Set(curves.flatMap((points) => [...points.keys()]))].sort((p, q) => p - q);
  const mean = new Map(), low = new Map(), high = new Map();
  for (const x of xs) {
    const values = readers.map((read) => read(x)).filter((v) => v !== null);
    mean.set(x, values.reduce((sum, v) => sum + v, 0) / values.length);
    low.set(x, Math.min(...values));
    high.set(x, Math.max(...values));
  }
  return { mean, low, high };
}
