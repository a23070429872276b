// The images of a text, or its spectrogram, under the weights of a token.
import { seconds } from "./format";
import type { Context } from "./context";
import type { PicturePanel } from "./data";
import { h, s } from "./dom";
import { coverOf, photoOf, placeOf, shareOnScale } from "./patches";
import type { PictureTokens } from "./picture_tokens";
import { within } from "./steps";

export interface Pointing {
  over(token: number): void;
  leave(): void;
  choose(token: number): void;
}

export function pictureStage(context: Context, tokens: PictureTokens, pointing: Pointing) {
  const element = h("div", {
    class: "pictures",
    tabindex: 0,
    role: "group",
    "aria-label": "Patches. Arrows move.",
  });
  const curve = s("svg", {
    class: "curve",
    viewBox: "0 0 1000 60",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": "Weight by time",
  }); // under a spectrogram
  let overlays: SVGImageElement[] = [];
  let marks: SVGRectElement[] = [];
  const heightOf = (panel: PicturePanel) => (tokens.isSound ? panel.width / 5 : panel.height);

  function build() {
    [overlays, marks] = [[], []];
    element.className = `pictures${tokens.panels.length > 1 ? " many" : ""}${tokens.isSound ? " sound" : ""}`;
    element.replaceChildren(
      ...tokens.panels.map((panel, at) => {
        const name = nameOf(at);
        return h(
          "figure",
          { class: "patches" },
          photo(panel, at),
          tokens.isSound && curve,
          tokens.isSound && timeAxis(panel),
          name && h("figcaption", {}, name),
        );
      }),
    );
  }

  const nameOf = (at: number) =>
    context.text.picture?.kind === "video"
      ? `frame ${at}`
      : tokens.panels.length > 1
        ? `image ${at + 1}`
        : "";

  function photo(panel: PicturePanel, at: number): SVGSVGElement {
    const height = heightOf(panel);
    const number = tokens.panels.length > 1 ? at + 1 : "";
    const svg = s(
      "svg",
      {
        viewBox: `0 0 ${panel.width} ${height}`,
        width: panel.width,
        height,
        role: "img",
        "aria-label": tokens.isSound
          ? "Spectrogram under the weights"
          : `Image ${number} under the weights`,
        preserveAspectRatio: "none",
        class: "photo",
        onpointermove: (event: PointerEvent) => pointing.over(tokenAt(panel, event)),
        onpointerleave: () => pointing.leave(),
        onclick: (event: MouseEvent) => pointing.choose(tokenAt(panel, event)),
      },
      s("image", { href: photoOf(panel), width: panel.width, height, preserveAspectRatio: "none" }),
    );
    overlays[at] = svg.appendChild(
      s("image", {
        class: "cover",
        width: panel.width,
        height,
        preserveAspectRatio: "none",
        style: "image-rendering:pixelated",
      }),
    );
    marks[at] = svg.appendChild(
      s("rect", {
        class: "mark",
        fill: "none",
        stroke: "var(--accent)",
        "stroke-width": 2,
        "vector-effect": "non-scaling-stroke",
      }),
    );
    return svg;
  }

  function tokenAt(panel: PicturePanel, event: MouseEvent): number {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const [row, column] = [
      within(Math.floor(((event.clientY - box.top) / box.height) * panel.rows), panel.rows),
      within(Math.floor(((event.clientX - box.left) / box.width) * panel.columns), panel.columns),
    ];
    return placeOf(panel, row * panel.columns + column);
  }

  // The time axis of a spectrogram.
  function timeAxis(panel: PicturePanel): HTMLElement {
    const all = panel.columns * (context.text.picture?.seconds ?? 0);
    const step = [0.1, 0.2, 0.5, 1, 2, 5, 10].find((one) => all / one <= 8) ?? 10;
    return h(
      "div",
      { class: "seconds", "aria-hidden": "true" },
      ...Array.from({ length: Math.floor(all / step + 1e-6) + 1 }, (_, at) =>
        h("span", { style: `left:${(100 * at * step) / all}%` }, seconds(at * step)),
      ),
    );
  }

  // The weights along the time.
  function drawCurve(values: Float32Array | null, top: number) {
    if (!tokens.isSound) return;
    const steps = values
      ? [...values].map(
          (weight, at) =>
            `L${(1000 * at) / values.length},` +
            `${60 - 58 * shareOnScale(context.state.scale, weight / top)}H${(1000 * (at + 1)) / values.length}`,
        )
      : [];
    curve.replaceChildren(s("path", { d: `M0,60${steps.join("")}V60Z`, fill: "currentColor" }));
  }

  function mark(number: number, panel: PicturePanel, chosen: number) {
    const found = tokens.choosesPatches ? tokens.patchOf.get(chosen) : undefined;
    const isHere = found?.[0] === number;
    marks[number].style.display = isHere ? "" : "none";
    if (!isHere) return;
    const [wide, tall] = [panel.width / panel.columns, heightOf(panel) / panel.rows];
    const [row, column] = [Math.floor(found![1] / panel.columns), found![1] % panel.columns];
    for (const [name, value] of Object.entries({
      x: column * wide,
      y: row * tall,
      width: wide,
      height: tall,
    }))
      marks[number].setAttribute(name, String(value));
  }

  return {
    element,
    build,
    // Weights of the tokens, the largest one, and the chosen token; null: only words have weights.
    color(values: Float32Array | null, top: number, chosen: number) {
      const { state, colors } = context;
      tokens.panels.forEach((panel, number) => {
        const shares = Float32Array.from({ length: panel.rows * panel.columns }, (_, patch) =>
          values ? shareOnScale(state.scale, values[placeOf(panel, patch)] / top) : 1,
        );
        overlays[number].setAttribute(
          "href",
          coverOf(shares, panel.rows, panel.columns, state.cover, colors).toDataURL(),
        );
        mark(number, panel, chosen);
      });
      drawCurve(values, top);
    },
  };
}
