// The Review tab of TensorBoard and the report of `finetune review --html`: no library, no build step.
//
// TensorBoard imports this module into an iframe and calls render(); the report holds it together with its data. Names
// and texts come from runs, so they only ever become text nodes: nothing here writes HTML.

const RENEW_SECONDS = 30;
const OPEN_AT_FIRST = 3; // so many runs are shown in full; of more, only the last one to write and what the user opens
const COLORS = {data_wait: "#e15759", forward: "#4e79a7", backward: "#76b7b2", communication: "#f28e2b", optimizer: "#59a14f", other: "#9c8f8a"};
const LINES = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#9c755f", "#d4a72c"];
const COMPARED = ["loss", "eval_loss", "tokens_per_gpu", "rows_per_second", "step_seconds", "mfu", "padding", "lost_to_slowest", "fullest", "hours"];
const MISSING = "not recorded";

const STYLE = `
:root { --text: #212121; --faint: #616161; --line: #dadce0; --page: #fff; --panel: #fff; --link: #1565c0;
  --warning: #e65100; --warning-back: #fff3e0; --note: #1565c0; --note-back: #e8f0fe; --good: #2e7d32; color-scheme: light; }
:root.dark { --text: #fff; --faint: #bdbdbd; --line: #555; --page: #303030; --panel: #383838; --link: #90caf9;
  --warning: #ffb74d; --warning-back: #4a3a24; --note: #90caf9; --note-back: #2b3a4a; --good: #81c784; color-scheme: dark; }
body { font: 14px/1.45 Roboto, system-ui, sans-serif; color: var(--text); background: var(--page); margin: 20px 24px 60px; }
main { max-width: 1060px; }
h2 { font-size: 20px; font-weight: 500; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 14px; font-weight: 600; margin: 22px 0 6px; }
p { margin: 6px 0; max-width: 900px; overflow-wrap: anywhere; }
.faint { color: var(--faint); }
details.run { border: 1px solid var(--line); border-radius: 6px; background: var(--panel); padding: 14px 18px; margin: 14px 0; }
details.run > summary { cursor: pointer; }
details.run > summary h2 { display: inline; }
.verdict { font-size: 16px; margin: 10px 0; border-left: 4px solid var(--good); padding: 4px 12px; }
.verdict.warning { border-color: var(--warning); }
.finding { border-left: 4px solid var(--note); background: var(--note-back); padding: 8px 12px; margin: 8px 0; max-width: 900px; }
.finding.warning { border-color: var(--warning); background: var(--warning-back); }
.finding b { display: inline-block; }
.finding b::first-letter { text-transform: uppercase; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 500; color: var(--faint); }
th:first-child, td:first-child, .words { text-align: left; }
td.words { white-space: normal; min-width: 16em; overflow-wrap: anywhere; }
a, button.link { color: var(--link); }
button.link { background: none; border: 0; padding: 0; font: inherit; cursor: pointer; text-decoration: underline; text-align: left; }
svg { display: block; width: 100%; max-width: 900px; height: auto; }
svg text { fill: var(--text); font-size: 12px; }
svg .axis { stroke: var(--line); }
svg text.bad { fill: #e15759; font-size: 14px; }
svg text.tick { fill: var(--faint); font-size: 11px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12px; margin: 6px 0; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
.readout { min-height: 1.45em; font-size: 12px; color: var(--faint); }
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

/** A value with its unit: shares as a percentage, NaN and infinity by name, nothing as "not recorded". */
function shown(value, unit = "") {
  if (value === null || value === undefined) return MISSING;
  if (!isNumber(value)) return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (unit === "0-1") return `${(100 * value).toFixed(1)} %`;
  const size = Math.abs(value);
  const small = size > 0 && size < 1e-3;
  const text = small ? value.toExponential(2) : value.toLocaleString("en-US", size >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 4});
  return unit === "" ? text : unit === "1/s" ? `${text} /s` : `${text} ${unit}`;
}

/** Rows of strings under a heading; `textual` names the columns of sentences. */
function table(parent, head, rows, textual = []) {
  const grid = make(make(parent, "div", {class: "wide"}), "table");
  const first = make(make(grid, "thead"), "tr");
  head.forEach(({label, about = ""}, column) => make(first, "th", {scope: "col", title: about, class: textual.includes(column) ? "words" : ""}, label));
  const body = make(grid, "tbody");
  for (const row of rows) {
    const line = make(body, "tr");
    row.forEach((cell, column) => {
      const place = make(line, "td", textual.includes(column) ? {class: "words"} : {});
      if (typeof cell === "function") cell(place);
      else place.textContent = cell;
    });
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

/** A bar per rank, a color per phase: where the seconds of a step go. */
function phaseBars(parent, bars, phases, names) {
  const ranks = entries(bars);
  const total = (parts) => phases.reduce((sum, phase) => sum + (isNumber(parts[phase]) ? parts[phase] : 0), 0);
  const longest = Math.max(...ranks.map(([, parts]) => total(parts)), Number.MIN_VALUE);
  const height = ranks.length > 16 ? 16 : 30;
  const picture = svg(parent, "svg", {viewBox: `0 0 900 ${height * ranks.length}`, role: "img", "aria-label": "Phases of a step, by rank"});
  ranks.forEach(([rank, parts], row) => {
    const middle = height * (row + 0.5) + 4;
    svg(picture, "text", {x: 0, y: middle}, `rank ${rank}`);
    let x = 62;
    for (const phase of phases) {
      if (!isNumber(parts[phase])) continue;
      const width = (760 * Math.max(parts[phase], 0)) / longest;
      const bar = svg(picture, "rect", {x, y: height * row + 2, width, height: height - 4, fill: COLORS[phase], "data-rank": rank, "data-phase": phase});
      svg(bar, "title", {}, `rank ${rank}, ${names[phase]?.label ?? words(phase)}: ${shown(parts[phase], "s")}`);
      x += width;
    }
    svg(picture, "text", {x: x + 6, y: middle}, shown(total(parts), "s"));
  });
  legend(parent, phases.map((phase) => [names[phase]?.label ?? words(phase), COLORS[phase]]));
}

/** About `count` round numbers; the first is at most the least value, the last at least the largest. */
function ticks(values, count) {
  let [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({length: last - first + 1}, (_, k) => (first + k) * step);
}

const short = (value) => new Intl.NumberFormat("en-US", {notation: "compact", maximumSignificantDigits: 4}).format(value);

/**
 * Lines over the tokens seen. Each line is {name, color, x, y, dots}. A value that is no number (NaN) interrupts its
 * line and is marked at the top. Returns whether anything was drawn.
 */
function lineChart(parent, lines, yLabel) {
  const points = lines.map(({x, y}) => x.map((one, k) => [one, y[k]]).filter(([one, value]) => isNumber(one) && value !== null && value !== undefined));
  const finite = points.flat().filter(([, value]) => isNumber(value));
  if (!finite.length) return false;
  const [left, right, top, bottom] = [62, 880, 14, 236];
  const xs = ticks(points.flat().map(([x]) => x), 8), ys = ticks(finite.map(([, y]) => y), 5);
  const [xLow, xHigh, yLow, yHigh] = [xs[0], xs.at(-1), ys[0], ys.at(-1)];
  const across = (x) => left + ((right - left) * (x - xLow)) / (xHigh - xLow);
  const up = (y) => bottom - ((bottom - top) * (y - yLow)) / (yHigh - yLow);
  const picture = svg(parent, "svg", {viewBox: "0 0 900 274", role: "img", "aria-label": `${yLabel} over tokens`});
  for (const y of ys) {
    svg(picture, "line", {class: "axis", x1: left, x2: right, y1: up(y), y2: up(y)});
    svg(picture, "text", {class: "tick", x: left - 6, y: up(y) + 4, "text-anchor": "end"}, short(y));
  }
  for (const x of xs) svg(picture, "text", {class: "tick", x: across(x), y: bottom + 16, "text-anchor": "middle"}, short(x));
  svg(picture, "text", {class: "tick", x: right, y: bottom + 32, "text-anchor": "end"}, "tokens seen");
  lines.forEach(({name, color, dots}, k) => {
    let path = "", pen = "M";
    for (const [x, y] of points[k]) {
      if (isNumber(y)) {
        path += `${pen}${across(x).toFixed(1)} ${up(y).toFixed(1)}`;
        pen = "L";
        if (dots) svg(svg(picture, "circle", {cx: across(x), cy: up(y), r: 3, fill: color}), "title", {}, `${name} ${shown(y)} at ${shown(x)} tokens`);
      } else {
        pen = "M";
        svg(svg(picture, "text", {class: "bad", x: across(x), y: top + 4, "text-anchor": "middle"}, "✕"), "title", {}, `${name} is ${y} at ${shown(x)} tokens`);
      }
    }
    svg(picture, "path", {d: path, fill: "none", stroke: color, "stroke-width": 1.6, "data-line": name});
  });
  legend(parent, lines.map(({name, color}) => [name, color]));
  readout(parent, picture, lines, points, (x) => xLow + ((xHigh - xLow) * (x - left)) / (right - left));
  return true;
}

/** Below a chart, the values nearest to the pointer. */
function readout(parent, picture, lines, points, valueAt) {
  const line = make(parent, "div", {class: "readout"}, "Point at the chart to read values.");
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = valueAt((900 * (event.clientX - box.left)) / box.width);
    const nearest = points.map((all) => all.reduce((best, one) => (!best || Math.abs(one[0] - x) < Math.abs(best[0] - x) ? one : best), null));
    line.textContent = nearest.map((point, k) => point && `${lines[k].name} ${shown(point[1])} at ${shown(point[0])} tokens`).filter(Boolean).join("  ·  ");
  });
}

// Parts of the page ------------------------------------------------------------------------------------------------

/** Address of TensorBoard's time series with charts pinned, for one run, without smoothing. */
function chartsAddress(tags, run) {
  const cards = tags.map((tag) => ({plugin: "scalars", tag}));
  const only = run ? `&runFilter=${encodeURIComponent(`^${run.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`)}` : "";
  const query = `smoothing=0&pinnedCards=${encodeURIComponent(JSON.stringify(cards))}${only}`;
  return new URL(`../../../?${query}#timeseries`, document.baseURI).href; // above data/plugin/finetune/
}

