"use strict";
// Draws timelines. The data are columns of numbers (see piperlang/view/page.py); bars are painted on a canvas, all else
// is DOM. Whatever comes from the data reaches the DOM as text only, never as markup.
(() => {

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const PASSES = { F: "forward", R: "forward again", B: "backward", I: "input gradient", W: "weight gradient" };
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const SMALL = FONT.replace("11px", "9.5px");
const STRIP = 5;  // the height of a collapsed lane
const UNMATCHED = 0.15, OFF_PATH = 0.35;  // how solid bars are that do not match a search, or are off the shown path
const PARTS = 100;  // that are listed of a critical path
const PIXELS_PER_MESSAGE = 30;  // more arrows than that hide the bars

// ---------------------------------------------------------------------------------------------------------- timelines

function readTimeline(raw) {
  const count = raw.start.length, scale = raw.scale;
  const start = new Float64Array(count), end = new Float64Array(count), ready = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    start[i] = ready[i] = raw.start[i] / scale;
    end[i] = (raw.start[i] + raw.took[i]) / scale;
  }
  raw.waited[0].forEach((i, k) => { ready[i] = (raw.start[i] + raw.waited[1][k]) / scale; });
  const lanes = raw.lanes.map(([row, stream, computes]) => ({ row, stream, computes, tracks: [] }));
  const laneOf = new Int32Array(count);
  let first = 0;
  for (const [lane, after] of raw.tracks) {
    lanes[lane].tracks.push({ first, after });
    laneOf.fill(lane, first, after);
    first = after;
  }
  const activities = raw.activities.map(
    ([op, name, tags, line, bytes, computes]) => ({ op, name, tags, line, bytes, computes }));
  const rows = raw.rows.map(([devices, idle], row) => ({
    devices, idle, collapsed: false,
    lanes: lanes.filter((lane) => lane.row === row), memory: readCurve(raw.memory[row], scale),
  }));
  return {
    title: raw.title, source: raw.source, unit: raw.unit, length: raw.length, idle: raw.idle, exposed: raw.exposed,
    microbatch: raw.microbatch, devices: raw.devices, messages: raw.messages, what: raw.what,
    activities, rows, lanes, laneOf, start, end, ready, path: readPath(raw.path, count),
  };
}

// Which bars are on the critical path, and what it consists of.
function readPath(raw, count) {
  if (!raw) return null;
  const has = new Uint8Array(count);
  for (const i of raw.bars) has[i] = 1;
  const parts = raw.parts.map(([what, device, line, time, bars]) => ({ what, device, line, time, bars }));
  return { bars: raw.bars, has, parts };
}

function readCurve(raw, scale) {
  if (!raw) return null;
  return { time: raw[0].map((time) => time / scale), size: raw[1], peak: raw[1].reduce((a, b) => Math.max(a, b), 0) };
}

const timelines = data.timelines.map(readTimeline);
const estimated = data.estimated && readTimeline(data.estimated);
const everything = estimated ? [...timelines, estimated] : timelines;
const unit = timelines.length ? timelines[0].unit : "s";
const total = longest() || 1;
let factor = 1;  // that times of the estimate are multiplied by
const memoryPeak = Math.max(0, ...everything.map(peakOf));

function peakOf(timeline) {
  return timeline.rows.reduce((peak, row) => Math.max(peak, row.memory ? row.memory.peak : 0), 0);
}

function longest() {
  let found = 0;
  for (const one of everything) {
    found = Math.max(found, one.length);
    for (let i = 0; i < one.end.length; i++) if (one.end[i] > found) found = one.end[i];
  }
  return found;
}

// A lane of the estimate belongs to the lane with the same stream of a row that shares a device with it.
function linkEstimate() {
  if (!estimated || !timelines.length) return;
  const shown = timelines[0];
  const rowOf = new Map(shown.devices.flatMap((devices, row) => devices.map((device) => [device, row])));
  for (const lane of estimated.lanes) {
    const device = estimated.devices[lane.row].find((one) => rowOf.has(one));
    const row = device === undefined ? null : shown.rows[rowOf.get(device)];
    const same = row && row.lanes.find((one) => one.stream === lane.stream);
    if (same) same.ghost = lane;
  }
}
linkEstimate();

// The first bar of a track that ends after a time; bars of a track do not overlap.
function firstAfter(timeline, track, time) {
  let low = track.first, high = track.after;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timeline.end[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

// ------------------------------------------------------------------------------------------------------------- colours

// OKLCH to sRGB: equal lightness looks equally light, whatever the hue.
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue * Math.PI / 180), b = chroma * Math.sin(hue * Math.PI / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3;
  const channels = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s,
  ];
  const bytes = channels.map((x) => {
    const y = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, y)));
  });
  return "#" + bytes.map((x) => x.toString(16).padStart(2, "0")).join("");
}

const AGAIN = "rgba(10,20,40,0.42)";  // lines on what is computed again
const HUES = [252, 52, 155, 345, 98, 298, 200, 25];
const SHADES = {
  light: { F: [0.88, 0.065], R: [0.88, 0.065], I: [0.76, 0.12], B: [0.61, 0.135], W: [0.44, 0.10] },
  dark: { F: [0.83, 0.07], R: [0.83, 0.07], I: [0.69, 0.12], B: [0.54, 0.125], W: [0.40, 0.09] },
};
const PLAIN = {
  light: {
    paper: "#ffffff", idle: "#eef0f3", grid: "#dde1e7", text: "#1b2027", muted: "#59636e", ring: "#0b5fd6",
    ghost: "#59636e", ghostFill: "rgba(60,70,85,0.07)", wait: "#e9ecf0", hatch: "rgba(60,70,85,0.22)",
    curve: "#8b6bb8", area: "rgba(139,107,184,0.16)", arrow: "#3b4653", match: "#d9480f", path: "#c2255c", other: [0.80, 0.025, 80],
  },
  dark: {
    paper: "#14171c", idle: "#1f242b", grid: "#2b313a", text: "#e6e9ee", muted: "#a0a9b5", ring: "#7db4ff",
    ghost: "#a0a9b5", ghostFill: "rgba(200,210,225,0.07)", wait: "#232930", hatch: "rgba(200,210,225,0.20)",
    curve: "#b79be0", area: "rgba(183,155,224,0.18)", arrow: "#cdd5df", match: "#ffb347", path: "#ff6b9a", other: [0.50, 0.025, 80],
  },
};

const stages = orderedValues("stage");
const stageIndex = new Map(stages.map((stage, k) => [stage, k]));
const COMMUNICATION = [
  "send", "recv", "all_reduce", "all_to_all", "gather", "scatter", "reduce", "norm", "dispatch", "combine", "choose", "offload", "fetch",
];
const operations = new Map();  // those that appear, with numbers that are the same on every page

function orderedValues(key) {
  const found = new Set(everything.flatMap((one) => one.activities.map((what) => what.tags[key])));
  found.delete(undefined);
  const numbers = [...found].every((value) => typeof value === "number");
  return [...found].sort((a, b) => (numbers ? a - b : String(a) < String(b) ? -1 : 1));
}

function hueOf(stage) {
  const k = stageIndex.get(stage);
  if (k === undefined) return 252;
  return k < HUES.length ? HUES[k] : (252 + 137.508 * k) % 360;
}

function operationNumber(op) {
  const known = COMMUNICATION.indexOf(op);
  return known < 0 ? COMMUNICATION.length : known;
}

