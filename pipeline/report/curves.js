// Draws every block of repeats from the JSON beside it: one dot a block, at every M or at one of them.
// Loads nothing. Without it, the page shows the curve at its top, its tables and the plots.
const data = JSON.parse(document.getElementById("curves-data").textContent);
const HEIGHT = 360, LEFT = 58, RIGHT = 14, TOP = 14, BOTTOM = 32;
const place = document.getElementById("curves-chart");
const hidden = new Set(), buttons = [];
let figure = "ratio", only = null, drawn = [], chosen = -1;

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

const shown = value => value == null ? "?" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
const middle = values => {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};

// One dot for each side of each block; x runs from 0 to 1 over the points that are drawn.
function dots(points, sides) {
  const found = [];
  points.forEach((point, slot) => point.blocks.forEach((block, index) => {
    for (const side of sides) {
      const value = block[figure][side];
      if (value == null) continue;
      const within = 0.1 + 0.8 * (index + 0.5) / point.blocks.length;
      found.push({ point, block, index, side, value, x: (slot + within) / points.length });
    }
  }));
  return found;
}

function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function draw() {
  const width = Math.max(300, place.clientWidth || 960);
  place.replaceChildren();
  chosen = -1;
  const points = data.points.filter(point => only === null || point.m === only);
  const sides = (figure === "ratio" ? ["artifact"] : data.sides).filter(side => !hidden.has(side));
  const all = dots(points, sides);
  const levels = all.map(dot => dot.value);
  if (figure === "ratio") levels.push(1, data.floor);
  else levels.push(0);
  const least = Math.min(...levels), most = Math.max(...levels), room = (most - least || 1) * 0.06;
  const low = least === 0 ? 0 : least - room, high = most + room;
  const x = share => LEFT + share * (width - LEFT - RIGHT);
  const y = value => TOP + (high - Math.max(low, Math.min(high, value))) / (high - low) * (HEIGHT - TOP - BOTTOM);

  const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": data.figures[figure] }, place);
  for (const at of ticks(low, high)) {
    element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at) }, svg);
    element("text", { x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, svg, shown(at));
  }
  if (figure === "ratio") {
    element("line", { class: "baseline", x1: LEFT, x2: width - RIGHT, y1: y(1), y2: y(1) }, svg);
    element("line", { class: "floor", x1: LEFT, x2: width - RIGHT, y1: y(data.floor), y2: y(data.floor) }, svg);
  }
  points.forEach((point, slot) => {
    const label = width / points.length > 70 ? `M = ${point.m}` : point.m;
    element("text", { class: `m ${point.status}`, x: x((slot + 0.5) / points.length), y: HEIGHT - 8, "text-anchor": "middle" }, svg, label);
    if (figure === "ratio" && point.ratio[1] != null && !hidden.has("artifact")) whisker(svg, point, x(slot / points.length + 0.04 / points.length), y, low, high);
  });
  for (const side of sides) medians(svg, points, all.filter(dot => dot.side === side), side, x, y);
  drawn = all.map((dot, index) => {
    const circle = element("circle", { class: `block ${dot.side}`, cx: x(dot.x), cy: y(dot.value), r: only === null ? 3.5 : 5 }, svg);
    element("title", {}, circle, words(dot));
    circle.addEventListener("mouseenter", () => choose(index));
    return { dot, circle };
  });
  say(`${all.length} dots: ${points.map(point => `${named(point)}: ${point.blocks.length} blocks, ${point.status}`).join("; ")}`);
}

// Marks one dot and says its figures.
function choose(index) {
  const before = drawn[chosen];
  if (before) before.circle.setAttribute("class", `block ${before.dot.side}`);
  chosen = Math.max(0, Math.min(drawn.length - 1, index));
  const now = drawn[chosen];
  if (!now) return;
  now.circle.setAttribute("class", `block ${now.dot.side} chosen`);
  say(words(now.dot));
}

// The interval that decided, beside its blocks.
function whisker(svg, point, at, y, low, high) {
  const [below, ratio, above] = point.ratio;
  element("line", { class: "interval artifact", x1: at, x2: at, y1: y(below ?? low), y2: y(above ?? high) }, svg);
  const mark = element("circle", { class: "mark artifact", cx: at, cy: y(ratio), r: 5 }, svg);
  mark.addEventListener("mouseenter", () => say(`${named(point)}: ratio ${shown(ratio)}, interval ${shown(below)} to ${shown(above)}, ${point.status}`));
}

function medians(svg, points, own, side, x, y) {
  const at = points.map((point, slot) => {
    const values = own.filter(dot => dot.point === point).map(dot => dot.value);
    return values.length ? `${x((slot + 0.5) / points.length)},${y(middle(values))}` : null;
  }).filter(each => each !== null);
  element("polyline", { class: `line ${side}`, points: at.join(" ") }, svg);
}

function named(point) {
  return `M=${point.m}${point.drawn ? " (drawn)" : ""}`;
}

function words({ point, block, index, side, value }) {
  const what = figure === "ratio" ? "artifact ÷ baseline" : side;
  const others = figure === "ratio" ? ` (${shown(block.throughput.artifact)} ÷ ${shown(block.throughput.baseline)} tok/s)` : "";
  const restarts = block.restarts ? `, servers restarted ${block.restarts} times` : "";
  return `${named(point)}, block ${index + 1} of ${point.blocks.length}, at ${shown(block.began)} s${restarts}: ${what} ${shown(value)}${others}`;
}

const say = text => { document.getElementById("curves-words").textContent = text; };

// A group of buttons; `state()` of each says whether it is pressed, and is asked again after every click.
function group(name, choices) {
  const made = document.createElement("div");
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", name);
  for (const { text, kind, pressed, click } of choices) {
    const button = document.createElement("button");
    button.textContent = text;
    button.setAttribute("type", "button");
    button.setAttribute("class", kind ?? "");
    button.addEventListener("click", () => { click(); press(); draw(); });
    buttons.push({ button, pressed });
    made.appendChild(button);
  }
  document.getElementById("curves-controls").appendChild(made);
}

const press = () => { for (const { button, pressed } of buttons) button.setAttribute("aria-pressed", pressed()); };

group("Figure", Object.entries(data.figures).map(([name, title]) =>
  ({ text: title, pressed: () => figure === name, click: () => { figure = name; } })));
group("Side", data.sides.map(side => ({
  text: side, kind: `side ${side}`, pressed: () => !hidden.has(side),
  click: () => { hidden.has(side) ? hidden.delete(side) : hidden.add(side); },
})));
group("M", [null, ...data.points.map(point => point.m)].map(m =>
  ({ text: m === null ? "every M" : `M = ${m}`, pressed: () => only === m, click: () => { only = m; } })));
place.addEventListener("keydown", event => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  choose(chosen + step);
});
addEventListener("resize", draw);
document.getElementById("curves").hidden = false;
press();
draw();
