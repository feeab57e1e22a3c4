// What a text has in common with another one, word by word.

// Texts with more insertions and deletions than these count as different between their common ends.
const MOST_EDITS = 2000;

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? [];

// Which of the words are in a longest common subsequence with the others (Myers 1986, "An O(ND) Difference Algorithm").
function commonWords(words, others) {
  const most = Math.min(words.length + others.length, MOST_EDITS), middle = most + 1;
  // By diagonal: the most words that some number of edits gets to; `reached` keeps them for each number.
  const front = new Int32Array(2 * middle + 1), reached = [];
  const down = (d, k, at) => k === -d || (k !== d && at(k - 1) < at(k + 1));
  const follow = (i, k) => {
    let end = i;
    while (end < words.length && end - k < others.length && words[end] === others[end - k]) end += 1;
    return end;
  };
  for (let d = 0; d <= most; d += 1) {
    reached.push(front.slice(middle - d - 1, middle + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const at = (n) => front[middle + n];
      front[middle + k] = follow(down(d, k, at) ? at(k + 1) : at(k - 1) + 1, k);
      if (front[middle + k] >= words.length && front[middle + k] - k >= others.length) return walkedBack(words, others, reached, down);
    }
  }
  return words.map(() => false);
}

function walkedBack(words, others, reached, down) {
  const common = words.map(() => false);
  let i = words.length, k = words.length - others.length;
  for (let d = reached.length - 1; d >= 0; d -= 1) {
    const at = (n) => reached[d][n + d + 1];
    const before = down(d, k, at) ? k + 1 : k - 1;
    const start = d === 0 ? 0 : before === k + 1 ? at(before) : at(before) + 1;
    while (i > start) { i -= 1; common[i] = true; }
    i = at(before);
    k = before;
  }
  return common;
}

// A text in parts [kind, words], where a kind is "same" or "differs".
export function differingParts(text, other) {
  const words = wordsOf(text), others = wordsOf(other), shorter = Math.min(words.length, others.length);
  let start = 0, end = 0;
  while (start < shorter && words[start] === others[start]) start += 1;
  while (end < shorter - start && words.at(-1 - end) === others.at(-1 - end)) end += 1;
  const common = commonWords(words.slice(start, words.length - end), others.slice(start, others.length - end));
  const parts = [];
  words.forEach((word, i) => {
    const kind = i < start || i >= words.length - end || common[i - start] ? "same" : "differs";
    if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += word; else parts.push([kind, word]);
  });
  return parts;
}