// What takes part in communication: it sends, or it is on a stream without passes.
function noteKinds() {
  for (const one of everything) {
    for (let i = 0; i < one.what.length; i++) {
      const what = one.activities[one.what[i]];
      if (what.kind) continue;
      what.kind = what.computes ? "pass" : what.bytes || !one.lanes[one.laneOf[i]].computes ? "communication" : "other";
      if (what.kind === "communication") operations.set(what.op, operationNumber(what.op));
    }
  }
}
noteKinds();

let theme = "light", plain = PLAIN.light, hatches = {};

function passColour(pass, stage) {
  const [lightness, chroma] = SHADES[theme][pass] || SHADES[theme].B;
  return oklch(lightness, stages.length ? chroma : chroma * 0.8, hueOf(stage));
}

function communicationColour(op) {
  const k = operations.get(op) || 0, dark = theme === "dark";
  return oklch((dark ? 0.58 : 0.74) - 0.05 * (k % 3), 0.03, [250, 75, 190, 330][k % 4]);
}

function colourOf(what) {
  if (what.kind === "pass") return passColour(what.op, what.tags.stage);
  if (what.kind === "communication") return communicationColour(what.op);
  return oklch(...plain.other);
}

function lightnessOf(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function hatch(colour, spacing) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = spacing;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.1;
  for (const shift of [-spacing, 0, spacing]) {
    pen.moveTo(shift, spacing);
    pen.lineTo(shift + spacing, 0);
  }
  pen.stroke();
  return tile;
}

function setTheme(name) {
  theme = name;
  plain = PLAIN[name];
  document.documentElement.dataset.theme = name;
  for (const one of everything) {
    for (const what of one.activities) {
      what.colour = colourOf(what);
      what.ink = lightnessOf(what.colour) > 0.18 ? "#12161b" : "#ffffff";
    }
  }
  hatches = {
    wait: context.createPattern(hatch(plain.hatch, 6), "repeat"),
    again: context.createPattern(hatch(AGAIN, 5), "repeat"),
  };
  fillLegend();
  draw();
}

// ---------------------------------------------------------------------------------------------------------------- text

function timeText(time, digits = 4) {
  if (unit !== "s") return `${number(time, digits)} ${unit}`;
  const size = Math.abs(time);
  if (size === 0) return "0 s";
  const [factor, name] = size < 1e-3 ? [1e6, "us"] : size < 1 ? [1e3, "ms"] : [1, "s"];
  return `${number(time * factor, digits)} ${name}`;
}

function number(value, digits) {
  return String(Number(value.toPrecision(Math.max(digits, 1 + Math.floor(Math.log10(Math.abs(value) || 1))))));
}

function bytesText(count) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  for (; count >= 1024 && k + 1 < names.length; k++) count /= 1024;
  return `${count >= 100 || k === 0 ? Math.round(count) : count.toFixed(1)} ${names[k]}`;
}

const percent = (share) => `${(100 * share).toFixed(1)}%`;

function labelsOf(timeline, what) {
  if (what.labels) return what.labels;
  const mb = what.tags[timeline.microbatch], stage = what.tags.stage;
  const short = mb === undefined ? what.op : String(mb);
  const labels = what.kind === "pass" ? [short] : [what.op];
  if (mb !== undefined) labels.unshift(`${what.op} ${mb}`);
  const staged = mb !== undefined && stage !== undefined && what.kind === "pass";
  if (staged) labels.unshift(`${what.op} ${mb}  stage ${stage}`);
  what.labels = labels;
  return labels;
}

function details(timeline, i) {
  const what = timeline.activities[timeline.what[i]], lane = timeline.lanes[timeline.laneOf[i]];
  const devices = timeline.rows[lane.row].devices;
  const waited = timeline.ready[i] - timeline.start[i];
  const pairs = Object.entries(what.tags).map(([key, value]) => [key, String(value)]);
  pairs.push([/[-,]/.test(devices) ? "devices" : "device", devices], ["stream", lane.stream]);
  pairs.push(["start", timeText(timeline.start[i], 6)], ["duration", timeText(timeline.end[i] - timeline.start[i], 6)]);
  if (waited > 0) pairs.push(["waited", timeText(waited, 6)]);
  if (what.bytes) pairs.push(["sends", bytesText(what.bytes)]);
  if (what.line) pairs.push(["line", what.line]);
  return { head: headOf(what), colour: what.colour, pairs, note: onPath(timeline, i) ? "on the critical path" : "" };
}

// Many names begin with the operation.
function headOf({ op, name }) {
  const rest = name.slice(op.length);
  return name.startsWith(op) && !/^\w/.test(rest) ? name : name ? `${op}  ${name}` : op;
}

function detailsText(timeline, i) {
  const { head, pairs, note } = details(timeline, i);
  return [head, ...pairs.map(([key, value]) => `${key} ${value}`), ...(note ? [note] : [])].join(", ");
}

function element(tag, className = "", text = "") {
  const found = document.createElement(tag);
  if (className) found.className = className;
  if (text) found.textContent = text;
  return found;
}

function fillCard(card, { head: title, colour, pairs, note }) {
  const head = element("div", "head"), swatch = element("span", "swatch"), list = element("div", "pairs");
  swatch.style.background = colour;
  head.append(swatch, element("span", "", title));
  for (const [key, value] of pairs) list.append(element("span", "", key), element("span", "", value));
  card.replaceChildren(head, list, ...(note ? [element("div", "note", note)] : []));
}

// -------------------------------------------------------------------------------------------------------------- layout

const canvas = $("bars"), context = canvas.getContext("2d");
const axis = $("axis"), axisContext = axis.getContext("2d");
const scroller = $("scroll"), plot = $("plot");
const view = { from: 0, to: total, width: 100, height: 100 };
let contentHeight = 0;

// Lanes are as high as fits, between readable and clumsy.
function layout() {
  const least = place(1);
  const fixed = place(0);
  const room = scroller.clientHeight - fixed;
  contentHeight = place(Math.min(2, Math.max(1, room / Math.max(1, least - fixed))));
  const height = Math.max(contentHeight, scroller.clientHeight);
  plot.style.height = $("labels").style.height = `${height}px`;
  fillLabels();
  resize();
}

function place(stretch) {
  let y = 0;
  timelines.forEach((timeline, k) => {
    timeline.top = y;
    y += timelines.length > 1 ? 26 : 0;
    for (const row of timeline.rows) {
      row.top = y;
      y += 4;
      for (const lane of row.lanes) {
        lane.top = y;
        lane.height = laneHeight(row, lane, stretch);
        y += lane.height + (row.collapsed && !lane.computes ? 1 : 3);
      }
      if (!row.lanes.length) y += 22 * stretch;
      if (row.memory) {
        row.memory.top = y;
        row.memory.height = row.collapsed ? 0 : 24 * stretch;
        y += row.collapsed ? 0 : row.memory.height + 3;
      }
      y += 2;
      row.bottom = y;
    }
    timeline.bottom = y;
    if (k + 1 < timelines.length) y += 6;
  });
  return y;
}

function laneHeight(row, lane, stretch) {
  const tracks = Math.max(1, lane.tracks.length);
  if (lane === row.lanes[0]) return Math.max(24, Math.min(tracks, 6) * 11) * stretch;
  if (row.collapsed) return STRIP;
  return Math.max(13, Math.min(tracks, 8) * 8) * stretch;
}

function fillLabels() {
  const parts = [];
  for (const timeline of timelines) {
    const title = element("div", "panel-label", `${timeline.title || "Timeline"}  `);
    title.append(element("span", "", `${timeText(timeline.length)}, ${percent(timeline.idle)} idle`));
    if (timelines.length > 1) parts.push(positioned(title, timeline.top, 24));
    for (const row of timeline.rows) parts.push(rowLabel(row));
  }
  $("labels").replaceChildren(...parts);
}

