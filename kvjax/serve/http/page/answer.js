// A policy and its answer: what the server does until it comes, the text, and its bytes as the tokens come.
import {make} from "./draw.js";
import {size} from "./cache.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 420, HIGH = 100;

const STAGES = {
  asking: () => "Asks the server",
  waiting: () => "Waits for others",
  compiling: () => "Compiles programs for this policy, once for all texts",
  reading: (look) => `Reads the prompt, ${look.read_tokens} of ${look.prompt_tokens} tokens`,
};

export class Answer {
  constructor(root, policy) {
    this.prompt = 0; // tokens
    this.bytes = new Map(); // {live, full} by tokens that were fed
    this.ended = false;
    for (const name of ["status", "stage", "seconds", "error", "text", "held", "share", "bytes-facts"]) {
      this[name] = root.querySelector(`.${name}`);
    }
    this.chart = root.querySelector("svg");
    root.querySelector("h2").textContent = policy;
    this.begun = performance.now();
    this.at("asking");
    this.clock = setInterval(() => this.#tick(), 200);
    this.#tick();
  }

  #tick() { this.seconds.textContent = `${((performance.now() - this.begun) / 1000).toFixed(1)} s`; }

  // Where the request is (`look.stage`); nothing is said of it once its text comes.
  at(stage, look) {
    const words = !this.ended && STAGES[stage]?.(look);
    this.status.hidden = !words;
    if (words && words !== this.stage.textContent) this.stage.textContent = words;
  }

  say(text) { this.text.textContent += text; }

  fail(message) {
    this.error.textContent = message;
    this.error.hidden = false;
    this.text.hidden = !this.text.textContent;
    this.end();
  }

  end() {
    this.ended = true;
    this.status.hidden = true;
    clearInterval(this.clock);
  }

  // What the cache took when so many tokens had been fed.
  took(seen, live, full) { this.bytes.set(seen, {live, full}); }

  // Most bytes that there were: charts of one page have one scale.
  get most() { return Math.max(0, ...[...this.bytes.values()].map(({live, full}) => Math.max(live, full))); }

  // The bytes up to now, and in words where so many tokens had been fed.
  draw(most, end, seen) {
    const points = [...this.bytes].sort(([a], [b]) => a - b);
    this.held.hidden = !points.length;
    if (!points.length) return;
    const first = points[0][0], span = Math.max(1, end - first);
    const x = (at) => (WIDE * (at - first)) / span, y = (bytes) => HIGH - (HIGH * bytes) / Math.max(1, most);
    const line = (kind) => points.map(([at, bytes], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(bytes[kind]).toFixed(1)}`)
      .join("") + (points.length === 1 ? "h3" : "");
    const now = points.findLast(([at]) => at <= seen) ?? points[0];
    const last = x(points[points.length - 1][0]).toFixed(1);
    this.chart.replaceChildren(
      svg("path", {class: "under", d: `${line("live")}V${HIGH}H0Z`}),
      svg("line", {x1: 0, x2: WIDE, y1: HIGH, y2: HIGH}),
      svg("path", {class: "full", d: line("full")}),
      svg("path", {class: "live", d: line("live")}),
      ...(x(now[0]).toFixed(1) === last ? [] : [svg("line", {class: "now", x1: x(now[0]), x2: x(now[0]), y1: 0, y2: HIGH})]),
    );
    const {live, full} = now[1], held = `${size(live)}, ${Math.round((100 * live) / full)} %`;
    this.share.replaceChildren(make("b", held), ` of the ${size(full)} that keys and values of all tokens take`);
    this.chart.setAttribute("aria-label", `Bytes as tokens come; after ${now[0]} tokens ${held} of ${size(full)}`);
    this["bytes-facts"].replaceChildren(
      mark("live", "this cache"), mark("full", "all tokens"),
      make("span", `token ${points[0][0] - this.prompt + 1} to ${end - this.prompt + 1}, up to ${size(most)}`),
    );
  }
}

function svg(tag, attributes) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  return found;
}

function mark(kind, words) {
  const found = make("span");
  found.append(make("i", "", kind), words);
  return found;
}
