// The Review tab of TensorBoard and the report of `finetune review --html`: no library, no build step.
//
// TensorBoard imports this module into an iframe and calls render(); the report holds it together with its data. Names
// and texts come from runs, so they only ever become text nodes: nothing here writes HTML.

const RENEW_SECONDS = 30;
const OPEN_AT_FIRST = 3; // so many runs are shown in full; of more, only the last one to write and what the user opens
const COLORS = {data_wait: "#e15759", forward: "#4e79a7", backward: "#76b7b2", communication: "#f28e2b", optimizer: "#59a14f", other: "#9c8f8a"};
const LINES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#d4a72c"];
const COMPARED = ["loss", "eval_loss", "tokens_per_gpu", "step_seconds", "hours", "mfu", "padding", "lost_to_slowest", "fullest"];
const SHORT = {step_seconds: "step", hours: "time", lost_to_slowest: "waiting", fullest: "memory"}; // labels of narrow columns
const PREDICTED = {step_seconds: ["step time", "s"], peak_memory_gib: ["peak memory", "GiB"]};
const TEXTS = ["run", "model", "verdict"]; // columns of words in the table of runs
const FAR_APART = 8; // the longest run by the shortest: from then on the axis of a chart is logarithmic
const MISSING = "not recorded";
const NOT_FINITE = "not finite"; // JSON has no NaN: a loss of null

const STYLE = `
:root { --text: #212121; --faint: #5f6368; --line: #dadce0; --page: #fff; --panel: #fff; --link: #1565c0;
  --warning: #e65100; --warning-back: #fff3e0; --note: #1565c0; --note-back: #e8f0fe; --good: #2e7d32; color-scheme: light; }
:root.dark { --text: #fff; --faint: #bdbdbd; --line: #555; --page: #303030; --panel: #383838; --link: #90caf9;
  --warning: #ffb74d; --warning-back: #4a3a24; --note: #90caf9; --note-back: #2b3a4a; --good: #81c784; color-scheme: dark; }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { font: 14px/1.45 Roboto, system-ui, sans-serif; color: var(--text); background: var(--page); margin: 20px 24px 60px; }
main { max-width: 1600px; }
h1 { font-size: 24px; font-weight: 500; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 20px; font-weight: 500; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 14px; font-weight: 600; margin: 22px 0 6px; }
p { margin: 6px 0; max-width: 900px; overflow-wrap: anywhere; }
.faint { color: var(--faint); }
details.run { border: 1px solid var(--line); border-radius: 6px; background: var(--panel); padding: 14px 18px; margin: 14px 0; }
summary { cursor: pointer; }
details.run > summary h2 { display: inline; }
.verdict { font-size: 16px; margin: 6px 0; border-left: 4px solid var(--good); padding: 4px 12px; }
.verdict.warning { border-color: var(--warning); }
.verdict.note { border-color: var(--note); }
.verdict.unknown { border-color: var(--faint); }
.finding { border-left: 4px solid var(--note); background: var(--note-back); padding: 8px 12px; margin: 8px 0; max-width: 900px; }
.finding.warning { border-color: var(--warning); background: var(--warning-back); }
.finding b { display: inline-block; }
.finding b::first-letter { text-transform: uppercase; }
.finding dt { font-weight: 600; margin-top: 6px; }
.finding dd { margin: 0; }
.fold > summary { color: var(--link); font-size: 12px; margin: 6px 0; width: fit-content; }
.fold dl { margin: 6px 0; max-width: 900px; }
.words-list { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; font-size: 12px; }
.words-list dt { color: var(--faint); }
.words-list dd { margin: 0; }
.wide { overflow-x: auto; }
.wide:focus-visible { outline: 2px solid var(--link); }
.scrolls { font-size: 12px; color: var(--faint); margin: 0 0 2px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 500; color: var(--faint); text-align: right; }
thead th { vertical-align: bottom; }
th:first-child, td:first-child, .words { text-align: left; }
td.words { white-space: normal; min-width: 16em; overflow-wrap: anywhere; }
td.one-line { width: 100%; max-width: 0; min-width: 18em; text-align: left; line-height: 1.35; }
td.one-line > div { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.first { font-size: 12px; color: var(--faint); }
table.runs th, table.runs th button.sort { white-space: normal; }
table.runs button.sort { text-align: inherit; }
table.runs th.words { white-space: nowrap; }
td.name { text-align: left; }
th.name { text-align: left; }
td.name > span, td.name > button { display: inline-block; vertical-align: bottom; max-width: min(18em, 40vw); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
table.runs { width: 100%; }
table.runs td { height: 30px; padding: 0 10px 0 0; }
.level.warning { color: var(--warning); }
.level.note { color: var(--note); }
.level.good { color: var(--good); }
tr.off td { color: var(--faint); }
tr.off td.one-line, tr.off td button { text-decoration: line-through; }
td abbr { border: 0 !important; }
abbr { text-decoration: none; border-bottom: 1px dotted var(--faint); cursor: help; }
a, button.link { color: var(--link); }
button.link { background: none; border: 0; padding: 0; font: inherit; cursor: pointer; text-decoration: underline; text-align: left; }
button.sort { background: none; border: 0; padding: 0; font: inherit; color: inherit; cursor: pointer; white-space: nowrap; }
button.sort:hover, th[aria-sort] button.sort { color: var(--text); text-decoration: underline; }
input[type=checkbox] { margin: 0 8px 0 0; vertical-align: -2px; }
.tools { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 14px; margin: 6px 0 10px; }
.tools input[type=search] { font: inherit; color: inherit; background: var(--page); border: 1px solid var(--faint); border-radius: 4px; padding: 4px 8px; width: min(22em, 100%); }
svg { display: block; width: 100%; height: auto; }
.picture { max-width: 900px; }
svg text { fill: var(--text); font-size: 12px; }
svg .axis { stroke: var(--line); }
svg text.bad { fill: #e15759; font-size: 14px; }
svg text.tick { fill: var(--faint); font-size: 11px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12px; margin: 6px 0; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
.legend span { overflow-wrap: anywhere; }
.readout { min-height: 1.45em; font-size: 12px; color: var(--faint); }
@media (max-width: 600px) { body { margin: 12px 10px 40px; } details.run { padding: 10px; } th, td { padding-right: 10px; } td.words { min-width: 12em; }
  table.runs, table.runs tbody, table.runs tr, table.runs td.one-line { display: block; max-width: none; min-width: 0; }
  table.runs thead tr { display: flex; flex-wrap: wrap; gap: 2px 12px; } table.runs thead th { border: 0; }
  table.runs tbody tr { border-bottom: 1px solid var(--line); padding: 6px 0; } table.runs td { display: inline-block; height: auto; border: 0; }
  table.runs td[data-label]::before { content: attr(data-label) " "; color: var(--faint); } td.one-line > div { white-space: normal; } }
@media print { details.run { break-inside: avoid-page; } .tools, .scrolls, .readout { display: none; } }
`;