function positioned(node, top, height) {
  node.style.top = `${top}px`;
  node.style.height = `${height}px`;
  return node;
}

function rowLabel(row) {
  const label = positioned(element("div", "row-label"), row.top, row.bottom - row.top);
  const device = element("div", "device");
  const first = row.lanes[0], name = `${/[-,]/.test(row.devices) ? "devices" : "device"} ${row.devices}`;
  device.style.height = `${Math.min(first ? first.height + 4 : row.bottom - row.top - 1, 60)}px`;
  const what = element("span", "what"), idle = element("span", "idle", percent(row.idle));
  if (name.length < 13) what.append(element("span", "word", name.slice(0, -row.devices.length)));
  what.append(row.devices);
  what.title = name;
  idle.title = `idle ${percent(row.idle)} of the step`;
  if (row.lanes.length > 1 || row.memory) device.append(collapseButton(row, name)); else what.style.marginLeft = "23px";
  device.append(what, idle);
  label.append(device);
  if (row.collapsed) return label;
  for (const lane of row.lanes.slice(1)) label.append(laneLabel(lane.stream, "", lane, row));
  if (row.memory) label.append(laneLabel("memory", bytesText(row.memory.peak), row.memory, row));
  return label;
}

function collapseButton(row, name) {
  const button = element("button", "", row.collapsed ? "▶" : "▼");
  button.setAttribute("aria-expanded", String(!row.collapsed));
  button.setAttribute("aria-label", `communication of ${name}`);
  button.onclick = () => {
    row.collapsed = !row.collapsed;
    layout();
    // The labels are new elements now.
    const all = [...document.querySelectorAll(".device button")];
    const found = all.find((one) => one.getAttribute("aria-label") === button.getAttribute("aria-label"));
    if (found) found.focus();
  };
  return button;
}

function laneLabel(name, size, lane, row) {
  const label = positioned(element("div", "lane-label"), lane.top - row.top, lane.height);
  label.append(element("span", "", name));
  if (size) {
    const peak = element("span", "size", size);
    peak.title = "peak";
    label.append(peak);
  }
  return label;
}

function collapseAll() {
  const rows = timelines.flatMap((one) => one.rows), open = rows.some((row) => !row.collapsed);
  for (const row of rows) row.collapsed = open;
  $("collapse").setAttribute("aria-pressed", String(open));
  layout();
}

function resize() {
  view.width = plot.clientWidth;
  view.height = scroller.clientHeight;
  sizeCanvas(canvas, context, view.width, view.height);
  sizeCanvas(axis, axisContext, view.width, 26);
  draw();
}