function findings(parent, run, inTensorBoard) {
  for (const {rule, level, evidence, advice, gain} of run.findings ?? []) {
    const box = make(parent, "div", {class: `finding ${level}`, "data-rule": rule});
    const first = make(box, "p");
    make(first, "b", {}, words(rule).replaceAll("-", " "));
    first.append(`: ${evidence ?? ""}`);
    if (advice) make(box, "p", {}, `What to do: ${advice}`);
    if (gain) make(box, "p", {class: "faint"}, `Expected gain: ${gain}`);
    const tags = run.charts?.[rule] ?? [];
    if (!tags.length) continue;
    const last = make(box, "p", {class: "faint"});
    if (inTensorBoard) make(last, "a", {href: chartsAddress(tags, run.tensorboard), target: "_top"}, "Open its charts");
    else last.append(`Charts in TensorBoard: ${tags.join(", ")}`);
  }
}

function verdict(parent, run) {
  const warns = (run.findings ?? []).some(({level}) => level === "warning");
  const line = make(parent, "p", {class: warns ? "verdict warning" : "verdict", "data-panel": "verdict"}, run.verdict ?? "");
  if (run.confidence) make(line, "span", {class: "faint"}, ` Confidence: ${run.confidence}.`);
}

function learning(parent, run) {
  const lines = [];
  if (run.curve?.loss?.length) lines.push({name: "loss", color: LINES[0], x: run.curve.tokens, y: run.curve.loss});
  if (run.evaluations?.loss?.length) lines.push({name: "eval loss", color: LINES[1], x: run.evaluations.tokens, y: run.evaluations.loss, dots: true});
  if (!lines.length) return;
  const section = panel(parent, "curve", "Loss [nats] over tokens");
  if (!lineChart(section, lines, "Loss")) make(section, "p", {}, "No finite loss was recorded.");
}

