// What a text has in common with another one, word by word.

// Texts with more insertions and deletions than these count as different between their common ends.
const MOST_EDITS = 2000;

const wordsOf = (text) => text.match(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? [];

// The places of the words in the others along a longest common subsequence (Myers 1986, "An O(ND) Difference
// Algorithm"); -1 for a word that is not in it.
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
  return words.map(() => -1);
}

function walkedBack(words, others, reached, down) {
  const common = words.map(() => -1);
  let i = words.length, k = words.length - others.length;
  for (let d = reached.length - 1; d >= 0; d -= 1) {
    const at = (n) => reached[d][n + d + 1];
    const before = down(d, k, at) ? k + 1 : k - 1;
    const start = d === 0 ? 0 : before === k + 1 ? at(before) : at(before) + 1;
    while (i > start) { i -= 1; common[i] = i - k; }
    i = at(before);
    k = before;
  }
  return common;
}

// A text in parts [kind, words]: what it has in common with the other one, what differs, what is missing from it.
export function differingParts(text, other) {
  const words = wordsOf(text), others = wordsOf(other), shorter = Math.min(words.length, others.length);
  let start = 0, end = 0;
  while (start < shorter && words[start] === others[start]) start += 1;
  while (end < shorter - start && words.at(-1 - end) === others.at(-1 - end)) end += 1;
  const middle = commonWords(words.slice(start, words.length - end), others.slice(start, others.length - end));
  const common = words.map((_, i) => {
    if (i < start) return i;
    if (i >= words.length - end) return i + others.length - words.length;
    return middle[i - start] < 0 ? -1 : middle[i - start] + start;
  });
  const parts = [];
  const put = (kind, piece) => {
    if (!piece) return;
    if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += piece; else parts.push([kind, piece]);
  };
  // What is missing comes before what replaces it: up to the place of the next word in common.
  const ahead = [];
  for (let i = words.length - 1; i >= 0; i -= 1) ahead[i] = common[i] >= 0 ? common[i] : ahead[i + 1] ?? others.length;
  let next = 0;
  words.forEach((word, i) => {
    put("missing", others.slice(next, ahead[i]).join(""));
    put(common[i] >= 0 ? "same" : "differs", word);
    next = ahead[i] + (common[i] >= 0 ? 1 : 0);
  });
  put("missing", others.slice(next).join(""));
  return parts;
}
