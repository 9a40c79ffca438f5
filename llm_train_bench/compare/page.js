// Elements, hints and axes of the report.
const tip = document.getElementById("tip");

// An element with properties, attributes (those with a dash, or on SVG) and children.
function make(name, given = {}, ...children) {
  const drawn = ["svg", "g", "line", "path", "circle", "text", "rect"].includes(name);
  const node = drawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (drawn || key.includes("-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter(child => child !== null));
  return node;
}
const known = value => value !== null && value !== undefined;
const show = (value, digits = 0) => known(value)
  ? value.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits}) : "unknown";
const short = value => Number(value.toPrecision(3)).toLocaleString("en-US", {maximumSignificantDigits: 3});

function hover(node, text) {
  node.addEventListener("pointermove", event => say(event, text));
  node.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
function say(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

// Axes of a plot; gives functions from values to places.
function axes(box, xs, ys, names) {
  const [width, height, left, bottom] = [460, 250, 58, 34];
  const range = values => { let [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low || Math.abs(high) || 1) * .06; return [low - room, high + room]; };
  const ticks = ([low, high]) => { const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map(s => s * power).find(s => s >= rough), found = [];
    for (let t = Math.ceil(low / step) * step; t <= high; t += step) found.push(Math.abs(t) < step / 1e6 ? 0 : t);
    return found; };
  const [xr, yr] = [range(xs), range(ys)];
  const x = v => left + (v - xr[0]) / (xr[1] - xr[0]) * (width - left - 8);
  const y = v => height - bottom - (v - yr[0]) / (yr[1] - yr[0]) * (height - bottom - 8);
  box.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const t of ticks(yr)) box.append(make("line", {class: "axis", x1: left, x2: width - 8, y1: y(t), y2: y(t)}),
    make("text", {x: left - 6, y: y(t) + 4, "text-anchor": "end"}, t.toLocaleString("en-US", {maximumSignificantDigits: 4})));
  for (const t of ticks(xr)) box.append(make("text", {x: x(t), y: height - bottom + 14, "text-anchor": "middle"},
    t.toLocaleString("en-US", {maximumSignificantDigits: 4})));
  box.append(make("text", {x: (left + width) / 2, y: height - 3, "text-anchor": "middle"}, names));
  return [x, y, width, height, left, bottom];
}
const panel = (title, ...inside) => make("div", {className: "panel"}, make("h3", {textContent: title}), ...inside);
