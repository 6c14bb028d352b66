// Parallel coordinates: an axis for each column of a table that has data-axis, a line for each row. The table stays the
// data: a brush on an axis filters the lines and the rows alike. Each axis has two handles for the keyboard.
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 320, TOP = 44, BOTTOM = 20, SIDE = 64, GAP = 112;
const brushes = new Map();
let drawnFrom = "";

function make(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value != null) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function shortNumber(value) {
  return value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5) ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

function readTable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const columns = heads.flatMap((head, column) => (head.dataset.axis === undefined ? [] : [{ column, name: head.dataset.axis, metric: "metric" in head.dataset }]));
  const rows = [...table.tBodies[0].rows].map((row) => ({
    row,
    label: row.cells[0].textContent.trim(),
    state: row.dataset.state,
    best: "best" in row.dataset,
    values: columns.map(({ column }) => (row.cells[column].dataset.value === "" ? null : JSON.parse(row.cells[column].dataset.value))),
  }));
  return { columns, rows };
}

// A scale gives each value its place from 0 (bottom) to 1 (top), and each place a text.
function makeScale(values) {
  const known = values.filter((value) => value != null);
  if (known.length && known.every((value) => typeof value === "number")) {
    const low = Math.min(...known), high = Math.max(...known);
    const log = low > 0 && high / low >= 1000;
    const from = log ? Math.log(low) : low, span = (log ? Math.log(high) : high) - from;
    const back = (share) => (log ? Math.exp(from + share * span) : from + share * span);
    return {
      place: (value) => (value == null ? null : span ? ((log ? Math.log(value) : value) - from) / span : 0.5),
      text: (share) => shortNumber(back(share)),
      ticks: span ? [0, 0.25, 0.5, 0.75, 1] : [0.5],
      step: 0.02,
      log,
    };
  }
  const words = [...new Set(known.map((value) => JSON.stringify(value)))].sort();
  const places = new Map(words.map((word, number) => [word, words.length > 1 ? number / (words.length - 1) : 0.5]));
  const nearest = (share) => words.reduce((one, other) => (Math.abs(places.get(other) - share) < Math.abs(places.get(one) - share) ? other : one), words[0] ?? "null");
  return {
    place: (value) => (value == null ? null : places.get(JSON.stringify(value))),
    text: (share) => { const value = JSON.parse(nearest(share)); return typeof value === "string" ? value : JSON.stringify(value); },
    ticks: words.length <= 12 ? [...places.values()] : [0, 1],
    step: words.length > 1 ? 1 / (words.length - 1) : 1,
    log: false,
  };
}

function draw(box) {
  const table = document.getElementById(box.dataset.table);
  if (!table) return;
  const { columns, rows } = readTable(table);
  const width = Math.max(box.clientWidth - 2, 2 * SIDE + GAP * (columns.length - 1));
  const signature = JSON.stringify([width, columns, rows.map(({ label, state, best, values }) => [label, state, best, values])]);
  if (signature === drawnFrom && box.parallel) {
    box.parallel.lines.forEach((line, place) => { line.row = rows[place].row; });
    applyBrushes(box);
    return;
  }
  drawnFrom = signature;
  const scales = columns.map((_, place) => makeScale(rows.map((row) => row.values[place])));
  const x = (place) => (columns.length > 1 ? SIDE + ((width - 2 * SIDE) * place) / (columns.length - 1) : width / 2);
  const y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const focused = document.activeElement?.dataset?.handle;
  const svg = make("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": "Parallel coordinates; the table below has the same numbers" });

  const metric = columns.findIndex((column) => column.metric);
  const lines = rows.map((row) => {
    const shares = row.values.map((value, place) => scales[place].place(value));
    const points = shares.flatMap((share, place) => (share == null ? [] : [`${x(place).toFixed(1)} ${y(share).toFixed(1)}`]));
    const good = metric < 0 || shares[metric] == null ? 0.5 : box.dataset.direction === "minimize" ? 1 - shares[metric] : shares[metric];
    const line = make("path", { class: `line ${row.state}${row.best ? " is-best" : ""}`, d: points.length > 1 ? `M${points.join("L")}` : null, "stroke-opacity": row.best ? 1 : (0.18 + 0.5 * good).toFixed(2) });
    line.append(make("title", {}, row.label));
    return { ...row, shares, line };
  });
  svg.append(...lines.filter((each) => !each.best).map((each) => each.line), ...lines.filter((each) => each.best).map((each) => each.line));

  box.parallel = { lines, columns, scales, x, y, handles: [] };
  columns.forEach((column, place) => svg.append(drawAxis(box, column, place)));
  box.replaceChildren(svg);
  if (focused) box.querySelector(`[data-handle="${CSS.escape(focused)}"]`)?.focus();
  applyBrushes(box);
}

