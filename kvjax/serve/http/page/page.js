// The page: asks for one or two texts at once, looks at their caches while they are written.
import {Answer} from "./answer.js";
import {Refused, ask, events} from "./ask.js";
import {Side} from "./draw.js";
import {read, written} from "./link.js";
import {Menu} from "./menu.js";

const $ = (id) => document.getElementById(id);
const PAUSE = 120; // milliseconds between two looks at a cache
let texts = [], shown = [], leave = null, follow = true;

// --- what the server is --------------------------------------------------------------------------

async function greet() {
  try {
    const models = await (await ask("/v1/models", $("key").value)).json();
    const {id, max_model_len, kv_policy, chat_template} = models.data[0];
    if (chat_template && !linked.mode) $("mode").value = "chat";
    $("server").textContent = `${id}, ${max_model_len} positions, policy ${kv_policy}`;
    $("policy-a").placeholder = kv_policy;
    const {allowed, presets, about} = await (await ask("/v1/policies", $("key").value)).json();
    const entries = allowed ? allowed.map((policy) => ["", policy, ""])
      : Object.entries(presets).map(([name, policy]) => [name, policy, about[name]]);
    menu.fill(entries);
    $("policies").replaceChildren(...entries.map(([name, policy]) => {
      const option = document.createElement("option");
      option.value = name || policy;
      if (name && name !== policy) option.label = policy;
      return option;
    }));
  } catch (error) {
    $("server").textContent = error.message;
    if (error.status === 401) {
      $("key-field").hidden = false;
      $("key").focus();
    }
  }
}

const menu = new Menu($("menu"));
for (const button of document.querySelectorAll(".presets")) {
  const field = $(button.dataset.for);
  button.addEventListener("click", () => menu.open((policy) => {
    field.value = policy;
    field.focus();
  }));
}

$("key").value = sessionStorage.getItem("key") ?? "";
$("key-field").hidden = !$("key").value;
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  greet();
});

// --- the link: prompt and policies, never the key ------------------------------------------------

const INPUTS = {
  prompt: "prompt", a: "policy-a", b: "policy-b", mode: "mode", tokens: "tokens", temperature: "temperature",
};

function form() {
  return Object.fromEntries(Object.entries(INPUTS).map(([name, id]) => [name, $(id).value]));
}

function fill() {
  const found = read(location.hash);
  for (const [name, value] of Object.entries(found)) $(INPUTS[name]).value = value;
  return found;
}

const linked = fill();
addEventListener("hashchange", fill);

$("link").addEventListener("click", async () => {
  history.replaceState(null, "", `#${written(form())}`);
  try {
    await navigator.clipboard.writeText(location.href);
    $("link").textContent = "Copied";
  } catch { // no clipboard where the page came without TLS
    $("link").textContent = "It is this page's address";
  }
  setTimeout(() => { $("link").textContent = "Copy link"; }, 2000);
});

// --- writing -------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
$("stop").addEventListener("click", () => leave?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("form").requestSubmit(); }
  if (event.key === "Escape" && !$("menu").open) leave?.abort();
});

async function write() {
  leave?.abort();
  const mine = new AbortController();
  leave = mine;
  follow = true;
  history.replaceState(null, "", `#${written(form())}`);
  const asked = [$("policy-a").value.trim() || $("policy-a").placeholder];
  if ($("policy-b").value.trim()) asked.push($("policy-b").value.trim());
  for (const {answer} of texts) answer.end();
  texts = asked.map((policy) => ({
    answer: new Answer(added("answer"), policy), side: new Side(added("side"), policy),
  }));
  for (const places of [$("answers"), $("sides")]) {
    while (places.children.length > asked.length) places.firstElementChild.remove();
  }
  shown = [];
  $("steps").hidden = $("legend").hidden = true;
  $("stop").disabled = false;
  $("answers").classList.add("writing");
  // On a small screen the answer would come where nobody looks.
  if ($("answers").getBoundingClientRect().top > innerHeight / 2) $("answers").scrollIntoView();
  await Promise.all(texts.map((text, at) => one(text, asked[at], mine)));
  if (leave !== mine) return;
  $("answers").classList.remove("writing");
  $("stop").disabled = true;
}

