// The page of `meshwright serve`: asks the same addresses as any other client.

const WORDS = {
  en: {
    completion: "Completion", chat: "Chat", prompt: "Beginning of a text", promptHint: "Once upon a time",
    generate: "Generate", stop: "Stop", append: "Put the text into the prompt", send: "Send", clear: "Clear",
    message: "Message", messageHint: "Ask something", settings: "Settings", textLabel: "Generated text",
    turnsLabel: "Dialogue", user: "You", assistant: "Model", stops: "Stop strings, separated by |", stopsHint: "\\n|END",
    seed: "Seed", seedHint: "random", key: "API key", keyHint: "if the server needs one",
    temperature: "Temperature", top_p: "Top-p", top_k: "Top-k (0: off)", min_p: "Min-p",
    repetition_penalty: "Repetition penalty", max_tokens: "Most new tokens",
    keys: "Ctrl+Enter generates, Escape stops. In the text, the arrow keys move from token to token and show the "
      + "probabilities of each; the less likely a token was, the warmer its colour.",
    base: "A base model: it continues a text. It has no chat template, so it was not made to answer questions.",
    facts: m => `step ${m.step}, reads ${m.max_model_len} tokens`, waiting: "Waiting ...",
    running: n => `${n} tokens ...`, other: "other language: 中文",
    done: (n, s, why) => `${n} tokens in ${s} s (${n && s > 0 ? (n / s).toFixed(1) : 0}/s), ${why}`,
    ends: { stop: "ended by itself", length: "cut at the length", stopped: "stopped" },
  },
  zh: {
    completion: "续写", chat: "对话", prompt: "文本开头", promptHint: "很久以前", generate: "生成", stop: "停止",
    append: "把生成的文本放进开头", send: "发送", clear: "清空", message: "消息", messageHint: "问点什么",
    settings: "设置", textLabel: "生成的文本", turnsLabel: "对话记录", user: "你", assistant: "模型",
    stops: "停止字符串，用 | 分隔", stopsHint: "\\n|END", seed: "随机种子", seedHint: "随机", key: "API 密钥",
    keyHint: "服务器需要时填写", temperature: "温度", top_p: "Top-p", top_k: "Top-k（0：关闭）", min_p: "Min-p",
    repetition_penalty: "重复惩罚", max_tokens: "最多新词元数",
    keys: "Ctrl+Enter 生成，Escape 停止。在文本中用方向键逐个移动词元并查看其概率；词元的概率越低，颜色越暖。",
    base: "基础模型：它续写文本。它没有对话模板，不是为回答问题而训练的。",
    facts: m => `第 ${m.step} 步，可读 ${m.max_model_len} 个词元`, waiting: "等待中……",
    running: n => `${n} 个词元……`, other: "other language: English",
    done: (n, s, why) => `${n} 个词元，${s} 秒（每秒 ${n && s > 0 ? (n / s).toFixed(1) : 0} 个），${why}`,
    ends: { stop: "自然结束", length: "达到长度上限", stopped: "已停止" },
  },
};
// name: least, most, step, at first
const SLIDERS = {
  temperature: [0, 2, 0.05, 0.8], top_p: [0.01, 1, 0.01, 1], top_k: [0, 200, 1, 0], min_p: [0, 0.5, 0.01, 0],
  repetition_penalty: [1, 2, 0.01, 1], max_tokens: [1, 1024, 1, 128],
};
const LIKELIEST = 5;

const $ = id => document.getElementById(id);
const element = (tag, text = "", ...classes) => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.classList.add(...classes);
  return made;
};
const kept = {  // the storage may be forbidden
  get: name => { try { return localStorage.getItem(name); } catch { return null; } },
  set: (name, value) => { try { localStorage.setItem(name, value); } catch { /* not kept */ } },
};

let language = kept.get("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");
let model = null;
let work = null;  // the AbortController of the answer that comes
let shown = null;  // the function that writes the state again, in another language
const turns = [];  // of the dialogue
const parts = new WeakMap();  // element of the text -> its tokens

// Words

