"use strict";
// Two halves that share the key: the playground asks, the dashboard reads /stats. All text goes in as text nodes.

const $ = (id) => document.getElementById(id);
const el = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
// The key lives in the input alone: nothing is stored, so another page of this origin, or the next user, finds none.
const ask = (path, options = {}) => {
  const key = $("key").value.trim();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
};
const failure = async (response) => {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? response.statusText;
  return `${response.status}: ${response.status === 401 ? "an API key is needed (at the top of the page)" : message}`;
};

// ---- playground ----

let conversation = [];
let running = null;
const mode = () => document.querySelector("input[name=mode]:checked").value;

async function loadModels() {
  const response = await ask("/v1/models").catch(() => null);
  if (!response?.ok) return;
  const chosen = $("model").value;
  const ids = (await response.json()).data.map((model) => model.id);
  $("model").replaceChildren(...ids.map((id) => el("option", { value: id, textContent: id })));
  if (ids.includes(chosen)) $("model").value = chosen;
}

function body(text) {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const shared = {
    model: $("model").value || undefined, stream: true, stream_options: { include_usage: true },
    max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"),
    seed: number("seed"), stop: $("stop_text").value || undefined,
  };
  const wanted = $("logprobs").checked;
  if (mode() === "completion") return { ...shared, prompt: text, ...(wanted && { logprobs: 5 }) };
  const messages = [...conversation, { role: "user", content: text }];
  return { ...shared, messages, ...(wanted && { logprobs: true, top_logprobs: 5 }) };
}