function ranks(parent, run, names) {
  if (!run.ranks?.length) return;
  const keys = [...new Set(run.ranks.flatMap(Object.keys))].filter((key) => !run.ranks.every((rank) => typeof (rank[key] ?? {}) === "object"));
  const metric = (key) => names[{step: "step_seconds", peak_gib: "peak_of_rank"}[key] ?? key] ?? names[`${key}_of_rank`];
  const head = keys.map((key) => ({label: metric(key)?.label ?? words(key), about: metric(key)?.meaning}));
  const unit = (key) => metric(key)?.unit ?? "";
  table(panel(parent, "ranks", "Ranks"), head, run.ranks.map((rank) => keys.map((key) => (key === "rank" ? String(rank.rank) : shown(rank[key], unit(key))))));
}

function predictions(parent, run) {
  if (!run.predicted?.length) return;
  const head = ["", "predicted", "measured", "error"].map((label) => ({label}));
  table(panel(parent, "predicted", "Predicted and measured"), head,
    run.predicted.map(({what, predicted, measured, error}) => [words(what), shown(predicted), shown(measured), shown(error, "0-1")]));
}

function metrics(parent, run, names) {
  const recorded = entries(run.metrics).filter(([, value]) => value !== null && typeof value !== "object");
  if (!recorded.length) return;
  const fold = make(parent, "details", {"data-panel": "metrics"});
  make(fold, "summary", {class: "faint"}, "All metrics");
  table(fold, [{label: "metric"}, {label: "value"}, {label: "meaning"}],
    recorded.map(([name, value]) => [names[name]?.label ?? words(name), shown(value, names[name]?.unit), names[name]?.meaning ?? ""]), [2]);
}