function translate() {
  const words = WORDS[language];
  document.documentElement.lang = language;
  for (const e of document.querySelectorAll("[data-t]")) e.textContent = words[e.dataset.t];
  for (const e of document.querySelectorAll("[data-placeholder]")) e.placeholder = words[e.dataset.placeholder];
  for (const e of document.querySelectorAll("[data-label]")) e.setAttribute("aria-label", words[e.dataset.label]);
  for (const e of document.querySelectorAll("[data-role]")) e.textContent = words[e.dataset.role];
  $("language").textContent = language === "en" ? "中文" : "English";
  $("language").lang = language === "en" ? "zh" : "en";
  $("language").setAttribute("aria-label", words.other);
  $("facts").textContent = model ? words.facts(model) : "";
  shown?.();
}

function say(write, isError = false) {
  shown = () => {
    $("state").textContent = write(WORDS[language]);
    $("state").classList.toggle("error", isError);
  };
  shown();
}

// Settings

function makeSliders() {
  for (const [name, [least, most, step, value]] of Object.entries(SLIDERS)) {
    const row = element("div", "", "slider"), label = element("label"), output = element("output");
    const input = Object.assign(document.createElement("input"), { type: "range", id: name, min: least, max: most, step });
    input.value = value;
    label.htmlFor = name;
    label.dataset.t = name;
    output.htmlFor.add(name);
    input.addEventListener("input", () => { output.textContent = input.value; });
    output.textContent = input.value;
    row.append(label, output, input);
    $("sliders").append(row);
  }
}

function settings() {
  const out = Object.fromEntries(Object.keys(SLIDERS).map(name => [name, Number($(name).value)]));
  const stop = $("stops").value.split("|").map(s => s.replaceAll("\\n", "\n")).filter(Boolean);
  if (stop.length) out.stop = stop;
  if ($("seed").value !== "") out.seed = Number($("seed").value);
  return out;
}

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

// Answers

async function* events(path, body, signal) {
  const reply = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event.choices[0];
    }
  }
}

// The tokens of a part with the likeliest in their places, from either form of the answer.
function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map(t => ({ token: t.token, logprob: t.logprob, top: t.top_logprobs.map(o => [o.token, o.logprob]) }));
  }
  return found.tokens.map((token, i) => ({
    token, logprob: found.token_logprobs[i], top: Object.entries(found.top_logprobs[i] ?? {}),
  }));
}

function addPart(place, text, tokens) {
  if (!text && !tokens.length) return;
  const likely = Math.min(1, ...tokens.map(t => Math.exp(t.logprob)));
  const span = element("span", text, "token", `p${[0.5, 0.2, 0.05, 0.01].filter(p => likely < p).length}`);
  parts.set(span, tokens);
  place.append(span);
}

async function run(path, body, place) {
  work?.abort();
  const mine = work = new AbortController(), began = performance.now();
  let text = "", count = 0, why = "stopped";
  setRunning(true);
  say(words => words.waiting);
  try {
    for await (const choice of events(path, { ...body, ...settings(), stream: true }, mine.signal)) {
      const piece = choice.text ?? choice.delta.content ?? "", tokens = tokensOf(choice);
      addPart(place, piece, tokens);
      text += piece;
      count += tokens.length;
      why = choice.finish_reason ?? why;
      say(words => words.running(count));
    }
    finish();
  } catch (error) {
    if (error.name === "AbortError") finish();
    else say(() => error.message, true);
  } finally {
    if (work === mine) {
      work = null;
      setRunning(false);
    }
  }
  return text;

  function finish() {
    const seconds = ((performance.now() - began) / 1000).toFixed(2);
    say(words => words.done(count, seconds, words.ends[why]));
  }
}

function setRunning(isRunning) {
  for (const e of document.querySelectorAll(".stop")) e.disabled = !isRunning;
  for (const e of document.querySelectorAll(".main, #append, #clear")) e.disabled = isRunning;
  if (!isRunning) $("append").disabled = !$("text").textContent;
}

async function generate() {
  if (work) return;
  const prompt = $("prompt").value, place = $("text");
  place.replaceChildren(element("span", prompt, "given"));
  await run("v1/completions", { prompt, logprobs: LIKELIEST }, place);
}

async function send() {
  const content = $("message").value;
  if (work || !content.trim()) return;
  $("message").value = "";
  addTurn({ role: "user", content });
  const { body, place } = addTurn({ role: "assistant", content: "" });
  const before = turns.slice(0, -1);
  body.content = await run("v1/chat/completions", { messages: before, truncation: "auto", logprobs: true, top_logprobs: LIKELIEST }, place);
}

