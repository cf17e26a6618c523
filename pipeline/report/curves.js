// Draws the page's curves from the JSON beside it: one dot a block, at every M or at one of them.
// Nothing is loaded; what is not drawn here is in the table below.
const data = JSON.parse(document.getElementById("curves-data").textContent);
const WIDTH = 960, HEIGHT = 420, LEFT = 64, RIGHT = 16, TOP = 16, BOTTOM = 44;
const hidden = new Set();
let figure = "ratio", only = null;

function element(name, attributes, parent, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

const shown = value => value == null ? "?" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
const middle = values => {
  const sorted = values.toSorted((a, b) => a - b), half = sorted.length >> 1;
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
  const place = document.getElementById("curves-chart");
  place.replaceChildren();
  const points = data.points.filter(point => only === null || point.m === only);
  const sides = (figure === "ratio" ? ["artifact"] : Object.keys(data.sides)).filter(side => !hidden.has(side));
  const all = dots(points, sides);
  const levels = all.map(dot => dot.value);
  if (figure === "ratio") levels.push(1, data.floor);
  if (figure === "ttft" || figure === "tpot") levels.push(0);
  const least = Math.min(...levels), most = Math.max(...levels), room = (most - least || 1) * 0.06;
  const low = least === 0 ? 0 : least - room, high = most + room;
  const x = share => LEFT + share * (WIDTH - LEFT - RIGHT);
  const y = value => TOP + (high - Math.max(low, Math.min(high, value))) / (high - low) * (HEIGHT - TOP - BOTTOM);

  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": data.figures[figure] }, place);
  for (const at of ticks(low, high)) {
    element("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at), stroke: "#e4e4e4" }, svg);
    element("text", { x: LEFT - 8, y: y(at) + 4, "text-anchor": "end" }, svg, shown(at));
  }
  if (figure === "ratio") {
    element("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(1), y2: y(1), stroke: data.sides.baseline }, svg);
    element("line", { class: "floor", x1: LEFT, x2: WIDTH - RIGHT, y1: y(data.floor), y2: y(data.floor), stroke: data.floorColour, "stroke-dasharray": "6 4" }, svg);
  }
  points.forEach((point, slot) => {
    const label = element("text", { class: "m", x: x((slot + 0.5) / points.length), y: HEIGHT - 22, "text-anchor": "middle" }, svg, `M = ${point.m}`);
    label.addEventListener("click", () => { only = only === null ? point.m : null; draw(); });
    if (figure === "ratio" && point.ratio[1] != null && !hidden.has("artifact")) whisker(svg, point, x(slot / points.length + 0.04 / points.length), y, low, high);
  });
  element("text", { x: WIDTH / 2, y: HEIGHT - 4, "text-anchor": "middle" }, svg,
    only === null ? "blocks of repeats, oldest first; click an M to see it alone" : "click M to see all of them");
  for (const side of sides) medians(svg, points, all.filter(dot => dot.side === side), side, x, y);
  for (const dot of all) {
    const circle = element("circle", { class: "block", cx: x(dot.x), cy: y(dot.value), r: only === null ? 3 : 5, fill: data.sides[dot.side] }, svg);
    element("title", {}, circle, words(dot));
    circle.addEventListener("mouseenter", () => say(words(dot)));
  }
  say(`${all.length} dots: ${points.map(point => `M=${point.m}: ${point.blocks.length} blocks, ${point.status}`).join("; ")}`);
}

// The interval that decided, beside its blocks.
function whisker(svg, point, at, y, low, high) {
  const [below, ratio, above] = point.ratio, attributes = { stroke: data.sides.artifact, "stroke-width": 2 };
  element("line", { ...attributes, x1: at, x2: at, y1: y(below ?? low), y2: y(above ?? high) }, svg);
  const mark = element("circle", { cx: at, cy: y(ratio), r: 5, fill: "white", ...attributes }, svg);
  mark.addEventListener("mouseenter", () => say(`M=${point.m}: ratio ${shown(ratio)}, interval ${shown(below)} to ${shown(above)}, ${point.status}`));
}

function medians(svg, points, own, side, x, y) {
  const at = points.map((point, slot) => {
    const values = own.filter(dot => dot.point === point).map(dot => dot.value);
    return values.length ? `${x((slot + 0.5) / points.length)},${y(middle(values))}` : null;
  }).filter(each => each !== null);
  element("polyline", { points: at.join(" "), fill: "none", stroke: data.sides[side], "stroke-width": 1.5 }, svg);
}

function words({ point, block, index, side, value }) {
  const what = figure === "ratio" ? "artifact ÷ baseline" : side;
  const others = figure === "ratio" ? ` (${shown(block.throughput.artifact)} ÷ ${shown(block.throughput.baseline)} tok/s)` : "";
  const anew = block.restarts ? `, servers started anew ${block.restarts} times` : "";
  return `M=${point.m}, block ${index + 1} of ${point.blocks.length}, at ${shown(block.began)} s${anew}: ${what} ${shown(value)}${others}`;
}

const say = text => { document.getElementById("curves-words").textContent = text; };

function button(text, pressed, onclick, colour) {
  const made = document.createElement("button");
  made.textContent = text;
  made.setAttribute("aria-pressed", pressed());
  if (colour) made.setAttribute("style", `border-bottom: 3px solid ${colour}`);
  made.addEventListener("click", () => { onclick(); controls(); draw(); });
  return made;
}

function controls() {
  document.getElementById("curves-controls").replaceChildren(
    ...Object.entries(data.figures).map(([name, title]) => button(title, () => figure === name, () => { figure = name; })),
    ...Object.entries(data.sides).map(([side, colour]) =>
      button(side, () => !hidden.has(side), () => { hidden.has(side) ? hidden.delete(side) : hidden.add(side); }, colour)));
}

controls();
draw();
