// What a look at the cache says of each token and each stream. Pure.

// Of each of n tokens, how many streams hold it: exactly, as codes, and by φ in a layer that has one.
export function holders(cache) {
  const n = cache.seen;
  const exact = new Array(n).fill(0), codes = new Array(n).fill(0), phi = new Array(n).fill(0);
  let streams = 0;
  cache.streams.forEach((layer, index) => {
    for (const head of layer) {
      streams += 1;
      const held = new Uint8Array(n);
      for (const [where, counts] of [[head.ring, exact], [head.pages, exact], [head.codes, codes]]) {
        for (let i = 0; i < where.length; i += 2) {
          for (let at = where[i]; at < where[i] + where[i + 1]; at += 1) {
            counts[at] += 1;
            held[at] = 1;
          }
        }
      }
      if (cache.completed[index]) held.forEach((yes, at) => { if (!yes) phi[at] += 1; });
    }
  });
  return {exact, codes, phi, streams};
}

// Where a token is held: "layer 0: heads 0 1; …", in at most a few words.
export function places(cache, at) {
  const inside = (runs) => {
    for (let i = 0; i < runs.length; i += 2) if (runs[i] <= at && at < runs[i] + runs[i + 1]) return true;
    return false;
  };
  return cache.streams.map((layer) => layer.map((head) =>
    inside(head.ring) ? "ring" : inside(head.pages) ? "pages" : inside(head.codes) ? "codes" : ""));
}

export function count(runs) {
  let total = 0;
  for (let i = 1; i < runs.length; i += 2) total += runs[i];
  return total;
}

// Live slots [layer][head].
export function lengths(cache) {
  return cache.streams.map((layer) => layer.map((h) => count(h.ring) + count(h.pages) + count(h.codes)));
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${at && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[at]}`;
}