function addTurn(body) {
  const turn = element("div", "", "turn"), who = element("b"), place = element("span", body.content);
  who.dataset.role = body.role;
  who.textContent = WORDS[language][body.role];
  turn.append(who, place);
  $("turns").append(turn);
  turn.scrollIntoView({ block: "nearest" });
  turns.push(body);
  return { body, place };
}

// Probabilities of a token, beside the mouse or the token that the arrow keys have reached

function showTip(span) {
  hideTip();
  const tip = $("tip"), tokens = parts.get(span);
  if (!tokens?.length) return;
  span.classList.add("at");
  tip.replaceChildren(...tokens.flatMap((t, i) => [...(i ? [element("hr")] : []), ...likeliest(t)]));
  tip.hidden = false;
  const at = span.getBoundingClientRect();
  const below = at.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? at.bottom + 6 : Math.max(4, at.top - tip.offsetHeight - 6)}px`;
}

function likeliest(t) {
  const all = t.top.some(([token]) => token === t.token) ? t.top : [[t.token, t.logprob], ...t.top];
  return all.sort((a, b) => b[1] - a[1]).map(([token, logprob]) => {
    const row = element("div"), p = Math.exp(logprob);
    row.classList.toggle("chosen", token === t.token);
    const bar = Object.assign(document.createElement("meter"), { min: 0, max: 1, value: p });
    const name = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
    row.append(element("code", name || "∅"), bar, element("span", `${(100 * p).toFixed(p < 0.01 ? 2 : 1)} %`));
    return row;
  });
}

function hideTip() {
  $("tip").hidden = true;
  document.querySelector(".token.at")?.classList.remove("at");
}

function step(place, event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const all = [...place.querySelectorAll(".token")];
  if (!by || !all.length) return;
  event.preventDefault();
  const at = all.indexOf(place.querySelector(".token.at"));
  const next = at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, at + by));
  all[next].scrollIntoView({ block: "nearest" });
  showTip(all[next]);
}

// Beginning

function choose(name) {
  for (const other of ["completion", "chat"]) {
    const isIt = other === name, tab = $(`tab-${other}`);
    $(other).hidden = !isIt;
    tab.setAttribute("aria-selected", isIt);
    tab.tabIndex = isIt ? 0 : -1;
  }
}

async function readModel() {
  const reply = await fetch("v1/models", { headers: headers() });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error.message);
  model = answer.data[0];
  $("name").textContent = model.id;
  document.title = `${model.id} · Meshwright`;
  $("tabs").hidden = !model.has_chat_template;
  $("base").hidden = model.has_chat_template;
  const length = $("max_tokens");
  length.max = model.max_model_len - 1;
  length.value = Math.min(128, model.max_model_len >> 1);
  length.dispatchEvent(new Event("input"));
  translate();
}

function connect() {
  for (const name of ["completion", "chat"]) $(`tab-${name}`).addEventListener("click", () => choose(name));
  document.querySelector(".tabs").addEventListener("keydown", event => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const name = $("chat").hidden ? "chat" : "completion";
    choose(name);
    $(`tab-${name}`).focus();
  });
  $("language").addEventListener("click", () => {
    language = language === "en" ? "zh" : "en";
    kept.set("language", language);
    translate();
  });
  $("generate").addEventListener("click", generate);
  $("send").addEventListener("click", send);
  $("append").addEventListener("click", () => {
    $("prompt").value = $("text").textContent;
    $("prompt").focus();
  });
  $("clear").addEventListener("click", () => {
    turns.length = 0;
    $("turns").replaceChildren();
  });
  for (const e of document.querySelectorAll(".stop")) e.addEventListener("click", () => work?.abort());
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") {
      work?.abort();
      hideTip();
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ($("chat").hidden ? generate : send)();
    }
  });
  for (const place of [$("text"), $("turns")]) {
    place.addEventListener("mouseover", event => event.target.closest(".token") && showTip(event.target.closest(".token")));
    place.addEventListener("mouseleave", hideTip);
    place.addEventListener("keydown", event => step(place, event));
    place.addEventListener("blur", hideTip);
  }
  $("key").addEventListener("change", () => readModel().catch(error => say(() => error.message, true)));
}

makeSliders();
translate();
connect();
readModel().catch(error => say(() => error.message, true));