// The JSON of each event of a stream; events may be cut anywhere between two reads.
async function* eventsOf(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Log-probabilities of either endpoint as [{bytes, name, logprob, top: [[name, logprob]]}].
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    const top = (item) => (item.top_logprobs ?? []).map((other) => [other.token, other.logprob]);
    return logprobs.content.map((item) => ({ bytes: item.bytes, name: item.token, logprob: item.logprob, top: top(item) }));
  }
  return (logprobs.tokens ?? []).map((name, i) => ({
    bytes: bytesOf(name), name, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
  }));
}
const bytesOf = (name) => {
  const part = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(name);
  return part ? part[1].match(/[0-9a-f]{2}/g).map((digits) => parseInt(digits, 16)) : [...new TextEncoder().encode(name)];
};
const percent = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)} %`;

// One answer that grows. Tokens that are part of a character show it where its last byte comes.
class Turn {
  constructor(role) {
    this.text = "";
    this.place = el("div");
    this.decoder = new TextDecoder();
    const name = role === "user" ? "You" : role === "prompt" ? "Prompt" : "Model";
    $("transcript").querySelector(".empty")?.remove();
    $("transcript").append(el("div", { className: `turn ${role === "assistant" ? "assistant" : "user"}` }, el("b", { textContent: name }), this.place));
  }
  add(text, tokens = []) {
    const log = $("transcript");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    this.text += text;
    if (!tokens.length) this.place.append(text);
    for (const token of tokens) this.place.append(this.span(token));
    if (follows) log.scrollTop = log.scrollHeight;
  }
  span(token) {
    const shown = token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.name;
    const p = Math.exp(token.logprob);
    const span = el("span", { className: `t p${[0.05, 0.2, 0.5, 0.8].filter((bound) => p > bound).length}`, textContent: shown });
    span.token = token;
    return span;
  }
}

function tell(span) {
  document.querySelector(".t.at")?.classList.remove("at");
  if (!span) return;
  span.classList.add("at");
  const { name, logprob, top } = span.token;
  const others = top.filter(([other]) => other !== name).map(([other, value]) => `${JSON.stringify(other)} ${percent(value)}`);
  $("token").textContent = `${JSON.stringify(name)} ${percent(logprob)}${others.length ? `; others: ${others.join(", ")}` : ""}`;
}

async function send(text) {
  const asked = body(text);
  const turn = new Turn(mode() === "chat" ? "user" : "prompt");
  turn.add(text);
  const answer = new Turn("assistant");
  answer.place.className = "busy";
  $("alert").textContent = $("token").textContent = "";
  $("status").textContent = "waiting";
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const began = performance.now();
  let first = null, usage = null, reason = null;
  try {
    const path = mode() === "chat" ? "/v1/chat/completions" : "/v1/completions";
    const headers = { "Content-Type": "application/json" };
    const response = await ask(path, { method: "POST", headers, body: JSON.stringify(asked), signal: running.signal });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const piece = choice.delta?.content ?? choice.text ?? "";
      const tokens = tokensOf(choice.logprobs);
      if (piece || tokens.length) {
        first ??= performance.now();
        answer.add(piece, tokens);
        $("status").textContent = "answering";
      }
      reason = choice.finish_reason ?? reason;
    }
    const after = usage && first ? (usage.completion_tokens - 1) / ((performance.now() - first) / 1000) : 0;
    const speed = Number.isFinite(after) && after > 0 ? `, ${after.toFixed(0)} tokens/s` : "";
    const soon = first ? `first token after ${((first - began) / 1000).toFixed(2)} s` : "no text";
    $("status").textContent = `${reason ?? "the stream broke off"}; ${usage?.completion_tokens ?? 0} tokens, ${soon}${speed}`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("status").textContent = stopped ? "stopped" : "";
    if (!stopped) $("alert").textContent = error.message;
  } finally {
    answer.place.className = "";
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    if (mode() === "chat" && answer.text) conversation.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
  }
}

function clear() {
  running?.abort();
  conversation = [];
  $("transcript").replaceChildren();
  $("token").textContent = $("alert").textContent = $("status").textContent = "";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value;
  if (running || !text || !$("form").reportValidity()) return;
  if (mode() === "chat") $("prompt").value = "";
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", clear);
$("logprobs").addEventListener("change", () => ($("legend").hidden = !$("logprobs").checked));
for (const radio of document.querySelectorAll("input[name=mode]")) {
  radio.addEventListener("change", () => {
    clear();
    $("prompt-label").textContent = mode() === "chat" ? "Message" : "Prompt";
  });
}
$("transcript").addEventListener("pointerover", (event) => event.target.token && tell(event.target));
$("transcript").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const spans = [...$("transcript").querySelectorAll(".t")];
  if (!step || !spans.length) return;
  event.preventDefault();
  const at = spans.findIndex((span) => span.classList.contains("at"));
  tell(spans[at < 0 ? 0 : Math.min(spans.length - 1, Math.max(0, at + step))]);
});
$("key").addEventListener("change", () => { loadModels(); refresh(); });

// ---- dashboard ----

const PERIOD_MS = 2000, POINTS = 90;
const history = { tokens: [], first: [] };
const time = (s) => (s == null ? "–" : s < 1 ? `${(1000 * s).toPrecision(3)} ms` : `${s.toPrecision(3)} s`);
const plain = (x) => (x == null ? "–" : x >= 100 ? x.toFixed(0) : Number(x.toPrecision(3)).toString());

function line(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const polyline = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const top = Math.max(...values.filter((value) => value != null), 1e-9);
  const points = values.map((value, i) => `${(100 * (POINTS - values.length + i)) / (POINTS - 1)},${19 - (18 * (value ?? 0)) / top}`);
  for (const [name, value] of [["viewBox", "0 0 100 20"], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
  polyline.setAttribute("points", points.join(" "));
  svg.append(polyline);
  return svg;
}
const tile = (name, value, more = "", drawn = null) =>
  el("dl", { className: "tile" }, el("dt", { textContent: name }), el("dd", { textContent: value }), el("dd", { textContent: more }), ...(drawn ? [line(drawn)] : []));
const rows = (pairs) =>
  el("dl", { className: "small" }, ...pairs.flatMap(([name, ...value]) => [el("dt", { textContent: name }), el("dd", {}, ...value)]));
const share = (name, value) => (value == null ? ["–"] : [el("meter", { value, ariaLabel: name }), `${(100 * value).toFixed(0)} %`]);

function engine([name, now]) {
  const waiting = Object.entries(now.waiting).filter(([, count]) => count).map(([lane, count]) => `${lane} ${count}`).join(", ");
  const pairs = [
    ["Running", `${now.running} of ${now.running + now.free_places}`],
    ["Waiting", waiting || "0"],
    ["Busy", ...share("busy", now.busy_share)],
  ];
  if (now.pages.total) pairs.push(["Cache in use", ...share("cache in use", (now.pages.used ?? 0) / now.pages.total)]);
  if (now.cached_share != null) pairs.push(["Prompt tokens from cache", ...share("prompt tokens from cache", now.cached_share)]);
  if (now.compiles) pairs.push(["Compiles after warm-up", String(now.compiles)]);
  const state = now.is_up ? [] : [" ", el("span", { className: "bad", textContent: "is down" })];
  return el("div", { className: "engine" }, el("h3", {}, name, ...state), ...(now.is_up ? [rows(pairs)] : []));
}

function show(now) {
  const first = now.latency.time_to_first_token, next = now.latency.time_per_output_token;
  history.tokens.push(now.tokens_per_s.generated);
  history.first.push(first.p95);
  for (const values of Object.values(history)) values.splice(0, values.length - POINTS);
  const cost = now.cost;
  $("numbers").replaceChildren(
    tile("First token, p95", time(first.p95), `p50 ${time(first.p50)}`, history.first),
    tile("Generated tokens/s", plain(now.tokens_per_s.generated), `prompt ${plain(now.tokens_per_s.prompt)}/s`, history.tokens),
    tile("Each further token, p95", time(next.p95), `p50 ${time(next.p50)}`),
    tile("Whole answer, p95", time(now.latency.request_duration.p95), `p50 ${time(now.latency.request_duration.p50)}`),
    tile("In the queue, p95", time(now.latency.queue.p95), `p50 ${time(now.latency.queue.p50)}`),
    tile("Requests/s", plain(now.requests_per_s), `${now.open_requests} open`),
    ...(cost ? [tile("Cost of 1,000 requests", plain(cost.per_thousand_requests), `1M tokens ${plain(cost.per_million_generated_tokens)}`)] : []),
  );
  $("engines").replaceChildren(...Object.entries(now.models).map(engine));
  const counted = (counts) => Object.entries(counts).map(([name, count]) => `${name}: ${count}`).join(", ") || "none";
  const minutes = `the last ${now.latency_window_s / 60} minutes`;
  const pairs = [["Answers by code", counted(now.codes)], ["Errors", counted(now.errors)]];
  $("outcomes").replaceChildren(el("div", { className: "counts" }, el("h3", { textContent: `In ${minutes}` }), rows(pairs)));
}

async function refresh() {
  let said;
  try {
    const response = await ask("/stats");
    if (response.ok) show(await response.json());
    said = response.ok ? `every ${PERIOD_MS / 1000} s` : await failure(response);
  } catch {
    said = "the service does not answer";
  }
  // Said once, not every two seconds: a screen reader would repeat it.
  if ($("fresh").textContent !== said) $("fresh").textContent = said;
}

loadModels();
refresh();
setInterval(() => document.hidden || refresh(), PERIOD_MS);
