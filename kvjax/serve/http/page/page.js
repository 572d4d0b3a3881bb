// The page: asks for one or two texts at once, looks at their caches while they are written.
import {Refused, ask, events} from "./ask.js";
import {Side} from "./draw.js";

const $ = (id) => document.getElementById(id);
const PAUSE = 120; // milliseconds between two looks at a cache
let sides = [], leave = null, follow = true;

// --- what the server is --------------------------------------------------------------------------

async function greet() {
  try {
    const models = await (await ask("/v1/models", $("key").value)).json();
    const {id, max_model_len, kv_policy, chat_template} = models.data[0];
    if (chat_template) $("mode").value = "chat";
    $("server").textContent = `${id}, ${max_model_len} positions, policy ${kv_policy}`;
    $("policy-a").placeholder = kv_policy;
    const {allowed, presets} = await (await ask("/v1/policies", $("key").value)).json();
    const options = allowed ? allowed.map((p) => [p, ""]) : Object.entries(presets);
    $("policies").replaceChildren(...options.map(([value, label]) => {
      const option = document.createElement("option");
      option.value = value;
      if (label && label !== value) option.label = label;
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

$("key").value = sessionStorage.getItem("key") ?? "";
$("key-field").hidden = !$("key").value;
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  greet();
});

// --- writing -------------------------------------------------------------------------------------

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
$("stop").addEventListener("click", () => leave?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("form").requestSubmit(); }
  if (event.key === "Escape") leave?.abort();
});

async function write() {
  leave?.abort();
  const mine = new AbortController();
  leave = mine;
  follow = true;
  const asked = [$("policy-a").value.trim() || $("policy-a").placeholder];
  if ($("policy-b").value.trim()) asked.push($("policy-b").value.trim());
  sides = asked.map((policy) => {
    const root = $("side").content.firstElementChild.cloneNode(true);
    $("sides").append(root);
    return [policy, root];
  }).map(([policy, root]) => new Side(root, policy));
  while ($("sides").children.length > asked.length) $("sides").firstElementChild.remove();
  $("steps").hidden = $("legend").hidden = false;
  $("stop").disabled = false;
  slide();
  await Promise.all(sides.map((side, at) => text(side, asked[at], mine)));
  if (leave === mine) $("stop").disabled = true;
}

// One text: its stream, and looks at its cache beside it until both are at an end.
async function text(side, policy, mine) {
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
    const answer = await ask(chat ? "/v1/chat/completions" : "/v1/completions", key, body, mine.signal);
    for await (const event of events(answer)) {
      looks ??= look(side, event.id, key, mine);
      if (event.usage) side.prompt = event.usage.prompt_tokens;
      for (const choice of event.choices) side.say(choice.text ?? choice.delta?.content ?? "");
    }
    await looks;
    side.show(Number($("step").value));
  } catch (error) {
    if (error.name !== "AbortError") side.fail(error.message);
  }
}

async function look(side, id, key, mine) {
  for (let done = false; !done && !mine.signal.aborted;) {
    try {
      const found = await (await ask(`/v1/kv/${id}`, key, undefined, mine.signal)).json();
      done = found.done;
      const last = side.steps[side.steps.length - 1];
      if (found.cache && found.cache.seen !== last?.seen) {
        side.add(found.cache);
        slide();
      }
    } catch (error) {
      if (error instanceof Refused) return side.fail(error.message);
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

// There is one step more: a slider at its end stays there.
function slide() {
  const steps = Math.max(0, ...sides.map((side) => side.steps.length - 1));
  $("step").max = steps;
  if (follow) $("step").value = steps;
  show();
}

function show() {
  const at = Number($("step").value);
  $("step-name").textContent = `${at + 1} of ${Number($("step").max) + 1}`;
  for (const side of sides) side.show(at);
}

greet();
