// The page: the answer, the detail of a token, and what a reader does. `charts.js` is in the same scope;
// the data is described in `page_data.py`.

const data = JSON.parse(document.getElementById("data").textContent);
const about = data.about;
const $ = (id) => document.getElementById(id);
const KINDS = {
  a: ["accepted draft", "guessed ahead, and the model agreed"],
  r: ["recovered", "the model's own token, where a guess was wrong"],
  b: ["bonus", "one more from the model, behind guesses that were all right"],
  p: ["plain", "no guess was made in this step"],
};
const SIGNS = {
  a: ["✓", "accepted"],
  no: ["✗", "rejected"],
  skip: ["–", "not judged: an earlier guess was wrong, or the answer had ended"],
};
// Parts of a step's time: what each is called in a list, and in the legend.
const PHASES = [
  ["draft", "drafting", "drafting"],
  ["verify", "the model", "the model (verify)"],
  ["host", "host", "host: scheduling, inputs, text"],
  ["prefill", "prompts", "prompts of others"],
];
let answer, visitOf, tokens, shown = [], pinned = null, shownStep = -1, layout = null;

// ---- small helpers ----

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}
const fill = (id, ...children) => { $(id).replaceChildren(...children); return $(id); };
function percent(share) {
  if (share === 0 || share === 1) return `${100 * share} %`;
  if (share < 0.001) return "< 0.1 %";
  if (share > 0.9995) return "> 99.9 %";
  return `${(100 * share).toFixed(share < 0.1 || share > 0.99 ? 1 : 0)} %`;
}
const ms = (value) => `${value < 1 ? value.toFixed(2) : value.toFixed(1)} ms`;
const number = (count) => count.toLocaleString("en");
const many = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const vocab = (id) => data.vocab[id] ?? `#${id}`;
const INVISIBLE = /[\u061c\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]/g;
const TURNS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/; // the direction of what follows
const CONTROL = /[\u0000-\u001f\u007f-\u009f]/g;
const code = (one) => `‹${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;

// A token's text so that each character of it can be seen.
function visible(text) {
  if (text === "") return "(nothing)";
  return text
    .replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(CONTROL, code)
    .replace(text.trim() === "" ? / /g : /^ +| +$/g, (spaces) => "␣".repeat(spaces.length))
    .replace(INVISIBLE, code);
}
const chip = (text, kind) => make("bdi", `chip ${kind}`, visible(text));
const textOf = (index) => answer.texts[index] ?? vocab(answer.ids[index]);
// What is shown for a token: its place in the text may hold nothing (half a character).
const nameOf = (index) => textOf(index) || vocab(answer.ids[index]);

function visitAt(index) {
  const [step, start, count, accepted, drafts, copied, matched, probs] = answer.visits[visitOf[index]];
  return { step, start, count, accepted, drafts, copied, matched, probs, number: visitOf[index] };
}
const stepOf = (number) => {
  const [batch, k, tier, reqs, draft, verify, prefill, host] = data.steps[answer.visits[number][0]];
  if (!about.speculative) return { batch, k, tier, reqs, draft: 0, verify, prefill, host: host + draft };
  return { batch, k, tier, reqs, draft, verify, prefill, host };
};

// ---- the answer ----

function drawToken(index) {
  const text = textOf(index), letter = answer.origins[index];
  const element = make("span", `t ${letter}`);
  if (answer.visits[visitOf[index]][1] === index) element.classList.add("first");
  text.split("\n").forEach((line, place) => {
    if (place) element.append(make("span", "nl", "\n"));
    if (line) element.append(line);
  });
  if (text.replace(INVISIBLE, "").replace(CONTROL, (one) => "\n\t".includes(one) ? one : "") === "")
    element.dataset.mark = visible(nameOf(index));
  if (TURNS.test(text)) element.classList.add("alone");
  element.dataset.i = index;
  element.tabIndex = -1;
  return element;
}

function drawGhosts() {
  if ($("answer").querySelector(".ghost")) return;
  answer.visits.forEach(([, start, count, accepted, drafts]) => {
    if (accepted >= drafts.length || accepted >= count) return;
    const ghost = make("del", "ghost", drafts.slice(accepted).map((id) => visible(vocab(id))).join(" "));
    ghost.setAttribute("aria-hidden", "true");
    tokens[start + accepted].before(ghost);
  });
}

function drawAnswer(number) {
  answer = data.answers[number];
  visitOf = [];
  answer.visits.forEach(([, start, count], place) => { for (let i = 0; i < count; i++) visitOf[start + i] = place; });
  tokens = answer.ids.map((_, index) => drawToken(index));
  fill("answer", ...tokens);
  if ($("show-ghosts").checked) drawGhosts();
  if (tokens.length) tokens[0].tabIndex = 0;
  $("prompt-title").textContent = `Prompt, ${many(answer.prompt_tokens, "token")}`;
  $("prompt").textContent = (answer.prompt_cut ? "… " : "") + answer.prompt;
  pinned = null;
  shownStep = -1;
  drawFigures();
  drawLegend();
  drawPositions();
  drawTimeline();
  drawByline();
  drawHint();
  if (tokens.length && matchMedia("(min-width: 56rem)").matches) show(example());
}

// A token of a step that shows most: drafts of which some were kept and one was not.
function example() {
  const score = ([, , count, accepted, drafts]) =>
    Math.min(accepted, 3) + (accepted < Math.min(drafts.length, count) ? 2 : 0);
  const best = answer.visits.reduce((one, other) => score(other) > score(one) ? other : one);
  return best[1];
}

function drawByline() {
  const facts = about.facts.slice(0, about.speculative ? 3 : 2);
  const words = facts.map(([name, value]) => (name === "Model" ? value : `${name.toLowerCase()} ${value}`));
  words.push(answer.temperature > 0 ? `sampled at temperature ${answer.temperature}` : "greedy");
  fill("byline", ...words.map((one) => make("span", "", one)));
}

function drawFigures() {
  const { tokens: count, steps, drafted, accepted, rate } = answer.figures;
  const ends = { stop: "to the model's own end", length: "to the limit", abort: "interrupted" };
  const waited = answer.first_token_s;
  const rows = [
    [number(count), "tokens", ends[answer.finish] ?? ""],
    [number(steps), "steps of the model", ""],
    [(steps ? count / steps : 0).toFixed(2), "tokens a step", "1 without drafts"],
  ];
  if (drafted)
    rows.push([percent(accepted / drafted), "of drafts accepted", `${number(accepted)} of ${number(drafted)}`]);
  if (rate !== null)
    rows.push([rate.toFixed(rate < 100 ? 1 : 0), "tokens a second",
      waited === null ? "" : `the first after ${waited.toFixed(2)} s`]);
  fill("figures", ...rows.map(([big, name, sub]) => {
    const row = make("div");
    row.append(make("dt", "", name), make("dd", "big", big));
    if (sub) row.append(make("dd", "sub", sub));
    return row;
  }));
}

function drawLegend() {
  const counts = { a: 0, r: 0, b: 0, p: 0 };
  for (const letter of answer.origins) counts[letter] += 1;
  const letters = Object.keys(KINDS).filter((letter) => counts[letter] || (about.speculative && letter !== "p"));
  fill("legend", ...letters.map((letter) => {
    const row = make("li"), words = make("span");
    words.append(make("strong", "", KINDS[letter][0]), `: ${KINDS[letter][1]}`);
    row.append(make("span", `swatch ${letter}`, number(counts[letter])), words);
    return row;
  }));
  $("switches").hidden = $("acceptance-card").hidden = !about.speculative;
}

// ---- one token ----

function drawHint() {
  fill("detail", make("p", "place",
    "Choose a token: here stands what was drafted there, and how sure drafter and model were."));
}

function drawDetail(index) {
  const visit = visitAt(index), step = stepOf(visit.number);
  const letter = answer.origins[index], offset = index - visit.start;
  const title = make("h2"), what = make("p", "what");
  title.append(chip(nameOf(index), letter));
  what.append(make("strong", "", KINDS[letter][0]), `: ${KINDS[letter][1]}.`);
  const parts = [
    title, what,
    make("p", "place", `token ${index + 1} of ${answer.ids.length} (id ${answer.ids[index]})`
      + ` · step ${visit.number + 1} of ${answer.visits.length}`
      + ` · graph for batch ${step.batch} × draft length ${step.k}`),
  ];
  const [kept, of] = [visit.accepted, visit.drafts.length];
  if (of) parts.push(make("h3", "", `Draft of this step: ${kept} of ${of} accepted`), drawDrafts(visit, offset));
  parts.push(...drawProbabilities(index, visit, offset));
  parts.push(make("h3", "", "Time of this step"), ...drawTimes(step));
  fill("detail", ...parts);
  $("detail").scrollTop = 0;
}

function drawDrafts(visit, offset) {
  const row = make("div", "drafts"), wrong = visit.count > visit.accepted ? visit.accepted : -1;
  visit.drafts.forEach((id, place) => {
    const judged = place < visit.accepted ? "a" : place === wrong ? "no" : "skip";
    const one = chip(vocab(id), judged);
    const [sign, words] = SIGNS[judged];
    one.append(make("span", "sign", sign));
    one.title = words;
    one.setAttribute("aria-label", `${vocab(id)}: ${words}`);
    if (place === offset && place < visit.accepted) one.classList.add("here");
    row.append(one);
  });
  if (visit.count > visit.accepted) {
    const own = visit.start + visit.accepted;
    const one = chip(nameOf(own), answer.origins[own]);
    one.append(make("span", "sign", "+"));
    one.title = KINDS[answer.origins[own]][0];
    if (offset === visit.accepted) one.classList.add("here");
    row.append(one);
  }
  return row;
}

function draftWords(visit, offset) {
  if (offset >= visit.drafts.length) return visit.drafts.length ? "Behind the draft: nothing was guessed here." : "";
  const guess = visit.drafts[offset];
  const given = offset < visit.accepted ? "this token" : `“${visible(vocab(guess))}”`;
  const said = `The drafter proposed ${given}`;
  if (visit.copied) {
    const source = visit.matched ? `what followed the last ${many(visit.matched, "token")} before` : "earlier text";
    return `${said} by copying ${source}: deterministic, without a probability.`;
  }
  if (visit.probs) return `${said} with probability ${percent(visit.probs[offset])}.`;
  const how = about.sampling === "coupled" ? "likeliest token under the model's noise" : "likeliest token";
  return `${said}, its own ${how}: deterministic, it gives no probability.`;
}

function drawProbabilities(index, visit, offset) {
  const parts = [make("h3", "", "Probability")];
  const words = draftWords(visit, offset);
  if (words) parts.push(make("p", "", words));
  if (!answer.likely) return [...parts, make("p", "place", "The model's probabilities were not recorded.")];
  const [own, rank, ...flat] = answer.likely[index];
  const guess = offset < visit.drafts.length ? visit.drafts[offset] : null;
  const when = answer.temperature > 0 ? " before temperature and filters" : "";
  const order = rank === 1 ? "more than any other" : `rank ${rank}`;
  parts.push(make("p", "", `The model gave it ${percent(own)}${when}, ${order}.`));
  const bars = make("div", "bars"), listed = new Set();
  for (let i = 0; i < flat.length; i += 2) {
    const [id, chance] = [flat[i], flat[i + 1]];
    listed.add(id);
    const name = chip(vocab(id), id === answer.ids[index] ? "chosen" : "");
    bars.append(name, track(chance), make("span", "", percent(chance)));
    if (id === guess && id !== answer.ids[index]) bars.lastChild.append(make("span", "tag", " drafted"));
  }
  parts.push(bars);
  if (guess !== null && guess !== answer.ids[index] && !listed.has(guess))
    parts.push(make("p", "place", "What was drafted is not among the model's likeliest."));
  return parts;
}

function track(share) {
  const outer = make("span", "track"), inner = make("i");
  inner.style.width = `${100 * share}%`;
  outer.append(inner);
  return outer;
}

const timesOf = (step) =>
  PHASES.filter(([name]) => step[name] > 0).map(([name, words]) => `${words} ${ms(step[name])}`);

function drawTimes(step) {
  const split = make("div", "split");
  const used = PHASES.filter(([name]) => step[name] > 0);
  used.forEach(([name]) => {
    const part = make("i", name);
    part.style.flexGrow = step[name];
    split.append(part);
  });
  return [split, make("p", "place", timesOf(step).join(" · "))];
}

function show(index) {
  shown.forEach((one) => one.classList.remove("mate", "now"));
  const { start, count, number } = visitAt(index);
  shown = tokens.slice(start, start + count);
  shown.forEach((one) => one.classList.add("mate"));
  tokens[index].classList.add("now");
  drawDetail(index);
  showStep(number);
}

function choose(index) {
  $("answer").querySelectorAll("[tabindex='0']").forEach((one) => { one.tabIndex = -1; });
  pinned = index;
  tokens[index].tabIndex = 0;
  tokens[index].setAttribute("role", "button");
  tokens[index].setAttribute("aria-label", `${visible(nameOf(index))}, ${KINDS[answer.origins[index]][0]}`);
  show(index);
}

function listen() {
  const box = $("answer");
  const indexOf = (event) => {
    const token = event.target.closest(".t");
    return token ? Number(token.dataset.i) : null;
  };
  const on = (name, act) => box.addEventListener(name, (event) => {
    const index = indexOf(event);
    if (index !== null) act(index);
  });
  on("pointerover", show);
  on("focusin", choose);
  on("click", (index) => tokens[index].focus({ preventScroll: true }));
  box.addEventListener("pointerleave", () => { if (pinned !== null) show(pinned); });
  box.addEventListener("keydown", (event) => {
    const now = indexOf(event);
    if (now === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const place = visitOf[now], last = tokens.length - 1, starts = answer.visits;
    const next = {
      ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last,
      ArrowDown: starts[Math.min(place + 1, starts.length - 1)][1], ArrowUp: starts[Math.max(place - 1, 0)][1],
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    tokens[Math.max(0, Math.min(last, next))].focus();
  });
  $("show-ghosts").addEventListener("change", (event) => {
    drawGhosts();
    box.classList.toggle("ghosts", event.target.checked);
  });
  $("show-steps").addEventListener("change", (event) => box.classList.toggle("steps", event.target.checked));
  $("pick").addEventListener("change", (event) => drawAnswer(Number(event.target.value)));
  $("timeline").addEventListener("pointermove", (event) => {
    const place = Math.floor((event.clientX - $("timeline").getBoundingClientRect().left) / layout.pitch);
    if (place >= 0 && place < answer.visits.length && place !== shownStep) show(answer.visits[place][1]);
  });
  $("timeline").addEventListener("click", () => {
    if (shownStep < 0) return;
    const token = tokens[answer.visits[shownStep][1]];
    token.focus({ preventScroll: true });
    token.scrollIntoView({ block: "center" });
  });
  addEventListener("resize", drawTimeline);
}

// ---- the page ----

function drawPage() {
  $("lead").textContent = about.speculative
    ? "A cheap drafter guesses the next few tokens; the model checks all of them in one step and keeps those that it "
      + `would have written itself. The text is ${about.promise}, in fewer steps.`
    : "Speculation was off in this run, so the model wrote one token a step. With it, a cheap drafter guesses tokens "
      + "ahead, and this page shows which were kept.";
  fill("facts", ...about.facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  $("command").textContent = about.command;
  $("footnote").textContent = "Recorded while it ran. Recording asks the model for probabilities. That changes no token"
    + (about.exact ? "" : " of a greedy request, and of a sampled one none while it draws on the same drafts")
    + ", but takes a little time in each step"
    + (about.adaptive ? ", by which other draft lengths may have paid best than without it." : ".");
  data.answers.forEach((one, index) => {
    const option = make("option", "", `${index + 1} of ${data.answers.length}: ${one.name}`);
    option.value = index;
    $("pick").append(option);
  });
  $("choice").hidden = data.answers.length < 2;
  if (!data.answers.length) return void fill("detail", make("p", "place", "No token was generated."));
  listen();
  drawAnswer(0);
}
drawPage();
