// Everything shown comes from the JSON in #data; texts only ever enter the page as textContent.
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const state = { text: 0, layer: 0, head: 0, query: 0 };
const LEAST_LABELLED = 9; // pixels of a cell below which not every token gets a label
const dark = matchMedia("(prefers-color-scheme: dark)");
let ramp = [];
let frame = { left: 0, top: 0, width: 1, height: 1 };

const text = () => data.texts[state.text];
const head = () => text().layers[state.layer].heads[state.head];
const queries = () => text().queries ?? text().tokens;
const number = (layer) => text().layers[layer].number; // in the model, of which a few layers may be shown
const exact = () => text().rows === queries().length && text().cols === text().tokens.length;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

function make(tag, attributes = {}, content = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = content;
  return element;
}

const strong = (content) => make("b", {}, content);

const decoded = new WeakMap(); // heads to their arrays, made when first looked at
function arrays(of) {
  if (!decoded.has(of)) decoded.set(of, { map: bytes(of.map), keys: words(of.keys), weights: words(of.weights) });
  return decoded.get(of);
}

const bytes = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

function words(base64) {
  const raw = bytes(base64);
  return Uint16Array.from({ length: raw.length / 2 }, (_, index) => raw[2 * index] + 256 * raw[2 * index + 1]);
}

// The inverse of quantise() in page.py.
const weight = (byte) => (byte === 0 ? 0 : ((byte - 1) / 254) ** 2);

// Weights of one query by key: all of them where the map is exact, the strongest links otherwise.
function looks(query) {
  const { map, keys, weights } = arrays(head());
  const found = new Map();
  const { cols } = text();
  if (exact()) for (let key = 0; key < cols; key++) found.set(key, weight(map[query * cols + key]));
  const [from, to] = [query * head().links, (query + 1) * head().links];
  for (let at = from; at < to; at++) if (keys[at] !== 65535) found.set(keys[at], weights[at] / 65535);
  return found;
}

// Cell c of `cells` holds these of `size` tokens: first and last.
const span = (c, cells, size) => [Math.ceil((c * size) / cells), Math.ceil(((c + 1) * size) / cells) - 1];

const shown = (value) => (value === 0 ? "0" : value < 0.0005 ? "< 0.001" : value.toFixed(3));

function readRamp() {
  const stops = colour("--ramp").split(",").map(channels);
  const none = channels(colour("--none"));
  ramp = Array.from({ length: 256 }, (_, byte) => {
    if (byte === 0) return none;
    const place = ((byte - 1) / 254) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, channel) => value + (place - low) * (stops[low + 1][channel] - value));
  });
}

