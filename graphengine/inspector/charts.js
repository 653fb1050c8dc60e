// Acceptance by position, and the timeline, of the answer that is shown.

function drawPositions() {
  const rows = answer.figures.positions;
  $("acceptance-note").textContent = rows.length
    ? "How often the guess at each place of a draft was kept; it is only where all before it in its draft were."
      + (about.adaptive ? " Long drafts are tried where guessing goes well, so a later place may do better." : "")
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
  const at = (value) => value.toFixed(1);
  const bar = (from, to, place, base) =>
    `M${at(place * pitch + 0.5)} ${at(base - from)}h${at(pitch - 1)}V${at(base - to)}h${at(1 - pitch)}z`;
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
    if (low) paths.k += `${place ? "L" : "M"}${at(place * pitch)} ${at(floor - step.k * unit)}h${at(pitch)}`;
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
  const cut = `${many(over, "column")} longer than ${Number(top.toPrecision(3))} ms ${over === 1 ? "is" : "are"} cut off`;
  $("timeline-note").textContent = `A column a step; the median one took ${ms(median(totals))}.`
    + (over ? ` ${cut}.` : "")
    + (most ? " Below: how many tokens were drafted, how many of them were kept, and the draft length k of the step." : "")
    + (about.async ? " Steps overlapped: the times are of the turn in which each was read." : "");
  const key = (className, words) => { const one = make("li"); one.append(make("i", className), words); return one; };
  const used = PHASES.filter(([name]) => steps.some((step) => step[name] > 0));
  fill("timeline-keys", ...used.map(([name, , words]) => key(name, words)),
    ...(most ? [key("accepted", "accepted"), key("drafted", "drafted, not kept"), key("line", "k")] : []));
  const label = `Time of ${steps.length} steps, median ${ms(median(totals))}; longest draft ${most}`;
  $("timeline").setAttribute("aria-label", label);
}

function showStep(number) {
  const step = stepOf(number), [, , count, accepted, drafts] = answer.visits[number];
  shownStep = number;
  const cursor = $("timeline").querySelector(".cursor");
  cursor.setAttribute("x", number * layout.pitch);
  $("readout").textContent = `step ${number + 1}: ${timesOf(step).join(", ")}`
    + `; k = ${step.k}, ${drafts.length} drafted, ${accepted} accepted, ${many(count, "token")} out`;
  const left = number * layout.pitch - $("scroller").scrollLeft, box = $("scroller");
  const isSeen = left >= 0 && left <= box.clientWidth - layout.pitch;
  if (!isSeen && !box.matches(":hover")) box.scrollLeft += left - box.clientWidth / 2;
}