function drawAxis(box, column, place) {
  const { scales, x, y } = box.parallel;
  const scale = scales[place], at = x(place), group = make("g", { class: `axis${column.metric ? " metric" : ""}` });
  const name = column.name.length > 17 ? `${column.name.slice(0, 16)}…` : column.name;
  group.append(make("text", { class: "axis-name", x: at, y: 16, "text-anchor": "middle" }, name, make("title", {}, column.name)));
  if (scale.log) group.append(make("text", { class: "tick", x: at, y: 30, "text-anchor": "middle" }, "log"));
  group.append(make("line", { x1: at, x2: at, y1: y(1), y2: y(0) }));
  for (const share of scale.ticks) {
    const text = scale.text(share);
    // Beside the last axis, where no line passes.
    const beside = place === scales.length - 1 && place > 0 ? { x: at + 12, "text-anchor": "start" } : { x: at - 12, "text-anchor": "end" };
    group.append(make("text", { class: "tick", y: y(share) + 4, ...beside }, text.length > 9 ? `${text.slice(0, 8)}…` : text, make("title", {}, text)));
  }
  const span = make("rect", { class: "brush", x: at - 8, width: 16, rx: 3 });
  const area = make("rect", { class: "brush-area", x: at - 16, width: 32, y: y(1), height: y(0) - y(1) });
  group.append(span, area);
  const handles = ["lower", "upper"].map((end) => {
    const handle = make("path", { class: "handle", d: end === "upper" ? "M-9 -7H9L0 1Z" : "M-9 7H9L0 -1Z", role: "slider", tabindex: 0, "data-handle": `${column.name} ${end}`, "aria-label": `${column.name}, ${end} end of the filter`, "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": 100 });
    handle.addEventListener("keydown", (event) => onHandleKey(box, column.name, scale, end, event));
    handle.addEventListener("pointerdown", (event) => startDrag(box, column.name, area, end, event));
    return handle;
  });
  group.append(...handles);
  box.parallel.handles.push({ name: column.name, at, scale, span, handles });
  area.addEventListener("pointerdown", (event) => startDrag(box, column.name, area, "", event));
  area.addEventListener("dblclick", () => setBrush(box, column.name, 0, 1));
  return group;
}

function setBrush(box, name, low, high) {
  const [from, to] = [Math.max(0, Math.min(low, high)), Math.min(1, Math.max(low, high))];
  if (from <= 0 && to >= 1) brushes.delete(name); else brushes.set(name, [from, to]);
  applyBrushes(box);
}

function onHandleKey(box, name, scale, end, event) {
  let [low, high] = brushes.get(name) ?? [0, 1];
  const move = { ArrowUp: scale.step, ArrowRight: scale.step, PageUp: 5 * scale.step, ArrowDown: -scale.step, ArrowLeft: -scale.step, PageDown: -5 * scale.step }[event.key];
  if (event.key === "Escape") [low, high] = [0, 1];
  else if (event.key === "Home") { if (end === "lower") low = 0; else high = low; }
  else if (event.key === "End") { if (end === "upper") high = 1; else low = high; }
  else if (move === undefined) return;
  else if (end === "lower") low = Math.min(high, Math.max(0, low + move));
  else high = Math.max(low, Math.min(1, high + move));
  event.preventDefault();
  setBrush(box, name, low, high);
}

function startDrag(box, name, area, end, event) {
  if (event.button) return;
  event.preventDefault();
  const frame = area.getBoundingClientRect();
  const share = (each) => Math.min(1, Math.max(0, (frame.bottom - each.clientY) / frame.height));
  const [low, high] = brushes.get(name) ?? [0, 1];
  const fixed = end === "lower" ? high : end === "upper" ? low : share(event);
  const startedAt = event.clientY;
  const move = (each) => { if (end || Math.abs(each.clientY - startedAt) > 3) setBrush(box, name, fixed, share(each)); };
  const stop = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", stop); };
  addEventListener("pointermove", move);
  addEventListener("pointerup", stop);
}

function applyBrushes(box) {
  const { lines, columns, handles, y } = box.parallel;
  for (const { name, at, scale, span, handles: [lower, upper] } of handles) {
    const [low, high] = brushes.get(name) ?? [0, 1];
    span.setAttribute("y", y(high) - 2);
    span.setAttribute("height", Math.max(4, y(low) - y(high) + 4));
    span.classList.toggle("active", brushes.has(name));
    for (const [handle, share] of [[lower, low], [upper, high]]) {
      handle.setAttribute("transform", `translate(${at} ${y(share)})`);
      handle.setAttribute("aria-valuenow", Math.round(share * 100));
      handle.setAttribute("aria-valuetext", scale.text(share));
    }
  }
  let shown = 0;
  for (const { line, row, shares } of lines) {
    const inside = columns.every(({ name }, place) => {
      const brush = brushes.get(name);
      return !brush || (shares[place] != null && shares[place] >= brush[0] - 1e-9 && shares[place] <= brush[1] + 1e-9);
    });
    line.classList.toggle("out", !inside);
    row.hidden = !inside;
    shown += inside;
  }
  const words = document.getElementById(box.dataset.shown);
  if (words) {
    words.dataset.all ??= words.textContent;
    const text = brushes.size ? `${shown} of ${lines.length} match the filter` : words.dataset.all;
    if (words.textContent !== text) words.textContent = text;
  }
}

const watched = new WeakSet();

export function drawParallel() {
  for (const box of document.querySelectorAll(".parallel[data-table]")) {
    draw(box);
    if (watched.has(box)) continue;
    watched.add(box);
    new ResizeObserver(() => draw(box)).observe(box);
  }
}
