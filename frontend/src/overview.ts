// The overview: a grid of small maps of all heads, coloured and sorted by a statistic, with warnings and roles.
import { headName, type Context, type Panel } from "./context";
import { paint, rangeLegend } from "./colour";
import { bytes, layerName, weightOf } from "./data";
import { choice, cut, fill, h, saving, shown, s, strong, visible } from "./dom";

export function overview(context: Context): Panel {
  const tools = h("div", { class: "tools" });
  const grid = h("div", { class: "heads", role: "grid", "aria-label": "All heads" });
  const beside = h("aside", { class: "beside" });
  const element = h("div", { class: "overview" }, h("div", { class: "main" }, tools, grid), beside);
  let buttons: HTMLButtonElement[] = [];
  let repaints: (() => void)[] = []; // of the small maps, for another colour scale
  let drawn = "";

  const places = () => {
    const { state, text } = context;
    const all = text.layers.flatMap((layer, at) => layer.heads.map((_, head) => ({ layer: at, head })));
    if (state.sort === "layer") return all;
    const value = (one: { layer: number; head: number }) => text.layers[one.layer].heads[one.head].values[state.colour]
      ?? 0;
    return all.sort((a, b) => (state.sort === "down" ? value(b) - value(a) : value(a) - value(b)));
  };

  // The lowest and the highest value of the statistic that colours the heads.
  function ends(): [number, number] {
    const { state, text } = context;
    const values = text.layers.flatMap((layer) => layer.heads.map((head) => head.values[state.colour] ?? 0));
    return [Math.min(...values), Math.max(...values)];
  }

  function drawTools() {
    const { state, text } = context;
    const names = Object.keys(text.layers[0].heads[0].values);
    fill(
      tools,
      choice("Colour by", state.colour, [["weights", "weights only"], ["role", "role"],
        ...names.map((name): [string, string] => [name, name])], (colour) => context.set({ colour })),
      choice("Order", state.sort, [["layer", "layer by layer"], ["down", "highest first"], ["up", "lowest first"]],
        (sort) => context.set({ sort })),
      saving(() => `${text.title} heads`, picture, () => context.root),
      h("p", { class: "hint" }, state.colour in context.source.common.statistics
        ? `${state.colour}: ${context.source.common.statistics[state.colour]}.`
        : "Each picture is one head: a row per query, a column per key. Larger weights are darker (lighter in the dark theme)."),
      state.colour in text.layers[0].heads[0].values && rangeLegend(context.colours, ...ends(), state.colour),
    );
  }

  function drawGrid() {
    const { state, text } = context;
    const warned = new Set(text.findings.flatMap((finding) => finding.heads.map((head) => `${finding.layer}.${head}`)));
    const [low, high] = ends();
    const width = Math.max(...text.layers.map((layer) => layer.heads.length));
    const grouped = state.sort === "layer";
    grid.style.setProperty("--columns", String(grouped ? width : Math.min(12, places().length)));
    const names = text.layers.map((layer) => cut(layerName(layer).replace(/^layer /, ""), 24));
    grid.style.setProperty("--label", `${Math.max(1.3, ...names.map((name) => grouped ? 0.6 * name.length : 0))}em`);
    buttons = [];
    repaints = [];
    const rows = new Map<number, HTMLElement>();
    grid.replaceChildren();
    for (const { layer, head } of places()) {
      const button = thumbnail(layer, head, warned, low, high);
      buttons.push(button);
      const row = grouped ? layer : Math.floor((buttons.length - 1) / 12);
      if (!rows.has(row)) {
        const label = h("span", { class: "axis", role: "rowheader",
          "aria-label": grouped ? layerName(text.layers[layer]) : "" }, grouped ? names[layer] : "");
        rows.set(row, grid.appendChild(h("div", { class: "row", role: "row" }, label)));
      }
      rows.get(row)!.append(button);
    }
    mark();
  }

  function thumbnail(layer: number, head: number, warned: Set<string>, low: number, high: number): HTMLButtonElement {
    const { text, state, source, colours } = context;
    const about = text.layers[layer].heads[head];
    const value = about.values[state.colour];
    const name = headName(context, layer, head);
    const roles = about.roles.map((role) => role.kind);
    const warning = warned.has(`${text.layers[layer].number}.${head}`);
    const label = [name, value === undefined ? "" : `${state.colour} ${shown(value)}`, roles.join(" and "),
      warning ? "has a warning" : ""].filter(Boolean).join(", ");
    const canvas = h("canvas", { "aria-hidden": "true", class: text.layers[layer].small[0] < 40 ? "crisp" : "" });
    const [rows, cols] = text.layers[layer].small;
    const repaint = () => paint(canvas, colours, Array.from(bytes(about.thumbnail), weightOf), rows, cols);
    repaint();
    repaints.push(repaint);
    const button = h("button", { type: "button", role: "gridcell", "aria-label": label, title: label,
      onclick: () => context.set({ layer, head, view: "map", x: -1, y: -1 }) }, canvas);
    if (value !== undefined) {
      const share = high > low ? (value - low) / (high - low) : 0;
      button.append(h("span", { class: "gauge", "aria-hidden": "true",
        style: `background:${colours.of(Math.max(share, 0.004))};color:${colours.on(share)}` }, shown(value)));
    }
    if (roles.length) button.append(h("span", { class: `chip${state.colour === "role" ? " big" : ""}`,
      "aria-hidden": "true" }, roles.map((kind) => source.common.kinds[kind].letter).join("")));
    if (warning) button.classList.add("warned");
    button.dataset.place = `${layer}.${head}`;
    button.addEventListener("focus", () => context.set({ layer, head }, true));
    return button;
  }

  // Tab reaches only the chosen head; arrows move between heads.
  function mark() {
    const { layer, head } = context.state;
    for (const button of buttons) {
      const chosen = button.dataset.place === `${layer}.${head}`;
      button.tabIndex = chosen ? 0 : -1;
      button.setAttribute("aria-selected", String(chosen));
    }
  }

  function drawBeside() {
    const { text, source, state } = context;
    const earned = text.layers.flatMap((layer) => layer.heads.flatMap((head) => head.roles.map((role) => role.kind)));
    const roles = Object.entries(source.common.kinds).map(([kind, { letter, meaning }]) => {
      const count = earned.filter((each) => each === kind).length;
      return count ? h("li", {}, h("span", { class: "chip" }, letter), strong(kind),
        ` ${meaning} (${count} head${count > 1 ? "s" : ""})`) : null;
    });
    const none = text.has_roles ? "No head has a role on this text."
      : `Roles need a text with more than ${source.common.queries} different tokens.`;
    const warnings = text.findings.map((finding) => {
      const layer = text.layers.findIndex((one) => one.number === finding.layer);
      return h("li", {}, h("button", { type: "button", class: "line",
        onclick: () => context.set({ layer: Math.max(layer, 0), head: finding.heads[0] ?? 0 }) }, finding.sentence));
    });
    fill(
      beside,
      h("h2", {}, headName(context)), aboutHead(context),
      h("p", {}, h("button", { type: "button", class: "main-button",
        onclick: () => context.set({ view: "map", x: -1, y: -1 }) }, "Open its map"), " ",
        h("button", { type: "button", onclick: () => context.set({ view: "text" }) }, "Show it in the text")),
      h("h2", {}, "Warnings"), h("p", { class: "hint" }, source.common.caveat),
        h("ul", { class: "plain findings" }, ...(warnings.length ? warnings : [h("li", {}, "None for this text.")])),
      h("h2", {}, "Roles"), h("ul", { class: "plain" }, ...(earned.length ? roles : [h("li", {}, none)])),
        text.has_roles && h("p", { class: "hint" }, source.common.roleCaveat),
    );
    beside.dataset.head = `${state.layer}.${state.head}`;
  }

  // The grid as one figure, to be saved.
  function picture(): SVGSVGElement {
    const { text } = context;
    const [size, width] = [60, Math.max(...text.layers.map((layer) => layer.heads.length))];
    const figure = s("svg", { width: 24 + width * size, height: 4 + text.layers.length * size, role: "img" });
    text.layers.forEach((layer, row) => {
      figure.append(s("text", { x: 16, y: row * size + size / 2 + 4, "text-anchor": "end", "font-size": 12,
        fill: "currentColor" }, layer.number));
      layer.heads.forEach((_, head) => {
        const canvas = grid.querySelector<HTMLCanvasElement>(`[data-place="${row}.${head}"] canvas`);
        if (canvas) figure.append(s("image", { x: 24 + head * size, y: 2 + row * size, width: size - 4,
          height: size - 4, preserveAspectRatio: "none", href: canvas.toDataURL() }));
      });
    });
    return figure;
  }

  return {
    element,
    update(before) {
      const { state } = context;
      const wanted = [state.text, state.colour, state.sort, context.colours.css[1]].join();
      if (!before || wanted !== drawn) {
        drawn = wanted;
        drawTools();
        drawGrid();
      } else if (before.scale !== state.scale) repaints.forEach((repaint) => repaint());
      context.cells(context.text.tokens.length / context.text.layers[0].small[1]);
      mark();
      drawBeside();
    },
    key(event) {
      const at = buttons.findIndex((button) => button.tabIndex === 0);
      const width = context.state.sort === "layer" ? context.text.layers[context.state.layer].heads.length : 12;
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width }[event.key];
      if (event.key === "Enter" && document.activeElement?.tagName !== "BUTTON") buttons[at]?.click();
      if (step === undefined) return false;
      buttons[at + step]?.focus();
      return true;
    },
  };
}