function sizeCanvas(target, pen, width, height) {
  const ratio = window.devicePixelRatio || 1;
  target.width = Math.max(1, Math.round(width * ratio));
  target.height = Math.max(1, Math.round(height * ratio));
  target.style.width = `${width}px`;
  target.style.height = `${height}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
}

// ---------------------------------------------------------------------------------------------------------------- view

const toX = (time) => (time - view.from) / (view.to - view.from) * view.width;
const toTime = (x) => view.from + x / view.width * (view.to - view.from);

function setRange(from, to) {
  const margin = 0.006 * total;
  const span = Math.min(Math.max(to - from, total * 1e-7), total + 2 * margin);
  const begin = Math.min(Math.max(from, -margin), total + margin - span);
  view.from = begin;
  view.to = begin + span;
  draw();
}

const fit = () => setRange(-total, 2 * total);

function zoom(factor, x = view.width / 2) {
  const at = toTime(x), span = (view.to - view.from) / factor;
  setRange(at - x / view.width * span, at - x / view.width * span + span);
}

function pan(pixels) {
  const time = pixels / view.width * (view.to - view.from);
  setRange(view.from + time, view.to + time);
}

function reveal(bar) {
  const { timeline, i } = bar, lane = timeline.lanes[timeline.laneOf[i]];
  const span = view.to - view.from, start = timeline.start[i], end = timeline.end[i];
  if (start < view.from || end > view.to) {
    const middle = (start + end) / 2, wide = Math.max(span, (end - start) * 1.2);
    setRange(middle - wide / 2, middle + wide / 2);
  }
  const bottom = lane.top + lane.height;
  if (lane.top < scroller.scrollTop) scroller.scrollTop = lane.top - 8;
  else if (bottom > scroller.scrollTop + view.height) scroller.scrollTop = bottom - view.height + 8;
}

// ------------------------------------------------------------------------------------------------------------- drawing

let hovered = null, selected = null, focused = null, pointer = null;
let waitingToDraw = false, lastDraw = 0, firstPaint = 0;

function draw() {
  if (waitingToDraw) return;
  waitingToDraw = true;
  requestAnimationFrame(() => { waitingToDraw = false; drawNow(); });
}

function drawNow() {
  const began = performance.now();
  context.fillStyle = plain.paper;
  context.fillRect(0, 0, view.width, view.height);
  const top = scroller.scrollTop, bottom = top + view.height;
  const steps = ticks();
  for (const timeline of timelines) {
    for (const row of timeline.rows) {
      if (row.bottom < top || row.top > bottom) continue;
      drawRow(timeline, row, top, steps);
    }
  }
  for (const timeline of timelines) drawEnd(timeline, top);
  drawEstimatedEnd(top);
  for (const timeline of timelines) drawMessages(timeline, top);
  if (path.shown) for (const timeline of timelines) if (timeline.path) drawPath(timeline, top);
  for (const [bar, width] of [[hovered, 1.5], [selected, 2], [focused, 2.5]]) if (bar) drawRing(bar, width, top);
  if (pointer) drawCrosshair();
  drawAxis(steps);
  lastDraw = performance.now() - began;
  if (!firstPaint) {
    firstPaint = performance.now();
    performance.mark("first paint of the timeline");
  }
}

function drawRow(timeline, row, top, steps) {
  const left = Math.max(0, toX(0)), right = Math.min(view.width, toX(timeline.length));
  context.fillStyle = plain.grid;
  context.fillRect(0, Math.round(row.top - top), view.width, 1);
  context.fillStyle = plain.idle;
  for (const lane of row.lanes) {
    context.fillRect(left, Math.round(lane.top - top), right - left, Math.round(lane.height));
  }
  context.fillStyle = plain.grid;
  for (const time of steps.times) context.fillRect(Math.round(toX(time)), row.top - top, 1, row.bottom - row.top);
  for (const lane of row.lanes) {
    if (lane.ghost && lane.height > 10) drawGhosts(lane, top);
    drawLane(timeline, lane, top);
  }
  if (row.memory && row.memory.height) drawMemory(row.memory, timeline.length, top);
}

function drawEnd(timeline, top) {
  const x = Math.round(toX(timeline.length));
  context.fillStyle = plain.muted;
  if (x >= 0 && x <= view.width) context.fillRect(x, timeline.top - top, 1, timeline.bottom - timeline.top);
}

function drawEstimatedEnd(top) {
  if (!estimated || !timelines.length) return;
  const x = Math.round(toX(factor * estimated.length)) + 0.5, { top: from, bottom } = timelines[0];
  context.strokeStyle = plain.ghost;
  context.lineWidth = 1;
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(x, from - top);
  context.lineTo(x, bottom - top);
  context.stroke();
  context.setLineDash([]);
}

// With an estimate behind them, bars leave room above and below for its outlines.
function band(lane, track, top) {
  if (lane.height === STRIP) return [Math.round(lane.top - top), STRIP];  // all tracks in one
  const inset = lane.ghost && lane.height > 10 ? 3 : 0;
  const each = (lane.height - 2 * inset) / lane.tracks.length;
  const from = lane.top - top + inset, gap = lane.tracks.length > 1 && each > 4 ? 1 : 0;
  const y = Math.round(from + track * each);
  return [y, Math.max(1, Math.round(from + (track + 1) * each) - y - gap)];
}

function drawLane(timeline, lane, top) {
  const { start, end, what, activities } = timeline;
  context.font = FONT;
  context.textBaseline = "middle";
  context.textAlign = "center";
  const perPixel = (view.to - view.from) / view.width;
  const emphasised = path.shown || search.words ? (i) => isLit(timeline, i) : null;
  lane.tracks.forEach((track, k) => {
    const [y, height] = band(lane, k, top);
    let i = firstAfter(timeline, track, view.from - perPixel);
    while (i < track.after && start[i] < view.to) {
      if (end[i] - start[i] >= 1.5 * perPixel) {
        drawBar(timeline, i, y, height, emphasised ? emphasised(i) : true);
        i++;
        continue;
      }
      // Bars narrower than a pixel become one, in the colour of the longest, as solid as they are dense.
      const column = Math.floor(toX(start[i])), limit = toTime(column + 1);
      let longest = i, covered = 0, found = false;
      for (; i < track.after && start[i] < limit && end[i] - start[i] < 1.5 * perPixel; i++) {
        covered += end[i] - start[i];
        const match = emphasised ? emphasised(i) : false;
        if ((match && !found) || (match === found && end[i] - start[i] > end[longest] - start[longest])) longest = i;
        found = found || match;
      }
      context.globalAlpha = emphasised && !found ? faintness() : Math.min(1, Math.max(0.35, covered / perPixel));
      context.fillStyle = activities[what[longest]].colour;
      context.fillRect(column, y, 1, height);
      context.globalAlpha = 1;
    }
  });
}

// What is searched for, and on the critical path where that is shown.
function isLit(timeline, i) {
  return !((search.words && !matches(timeline, i)) || (path.shown && !onPath(timeline, i)));
}

const faintness = () => (search.words ? UNMATCHED : OFF_PATH);

function drawBar(timeline, i, y, height, lit) {
  // A strip has no room for what waits.
  const x = toX(height > STRIP ? timeline.start[i] : timeline.ready[i]);
  const right = Math.min(view.width + 4, toX(timeline.end[i]));
  const from = Math.max(-4, Math.round(x)), to = Math.round(right);
  // Neighbours are told apart by a gap of a pixel.
  const width = Math.max(1, to - from - (to - from > 3 ? 1 : 0));
  const what = timeline.activities[timeline.what[i]];
  context.globalAlpha = lit ? 1 : faintness();
  context.fillStyle = what.colour;
  context.fillRect(from, y, width, height);
  if (what.op === "R" && what.computes && width > 3) fillHatched(hatches.again, from, y, width, height);
  let inner = from;
  if (height > STRIP && timeline.ready[i] > timeline.start[i]) {
    const ready = Math.min(from + width, Math.max(from, Math.round(toX(timeline.ready[i]))));
    if (ready > from) drawWaiting(from, y, ready - from, height);
    inner = ready;
  }
  if (height >= 10 && from + width - inner > 10) drawLabel(timeline, what, inner, y, from + width - inner, height);
  if (lit && search.words && height > 3) underline(from, y, width, height);
  context.globalAlpha = 1;
}

function fillHatched(pattern, x, y, width, height) {
  context.fillStyle = pattern;
  context.fillRect(x, y, width, height);
}

function drawWaiting(x, y, width, height) {
  context.fillStyle = plain.wait;
  context.fillRect(x, y, width, height);
  if (width > 2) fillHatched(hatches.wait, x, y, width, height);
}

function underline(x, y, width, height) {
  context.fillStyle = plain.match;
  context.fillRect(x, y + height - 2, width, 2);
}

const widths = new Map();
function widthOf(text) {
  let found = widths.get(text);
  if (found === undefined) {
    context.font = FONT;
    widths.set(text, found = context.measureText(text).width);
  }
  return found;
}

function drawLabel(timeline, what, x, y, width, height) {
  const label = labelsOf(timeline, what).find((text) => widthOf(text) + 6 <= width);
  if (label === undefined) return;
  context.font = height < 14 ? SMALL : FONT;
  context.fillStyle = what.ink;
  context.fillText(label, x + width / 2, y + height / 2 + 0.5);
}

function drawGhosts(lane, top) {
  const ghost = lane.ghost, each = lane.height / ghost.tracks.length;
  const perPixel = (view.to - view.from) / view.width / factor, from = view.from / factor, until = view.to / factor;
  context.strokeStyle = plain.ghost;
  context.lineWidth = 1;
  ghost.tracks.forEach((track, k) => {
    const y = Math.round(lane.top - top + k * each), height = Math.round(each);
    let last = -1;
    for (let i = firstAfter(estimated, track, from); i < track.after && estimated.start[i] < until; i++) {
      const x = Math.round(toX(factor * estimated.ready[i])), right = Math.round(toX(factor * estimated.end[i]));
      context.fillStyle = plain.ghostFill;
      if (estimated.end[i] - estimated.ready[i] > 3 * perPixel) {
        context.fillRect(x, y, right - x, height);
        context.strokeRect(x + 0.5, y + 0.5, right - x - 1, height - 1);
      } else if (right > last) {
        context.fillRect(x, y, Math.max(1, right - x), height);
        last = right;
      }
    }
  });
}

function drawMemory(memory, length, top) {
  const { time, size } = memory, base = Math.round(memory.top + memory.height - top), high = memory.height - 2;
  const level = (k) => base - high * size[k] / (memoryPeak || 1);
  let k = lastBefore(time, view.from);
  context.beginPath();
  let x = Math.max(0, toX(time[k])), y = level(k);
  const from = x;
  context.moveTo(x, y);
  for (k++; k < time.length && time[k] < view.to; k++) {
    const next = toX(time[k]);
    // Of what falls into one pixel, the highest.
    let highest = level(k);
    while (k + 1 < time.length && toX(time[k + 1]) < next + 0.5) highest = Math.min(highest, level(++k));
    context.lineTo(next, y);
    context.lineTo(next, highest);
    y = level(k);
    context.lineTo(next, y);
    x = next;
  }
  const right = Math.max(x, Math.min(view.width, toX(length)));
  context.lineTo(right, y);
  context.strokeStyle = plain.curve;
  context.lineWidth = 1;
  context.stroke();
  context.lineTo(right, base);
  context.lineTo(from, base);
  context.closePath();
  context.fillStyle = plain.area;
  context.fill();
}

function lastBefore(times, time) {
  let low = 0, high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] > time) high = middle; else low = middle + 1;
  }
  return Math.max(0, low - 1);
}

function middleOf(timeline, i) {
  const lane = timeline.lanes[timeline.laneOf[i]];
  const track = lane.tracks.findIndex((one) => i < one.after);
  const [y, height] = band(lane, track, 0);
  return y + height / 2;
}

// Bars of the path keep their colours between two lines; where one waited for the next is a line between them.
function drawPath(timeline, top) {
  const { bars } = timeline.path, chosen = path.part && path.part.timeline === timeline ? path.part.bars : null;
  const links = new Path2D();
  let before = -1;
  for (const i of bars) {
    if (timeline.end[i] >= view.from && (before < 0 || timeline.end[before] <= view.to)) {
      link(links, timeline, before, i, top);
      edges(timeline, i, top, chosen && chosen.has(i) ? 4 : 2);
    }
    before = i;
  }
  for (const [colour, width] of [[plain.paper, 4], [plain.path, 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke(links);
  }
}

// Down or up to the lane of the next bar, then, for the time of the host, along it; to the first bar from the beginning.
function link(links, timeline, from, to, top) {
  const x = Math.round(toX(from < 0 ? 0 : timeline.end[from])), end = Math.round(toX(timeline.ready[to]));
  const endY = middleOf(timeline, to) - top, y = from < 0 ? endY : middleOf(timeline, from) - top;
  if (Math.abs(end - x) <= 1 && y === endY) return;
  links.moveTo(x, y);
  links.lineTo(x, endY);
  if (end > x) links.lineTo(end, endY);  // both ends of a message are at the same time
}

function edges(timeline, i, top, thick) {
  const box = boxOf({ timeline, i }, top), thin = Math.min(thick, Math.ceil(box.height / 4));
  if (box.y > view.height || box.y + box.height < 0) return;
  const x = Math.round(Math.max(-4, toX(timeline.ready[i])));
  const width = Math.max(1, Math.round(Math.min(view.width + 4, toX(timeline.end[i]))) - x);
  context.fillStyle = plain.path;
  context.fillRect(x, box.y, width, thin);
  context.fillRect(x, box.y + box.height - thin, width, thin);
}

function drawMessages(timeline, top) {
  const { messages } = timeline, shown = [], marked = [], most = view.width / PIXELS_PER_MESSAGE;
  const bars = [hovered, selected, focused].filter((bar) => bar && bar.timeline === timeline).map((bar) => bar.i);
  for (let k = 0; k < messages.length; k += 2) {
    const from = messages[k], to = messages[k + 1];
    if (bars.includes(from) || bars.includes(to)) marked.push(k);
    else if (!path.shown && shown.length <= most && timeline.start[from] < view.to && timeline.end[to] > view.from) shown.push(k);
  }
  context.strokeStyle = context.fillStyle = plain.arrow;
  context.globalAlpha = 0.45;
  if (shown.length <= most) for (const k of shown) arrow(timeline, messages[k], messages[k + 1], top, 1);
  context.globalAlpha = 1;
  context.strokeStyle = context.fillStyle = plain.ring;
  for (const k of marked) arrow(timeline, messages[k], messages[k + 1], top, 1.5);
}

// From when the message begins to move to when it is there.
function arrow(timeline, from, to, top, width) {
  const x = toX(timeline.ready[from]), y = middleOf(timeline, from) - top;
  const tipX = toX(timeline.end[to]), tipY = middleOf(timeline, to) - top;
  if (Math.max(y, tipY) < 0 || Math.min(y, tipY) > view.height) return;
  const angle = Math.atan2(tipY - y, tipX - x), size = 5;
  context.lineWidth = width;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(tipX, tipY);
  context.stroke();
  context.beginPath();
  context.moveTo(tipX, tipY);
  for (const side of [angle - 0.4, angle + 0.4]) {
    context.lineTo(tipX - size * Math.cos(side), tipY - size * Math.sin(side));
  }
  context.fill();
}

function boxOf({ timeline, i }, top) {
  const lane = timeline.lanes[timeline.laneOf[i]];
  const [y, height] = band(lane, lane.tracks.findIndex((one) => i < one.after), top);
  const x = toX(timeline.start[i]);
  return { x, y, width: Math.max(2, toX(timeline.end[i]) - x), height };
}

function drawRing(bar, width, top) {
  const box = boxOf(bar, top);
  const x = Math.round(Math.max(-6, box.x)), right = Math.round(Math.min(view.width + 6, box.x + box.width));
  context.lineWidth = width + 2;
  context.strokeStyle = plain.paper;
  context.strokeRect(x - 0.5, box.y - 0.5, right - x, box.height + 1);
  context.lineWidth = width;
  context.strokeStyle = plain.ring;
  context.strokeRect(x - 0.5, box.y - 0.5, right - x, box.height + 1);
}

function drawCrosshair() {
  context.fillStyle = plain.muted;
  context.globalAlpha = 0.5;
  context.fillRect(Math.round(pointer.x), 0, 1, view.height);
  context.globalAlpha = 1;
}

// Steps of 1, 2 or 5, about 100 pixels apart.
function ticks() {
  const wanted = (view.to - view.from) * 100 / view.width;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= wanted * 0.999);
  const times = [];
  for (let k = Math.ceil(view.from / step); k * step <= view.to; k++) if (k >= 0) times.push(k * step);
  return { step, times };
}

function axisText(time, step) {
  if (time === 0) return "0";
  const [factor, name] = unit !== "s" ? [1, ""] : total < 1e-3 ? [1e6, " us"] : total < 1 ? [1e3, " ms"] : [1, " s"];
  const decimals = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  return (time * factor).toFixed(Math.min(decimals, 12)) + name;
}

function drawAxis({ step, times }) {
  const pen = axisContext;
  pen.fillStyle = plain.paper;
  pen.fillRect(0, 0, view.width, 26);
  pen.font = FONT;
  pen.textBaseline = "middle";
  const here = pointer && pointerLabel(pen, step);
  pen.fillStyle = plain.muted;
  for (const time of times) {
    const x = Math.round(toX(time)), text = axisText(time, step), width = pen.measureText(text).width;
    const left = Math.min(Math.max(2, x - width / 2), view.width - width - 2);
    pen.fillRect(x, 21, 1, 5);
    if (!here || left > here.x + here.width + 4 || left + width < here.x - 4) pen.fillText(text, left, 12);
  }
  drawOverview(pen);
  if (here) drawPointerTime(pen, here);
}

// Which part of the step is in sight.
function drawOverview(pen) {
  if (view.to - view.from >= total) return;
  pen.fillStyle = plain.grid;
  pen.fillRect(0, 0, view.width, 3);
  pen.fillStyle = plain.ring;
  const scale = view.width / total;
  pen.fillRect(Math.max(0, view.from * scale), 0, Math.max(3, (view.to - view.from) * scale), 3);
}

function pointerLabel(pen, step) {
  const text = axisText(Math.max(0, toTime(pointer.x)), step / 100), width = pen.measureText(text).width + 10;
  return { text, width, x: Math.min(Math.max(0, pointer.x - width / 2), view.width - width) };
}

function drawPointerTime(pen, { text, x, width }) {
  pen.fillStyle = plain.text;
  pen.fillRect(x, 4, width, 17);
  pen.fillStyle = plain.paper;
  pen.fillText(text, x + 5, 13);
}

// -------------------------------------------------------------------------------------------------- bars under a point

// x and y of the plot.
function barAt(x, y) {
  const at = y + scroller.scrollTop;
  for (const timeline of timelines) {
    if (at < timeline.top || at >= timeline.bottom) continue;
    const lane = timeline.lanes.find((one) => at >= one.top && at < one.top + one.height);
    return lane ? barInLane(timeline, lane, x, at) : null;
  }
  return null;
}

// The bar itself, or one that is so thin that the pointer misses it by a pixel or two.
function barInLane(timeline, lane, x, y) {
  const count = lane.tracks.length, number = Math.floor((y - lane.top) / lane.height * count);
  const strip = lane.height === STRIP, begin = strip ? timeline.ready : timeline.start;
  const tracks = strip ? lane.tracks : lane.tracks.slice(Math.min(count - 1, number), number + 1);
  const time = toTime(x), near = 3 * (view.to - view.from) / view.width;
  let best = -1, distance = near;
  for (const track of tracks) {
    for (let i = firstAfter(timeline, track, time - near); i < track.after && timeline.start[i] <= time + near; i++) {
      const away = Math.max(begin[i] - time, time - timeline.end[i], 0);
      if (away < distance) [best, distance] = [i, away];
    }
  }
  return best < 0 ? null : { timeline, i: best };
}

function memoryAt(x, y) {
  const at = y + scroller.scrollTop;
  for (const timeline of timelines) {
    const row = timeline.rows.find(({ memory }) => memory && at >= memory.top && at < memory.top + memory.height);
    if (row) return { row, size: row.memory.size[lastBefore(row.memory.time, toTime(x))] };
  }
  return null;
}

function showTooltip(x, y, content) {
  const card = $("tooltip");
  fillCard(card, content);
  card.hidden = false;
  const box = card.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - box.width - 12 : x + 16;
  const top = y + 16 + box.height > innerHeight ? y - box.height - 12 : y + 16;
  card.style.left = `${Math.max(4, left)}px`;
  card.style.top = `${Math.max(4, top)}px`;
}

function inPlot(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function hover(event) {
  const [x, y] = inPlot(event);
  pointer = { x, y };
  hovered = barAt(x, y);
  const memory = hovered ? null : memoryAt(x, y);
  if (hovered) showTooltip(event.clientX, event.clientY, details(hovered.timeline, hovered.i));
  else if (memory) showTooltip(event.clientX, event.clientY, memoryCard(memory, toTime(x)));
  else $("tooltip").hidden = true;
  draw();
}

function memoryCard({ row, size }, time) {
  const pairs = [["device", row.devices], ["at", timeText(Math.max(0, time), 6)], ["peak", bytesText(row.memory.peak)]];
  return { head: `memory ${bytesText(size)}`, colour: plain.curve, pairs };
}

function leave() {
  hovered = pointer = null;
  $("tooltip").hidden = true;
  draw();
}

function select(bar) {
  selected = bar;
  const card = $("selected");
  card.hidden = !bar;
  if (bar) {
    fillCard(card, details(bar.timeline, bar.i));
    const close = element("button", "close", "✕");
    close.setAttribute("aria-label", "Close");
    close.onclick = () => { select(null); plot.focus(); };
    card.append(close);
    $("live").textContent = `Selected: ${detailsText(bar.timeline, bar.i)}`;
  }
  draw();
}

// --------------------------------------------------------------------------------------------------------------- mouse

let drag = null;

plot.addEventListener("wheel", (event) => {
  event.preventDefault();
  const amount = (value) => value * (event.deltaMode === 1 ? 16 : 1);
  if (event.shiftKey) scroller.scrollTop += amount(event.deltaY || event.deltaX);
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(amount(event.deltaX));
  else zoom(Math.exp(-amount(event.deltaY) * 0.0016), event.clientX - plot.getBoundingClientRect().left);
  hover(event);
}, { passive: false });

plot.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  leaving = false;
  drag = { x: event.clientX, y: event.clientY, from: view.from, to: view.to, top: scroller.scrollTop, moved: false };
  plot.setPointerCapture(event.pointerId);
});

plot.addEventListener("pointermove", (event) => {
  if (!drag) return hover(event);
  const x = event.clientX - drag.x, y = event.clientY - drag.y;
  drag.moved = drag.moved || Math.hypot(x, y) > 3;
  if (!drag.moved) return undefined;
  plot.classList.add("dragging");
  $("tooltip").hidden = true;
  const time = x / view.width * (drag.to - drag.from);
  setRange(drag.from - time, drag.to - time);
  scroller.scrollTop = drag.top - y;
  return undefined;
});

plot.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    focused = null;
    select(barAt(...inPlot(event)));
  }
  drag = null;
  plot.classList.remove("dragging");
});

plot.addEventListener("pointercancel", () => { drag = null; });
plot.addEventListener("pointerleave", leave);
plot.addEventListener("dblclick", fit);
scroller.addEventListener("scroll", draw);

// ------------------------------------------------------------------------------------------------------------ keyboard

let leaving = false;  // after Escape, Tab leaves the timeline instead of going to a bar

function inTimeOrder(timeline, lane) {
  if (lane.order) return lane.order;
  const found = [];
  for (const track of lane.tracks) for (let i = track.first; i < track.after; i++) found.push(i);
  lane.order = found.sort((a, b) => timeline.start[a] - timeline.start[b] || a - b);
  return lane.order;
}

function stepFocus(way) {
  const from = focused || selected;
  if (!from) {
    const timeline = timelines.find((one) => one.lanes.length);
    if (!timeline || way < 0) return false;
    const order = inTimeOrder(timeline, timeline.lanes[0]);
    return focusBar(timeline, order.find((i) => timeline.end[i] > view.from) ?? order[0]);
  }
  const { timeline, i } = from, order = inTimeOrder(timeline, timeline.lanes[timeline.laneOf[i]]);
  const next = order[order.indexOf(i) + way];
  return next === undefined ? false : focusBar(timeline, next);
}

function focusBar(timeline, i) {
  focused = { timeline, i };
  reveal(focused);
  drawNow();
  const box = boxOf(focused, scroller.scrollTop), outer = canvas.getBoundingClientRect();
  const x = Math.min(Math.max(0, box.x), view.width);
  showTooltip(outer.left + x, outer.top + box.y + box.height, details(timeline, i));
  $("live").textContent = detailsText(timeline, i);
  return true;
}

// To the bar at about the same time, of the lane above or below.
function changeLane(way) {
  const lanes = timelines.flatMap((timeline) => timeline.lanes.map((lane) => ({ timeline, lane })));
  const { timeline, i } = focused, middle = (timeline.start[i] + timeline.end[i]) / 2;
  const next = lanes[lanes.findIndex((one) => one.lane === timeline.lanes[timeline.laneOf[i]]) + way];
  if (!next) return;
  const away = (k) => Math.max(next.timeline.start[k] - middle, middle - next.timeline.end[k], 0);
  focusBar(next.timeline, inTimeOrder(next.timeline, next.lane).reduce((best, k) => (away(k) < away(best) ? k : best)));
}

function escapeKey() {
  leaving = true;
  focused = null;
  $("tooltip").hidden = true;
  leavePart();
  select(null);
}

const KEYS = {
  ArrowLeft: () => pan(-view.width / 8),
  ArrowRight: () => pan(view.width / 8),
  ArrowUp: () => (focused ? changeLane(-1) : scroller.scrollBy(0, -60)),
  ArrowDown: () => (focused ? changeLane(1) : scroller.scrollBy(0, 60)),
  PageUp: () => scroller.scrollBy(0, -view.height * 0.9),
  PageDown: () => scroller.scrollBy(0, view.height * 0.9),
  "+": () => zoom(1.4), "=": () => zoom(1.4), "-": () => zoom(1 / 1.4),
  0: fit, Home: fit,
  Escape: escapeKey,
  "?": () => $("help").showModal(),
  t: () => chooseTheme(theme === "dark" ? "light" : "dark"),
  c: collapseAll,
  p: togglePath,
  s: toggleStretched,
  "/": () => $("search").focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target === $("search")) return;
  if ($("time").hidden) return graphKey(event);
  const onPlot = document.activeElement === plot;
  if (event.key === "Tab") {
    if (onPlot && !leaving && stepFocus(event.shiftKey ? -1 : 1)) event.preventDefault();
    return;
  }
  if (event.key === "Enter" && onPlot && focused) return select(focused);
  const action = KEYS[event.key];
  if (!action) return;
  action();
  event.preventDefault();
});

plot.addEventListener("focus", () => { leaving = false; });
plot.addEventListener("blur", () => { focused = null; $("tooltip").hidden = true; draw(); });

// -------------------------------------------------------------------------------------------------------------- search

const search = { words: null, count: 0, at: null };

// Words that an activity has, and those that its lane has: a bar matches if it has every word.
function find(text) {
  const words = text.trim().toLowerCase().split(/\s+/).filter(Boolean).slice(0, 30);
  search.words = words.length ? words : null;
  search.all = 2 ** words.length - 1;
  search.count = 0;
  search.at = null;
  if (search.words) for (const timeline of timelines) search.count += mark(timeline, words);
  const all = timelines.reduce((sum, one) => sum + one.what.length, 0);
  $("found").textContent = search.words ? `${search.count.toLocaleString("en")} of ${all.toLocaleString("en")}` : "";
  draw();
  return search.count;
}

function mark(timeline, words) {
  const bits = (test) => words.reduce((sum, word, k) => sum + (test(word) ? 2 ** k : 0), 0);
  for (const what of timeline.activities) what.bits = bits((word) => activityHas(what, word));
  for (const lane of timeline.lanes) lane.bits = bits((word) => laneHas(timeline, lane, word));
  let count = 0;
  for (let i = 0; i < timeline.what.length; i++) count += matches(timeline, i);
  return count;
}

function matches(timeline, i) {
  return (timeline.activities[timeline.what[i]].bits | timeline.lanes[timeline.laneOf[i]].bits) === search.all;
}

function activityHas(what, word) {
  const tags = Object.entries(what.tags).map(([key, value]) => `${key}=${value}`.toLowerCase());
  const op = what.op.toLowerCase();
  if (/^\w+=/.test(word)) return tags.includes(word) || word === `op=${op}` || word === `pass=${op}`;
  return [what.op, what.name, what.line, ...tags].some((text) => text.toLowerCase().includes(word));
}

function laneHas(timeline, lane, word) {
  const devices = timeline.devices[lane.row];
  if (word.startsWith("device=")) return devices.includes(Number(word.slice(7)));
  if (word.startsWith("stream=")) return lane.stream.toLowerCase() === word.slice(7);
  return lane.stream.toLowerCase().includes(word) && !lane.computes;
}

function nextMatch() {
  for (let timeline = 0, from = 0, turn = 0; turn <= timelines.length; turn++) {
    if (search.at && !turn) [timeline, from] = [search.at[0], search.at[1] + 1];
    for (let i = from; i < timelines[timeline].what.length; i++) {
      if (!matches(timelines[timeline], i)) continue;
      search.at = [timeline, i];
      reveal({ timeline: timelines[timeline], i });
      return select({ timeline: timelines[timeline], i });
    }
    [timeline, from] = [(timeline + 1) % timelines.length, 0];
  }
  return undefined;
}

function setSearch(text) {
  $("search").value = text;
  find(text);
}

$("search").addEventListener("input", () => find($("search").value));
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && search.count) nextMatch();
  if (event.key === "Escape") { setSearch(""); plot.focus(); }
});

// ------------------------------------------------------------------------------------------------------- critical path

const path = { shown: false, part: null };

function onPath(timeline, i) {
  return timeline.path !== null && timeline.path.has[i] === 1;
}

function togglePath() {
  if (!timelines.some((one) => one.path)) return;
  path.shown = !path.shown;
  path.part = null;
  $("show-path").setAttribute("aria-pressed", String(path.shown));
  $("path").hidden = !path.shown;
  if (path.shown) fillPath();
  layout();
}

function fillPath() {
  $("path").classList.toggle("several", timelines.length > 2);
  $("path").replaceChildren(...timelines.filter((one) => one.path).map(pathList));
}

function pathList(timeline) {
  const found = element("div"), list = element("ol"), { parts, bars } = timeline.path;
  const several = timelines.length > 1, counted = plural(bars.length, "bar");
  const title = element("h2", "", several ? timeline.title || "Timeline" : "Critical path");
  title.append("  ", element("span", "", several ? `critical path, ${counted}` : counted));
  list.append(...parts.slice(0, PARTS).map((part) => partRow(timeline, part)));
  found.append(title, list);
  if (parts.length > PARTS) found.append(`and ${plural(parts.length - PARTS, "more part")}`);
  return found;
}

function partRow(timeline, part) {
  const row = element("li"), button = element("button", "part"), share = part.time / (timeline.length || 1);
  const what = `${part.what} on device ${part.device}`, bar = element("span", "share");
  bar.style.width = percent(part.time / timeline.path.parts[0].time);  // of the longest part, which is the first
  button.append(element("span", "figure", timeText(part.time, 3)), bar, element("span", "figure", percent(share)),
    element("span", "", what), element("span", "from", shortLine(part.line)));
  button.title = [what, part.line, plural(part.bars.length, "bar"), "click for the next one"].filter(Boolean).join(", ");
  button.setAttribute("aria-pressed", "false");
  button.onclick = () => choosePart(timeline, part, button);
  row.append(button);
  return row;
}

const plural = (many, what) => `${many.toLocaleString("en")} ${what}${many === 1 ? "" : "s"}`;

// Of a long path, what tells it from others.
function shortLine(line) {
  return line.length > 34 ? `…/${line.split("/").pop()}` : line;
}

// A first click marks the bars of a part and goes to the first one, further clicks to the next ones.
function choosePart(timeline, part, button) {
  if (!part.bars.length) return;
  const again = path.part && path.part.of === part;
  if (!again) leavePart();
  const at = again ? (path.part.at + 1) % part.bars.length : 0;
  path.part = { timeline, of: part, bars: new Set(part.bars), at };
  button.setAttribute("aria-pressed", "true");
  const bar = { timeline, i: part.bars[at] };
  reveal(bar);
  select(bar);
}

function leavePart() {
  path.part = null;
  for (const button of document.querySelectorAll(".part[aria-pressed=true]")) button.setAttribute("aria-pressed", "false");
}

// ------------------------------------------------------------------------------------------------------------ estimate

function canStretch() {
  return Boolean(estimated && estimated.length && timelines.length && timelines[0].length);
}

function toggleStretched() {
  if (!canStretch()) return;
  const stretched = factor === 1 && timelines[0].length !== estimated.length;
  factor = stretched ? timelines[0].length / estimated.length : 1;
  $("stretch").setAttribute("aria-pressed", String(stretched));
  fillHeader();
  draw();
}

// ------------------------------------------------------------------------------------------------------ header, legend

const COUNTS = { 2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight" };

function fillHeader() {
  const names = timelines.map((one) => one.title || "Timeline");
  $("title").textContent = timelines.length > 1 ? `${COUNTS[timelines.length] || timelines.length} schedules` : names[0] || "Timeline";
  $("source").textContent = [...new Set(everything.map((one) => one.source))].filter(Boolean).join("; ");
  $("source").title = $("source").textContent;
  $("facts").replaceChildren(...timelines.map((one, k) => factsOf(one, k, names[k])));
}

function factsOf(timeline, k, name) {
  const line = element("div");
  const devices = timeline.devices.reduce((sum, its) => sum + its.length, 0);
  const counted = `${devices.toLocaleString("en")} device${devices > 1 ? "s" : ""}`;
  line.append(element("dt", "name", timelines.length > 1 ? name : counted));
  line.append(fact("step", timeText(timeline.length), comparison(timeline, k)), fact("idle", percent(timeline.idle), ""));
  const peak = peakOf(timeline);
  line.append(peak ? fact("memory", bytesText(peak), "") : element("dd"));
  line.append(exposedFact(timeline));
  return line;
}

// How long the step is beside what it is compared with.
function comparison(timeline, k) {
  const other = k ? timelines[0] : estimated;
  if (!other || !other.length) return "";
  const share = percent(timeline.length / other.length);
  if (k) return ` (${share} of the first)`;
  const scaled = factor === 1 ? "" : `, scaled by ${number(factor, 4)}`;
  return ` (${share} of the estimate, ${timeText(other.length)}${scaled})`;
}

function fact(name, value, more) {
  const found = element("dd", "", `${name} `);
  found.append(element("b", "", value), more);
  return found;
}

function exposedFact(timeline) {
  const found = element("dd"), streams = Object.entries(timeline.exposed).sort((a, b) => b[1] - a[1]);
  if (streams.length) found.append("exposed ");
  streams.forEach(([stream, time], k) => {
    found.append(`${k ? ", " : ""}${stream} `, element("b", "", timeText(time)));
  });
  found.title = "Communication during which a device computes nothing: the most of any device, by stream";
  return found;
}

function fillLegend() {
  const parts = [passEntries(), stageEntries(), communicationEntries(), otherEntries()];
  $("legend").replaceChildren(...parts.filter(Boolean));
}

function passEntries() {
  const used = new Set(everything.flatMap((one) => one.activities.filter((what) => what.computes).map(({ op }) => op)));
  const passes = Object.keys(PASSES).filter((pass) => used.has(pass));
  const one = (pass) => entry(`${pass} ${PASSES[pass]}`, `pass=${pass}`, passColour(pass, stages[0]), pass);
  return passes.length ? entries("", passes.map(one)) : null;
}

function stageEntries() {
  const shown = stages.slice(0, 16).map((stage) => entry(String(stage), `stage=${stage}`, passColour("B", stage)));
  if (stages.length > 16) shown.push(element("span", "", `and ${stages.length - 16} more`));
  return stages.length ? entries("stage", shown) : null;
}

function communicationEntries() {
  const ordered = [...operations.keys()].sort((a, b) => operations.get(a) - operations.get(b));
  const shown = ordered.map((op) => entry(op, `op=${op}`, communicationColour(op)));
  return shown.length ? entries("communication", shown) : null;
}

function otherEntries() {
  const others = new Set(timelines.flatMap((one) => one.activities.filter((what) => what.kind === "other").map(({ op }) => op)));
  const waiting = timelines.some((one) => one.ready.some((time, i) => time > one.start[i]));
  const shown = [];
  if (others.size) shown.push(entry([...others].sort().join(", "), "", oklch(...plain.other)));
  if (waiting) shown.push(entry("waiting", "", plain.wait, "wait"));
  shown.push(entry("idle", "", plain.idle, "thin box"));
  if (estimated) shown.push(entry("estimated", "", "transparent", "box"));
  return entries("", shown);
}

function entries(name, its) {
  const found = element("div", "entries");
  found.append(...(name ? [element("span", "", name)] : []), ...its);
  return found;
}

function entry(text, words, colour, look = "") {
  const found = element(words ? "button" : "span", "entry"), swatch = element("span", "swatch");
  const lines = { R: AGAIN, wait: plain.hatch }[look];
  const hatched = `repeating-linear-gradient(135deg, ${lines} 0 1px, transparent 1px 4px), ${colour}`;
  swatch.style.background = lines ? hatched : colour;
  if (look.endsWith("box")) swatch.style.border = `1px solid ${look === "box" ? plain.ghost : plain.grid}`;
  found.append(swatch, element("span", "", text));
  if (words) {
    found.title = `Highlight ${words}`;
    found.onclick = () => setSearch($("search").value === words ? "" : words);
  }
  return found;
}

// --------------------------------------------------------------------------------------------------------------- graph

let graphScale = 1;

function showTab(name) {
  for (const one of ["time", "graph"]) {
    $(one).hidden = one !== name;
    $(`tab-${one}`).setAttribute("aria-selected", String(one === name));
  }
  $("legend").hidden = name === "graph";
  if (name === "graph" && !$("graph").firstChild) addGraph();
  if (name === "time") layout();
}

// As an image: nothing in it can run.
function addGraph() {
  const image = element("img");
  image.alt = "Graph of the schedule";
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(data.graph)}`;
  $("graph").append(image);
}