function channels(hex) {
  const number = parseInt(hex.trim().slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

function paint(canvas, values, rows, cols) {
  canvas.width = cols;
  canvas.height = rows;
  const image = new ImageData(cols, rows);
  for (let at = 0; at < rows * cols; at++) image.data.set([...ramp[values[at]], 255], 4 * at);
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Moving among items with the arrow keys: one of them is in the order of Tab, the others are not.

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function arrows(event, items, index, perRow) {
  const step = STEPS[event.key];
  const jump = { Home: 0, End: items.length - 1 }[event.key];
  if (!step && jump === undefined) return;
  event.preventDefault();
  const next = items[jump ?? index + step[0] * perRow + step[1]];
  if (next) next.focus();
}

function mark(items, index) {
  items.forEach((item, at) => Object.assign(item, { ariaSelected: at === index, tabIndex: at === index ? 0 : -1 }));
}

// Tabs

function drawTabs() {
  const tabs = data.texts.map((entry, index) => {
    const tab = make("button", { role: "tab", type: "button", "aria-controls": "panel", title: entry.title }, entry.title);
    tab.onclick = tab.onfocus = () => index !== state.text && open(index);
    tab.onkeydown = (event) => arrows(event, tabs, index, 1);
    return tab;
  });
  $("tabs").replaceChildren(...tabs);
  $("tabs").hidden = data.texts.length < 2;
}

function open(index) {
  state.text = index;
  Object.assign(state, text().start);
  mark([...$("tabs").children], index);
  $("title").textContent = text().title;
  document.title = `${text().title} · Regard`;
  drawWords();
  drawHeads();
  drawLegend();
  drawFindings();
  choose(state.layer, state.head);
}

// The text

// Whether a token follows the one before without a space.
const joins = (token, before) => /^##|^[.,;:!?)\]’”'%]+$/.test(token) || /^['’(“‘[]$/.test(before);

function drawWords() {
  const special = new Set(text().special);
  fill($("queries"), queries(), text().queries ? new Set() : special);
  $("keys").hidden = !text().queries;
  fill($("keys"), text().queries ? text().tokens : [], special);
  const items = [...$("queries").children];
  items.forEach((item, index) => {
    item.setAttribute("role", "option");
    item.onclick = item.onfocus = () => pin(index);
    item.onpointerenter = () => light(index);
    item.onpointerleave = () => light(state.query);
    item.onkeydown = (event) => arrows(event, items, index, 10);
  });
}

function fill(box, tokens, special) {
  const kind = (token, index) => (special.has(index) ? "special" : token.startsWith("##") ? "piece" : "word");
  const items = tokens.map((token, index) => make("span", { class: kind(token, index) }, token.replace(/^##(?=.)/, "")));
  box.replaceChildren();
  items.forEach((item, index) => box.append(index && !joins(tokens[index], tokens[index - 1]) ? " " : "", item));
}

function pin(query) {
  state.query = query;
  mark([...$("queries").children], query);
  light(query);
  drawMap();
}

// Colour every word by how much `query` looks at it, and say so.
function light(query) {
  const found = looks(query);
  const targets = [...(text().queries ? $("keys") : $("queries")).children];
  targets.forEach((item, key) => {
    const share = Math.sqrt(found.get(key) ?? 0);
    item.style.background = share < 0.1 ? "" : `color-mix(in srgb, var(--glow) ${Math.round(80 * share)}%, transparent)`;
  });
  const best = [...found].filter(([, value]) => value >= 0.0005).sort((a, b) => b[1] - a[1]).slice(0, 5);
  const line = $("looks");
  line.replaceChildren(strong(queries()[query]), ` (token ${query}) looks at `);
  best.forEach(([key, value], at) => line.append(at ? ", " : "", strong(text().tokens[key]), ` ${shown(value)}`));
  line.append(best.length ? `, in layer ${number(state.layer)} head ${state.head}.` : "nothing that this page keeps.");
}

// All heads

function drawHeads() {
  const { layers, findings, rows, cols, thumbnail } = text();
  const width = Math.max(...layers.map((layer) => layer.heads.length));
  const grid = $("heads");
  grid.style.gridTemplateColumns = `1.4em repeat(${width}, minmax(20px, 64px))`;
  const warned = new Set(findings.flatMap((finding) => finding.heads.map((at) => `${finding.layer}.${at}`)));
  const buttons = [];
  const top = make("div", { class: "row", "aria-hidden": "true" });
  top.append(make("span"));
  for (let at = 0; at < width; at++) top.append(make("span", { class: "axis" }, at));
  grid.replaceChildren(top);
  layers.forEach((layer, place) => {
    const row = make("div", { class: "row", role: "row" });
    row.append(make("span", { class: "axis", role: "rowheader", "aria-label": `Layer ${layer.number}` }, layer.number));
    layer.heads.forEach((entry, at) => {
      const button = headButton(place, at, warned.has(`${layer.number}.${at}`));
      const small = thumbnail && [bytes(entry.thumbnail), thumbnail, thumbnail];
      paint(button.firstChild, ...(small || [arrays(entry).map, rows, cols]));
      const index = buttons.push(button) - 1;
      button.onkeydown = (event) => arrows(event, buttons, index, width);
      row.append(button);
    });
    for (let at = layer.heads.length; at < width; at++) row.append(make("span"));
    grid.append(row);
  });
}

function headButton(layer, at, warned) {
  const { roles } = text().layers[layer].heads[at];
  const names = roles.length ? `, ${roles.map((role) => role.kind).join(" and ")}` : "";
  const label = `Layer ${number(layer)} head ${at}${names}${warned ? ", has a warning" : ""}`;
  const button = make("button", { type: "button", role: "gridcell", "aria-label": label, title: label });
  button.append(make("canvas", { "aria-hidden": "true", class: text().rows < 24 ? "crisp" : "" }));
  if (roles.length) button.append(chip(roles.map((role) => role.kind)));
  button.dataset.place = `${layer}.${at}`;
  button.classList.toggle("warned", warned);
  button.onclick = button.onfocus = () => choose(layer, at);
  return button;
}

const chip = (kinds) => make("span", { class: "chip", "aria-hidden": "true" }, kinds.map((kind) => data.kinds[kind].letter).join(""));

// The letters that are on the maps of this text, and what they stand for.
function drawLegend() {
  const earned = text().layers.flatMap((layer) => layer.heads.flatMap((entry) => entry.roles.map((role) => role.kind)));
  $("legend").replaceChildren();
  for (const [kind, { meaning }] of Object.entries(data.kinds)) {
    const count = earned.filter((each) => each === kind).length;
    if (!count) continue;
    const item = $("legend").appendChild(make("li"));
    item.append(chip([kind]), strong(kind), ` ${meaning} (${count} head${count > 1 ? "s" : ""})`);
  }
  const none = text().told ? "No head earned the name of a role on this text." : `Roles need a text of more than ${data.queries} tokens that differ.`;
  if (!earned.length) $("legend").append(make("li", {}, none));
}

// What the chosen head earned, beside the same score on shuffled words.
function drawRoles() {
  const line = $("roles");
  line.replaceChildren();
  for (const { kind, offset, score, null: shuffled, chance } of head().roles) {
    const meaning = offset === null ? data.kinds[kind].meaning : `the token ${offset > 0 ? "+" : ""}${offset} places away`;
    const share = kind === "broad" ? "of the largest entropy" : "of its weight";
    line.append(chip([kind]), `looks at ${meaning}: `, strong(score.toFixed(2)));
    line.append(` ${share}, ${shuffled.toFixed(2)} when the words are shuffled`, kind === "broad" ? ". " : `, ${chance.toFixed(2)} by chance. `);
  }
  if (!head().roles.length) line.append(text().told ? "No role on this text." : "");
  line.title = data.roleCaveat;
}

function choose(layer, at) {
  Object.assign(state, { layer, head: at });
  const buttons = [...$("heads").querySelectorAll("button")];
  mark(buttons, buttons.findIndex((button) => button.dataset.place === `${layer}.${at}`));
  $("head-title").textContent = `Layer ${number(layer)}, head ${at}`;
  $("statistics-title").textContent = `Statistics of layer ${number(layer)}, head ${at}`;
  $("head-title").title = text().layers[layer].name;
  drawRoles();
  drawStatistics();
  pin(state.query);
  restCell();
}

function drawStatistics() {
  const { values } = head();
  $("statistics").tBodies[0].replaceChildren();
  for (const [name, value] of Object.entries(values)) {
    const row = $("statistics").tBodies[0].appendChild(make("tr"));
    row.append(make("th", { scope: "row" }, name), make("td", { class: "number" }, shown(value)));
    row.append(make("td", { class: "meaning" }, data.statistics[name] ?? ""));
  }
}

// One head

function drawMap() {
  const canvas = $("map");
  const scale = window.devicePixelRatio || 1;
  const room = Math.min($("map-box").clientWidth, 640);
  const { rows, cols, tokens } = text();
  const context = canvas.getContext("2d");
  context.font = "12px system-ui, sans-serif";
  const widest = Math.max(...[...tokens, ...queries()].map((token) => context.measureText(token).width));
  const labelled = exact() && (room - Math.min(widest + 8, 92)) / Math.max(rows, cols) >= LEAST_LABELLED;
  const gutter = labelled ? Math.min(widest + 8, 92) : 34;
  const side = Math.max(room - gutter, 40);
  const cell = side / Math.max(rows, cols);
  frame = { left: gutter, top: gutter, width: cell * cols, height: cell * rows };
  for (const extent of ["width", "height"]) {
    canvas.style[extent] = `${gutter + frame[extent]}px`;
    canvas[extent] = Math.round((gutter + frame[extent]) * scale);
  }
  context.scale(scale, scale);
  const image = document.createElement("canvas");
  paint(image, arrays(head()).map, rows, cols);
  context.imageSmoothingEnabled = cell * scale < 1;
  context.drawImage(image, frame.left, frame.top, frame.width, frame.height);
  context.strokeStyle = colour("--line");
  context.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.width + 1, frame.height + 1);
  const size = labelled ? Math.min(12, Math.max(8, cell - 1)) : 10;
  drawLabels(context, queries(), frame.height, size, false, labelled);
  drawLabels(context, tokens, frame.width, size, true, labelled);
  const sizes = `${queries().length} queries down, ${tokens.length} keys across`;
  canvas.setAttribute("aria-label", `Weights of layer ${number(state.layer)} head ${state.head}: ${sizes}.`);
}

// Tokens along an axis, or every so many numbers where there is no room; the chosen query stands out.
function drawLabels(context, tokens, extent, size, across, labelled) {
  const step = labelled ? 1 : 2 ** Math.ceil(Math.log2((tokens.length * 30) / extent));
  context.textBaseline = "middle";
  context.textAlign = across ? "left" : "right";
  for (let index = 0; index < tokens.length; index += step) {
    const at = ((index + 0.5) / tokens.length) * extent;
    const chosen = !across && labelled && index === state.query;
    context.font = `${chosen ? "600 " : ""}${size}px system-ui, sans-serif`;
    context.fillStyle = colour(chosen ? "--accent" : "--ink");
    context.save();
    context.translate(frame.left + (across ? at : -5), frame.top + (across ? -5 : at));
    if (across) context.rotate(-Math.PI / 2);
    context.fillText(labelled ? tokens[index] : index, 0, 0, frame.left - 6);
    context.restore();
  }
}

// Tell of the cell under the pointer, and return its first query.
function showCell(event) {
  const { rows, cols, tokens } = text();
  const box = $("map").getBoundingClientRect();
  const row = Math.floor(((event.clientY - box.top - frame.top) / frame.height) * rows);
  const col = Math.floor(((event.clientX - box.left - frame.left) / frame.width) * cols);
  if (row < 0 || col < 0 || row >= rows || col >= cols) return leaveCell();
  const value = weight(arrays(head()).map[row * cols + col]);
  const [from, to] = span(row, rows, queries().length);
  const [first, last] = span(col, cols, tokens.length);
  const names = (list, start, stop) => strong(list.slice(start, stop + 1).join(" "));
  $("cell").replaceChildren(names(queries(), from, to), " → ", names(tokens, first, last), ` ${shown(value)}`);
  if (!exact()) $("cell").append(`, summed over keys ${first}–${last}, averaged over queries ${from}–${to}`);
  const [height, width] = [frame.height / rows, frame.width / cols];
  band("row-band", frame.left, frame.top + row * height, frame.width, height);
  band("col-band", frame.left + col * width, frame.top, width, frame.height);
  light(from);
  return from;
}

function band(id, left, top, width, height) {
  const place = `left: ${left}px; top: ${top}px; width: ${Math.max(width, 2)}px; height: ${Math.max(height, 2)}px`;
  $(id).style.cssText = `display: block; ${place}`;
}

function restCell() {
  $("row-band").style.display = $("col-band").style.display = "none";
  const [query, key, value] = head().strongest;
  const target = strong(text().tokens[key] ?? "nothing");
  $("cell").replaceChildren("Strongest link: ", strong(queries()[query]), " → ", target, ` ${shown(value)}`);
}

function leaveCell() {
  restCell();
  light(state.query);
  return state.query;
}

// Warnings

function drawFindings() {
  $("caveat").textContent = text().told ? `${data.caveat} ${data.roleCaveat}` : data.caveat;
  $("findings").replaceChildren();
  for (const finding of text().findings) {
    const button = make("button", { type: "button" }, finding.sentence);
    const place = text().layers.findIndex((layer) => layer.number === finding.layer);
    button.onclick = () => choose(place, finding.heads[0]);
    $("findings").appendChild(make("li")).append(button);
  }
  if (!text().findings.length) $("findings").append(make("li", {}, "None for this text."));
}

function redraw() {
  readRamp();
  paint($("scale"), Array.from({ length: 255 }, (_, at) => at + 1), 1, 255);
  drawHeads();
  choose(state.layer, state.head);
}

$("map").onpointermove = showCell;
$("map").onpointerleave = leaveCell;
$("map").onclick = (event) => pin(showCell(event));
dark.addEventListener("change", redraw);
addEventListener("resize", drawMap);
readRamp();
drawTabs();
open(0);
redraw();