// The chosen head: its roles with their scores on shuffled words, its strongest link and its statistics.
export function aboutHead(context: Context): HTMLElement {
  const { text, state, source } = context;
  const about = text.layers[state.layer].heads[state.head];
  const roles = about.roles.map(({ kind, offset, score, null: shuffled, chance }) => {
    const meaning = offset === null ? source.common.kinds[kind].meaning
      : `the token at offset ${offset > 0 ? "+" : ""}${offset}`;
    const share = kind === "broad" ? "of the largest entropy" : "of its weight";
    const by = kind === "broad" ? "" : `, ${chance.toFixed(2)} by chance`;
    return h("p", { class: "role" }, h("span", { class: "chip" }, source.common.kinds[kind].letter),
      `attends to ${meaning}: `, strong(score.toFixed(2)),
      ` ${share}; ${shuffled.toFixed(2)} on shuffled words${by}.`);
  });
  const [query, key, weight] = about.strongest;
  const link = h("p", {}, "Strongest link: ", strong(visible((text.queries ?? text.tokens)[query])), " → ",
    strong(key in text.tokens ? visible(text.tokens[key]) : "nothing"), ` ${shown(weight)}`);
  const numbers = Object.entries(about.values).map(([name, value]) =>
    h("tr", { title: source.common.statistics[name] ?? "" }, h("th", { scope: "row" }, name),
      h("td", { class: "number" }, shown(value))));
  return h("div", { class: "about" }, ...(roles.length ? roles
    : [text.has_roles && h("p", { class: "hint" }, "No role on this text.")]), link,
    h("table", { class: "numbers" }, h("tbody", {}, ...numbers)));
}
