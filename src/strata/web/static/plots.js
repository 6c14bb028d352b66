// Plots by uPlot: series from the public API, axes, dashes, ticks of time, formats of numbers, the last values beside the
// title, and the numbers as a table.
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const CLASSES = ["series-0", "series-1", "series-2", "series-3"];
const WHOLE = [1, 2, 5].flatMap((first) => Array.from({ length: 12 }, (_, power) => first * 10 ** power)).sort((one, other) => one - other);
const drawn = new WeakMap();

function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  return Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value) : Number(value.toPrecision(4)).toString();
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function seriesColour(place) {
  return colour(["--working", "--bad", "--good", "--waiting"][place % 4]);
}

// What the API replies with, as {xs, series: [{name, values}]}: samples of hosts, or metrics of jobs. Metrics are drawn by
// step; without steps by time, and those of several jobs by the time since each began.
function align(replies, box) {
  const wanted = box.dataset.names ? box.dataset.names.split(",") : null;
  if (replies[0].points) {
    const points = replies[0].points;
    const names = wanted ?? [...new Set(points.flatMap((point) => Object.keys(point.values)))];
    const labels = box.dataset.labels ? box.dataset.labels.split("\n") : names;
    const scale = Number(box.dataset.scale || 1);
    const value = (point, name) => (point.values[name] == null ? null : point.values[name] * scale);
    return {
      xs: points.map((point) => point.at_s),
      series: names.map((name, place) => ({ name: labels[place] ?? name, values: points.map((point) => value(point, name)) })),
    };
  }
  const labels = box.dataset.labels ? box.dataset.labels.split("\n") : [];
  const chosen = replies.flatMap((reply, place) => reply.series.filter((each) => !wanted || wanted.includes(each.name))
    .map((each) => ({ ...each, label: labels[place] ?? each.name })));
  const comparing = replies.length > 1;
  const stepped = chosen.every((each) => each.steps?.every((step) => step != null));
  const places = chosen.map((each) => (stepped ? each.steps : comparing ? each.at_s.map((at) => at - each.at_s[0]) : each.at_s));
  const xs = [...new Set(places.flat())].sort((one, other) => one - other);
  return {
    xs,
    stepped,
    series: chosen.map((each, place) => {
      const byX = new Map(places[place].map((x, row) => [x, each.values[row]]));
      return { name: each.label, values: xs.map((x) => byX.get(x) ?? null) };
    }),
  };
}

// Local time, as fine as the distance between two ticks.
function times(_, ticks, __, ___, step) {
  const parts = step >= 86400 ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
  return ticks.map((each) => new Date(each * 1000).toLocaleString(undefined, { ...parts, hour12: false }));
}

function options(box, data) {
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
  const time = data.xs.length > 0 && data.xs[0] > 1e8;
  return {
    width: box.clientWidth,
    height: box.clientHeight,
    legend: { show: false },
    cursor: { sync: { key: "page", setSeries: false }, drag: { x: true, y: false } },
    scales: { x: { time } },
    axes: [{ ...axis, ...(time ? { size: 32, values: times, space: 72 } : { size: 32, labelSize: 14, labelFont: "11px system-ui", ...(data.stepped ? { incrs: WHOLE, label: "step" } : { label: "seconds since the start" }) }) }, { ...axis, size: 56, values: (_, ticks) => ticks.map((each) => (each == null ? "" : number(each) + (box.dataset.unit === "%" ? "%" : ""))) }],
    series: [{}, ...data.series.map((each, place) => ({ label: each.name, stroke: seriesColour(place), width: 1.5, dash: DASHES[place % 4], spanGaps: true, points: { show: data.xs.length < 3 } }))],
  };
}

function showLast(card, data, unit) {
  const last = card.querySelector(".plot-last");
  last.replaceChildren(...data.series.map((each, place) => {
    const item = document.createElement("span");
    item.className = CLASSES[place % 4];
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.setAttribute("viewBox", "0 0 14 8");
    const stroke = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const [name, value] of [["d", "M0 4h14"], ["stroke", "currentColor"], ["stroke-width", "2"], ["stroke-dasharray", DASHES[place % 4].join(" ")]]) if (value) stroke.setAttribute(name, value);
    line.append(stroke);
    const value = each.values.findLast((point) => point != null);
    item.append(...(data.series.length > 1 ? [line] : []), `${data.series.length > 1 ? `${each.name} ` : ""}${number(value)}${unit ? ` ${unit}` : ""}`);
    return item;
  }));
}

function showNumbers(card, data) {
  const box = card.querySelector(".numbers");
  if (!box || !card.querySelector("details")?.open) return;
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of ["at", ...data.series.map((each) => each.name)]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    cell.textContent = name;
    head.append(cell);
  }
  const body = table.createTBody();
  const step = Math.max(1, Math.ceil(data.xs.length / 200));
  for (let row = 0; row < data.xs.length; row += step) {
    const line = body.insertRow();
    line.insertCell().textContent = data.xs[row] > 1e8 ? new Date(data.xs[row] * 1000).toLocaleTimeString() : number(data.xs[row]);
    for (const each of data.series) line.insertCell().textContent = number(each.values[row]);
  }
  box.replaceChildren(table);
}

async function load(box) {
  const card = box.closest(".plot-card");
  const note = box.querySelector(".plot-note");
  const sources = box.dataset.src.split(" ");
  try {
    const replies = await Promise.all(sources.map(async (source) => {
      const reply = await fetch(source, { headers: { Accept: "application/json" } });
      if (!reply.ok) throw new Error((await reply.json()).error?.message ?? reply.statusText);
      return reply.json();
    }));
    const data = align(replies, box);
    if (!data.xs.length) { if (note) note.textContent = "no values yet"; return; }
    note?.remove();
    const columns = [data.xs, ...data.series.map((each) => each.values)];
    const before = drawn.get(box);
    if (before && before.series.length === columns.length) {
      const zoomed = before.scales.x.min > before.data[0][0] || before.scales.x.max < before.data[0].at(-1);
      before.setData(columns, !zoomed);
    } else {
      before?.destroy();
      drawn.set(box, new uPlot(options(box, data), columns, box));
    }
    showLast(card, data, box.dataset.unit);
    showNumbers(card, data);
    card.querySelector("details").ontoggle = () => showNumbers(card, data);
  } catch (error) {
    if (note) note.textContent = `cannot be drawn: ${error.message}`;
  }
}

export function drawPlots() {
  for (const box of document.querySelectorAll(".plot[data-src]")) {
    if (box.dataset.started) continue;
    box.dataset.started = "yes";
    load(box);
    new ResizeObserver(() => drawn.get(box)?.setSize({ width: box.clientWidth, height: box.clientHeight })).observe(box);
    const every = Number(box.dataset.every);
    if (every > 0) {
      const timer = setInterval(() => { if (!box.isConnected) clearInterval(timer); else if (!document.hidden) load(box); }, every * 1000);
    }
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const box of document.querySelectorAll(".plot[data-started]")) { drawn.get(box)?.destroy(); drawn.delete(box); load(box); }
});