function graphKey(event) {
  const factor = { "+": 1.25, "=": 1.25, "-": 0.8, 0: 0, Home: 0 }[event.key];
  if (event.key === "t") KEYS.t();
  if (event.key === "?") KEYS["?"]();
  if (factor === undefined) return;
  graphScale = factor ? graphScale * factor : 1;
  const image = $("graph").querySelector("img");
  image.style.width = `${image.naturalWidth * graphScale}px`;
  event.preventDefault();
}

// --------------------------------------------------------------------------------------------------------------- start

let themeChosen = false;
const darkWanted = matchMedia("(prefers-color-scheme: dark)");

function chooseTheme(name) {
  themeChosen = true;
  setTheme(name);
}

darkWanted.addEventListener("change", () => { if (!themeChosen) setTheme(darkWanted.matches ? "dark" : "light"); });
$("theme").onclick = () => KEYS.t();
$("fit").onclick = fit;
$("collapse").onclick = collapseAll;
$("collapse").hidden = !timelines.some((one) => one.rows.some((row) => row.lanes.length > 1 || row.memory));
$("show-path").onclick = togglePath;
$("show-path").hidden = $("path-help").hidden = !timelines.some((one) => one.path);
$("stretch").onclick = toggleStretched;
$("stretch").hidden = $("stretch-help").hidden = !canStretch();
$("show-help").onclick = KEYS["?"];
$("tabs").hidden = !data.graph;
$("tab-time").onclick = () => showTab("time");
$("tab-graph").onclick = () => showTab("graph");

