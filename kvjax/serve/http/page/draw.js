// One side of the page: a policy, its answer, and its cache at one of the steps.
import {holders, lengths, places, size} from "./cache.js";

const SVG = "http://www.w3.org/2000/svg";

function make(tag, text, name) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (name) found.className = name;
  return found;
}

export class Side {
  constructor(root, title) {
    this.steps = [];
    this.shown = -1;
    this.chosen = -1;
    this.prompt = 0;
    for (const name of ["error", "answer", "tokens", "token-facts", "grid", "bytes", "bytes-facts"]) {
      this[name] = root.querySelector(`.${name}`);
    }
    root.querySelector("h2").textContent = title;
    this.tokens.addEventListener("keydown", (event) => this.#key(event));
    this.tokens.addEventListener("click", (event) => {
      const at = [...this.tokens.children].indexOf(event.target);
      if (at >= 0) this.#choose(at);
    });
  }

  say(text) { this.answer.textContent += text; }

  fail(message) {
    this.error.textContent = message;
    this.error.hidden = false;
  }

  add(cache) { this.steps.push(cache); }

  // The cache at a step; a step beyond the last is the last.
  show(step) {
    const cache = this.steps[Math.min(step, this.steps.length - 1)];
    if (!cache) return;
    this.shown = step;
    this.cache = cache;
    this.#tokens(cache);
    this.#grid(cache);
    this.#bytes(cache);
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
    head.append(make("td"), ...found[0].map((_, k) => make("th", `head ${k}`)));
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

  #bytes(cache) {
    const steps = this.steps, last = steps[steps.length - 1];
    const most = Math.max(...steps.map((s) => Math.max(s.bytes.live, s.bytes.allocated, s.bytes.full)));
    const from = steps[0].seen, span = Math.max(1, last.seen - from);
    const x = (s) => 5 + (410 * (s.seen - from)) / span;
    const y = (bytes) => 145 - (135 * bytes) / most;
    const draw = (tag, attributes) => {
      const found = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
      return found;
    };
    const kinds = ["full", "allocated", "live"];
    const lines = kinds.map((kind) => draw("path", {
      class: kind,
      d: steps.map((s, at) => `${at ? "L" : "M"}${x(s).toFixed(1)} ${y(s.bytes[kind]).toFixed(1)}`).join("")
        + (steps.length === 1 ? "h2" : ""),
    }));
    const ground = draw("line", {x1: 5, x2: 415, y1: 145, y2: 145});
    const now = draw("line", {class: "now", x1: x(cache), x2: x(cache), y1: 5, y2: 145});
    this.bytes.replaceChildren(ground, ...lines, now);
    const words = kinds.map((kind) => `${kind} ${size(cache.bytes[kind])}`).join(", ");
    this.bytes.setAttribute("aria-label", `Bytes after ${cache.seen} tokens: ${words}`);
    this["bytes-facts"].replaceChildren(...[...kinds].reverse().map((kind) => {
      const found = make("span");
      found.append(make("i", "", kind), `${kind} `, make("b", size(cache.bytes[kind])));
      return found;
    }), make("span", `after ${cache.seen} tokens`));
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