// Building blocks --------------------------------------------------------------------------------------------------

function make(parent, name, attributes = {}, text = "") {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return parent.appendChild(node);
}

function svg(parent, name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return parent.appendChild(node);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const entries = (value) => Object.entries(value ?? {});
const words = (key) => String(key).replaceAll("_", " ");
const digits = (value, count) => value.toLocaleString("en-US", {maximumSignificantDigits: count});
const two = (value) => String(value).padStart(2, "0");

/** Minutes and seconds, or hours: 0:53, 1:02:03. */
function clock(seconds) {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Seconds in the unit that people read: 250 us, 0.7 ms, 4.33 s, 1:05. */
function duration(seconds) {
  const size = Math.abs(seconds);
  if (size >= 60) return clock(seconds);
  if (size >= 0.1 || size === 0) return `${digits(seconds, 3)} s`;
  return size >= 1e-4 ? `${digits(1e3 * seconds, 2)} ms` : `${digits(1e6 * seconds, 2)} us`;
}

/** A value with its unit: shares as a percentage, times as people read them, NaN and infinity by name. */
function shown(value, unit = "") {
  if (value === null || value === undefined) return MISSING;
  if (!isNumber(value)) return Array.isArray(value) ? value.join(", ") || "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
  if (unit === "0-1") return `${(100 * value).toFixed(1)} %`;
  if (unit === "s") return duration(value);
  if (unit === "h") return clock(3600 * value);
  const size = Math.abs(value);
  const small = size > 0 && size < 1e-3;
  const text = small ? value.toExponential(2) : value.toLocaleString("en-US", size >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 4});
  return unit === "" || unit === "1/s" ? text : `${text} ${unit}`;
}

const date = (seconds) => (isNumber(seconds) ? `${new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ")} UTC` : MISSING);

/** A cell that has no value: short, with the words on hover and for readers of the page. */
const missing = (place, text = "–", why = MISSING) => make(place, "abbr", {title: why, "aria-label": why}, text);

/** The end of a path or of a hub's name. */
const lastParts = (name) => (name ? name.split("/").slice(-2).join("/") : MISSING);

/** A loss, or that it is not finite. */
const lossText = (value) => (value === null ? NOT_FINITE : shown(value));

/** The training loss of the tables, for a legend. */
const lastTenth = (run) => (isNumber(run.metrics?.loss) ? `${shown(run.metrics.loss)} (median of the last tenth of the logged steps)` : NOT_FINITE);

/** Sentences of rules without the marks around code. */
const plain = (text) => String(text ?? "").replaceAll("`", "");

/** A box that scrolls sideways if what is in it is wider, and says so then. */
function scrolling(parent, label) {
  const hint = make(parent, "p", {class: "scrolls", hidden: ""}, "Wider than the window: scroll the table sideways.");
  const box = make(parent, "div", {class: "wide", role: "region", "aria-label": label});
  const look = () => {
    const wider = box.scrollWidth > box.clientWidth + 1;
    hint.hidden = !wider;
    wider ? box.setAttribute("tabindex", "0") : box.removeAttribute("tabindex");
  };
  new ResizeObserver(look).observe(box);
  return box;
}

/**
 * Rows under a heading. A column is {label, about, kind}: `about` is what it means, on hover and in a list below; a
 * `kind` of "words" holds sentences. A cell is a text or a function that fills its place.
 */
function table(parent, label, head, rows) {
  const grid = make(scrolling(parent, label), "table");
  const first = make(make(grid, "thead"), "tr");
  for (const {label: name, about, kind = ""} of head) {
    const place = make(first, "th", {scope: "col", class: kind});
    about ? make(place, "abbr", {title: about}, name) : (place.textContent = name);
  }
  const body = make(grid, "tbody");
  for (const row of rows) {
    const line = make(body, "tr");
    row.forEach((cell, column) => fill(make(line, "td", {class: head[column].kind ?? ""}), cell));
  }
  meanings(parent, head);
  return grid;
}

function fill(place, cell) {
  if (typeof cell === "function") cell(place);
  else place.textContent = cell;
}

/** What the columns of a table mean, for those who do not point at them. */
function meanings(parent, head) {
  const known = head.filter(({about}) => about);
  if (!known.length) return;
  const fold = make(parent, "details", {class: "fold"});
  make(fold, "summary", {}, "What the columns mean");
  const list = make(fold, "dl", {class: "words-list"});
  for (const {label, about} of known) {
    make(list, "dt", {}, label);
    make(list, "dd", {}, about);
  }
}

function panel(parent, name, title) {
  const section = make(parent, "section", {"data-panel": name});
  make(section, "h3", {}, title);
  return section;
}

function legend(parent, colors) {
  const list = make(parent, "div", {class: "legend"});
  for (const [name, color] of colors) {
    const one = make(list, "span");
    make(one, "i", {style: `background: ${color}`});
    one.append(name);
  }
}

// Pictures ---------------------------------------------------------------------------------------------------------

/** A place for a picture, drawn for the width that there is, so that its letters keep their size. */
function picture(parent, draw) {
  const place = make(parent, "div", {class: "picture"});
  let drawn = 0;
  const fit = () => {
    const width = Math.round(place.clientWidth);
    if (!width || width === drawn) return; // of a closed section: 0
    drawn = width;
    place.replaceChildren();
    draw(place, Math.max(width, 280));
  };
  new ResizeObserver(fit).observe(place);
  fit();
}

/** A bar per rank, a color per phase: where the seconds of a step go. */
function phaseBars(parent, bars, phases, names) {
  const ranks = entries(bars);
  const total = (parts) => phases.reduce((sum, phase) => sum + (isNumber(parts[phase]) ? parts[phase] : 0), 0);
  const longest = Math.max(...ranks.map(([, parts]) => total(parts)), Number.MIN_VALUE);
  const height = ranks.length > 16 ? 16 : 30;
  picture(parent, (place, whole) => {
    const image = svg(place, "svg", {viewBox: `0 0 ${whole} ${height * ranks.length}`, role: "img", "aria-label": "Phases of a step, by rank"});
    ranks.forEach(([rank, parts], row) => {
      const middle = height * (row + 0.5) + 4;
      svg(image, "text", {x: 0, y: middle}, `rank ${rank}`);
      let x = 62;
      for (const phase of phases) {
        if (!isNumber(parts[phase])) continue;
        const width = ((whole - 62 - 70) * Math.max(parts[phase], 0)) / longest;
        const bar = svg(image, "rect", {x, y: height * row + 2, width, height: height - 4, fill: COLORS[phase], "data-rank": rank, "data-phase": phase});
        svg(bar, "title", {}, `rank ${rank}, ${names[phase]?.label ?? words(phase)}: ${duration(parts[phase])}`);
        x += width;
      }
      svg(image, "text", {x: x + 6, y: middle}, duration(total(parts)));
    });
  });
  legend(parent, phases.map((phase) => [names[phase]?.label ?? words(phase), COLORS[phase]]));
}

/** About `count` round numbers; the first is at most the least value, the last at least the largest. */
function ticks(values, count) {
  let [low, high] = range(values);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({length: last - first + 1}, (_, k) => (first + k) * step);
}

/** Powers of ten, with 2 and 5 between them if there are few. */
function powers(values) {
  const [low, high] = range(values).map((value) => Math.log10(value));
  const all = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) all.push(...(high - low < 3 ? [1, 2, 5] : [1]).map((factor) => factor * 10 ** power));
  const first = all.findLastIndex((value) => Math.log10(value) <= low + 1e-9), last = all.findIndex((value) => Math.log10(value) >= high - 1e-9);
  return all.slice(Math.max(first, 0), last < 0 ? all.length : last + 1);
}