function drawRun(parent, run, review, opened) {
  const {names, phases} = review;
  const box = make(parent, "details", {class: "run", "data-run": run.folder ?? run.run});
  if (opened) box.setAttribute("open", "");
  const title = make(box, "summary");
  make(title, "h2", {}, run.run);
  if (run.status) make(title, "span", {class: "faint"}, `  ${run.status}`);
  verdict(title, run);
  findings(make(box, "section", {"data-panel": "findings"}), run, review.inTensorBoard);
  if (entries(run.bars).length) phaseBars(panel(box, "bars", "Where the time of a step goes"), run.bars, phases, names);
  learning(box, run);
  ranks(box, run, names);
  predictions(box, run);
  metrics(box, run, names);
  return box;
}

/** Runs side by side: figures that any of them has, settings that differ, and their losses at equal tokens. */
function compare(parent, review, boxes) {
  const {runs, names} = review;
  const section = panel(parent, "comparison", "Runs");
  const columns = COMPARED.filter((name) => runs.some((run) => isNumber(run.metrics?.[name])));
  const open = (k) => (place) => make(place, "button", {class: "link", type: "button"}, runs[k].run).addEventListener("click", () => {
    boxes[k].open = true;
    boxes[k].scrollIntoView();
  });
  table(section, [{label: "run"}, {label: "verdict"}, ...columns.map((name) => ({label: names[name]?.label ?? words(name), about: names[name]?.meaning}))],
    runs.map((run, k) => [open(k), run.verdict ?? "", ...columns.map((name) => shown(run.metrics?.[name], names[name]?.unit))]), [1]);
  const lines = runs.filter((run) => run.curve?.loss?.length).slice(0, LINES.length)
    .map((run, k) => ({name: run.run, color: LINES[k], x: run.curve.tokens, y: run.curve.loss}));
  if (lines.length > 1) lineChart(panel(parent, "curves", "Loss [nats] at equal tokens"), lines, "Loss");
}

function draw(review, main, openRuns) {
  main.replaceChildren();
  if (review.error) make(main, "p", {role: "alert"}, review.error);
  const runs = review.runs ?? [];
  if (!runs.length && !review.error) make(main, "p", {}, "There is no run in this folder yet. This page shows one as soon as it has written its first record.");
  const overview = make(main, "div");
  const boxes = runs.map((run, k) => drawRun(main, run, review, openRuns.get(run.folder ?? run.run) ?? (k === 0 || runs.length <= OPEN_AT_FIRST)));
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
    if (text === state.text) return;
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