// For scripts and tests: coordinates are those of the window.
window.timelineView = {
  range: () => [view.from, view.to],
  setRange, zoom, pan, fit, find, setTheme: chooseTheme,
  at(x, y) {
    const box = canvas.getBoundingClientRect(), bar = barAt(x - box.left, y - box.top);
    return bar && { timeline: timelines.indexOf(bar.timeline), index: bar.i, ...details(bar.timeline, bar.i) };
  },
  box(timeline, i) {
    const outer = canvas.getBoundingClientRect(), box = boxOf({ timeline: timelines[timeline], i }, scroller.scrollTop);
    return { x: outer.left + box.x, y: outer.top + box.y, width: box.width, height: box.height };
  },
  // Colours of a rectangle, row by row.
  pixels(x, y, width = 1, height = 1) {
    const box = canvas.getBoundingClientRect(), ratio = canvas.width / view.width;
    const left = Math.floor((x - box.left) * ratio), top = Math.floor((y - box.top) * ratio);
    const copy = document.createElement("canvas");
    [copy.width, copy.height] = [width, height];
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, left, top, width, height, 0, 0, width, height);
    const bytes = pen.getImageData(0, 0, width, height).data;
    const hex = (k) => bytes[k].toString(16).padStart(2, "0");
    return Array.from({ length: width * height }, (_, k) => `#${hex(4 * k)}${hex(4 * k + 1)}${hex(4 * k + 2)}`);
  },
  redraw() { drawNow(); return lastDraw; },
  firstPaint: () => firstPaint,
};

// Several schedules are compared first by their passes.
function collapseMany() {
  const open = timelines.length > 2 && contentHeight > scroller.clientHeight;
  if (open && !$("collapse").hidden) collapseAll();
}

fillHeader();
setTheme(darkWanted.matches ? "dark" : "light");
layout();
collapseMany();
fit();
drawNow();
new ResizeObserver(layout).observe(scroller);
})();
