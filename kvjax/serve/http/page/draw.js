// One side of the page: a policy's cache at one of the looks at it.
import {holders, lengths, places, size} from "./cache.js";

export function make(tag, text, name) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (name) found.className = name;
  return found;
}

export class Side {
  constructor(root, policy) {
    this.root = root;
    this.looks = [];
    this.chosen = -1;
    this.prompt = 0; // tokens
    for (const name of ["tokens", "token-facts", "grid", "allocated"]) this[name] = root.querySelector(`.${name}`);
    root.querySelector("h2").textContent = policy;
    this.tokens.addEventListener("keydown", (event) => this.#key(event));
    this.tokens.addEventListener("click", (event) => {
      const at = [...this.tokens.children].indexOf(event.target);
      if (at >= 0) this.#choose(at);
    });
  }

  add(cache) { this.looks.push(cache); }

  // The cache as it was last seen when it had been fed so many tokens.
  show(seen) {
    const cache = this.looks.findLast((look) => look.seen <= seen) ?? this.looks[0];
    this.root.hidden = !cache;
    if (!cache) return;
    this.cache = cache;
    this.#tokens(cache);
    this.#grid(cache);
    this.allocated.textContent = `The running batch, whose rows share its pools, has ${size(cache.bytes.allocated)} on the device.`;
    if (this.chosen >= 0) this.#choose(Math.min(this.chosen, cache.seen - 1));
  }

  #tokens(cache) {
    const {exact, codes, phi, streams} = holders(cache);
    const spans = this.tokens.children;
    while (spans.length > cache.seen) this.tokens.lastChild.remove();
    for (let at = 0; at < cache.seen; at += 1) {
      const span = spans[at] ?? this.tokens.appendChild(make("span"));
      span.textContent = cache.tokens[at].replace(/\n/g, "⏎\n");
      span.id ||= `t${Math.random().toString(36).slice(2)}`;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", at === this.chosen);
      const e = exact[at] / streams, c = e + codes[at] / streams, p = c + phi[at] / streams;
      span.style.setProperty("--held", c);
      span.style.setProperty("--of", c ? e / c : 1);
      span.style.setProperty("--e", e);
      span.style.setProperty("--c", c);
      span.style.setProperty("--p", p);
      span.dataset.exact = exact[at];
      span.dataset.codes = codes[at];
      span.dataset.phi = phi[at];
      span.className = `${c ? "" : "nowhere"} ${at >= this.prompt ? "new" : ""}`.trim();
    }
  }

  #grid(cache) {
    const found = lengths(cache);
    const head = make("tr");
    head.append(make("th", "KV head"), ...found[0].map((_, k) => make("th", String(k))));
    const rows = found.map((layer, index) => {
      const row = make("tr");
      row.append(make("th", `layer ${index}${cache.completed[index] ? " + φ" : ""}`));
      for (const live of layer) {
        const cell = make("td", String(live));
        cell.style.setProperty("--fill", live / Math.max(1, cache.seen));
        row.append(cell);
      }
      return row;
    });
    this.grid.replaceChildren(head, ...rows);
  }

  // --- one token ---------------------------------------------------------------------------------

  #key(event) {
    const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10};
    const last = this.tokens.children.length - 1;
    let at = null;
    if (event.key in moves) at = this.chosen + moves[event.key];
    if (event.key === "Home") at = 0;
    if (event.key === "End") at = last;
    if (at === null || last < 0) return;
    event.preventDefault();
    this.#choose(Math.max(0, Math.min(last, at)));
  }

  #choose(at) {
    const spans = this.tokens.children;
    if (this.chosen !== at) spans[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = at;
    const span = spans[at];
    span.setAttribute("aria-selected", "true");
    this.tokens.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({block: "nearest"});
    const found = places(this.cache, at);
    const all = found.flat(), held = all.filter(Boolean).length;
    const where = found.map((heads, layer) => {
      const here = heads.map((place, head) => place && `${head} (${place})`).filter(Boolean);
      return here.length ? `layer ${layer}: head ${here.join(", ")}` : "";
    }).filter(Boolean).join("; ");
    const stands = held < all.length && this.cache.completed.some(Boolean) ? " φ stands for it elsewhere." : "";
    this["token-facts"].textContent =
      `Token ${at} “${this.cache.tokens[at]}”: held by ${held} of ${all.length} heads${where ? ` (${where})` : ""}.${stands}`;
  }
}