// A template's content, at the end of its place.
function added(name) {
  return $(`${name}s`).appendChild($(name).content.firstElementChild.cloneNode(true));
}

// One text: its stream, and looks at its cache beside it until both are at an end.
async function one({answer, side}, policy, mine) {
  const key = $("key").value;
  const how = {
    max_tokens: Number($("tokens").value) || 1, temperature: Number($("temperature").value),
    stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}, kv_watch: true, kv_policy: policy,
  };
  const chat = $("mode").value === "chat";
  const body = chat ? {...how, messages: [{role: "user", content: $("prompt").value}]}
    : {...how, prompt: $("prompt").value};
  let looks = null;
  try {
    const stream = await ask(chat ? "/v1/chat/completions" : "/v1/completions", key, body, mine.signal);
    for await (const event of events(stream)) {
      looks ??= look({answer, side}, event.id, key, mine);
      if (event.usage) {
        const {prompt_tokens, kv} = event.usage;
        answer.prompt = side.prompt = prompt_tokens;
        answer.asked = prompt_tokens + how.max_tokens - 1;
        if (kv) {
          answer.at("writing");
          answer.took(kv.tokens_seen, kv.bytes_live, kv.bytes_full);
        }
      }
      for (const choice of event.choices) answer.say(choice.text ?? choice.delta?.content ?? "");
      show();
    }
    await looks;
    answer.asked = 0; // its chart ends where it ended
    answer.end();
  } catch (error) {
    if (error.name === "AbortError") answer.end();
    else answer.fail(error.message);
  }
  if (texts.some((text) => text.answer === answer)) show();
}

async function look({answer, side}, id, key, mine) {
  for (let done = false; !done && !mine.signal.aborted;) {
    try {
      const found = await (await ask(`/v1/kv/${id}`, key, undefined, mine.signal)).json();
      done = found.done;
      answer.at(found.stage, found);
      if (found.cache && found.cache.seen !== side.looks.at(-1)?.seen) {
        const {seen, bytes} = found.cache;
        answer.took(seen, bytes.live, bytes.full);
        side.add(found.cache);
        slide();
      }
    } catch (error) {
      if (error instanceof Refused) return answer.fail(error.message);
      return;
    }
    if (!done) await new Promise((wake) => setTimeout(wake, PAUSE));
  }
}

// --- the slider ----------------------------------------------------------------------------------

$("step").addEventListener("input", () => {
  follow = $("step").value === $("step").max;
  show();
});

// Numbers of tokens at which there was a look at one of the caches.
function moments() {
  return [...new Set(texts.flatMap(({side}) => side.looks.map((look) => look.seen)))].sort((a, b) => a - b);
}

// There is one look more: a slider at its end stays there. One in the middle stays where it was, too.
function slide() {
  const all = moments(), before = shown.length;
  const at = follow ? all.length - 1 : Math.max(0, all.indexOf(shown[Number($("step").value)]));
  shown = all;
  $("step").max = Math.max(0, all.length - 1);
  $("step").value = at;
  if (!before) $("steps").hidden = $("legend").hidden = false;
  show();
}

function show() {
  const seen = follow ? Infinity : shown[Number($("step").value)];
  if (shown.length) {
    const fed = texts[0].side.prompt - 1, last = shown.at(-1); // the token that is drawn is not fed yet
    $("step-name").textContent = `token ${Math.min(seen, last) - fed} of ${last - fed}`;
    $("step").setAttribute("aria-valuetext", $("step-name").textContent);
  }
  const most = Math.max(...texts.map(({answer}) => answer.most));
  const end = Math.max(...texts.map(({answer}) => Math.max(answer.asked ?? 0, ...answer.bytes.keys())));
  for (const {answer, side} of texts) {
    answer.draw(most, end, seen);
    side.show(seen);
  }
}

greet();