const range = (values) => values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
const short = (value) => new Intl.NumberFormat("en-US", {notation: "compact", maximumSignificantDigits: 4}).format(value);

/**
 * Lines over the tokens seen. Each line is {name, color, x, y, dots, end}; `end` is the text of the legend. A value
 * that is not finite (null) interrupts its line and is marked at the top. If one line is much longer than another, the axis is logarithmic. Returns whether
 * anything was drawn.
 */
function lineChart(parent, lines, yLabel) {
  const longest = lines.map(({x}) => Math.max(...x.filter(isNumber), 0)).filter((end) => end > 0);
  const log = longest.length > 1 && Math.max(...longest) > FAR_APART * Math.min(...longest);
  const points = lines.map(({x, y}) => x.map((one, k) => [one, y[k]]).filter(([one, value]) => isNumber(one) && (one > 0 || !log) && value !== undefined));
  const finite = points.flat().filter(([, value]) => isNumber(value));
  if (!finite.length) return false;
  if (log) make(parent, "p", {class: "faint"}, "The runs differ much in length: the axis of tokens is logarithmic.");
  const texts = make(parent, "div");
  picture(texts, (place, width) => {
    const [left, right, top, bottom] = [52, width - 22, 14, 236];
    const xs = log ? powers(points.flat().map(([x]) => x)) : ticks(points.flat().map(([x]) => x), Math.min(8, width / 90));
    const ys = ticks(finite.map(([, y]) => y), 5);
    const scale = log ? Math.log10 : (x) => x;
    const [xLow, xHigh, yLow, yHigh] = [scale(xs[0]), scale(xs.at(-1)), ys[0], ys.at(-1)];
    const across = (x) => left + ((right - left) * (scale(x) - xLow)) / (xHigh - xLow);
    const up = (y) => bottom - ((bottom - top) * (y - yLow)) / (yHigh - yLow);
    const image = svg(place, "svg", {viewBox: `0 0 ${width} 274`, role: "img", "aria-label": `${yLabel} over tokens`});
    for (const y of ys) {
      svg(image, "line", {class: "axis", x1: left, x2: right, y1: up(y), y2: up(y)});
      svg(image, "text", {class: "tick", x: left - 6, y: up(y) + 4, "text-anchor": "end"}, short(y));
    }
    for (const x of xs) svg(image, "text", {class: "tick", x: across(x), y: bottom + 16, "text-anchor": "middle"}, short(x));
    svg(image, "text", {class: "tick", x: right, y: bottom + 32, "text-anchor": "end"}, log ? "tokens seen (logarithmic)" : "tokens seen");
    lines.forEach(({name, color, dots}, k) => {
      let path = "", pen = "M";
      for (const [x, y] of points[k]) {
        if (isNumber(y)) {
          path += `${pen}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
          pen = "L";
          if (dots) svg(svg(image, "circle", {cx: across(x), cy: up(y), r: 3, fill: color}), "title", {}, `${name} ${shown(y)} at ${shown(x)} tokens`);
        } else {
          pen = "M";
          svg(svg(image, "text", {class: "bad", x: across(x), y: top + 4, "text-anchor": "middle"}, "✕"), "title", {}, `${name} is ${NOT_FINITE} at ${shown(x)} tokens`);
        }
      }
      svg(image, "path", {d: path, fill: "none", stroke: color, "stroke-width": 1.6, "data-line": name});
    });
    const valueAt = (x) => xLow + ((xHigh - xLow) * (x - left)) / (right - left);
    readout(place, image, lines, points, (x) => (log ? 10 ** valueAt(x) : valueAt(x)), width);
  });
  legend(parent, lines.map(({name, color, end}) => [`${name}${end}`, color]));
  return true;
}

/** Below a chart, the values nearest to the pointer. */
function readout(parent, image, lines, points, valueAt, width) {
  const line = make(parent, "div", {class: "readout"}, "Point at the chart to read values.");
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const x = valueAt((width * (event.clientX - box.left)) / box.width);
    const nearest = points.map((all) => all.reduce((best, one) => (!best || Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best), null));
    line.textContent = nearest.map((point, k) => point && `${lines[k].name} ${lossText(point[1])} at ${shown(point[0])} tokens`).filter(Boolean).join("  ·  ");
  });
}

// Parts of the page ------------------------------------------------------------------------------------------------

/** Address of TensorBoard's time series with charts pinned, for one run, without smoothing. */
function chartsAddress(tags, run) {
  const cards = tags.map((tag) => ({plugin: "scalars", tag}));
  const only = run ? `&runFilter=${encodeURIComponent(`^${run.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`)}` : "";
  const query = `smoothing=0&pinnedCards=${encodeURIComponent(JSON.stringify(cards))}${only}`;
  return new URL(`../../../?${query}#timeseries&_smoothingWeight=0`, document.baseURI).href; // above data/plugin/finetune/
}

function findings(parent, run, {rules = {}, inTensorBoard}) {
  for (const {rule, level, evidence, advice, gain} of run.findings ?? []) {
    const box = make(parent, "div", {class: `finding ${level}`, "data-rule": rule});
    const first = make(box, "p");
    make(first, "b", {}, words(rule).replaceAll("-", " "));
    first.append(`: ${plain(evidence)}`);
    if (advice) make(box, "p", {}, `What to do: ${plain(advice)}`);
    if (gain) make(box, "p", {class: "faint"}, `Expected gain: ${plain(gain)}`);
    if (rules[rule]) explanation(box, rule, rules[rule]);
    const tags = run.charts?.[rule] ?? [];
    if (!tags.length) continue;
    const last = make(box, "p", {class: "faint"});
    if (inTensorBoard) make(last, "a", {href: chartsAddress(tags, run.tensorboard), target: "_top"}, "Open its charts");
    else last.append(`Charts in TensorBoard: ${tags.join(", ")}`);
  }
}

/** What a rule means, for those who meet it for the first time: all that `finetune review --explain` prints. */
function explanation(parent, rule, {question, parts}) {
  const fold = make(parent, "details", {class: "fold", "data-explains": rule});
  make(fold, "summary", {}, `What does “${rule}” mean?`);
  const list = make(fold, "dl");
  make(list, "dd", {}, question);
  for (const [heading, text] of entries(parts)) {
    make(list, "dt", {}, heading);
    make(list, "dd", {}, plain(text));
  }
  make(fold, "p", {class: "faint"}, `In a terminal: finetune review --explain ${rule}.`);
}

/** Whether it learns, and what limits its speed; one sentence of a run that could not be reviewed. */
const halves = (run) => run.halves ?? [{name: "Review", sentence: run.verdict, level: "warning"}];

function verdict(parent, run) {
  for (const {name, sentence, level, confidence} of halves(run)) {
    const line = make(parent, "p", {class: `verdict ${level}`, "data-panel": "verdict"});
    make(line, "b", {}, `${name}: `);
    line.append(plain(sentence));
    if (confidence) make(line, "span", {class: "faint"}, ` Confidence: ${confidence}.`);
  }
}

function learning(parent, run) {
  const lines = [];
  if (run.curve?.loss?.length) lines.push({name: "training loss", color: LINES[0], x: run.curve.tokens, y: run.curve.loss, end: ` ${lastTenth(run)}`});
  if (run.evaluations?.loss?.length) lines.push({name: "held-out loss", color: LINES[1], x: run.evaluations.tokens, y: run.evaluations.loss, dots: true, end: ` ${lossText(run.evaluations.loss.at(-1))} (last evaluation)`});
  if (!lines.length) return;
  const section = panel(parent, "curve", "Loss [nats] over tokens");
  if (!lineChart(section, lines, "Loss")) make(section, "p", {}, "No finite loss was recorded.");
}

function ranks(parent, run, names) {
  if (!run.ranks?.length) return;
  const empty = (key) => run.ranks.every((rank) => rank[key] === null || rank[key] === undefined || (Array.isArray(rank[key]) && !rank[key].length));
  const keys = [...new Set(run.ranks.flatMap(Object.keys))].filter((key) => key !== "uuid" && !empty(key));
  const metric = (key) => (key === "rank" ? {} : names[{step: "step_seconds"}[key]] ?? names[key] ?? names[`${key}_of_rank`] ?? {});
  const unit = (key) => ({step: "s", own_work: "s", utilization: "0-1", throttled: "0-1", peak_gib: "GiB", reserved_gib: "GiB", memory_gib: "GiB"})[key] ?? metric(key).unit ?? "";
  const label = (key) => ({peak_gib: "peak memory", reserved_gib: "reserved memory", memory_gib: "GPU memory", gpu: "GPU"})[key] ?? (metric(key).label || words(key));
  const head = keys.map((key) => ({label: label(key), about: metric(key).meaning}));
  table(panel(parent, "ranks", "Ranks, in a typical step"), "Ranks", head, run.ranks.map((rank) => keys.map((key) => (key === "rank" ? String(rank.rank) : shown(rank[key], unit(key))))));
}

function predictions(parent, run, names) {
  if (!run.predicted?.length) return;
  const head = ["", "predicted", "measured", "error"].map((label) => ({label}));
  table(panel(parent, "predicted", "Predicted and measured"), "Predictions", head,
    run.predicted.map(({what, predicted, measured, error}) => {
      const [label, unit] = what === "tokens_per_second_per_gpu" ? [names.tokens_per_gpu.label, ""] : PREDICTED[what] ?? [words(what), ""];
      return [label, shown(predicted, unit), shown(measured, unit), shown(error, "0-1")];
    }));
}

/** What ran: a reader who has only this page can tell. */
function about(parent, run, opened) {
  const known = run.about ?? {};
  const devices = known.world_size ? `${known.world_size} × ${known.hardware ?? "device not recorded"}` : known.hardware;
  const facts = [
    ["began", date(known.began)], ["last record", date(known.ended)], ["model", known.model], ["data", known.data?.join(", ")], ["hardware", devices],
    ["steps", known.resumed_at ? `${shown(known.steps)}, the last session from step ${known.resumed_at} on` : known.steps && shown(known.steps)],
    ["versions", entries(known.versions).map(([name, one]) => `${name} ${one}`).join(", ")], ["folder", run.folder],
    ...entries(known.settings).map(([name, value]) => [name, isNumber(value) ? String(value) : shown(value)]),
  ].filter(([, value]) => value && value !== MISSING);
  if (!facts.length) return;
  const fold = make(parent, "details", {class: "fold", "data-panel": "about"});
  if (opened) fold.setAttribute("open", "");
  make(fold, "summary", {}, "What ran: model, data, hardware, versions, settings that differ from the defaults");
  table(fold, "What ran", [{label: ""}, {label: "", kind: "words"}], facts);
}

function metrics(parent, run, names) {
  const recorded = entries(run.metrics).filter(([name, value]) => (value === null ? name.endsWith("loss") : typeof value !== "object"));
  if (!recorded.length) return;
  const fold = make(parent, "details", {class: "fold", "data-panel": "metrics"});
  make(fold, "summary", {}, "All metrics");
  table(fold, "Metrics", [{label: "metric"}, {label: "value"}, {label: "meaning", kind: "words"}],
    recorded.map(([name, value]) => [names[name]?.label || words(name), value === null ? NOT_FINITE : shown(value, names[name]?.unit), names[name]?.meaning ?? ""]));
}

function drawRun(parent, run, review, opened) {
  const {names, phases} = review;
  const box = make(parent, "details", {class: "run", "data-run": run.folder ?? run.run});
  if (opened) box.setAttribute("open", "");
  const title = make(box, "summary");
  make(title, "h2", {}, run.run);
  if (run.status) make(title, "span", {class: "faint"}, `  ${run.status}`);
  verdict(title, run);
  findings(make(box, "section", {"data-panel": "findings"}), run, review);
  about(box, run, Boolean(review.report) && review.runs.length <= OPEN_AT_FIRST);
  if (entries(run.bars).length) phaseBars(panel(box, "bars", "Where the time of a step goes"), run.bars, phases, names);
  learning(box, run);
  ranks(box, run, names);
  predictions(box, run, names);
  metrics(box, run, names);
  return box;
}

// Several runs -----------------------------------------------------------------------------------------------------

/** What the user chose; it outlives the drawing of newer data. */
const view = {filter: "", hidden: new Set(), sort: null, down: false};
const id = (run) => run.folder ?? run.run;
const matches = (run) => `${run.run} ${run.verdict ?? ""} ${run.about?.model ?? ""} ${run.status ?? ""}`.toLowerCase().includes(view.filter.toLowerCase().trim());

/** Runs side by side: a line each, sorted, filtered and hidden as the user wants; what differs; losses at equal tokens. */
function compare(parent, review, boxes) {
  const {runs, names} = review;
  const section = panel(parent, "comparison", "Runs");
  const columns = COMPARED.filter((name) => name.endsWith("loss") || runs.some((run) => isNumber(run.metrics?.[name])));
  const models = new Set(runs.map((run) => run.about?.model));
  const value = (run, column) => (column === "model" ? lastParts(run.about?.model) : TEXTS.includes(column) ? run[column] : run.metrics?.[column]);
  const tools = make(section, "div", {class: "tools"});
  const search = make(tools, "input", {type: "search", placeholder: "Filter: name, verdict, model, status", "aria-label": "Filter runs"});
  search.value = view.filter;
  const all = make(make(tools, "label"), "input", {type: "checkbox"});
  all.after("all runs");
  const count = make(tools, "span", {class: "faint", role: "status"});

  const grid = make(scrolling(section, "Runs"), "table", {class: "runs"});
  const head = [{name: "run", label: "run", about: "Ticked runs are in the charts. The name opens what was found."},
    ...(models.size > 1 ? [{name: "model", label: "model", about: "The end of its name or path. Losses of different models cannot be compared."}] : []),
    {name: "verdict", label: "verdict", about: "Whether the run learns and what limits its speed, and what to do first about the most severe finding. Point at it to read it whole, or open the run."},
    ...columns.map((name) => ({name, label: SHORT[name] ?? names[name]?.label ?? words(name), about: `${SHORT[name] ? `${names[name]?.label}: ` : ""}${names[name]?.meaning ?? ""}`}))];
  const first = make(make(grid, "thead"), "tr");
  const heads = head.map(({name, label, about: title}) => {
    const place = make(first, "th", {scope: "col", class: TEXTS.includes(name) ? "words" : ""});
    make(place, "button", {class: "sort", type: "button", title: `${title} Click to sort.`}, label).addEventListener("click", () => {
      const [worst, same] = [!TEXTS.includes(name) && !/loss|seconds|hours|padding/.test(name), view.sort === name];
      view.down = same ? !view.down : worst; // what people look for comes first: fast runs, low losses
      view.sort = name;
      arrange();
    });
    return place;
  });
  const body = make(grid, "tbody");
  const lines = runs.map((run, k) => {
    const line = make(body, "tr", {"data-run-line": run.run});
    const place = make(line, "td", {class: "name"});
    const box = make(place, "input", {type: "checkbox", "aria-label": `show ${run.run}`});
    box.checked = !view.hidden.has(id(run));
    box.addEventListener("change", () => {
      box.checked ? view.hidden.delete(id(run)) : view.hidden.add(id(run));
      arrange();
    });
    make(place, "button", {class: "link", type: "button", title: run.run}, run.run).addEventListener("click", () => {
      view.hidden.delete(id(run));
      boxes[k].open = true;
      arrange();
      boxes[k].scrollIntoView();
    });
    if (models.size > 1) named(value(run, "model"))(make(line, "td", {class: "name"}));
    const limit = make(line, "td", {class: "one-line"});
    for (const {name, sentence, level} of halves(run)) {
      const half = make(limit, "div", {title: plain(`${name}: ${sentence}`)});
      make(half, "b", {class: `level ${level}`}, `${name}: `);
      half.append(plain(sentence));
    }
    if (run.change_first) make(limit, "div", {class: "first", title: plain(run.change_first)}, `Change first: ${plain(run.change_first)}`);
    for (const name of columns) {
      const cell = make(line, "td", {"data-label": head.find((one) => one.name === name).label}), one = run.metrics?.[name];
      if (one === undefined && name === "eval_loss") missing(cell, "none", "no evaluation was recorded");
      else if (one === undefined || (one === null && !name.endsWith("loss"))) missing(cell);
      else cell.textContent = name.endsWith("loss") ? lossText(one) : shown(one, names[name]?.unit);
    }
    return {run, line, box};
  });
  meanings(section, head);
  const below = make(section, "div");

  function arrange() {
    const number = (one) => (isNumber(one) ? one : null);
    const order = lines.map((one, k) => ({...one, k}));
    if (view.sort) {
      order.sort((one, other) => {
        const [a, b] = [one, other].map(({run}) => (TEXTS.includes(view.sort) ? value(run, view.sort) ?? "" : number(value(run, view.sort))));
        if (a === null || b === null) return (a === null) - (b === null); // what is not recorded comes last
        return (view.down ? -1 : 1) * (typeof a === "string" ? a.localeCompare(b, "en", {numeric: true}) : a - b);
      });
    }
    heads.forEach((place, k) => {
      const sorted = head[k].name === view.sort;
      sorted ? place.setAttribute("aria-sort", view.down ? "descending" : "ascending") : place.removeAttribute("aria-sort");
      place.firstChild.textContent = head[k].label + (sorted ? (view.down ? " ↓" : " ↑") : "");
    });
    const chosen = [];
    for (const {run, line, box, k} of order) {
      const [found, on] = [matches(run), !view.hidden.has(id(run))];
      body.append(line);
      line.hidden = !found;
      line.classList.toggle("off", !on);
      box.checked = on;
      if (found && on) chosen.push(run);
    }
    const listed = runs.filter(matches);
    all.checked = listed.every((run) => !view.hidden.has(id(run)));
    all.indeterminate = !all.checked && chosen.length > 0;
    count.textContent = `${chosen.length} of ${runs.length} shown`;
    showBoxes();
    below.replaceChildren();
    curves(below, review, chosen);
    differences(below, review, chosen);
  }
  search.addEventListener("input", () => {
    view.filter = search.value;
    arrange();
  });
  all.addEventListener("change", () => {
    for (const run of runs.filter(matches)) all.checked ? view.hidden.delete(id(run)) : view.hidden.add(id(run));
    arrange();
  });
  /** Of many runs, only those that the user opened are below the table. */
  function showBoxes() {
    runs.forEach((run, k) => (boxes[k].hidden = !matches(run) || view.hidden.has(id(run)) || (runs.length > OPEN_AT_FIRST && !boxes[k].open)));
  }
  for (const box of boxes) box.addEventListener("toggle", showBoxes);
  arrange();
}

/** A chart and a table for the runs of each model: losses of different models cannot be compared. */
function curves(parent, review, chosen) {
  const models = new Map();
  for (const run of chosen.filter((one) => one.curve?.loss?.length && one.curve.tokens?.length)) {
    const model = run.about?.model_id ?? "";
    models.set(model, [...(models.get(model) ?? []), run]);
  }
  const groups = [...models.entries()].filter(([, group]) => group.length > 1);
  if (models.size > 1) {
    const alone = models.size - groups.length;
    make(parent, "p", {class: "faint", "data-panel": "models"}, `The runs shown are of ${models.size} different models, whose losses cannot be compared: there is a chart for each model${alone ? " with several runs" : ""}. A run's own chart is in its section.`);
  }
  for (const [model, group] of groups) {
    const [known, twin] = [group[0].about?.model ?? "", groups.some(([other, [first]]) => other !== model && first.about?.model === group[0].about?.model)];
    const name = known && twin ? `${known}, ${model === known ? "weights not recorded" : `weights ${model.slice(0, 8)}`}` : known;
    const section = panel(parent, "curves", models.size > 1 && name ? `Training loss [nats] at equal tokens: ${group.length} runs of ${name}` : "Training loss [nats] at equal tokens");
    if (group.length > LINES.length) make(section, "p", {class: "faint"}, `The first ${LINES.length} of ${group.length} runs, in the order of the table. Sort, filter or untick runs to see others.`);
    lineChart(section, group.slice(0, LINES.length).map((run, k) => ({name: run.run, color: LINES[k], x: run.curve.tokens, y: run.curve.loss, end: `, training loss ${lastTenth(run)}`})), "Training loss");
    equalTokens(section, review, model, group);
  }
}

/** The losses behind the curves, as numbers. */
function equalTokens(parent, review, model, group) {
  const rows = (review.comparison?.at_equal_tokens ?? []).filter((row) => (row.model_id ?? "") === model);
  if (!rows.length) return;
  const fold = make(parent, "details", {class: "fold", "data-panel": "equal-tokens"});
  if (review.report || group.length <= OPEN_AT_FIRST) fold.setAttribute("open", "");
  make(fold, "summary", {}, "The training losses as numbers (at N tokens: the median of the twentieth of the logged steps before)");
  const place = new Map(review.runs.map((run, k) => [run, k]));
  table(fold, "Losses at equal tokens", [{label: "run", kind: "name"}, ...rows.map(({tokens}) => ({label: `at ${short(tokens)} tokens`}))],
    group.map((run) => [named(run.run), ...rows.map(({loss}) => loss[place.get(run)] === null ? missing : shown(loss[place.get(run)]))]));
}

const named = (name) => (place) => make(place, "span", {title: name}, name);

/** Settings in which the runs differ, a row each. */
function differences(parent, review, chosen) {
  const place = chosen.map((run) => review.runs.indexOf(run));
  const rows = (review.comparison?.configuration ?? []).filter(({values}) => new Set(place.map((k) => JSON.stringify(values[k] ?? null))).size > 1);
  if (!rows.length) return;
  const fold = make(parent, "details", {class: "fold", "data-panel": "differences"});
  if (chosen.length <= (review.report ? LINES.length : OPEN_AT_FIRST)) fold.setAttribute("open", "");
  make(fold, "summary", {}, `Settings that differ: ${rows.length}`);
  table(fold, "Settings that differ", [{label: ""}, ...chosen.map(({run}) => ({label: run}))], rows.map(({key, values}) => [key, ...place.map((k) => (isNumber(values[k]) ? String(values[k]) : shown(values[k])))]));
}

function heading(parent, {report, runs}) {
  const head = make(parent, "header");
  make(head, "h1", {}, report.title);
  make(head, "p", {class: "faint"}, `Written ${date(report.written)} by finetune review from what the ${runs.length === 1 ? "run" : "runs"} recorded.`);
}

function draw(review, main, openRuns) {
  main.replaceChildren();
  if (review.error) make(main, "p", {role: "alert"}, review.error);
  const runs = review.runs ?? [];
  if (!runs.length && !review.error) make(main, "p", {}, "There is no run in this folder yet. This page shows one as soon as it has written its first record.");
  if (review.report) heading(main, review);
  const overview = make(main, "div");
  const boxes = runs.map((run, k) => drawRun(main, run, review, openRuns.get(id(run)) ?? (k === 0 || runs.length <= OPEN_AT_FIRST)));
  if (runs.length > 1) compare(overview, review, boxes);
  if (review.left_out) make(main, "p", {class: "faint"}, `${review.left_out} older runs are not shown. To review one: finetune review FOLDER`);
}

// The page ---------------------------------------------------------------------------------------------------------

/** TensorBoard marks its own page when it is dark; a report follows the browser. */
function followTheme() {
  const root = document.documentElement;
  if (window.parent !== window) {
    const outer = window.parent.document.body;
    const follow = () => root.classList.toggle("dark", outer.classList.contains("dark-mode"));
    new MutationObserver(follow).observe(outer, {attributeFilter: ["class"]});
    follow();
  } else {
    const prefers = window.matchMedia("(prefers-color-scheme: dark)");
    const follow = () => root.classList.toggle("dark", prefers.matches);
    prefers.addEventListener("change", follow);
    follow();
  }
}

const isOpen = (main) => new Map([...main.querySelectorAll("details.run")].map((box) => [box.dataset.run, box.open]));

/** Ask TensorBoard for the review and draw it, but only if it has changed: open sections and the scroll position stay. */
async function renew(state, main, note) {
  try {
    const answer = await fetch("./review");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const text = await answer.text();
    note.textContent = "";
    if (text === state.text || main.querySelector("input:focus")) return; // not while the user types
    const place = document.documentElement.scrollTop;
    draw({...JSON.parse(text), inTensorBoard: true}, main, isOpen(main));
    document.documentElement.scrollTop = place;
    state.text = text;
  } catch (error) {
    note.textContent = `TensorBoard did not answer (${error.message}). Trying again every ${RENEW_SECONDS} seconds.`;
  }
}

export async function render() {
  make(document.head, "style", {}, STYLE);
  followTheme();
  const note = make(document.body, "p", {role: "status", class: "faint"});
  const main = make(document.body, "main");
  const inlined = document.getElementById("review");
  if (inlined) return draw(JSON.parse(inlined.textContent), main, new Map());
  note.textContent = "Reading the runs …";
  const state = {text: ""};
  const renewIfSeen = () => document.hidden || renew(state, main, note);
  document.addEventListener("visibilitychange", renewIfSeen);
  setInterval(renewIfSeen, 1000 * RENEW_SECONDS);
  await renew(state, main, note);
}
