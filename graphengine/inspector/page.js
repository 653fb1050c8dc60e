"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const about = data.about;
  const $ = (id) => document.getElementById(id);
  const KINDS = {
    a: ["accepted draft", "guessed ahead, and the model agreed"],
    r: ["recovered", "the model's own token, where a guess was wrong"],
    b: ["bonus", "one more from the model, behind guesses that were all right"],
    p: ["plain", "no guess was made in this step"],
  };
  const PHASES = [["draft", "drafting"], ["verify", "the model"], ["host", "host"], ["prefill", "prompts"]];
  let answer, visitOf, tokens, shown = [], pinned = null, shownStep = -1, layout = null;

  // ---- small helpers ----

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const fill = (id, ...children) => { $(id).replaceChildren(...children); return $(id); };
  const percent = (share) => share === 0 || share === 1 ? `${100 * share} %` : share < 0.001 ? "< 0.1 %" : share > 0.9995 && share < 1 ? "> 99.9 %" : `${(100 * share).toFixed(share < 0.1 || share > 0.99 ? 1 : 0)} %`;
  const ms = (value) => `${value < 1 ? value.toFixed(2) : value.toFixed(1)} ms`;
  const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
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
    if (text.replace(INVISIBLE, "").replace(CONTROL, (one) => "\n\t\r".includes(one) ? one : "") === "")
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
    const score = ([, , count, accepted, drafts]) => Math.min(accepted, 3) + (accepted < drafts.length && accepted < count ? 2 : 0);
    const best = answer.visits.reduce((one, other) => score(other) > score(one) ? other : one);
    return best[1];
  }

  function drawByline() {
    const facts = about.facts.slice(0, about.speculative ? 3 : 2).map(([name, value]) => `${name === "Model" ? "" : `${name.toLowerCase()} `}${value}`);
    facts.push(answer.temperature > 0 ? `sampled at temperature ${answer.temperature}` : "greedy: always the likeliest token");
    fill("byline", ...facts.filter(Boolean).map((one) => make("span", "", one)));
  }

  function drawFigures() {
    const { tokens: count, steps, drafted, accepted, rate } = answer.figures;
    const rows = [
      [count.toLocaleString("en"), "tokens", { stop: "to the model's own end", length: "to the limit", abort: "interrupted" }[answer.finish] ?? ""],
      [steps.toLocaleString("en"), "steps of the model", ""],
      [(steps ? count / steps : 0).toFixed(2), "tokens a step", "1 without drafts"],
    ];
    if (drafted) rows.push([percent(accepted / drafted), "of drafts accepted", `${accepted.toLocaleString("en")} of ${drafted.toLocaleString("en")}`]);
    if (rate !== null) rows.push([rate >= 100 ? rate.toFixed(0) : rate.toFixed(1), "tokens a second", answer.first_token_s === null ? "" : `the first after ${answer.first_token_s.toFixed(2)} s`]);
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
      row.append(make("span", `swatch ${letter}`, counts[letter].toLocaleString("en")), words);
      return row;
    }));
    $("switches").hidden = $("acceptance-card").hidden = !about.speculative;
  }

  // ---- one token ----

  function drawHint() {
    fill("detail", make("p", "place", answer.ids.length ? "Choose a token: here stands what was drafted there, and how sure drafter and model were." : "No token was generated."));
  }

  function drawDetail(index) {
    const visit = visitAt(index), step = stepOf(visit.number);
    const letter = answer.origins[index], offset = index - visit.start;
    const title = make("h2"), what = make("p", "what");
    title.append(chip(nameOf(index), letter));
    what.append(make("strong", "", KINDS[letter][0]), `: ${KINDS[letter][1]}.`);
    const parts = [
      title, what,
      make("p", "place", `token ${index + 1} of ${answer.ids.length} (id ${answer.ids[index]}) · step ${visit.number + 1} of ${answer.visits.length} · graph for batch ${step.batch} × draft length ${step.k}`),
    ];
    if (visit.drafts.length) parts.push(make("h3", "", `Draft of this step: ${visit.accepted} of ${visit.drafts.length} accepted`), drawDrafts(visit, offset));
    parts.push(...drawProbabilities(index, visit, offset));
    parts.push(make("h3", "", "Time of this step"), ...drawTimes(step));
    fill("detail", ...parts);
    $("detail").scrollTop = 0;
  }

  function drawDrafts(visit, offset) {
    const row = make("div", "drafts");
    visit.drafts.forEach((id, place) => {
      const judged = place < visit.accepted ? "a" : place === visit.accepted && visit.count > visit.accepted ? "no" : "skip";
      const one = chip(vocab(id), judged);
      const [sign, words] = { a: ["✓", "accepted"], no: ["✗", "rejected"], skip: ["–", "not judged: an earlier guess was wrong, or the answer had ended"] }[judged];
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
    if (visit.copied) return `The drafter proposed ${given} by copying${visit.matched ? ` what followed the last ${many(visit.matched, "token")} before` : " earlier text"}: deterministic, without a probability.`;
    if (visit.probs) return `The drafter proposed ${given} with probability ${percent(visit.probs[offset])}.`;
    if (about.sampling === "coupled") return `The drafter proposed ${given}: its own likeliest under the model's noise; it gives no probability.`;
    return `The drafter proposed ${given}: its own likeliest token, deterministic; it gives no probability.`;
  }

  function drawProbabilities(index, visit, offset) {
    const parts = [make("h3", "", "Probability")];
    const words = draftWords(visit, offset);
    if (words) parts.push(make("p", "", words));
    if (!answer.likely) return [...parts, make("p", "place", "The model's probabilities were not recorded.")];
    const [own, rank, ...flat] = answer.likely[index];
    const guess = offset < visit.drafts.length ? visit.drafts[offset] : null;
    const when = answer.temperature > 0 ? " before temperature and filters" : "";
    parts.push(make("p", "", `The model gave it ${percent(own)}${when}${rank === 1 ? ", more than any other" : `, rank ${rank}`}.`));
    const bars = make("div", "bars"), listed = new Set();
    for (let i = 0; i < flat.length; i += 2) {
      const [id, chance] = [flat[i], flat[i + 1]];
      listed.add(id);
      bars.append(chip(vocab(id), id === answer.ids[index] ? "chosen" : ""), track(chance), make("span", "", percent(chance)));
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

  function drawTimes(step) {
    const split = make("div", "split");
    const used = PHASES.filter(([name]) => step[name] > 0);
    used.forEach(([name]) => {
      const part = make("i", name);
      part.style.flexGrow = step[name];
      split.append(part);
    });
    return [split, make("p", "place", used.map(([name, words]) => `${words} ${ms(step[name])}`).join(" · "))];
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
    box.addEventListener("pointerover", (event) => { const index = indexOf(event); if (index !== null) show(index); });
    box.addEventListener("pointerleave", () => { if (pinned !== null) show(pinned); });
    box.addEventListener("focusin", (event) => { const index = indexOf(event); if (index !== null) choose(index); });
    box.addEventListener("click", (event) => { const index = indexOf(event); if (index !== null) tokens[index].focus({ preventScroll: true }); });
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
    $("show-ghosts").addEventListener("change", (event) => { drawGhosts(); box.classList.toggle("ghosts", event.target.checked); });
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

  // ---- charts ----

  function drawPositions() {
    const rows = answer.figures.positions;
    $("acceptance-note").textContent = rows.length
      ? "How often the guess at each place of a draft was kept. A guess is kept only where all before it in its draft were."
        + (about.adaptive ? " Long drafts are tried where guessing goes well, so a later place may do better than an earlier one." : "")
      : "No draft was verified for this answer.";
    fill("positions", ...rows.flatMap(([drafted, accepted], place) => [
      make("span", "", `guess ${place + 1}`), track(accepted / drafted),
      wrap(make("strong", "", percent(accepted / drafted)), make("span", "count", ` ${accepted} of ${drafted}`)),
    ]));
  }
  function wrap(...children) {
    const span = make("span");
    span.append(...children);
    return span;
  }

  // A round number of milliseconds that nearly all steps stay under.
  function niceTop(totals) {
    const sorted = [...totals].sort((one, other) => one - other);
    const high = Math.max(sorted[Math.floor(0.97 * (sorted.length - 1))] * 1.1, 1e-3);
    const unit = 10 ** Math.floor(Math.log10(high));
    return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((one) => one * unit).find((one) => one >= high);
  }

  function drawTimeline() {
    const svg = $("timeline"), count = answer.visits.length;
    const steps = answer.visits.map((_, number) => stepOf(number));
    $("readout").textContent = "";
    if (!count) { svg.replaceChildren(); $("axis").replaceChildren(); return; }
    const totals = steps.map((one) => PHASES.reduce((sum, [name]) => sum + one[name], 0));
    const top = niceTop(totals), most = Math.max(...steps.map((one) => one.k));
    const high = 150, gap = 18, low = most ? 64 : 0, pad = 8;
    const pitch = Math.min(26, Math.max(5, ($("scroller").clientWidth || 600) / count));
    layout = { pitch };
    const width = Math.ceil(pitch * count), height = pad + high + (low ? gap + low : 0) + pad;
    const bar = (from, to, place, base) => `M${(place * pitch + 0.5).toFixed(1)} ${(base - from).toFixed(1)}h${(pitch - 1).toFixed(1)}V${(base - to).toFixed(1)}h${(1 - pitch).toFixed(1)}z`;
    const paths = { draft: "", verify: "", host: "", prefill: "", drafted: "", accepted: "", k: "" };
    const scale = (value) => Math.min(high + pad, value / top * high);
    const base = pad + high, floor = height - pad;
    steps.forEach((step, place) => {
      let sum = 0;
      for (const [name] of PHASES) {
        if (step[name] > 0) paths[name] += bar(scale(sum), scale(sum + step[name]), place, base);
        sum += step[name];
      }
      const [, , , accepted, drafts] = answer.visits[place], unit = low / Math.max(1, most);
      if (drafts.length > accepted) paths.drafted += bar(accepted * unit, drafts.length * unit, place, floor);
      if (accepted) paths.accepted += bar(0, accepted * unit, place, floor);
      if (low) paths.k += `${place ? "L" : "M"}${(place * pitch).toFixed(1)} ${(floor - step.k * unit).toFixed(1)}h${pitch.toFixed(1)}`;
    });
    const element = (tag, className, attributes) => {
      const one = document.createElementNS(svg.namespaceURI, tag);
      one.setAttribute("class", className);
      for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
      return one;
    };
    const lines = [base, base - high / 2, base - high, ...(low ? [floor] : [])];
    svg.setAttribute("width", width);
    svg.setAttribute("height", height);
    svg.replaceChildren(
      element("path", "grid", { d: lines.map((y) => `M0 ${y}H${width}`).join("") }),
      ...Object.entries(paths).map(([name, d]) => element("path", name, { d })),
      element("rect", "cursor", { y: 0, height, width: pitch, x: -100 }),
    );
    const label = (y, text) => { const one = make("span", "", text); one.style.top = `${y}px`; return one; };
    const round = (value) => Number(value.toPrecision(3));
    fill("axis", label(base - high, `${round(top)} ms`), label(base - high / 2, `${round(top / 2)}`), label(base, "0"),
      ...(low ? [label(floor - low, `k = ${most}`), label(floor, "0")] : []));
    drawTimelineWords(steps, totals, top, most);
    if (shownStep >= 0) showStep(shownStep);
  }

  function drawTimelineWords(steps, totals, top, most) {
    const over = totals.filter((total) => total > top).length;
    const median = (values) => [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)];
    $("timeline-note").textContent = `A column a step; the median one took ${ms(median(totals))}.`
      + (over ? ` ${many(over, "column")} longer than ${Number(top.toPrecision(3))} ms ${over === 1 ? "is" : "are"} cut off.` : "")
      + (most ? " Below: how many tokens each step had drafted, how many of them were kept, and the draft length k that was chosen for it." : "")
      + (about.async ? " Steps overlapped: the times are of the turn in which each was read." : "");
    const key = (className, words) => { const one = make("li"); one.append(make("i", className), words); return one; };
    const used = PHASES.filter(([name]) => steps.some((step) => step[name] > 0));
    const long = { draft: "drafting", verify: "the model (verify)", host: "host: scheduling, inputs, text", prefill: "prompts of others" };
    fill("timeline-keys", ...used.map(([name]) => key(name, long[name])),
      ...(most ? [key("accepted", "accepted"), key("drafted", "drafted, not kept"), key("line", "k")] : []));
    $("timeline").setAttribute("aria-label", `Time of ${steps.length} steps, median ${ms(median(totals))}; longest draft ${most}`);
  }

  function showStep(number) {
    const step = stepOf(number), [, , count, accepted, drafts] = answer.visits[number];
    shownStep = number;
    const cursor = $("timeline").querySelector(".cursor");
    cursor.setAttribute("x", number * layout.pitch);
    $("readout").textContent = `step ${number + 1}: ${PHASES.filter(([name]) => step[name] > 0).map(([name, words]) => `${words} ${ms(step[name])}`).join(", ")}`
      + `; k = ${step.k}, ${drafts.length} drafted, ${accepted} accepted, ${many(count, "token")} out`;
    const left = number * layout.pitch, box = $("scroller");
    if (!box.matches(":hover") && (left < box.scrollLeft || left > box.scrollLeft + box.clientWidth - layout.pitch)) box.scrollLeft = left - box.clientWidth / 2;
  }

  // ---- the page ----

  function drawPage() {
    $("lead").textContent = !about.speculative
      ? "Speculation was off in this run, so the model wrote one token a step. With it, a cheap drafter guesses tokens ahead and this page shows which were kept."
      : "A cheap drafter guesses the next few tokens; the model checks all of them in one step and keeps those that it would have written itself. "
        + (about.exact ? "The text is the same as without guessing, in fewer steps." : "The text is distributed as without guessing, in fewer steps.");
    fill("facts", ...about.facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
    $("command").textContent = about.command;
    $("footnote").textContent = "Recorded while it ran. Recording asks the model for probabilities. That changes no token"
      + (about.exact ? "" : " of a greedy request, and of a sampled one none while it draws on the same drafts")
      + `, but takes a little time in each step${about.adaptive ? ", by which other draft lengths may have paid best than without it" : ""}.`;
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
})();
