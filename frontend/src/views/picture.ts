// The picture view: weights over an image, the frames of a video or a spectrogram; a map of every head beside it.
import { changeDetector } from "../changes";
import { meansOnly, type Context, type Panel } from "../context";
import { choice, fill, h, hint, segments, strong, visible } from "../dom";
import { shown } from "../format";
import { byLayer, headsInWords, isChosen, listedHeads, meanLine, MEANS } from "../head_sets";
import { legendOfCover, shareOnScale } from "../patches";
import { linksInWords } from "../picture_readout";
import { pictureStage } from "../picture_stage";
import { pictureTiles } from "../picture_tiles";
import { PictureTokens } from "../picture_tokens";
import { pictureWords } from "../picture_words";
import type { View } from "../registry";
import { arrowOf } from "../steps";

const [SOON, WAIT] = [30, 120]; // milliseconds that the mouse rests before the maps of a layer follow, and those of all layers

export const view: View = {
  place: 7,
  make: pictureView,
  isOffered: ({ text }) => Boolean(text.picture),
};

function pictureView(context: Context): Panel {
  const tokens = new PictureTokens(context);
  const [tools, notes, legendBox] = [
    h("div", { class: "tools" }),
    h("div", {}),
    h("div", { class: "key" }),
  ];
  const readout = h("p", { class: "readout looks", "aria-live": "polite" });
  const pointedAt = h("p", { class: "hint pointed" });
  const stage = pictureStage(context, tokens, { over: point, leave, choose });
  const words = pictureWords(context, tokens, { over: pointWord, leave, choose: chooseWord });
  const tiles = pictureTiles(context, tokens);
  const element = h(
    "div",
    { class: "picture-view" },
    tools,
    notes,
    h(
      "div",
      { class: "picture-sides" },
      h("div", {}, stage.element, legendBox, words.element, readout, pointedAt),
      tiles.element,
    ),
  );
  let turn = 0;
  let weights: Float32Array | null = null; // of the token that is shown
  let timer = 0;
  const isStageNew = changeDetector();

  // Drawing

  function draw() {
    if (!context.text.picture) return drawNothing();
    fill(notes, meansOnly(context));
    tokens.read();
    drawTools();
    stage.build();
    words.build();
    tiles.clear();
    drawWeights();
  }
  function drawNothing() {
    for (const box of [tools, stage.element, words.element, legendBox, tiles.element, readout])
      fill(box);
    fill(
      notes,
      hint(
        "This text has no picture. Pictures belong to models that read images, videos or sounds.",
      ),
    );
  }
  function drawWeights() {
    void color();
    void tiles.draw();
  }

  function drawTools() {
    const { state } = context;
    const heads = [...MEANS];
    if (isChosen(state)) heads.push([state.heads, headsInWords(context)]);
    fill(
      tools,
      segments(
        "Direction",
        tokens.isTurned ? "in" : "out",
        tokens.isCrossed
          ? [
              ["out", "What a word attends to"],
              ["in", `Which words attend to ${tokens.isSound ? "a moment" : "a patch"}`],
            ]
          : [
              ["out", "What it attends to"],
              ["in", "What attends to it"],
            ],
        (side) => context.set({ side, key: Math.max(0, state.key) }),
      ),
      choice("Heads", state.heads, heads, (heads) => context.set({ heads })),
      segments(
        "Cover",
        state.cover,
        [
          ["light", "Light"],
          ["colors", "Colors"],
        ],
        (cover) => context.set({ cover }),
      ),
    );
  }

  async function color() {
    const mine = ++turn;
    const at = tokens.shown;
    const values = await meanLine(context, byLayer(listedHeads(context)), at, tokens.isTurned);
    if (mine !== turn) return;
    weights = values;
    const overPatches = !tokens.choosesKeys;
    const top = tokens.largest(values, overPatches);
    stage.color(overPatches ? values : null, top, at);
    words.color(values, at);
    drawLegend(overPatches, top);
    fill(readout, ...linksInWords(context, tokens, values, at));
    if (tokens.preview === null) context.tell(readout.textContent ?? "");
  }

  function drawLegend(overPatches: boolean, top: number) {
    const { cover, scale } = context.state;
    const name = `${cover === "light" ? "Light on" : "Color of"} ${tokens.isSound ? "a moment" : "a patch"}`;
    fill(
      legendBox,
      overPatches && legendOfCover(context, top, (share) => shareOnScale(scale, share)),
      h(
        "span",
        { class: "hint" },
        overPatches
          ? `${name}: its weight, up to the largest, ${shown(top)}`
          : "the colors of the words are their weights",
      ),
    );
  }

  // Pointing

  function point(token: number) {
    if (!tokens.held && tokens.choosesPatches) return follow(token);
    if (!weights || tokens.choosesKeys) return;
    fill(
      pointedAt,
      strong(shown(weights[token])),
      tokens.isTurned ? " from " : " on ",
      visible(context.text.tokens[token]),
      ` (token ${token})`,
    );
    pointedAt.dataset.weight = String(weights[token]);
  }
  function pointWord(token: number) {
    if (!tokens.held && !tokens.choosesKeys) follow(token);
  }
  function follow(token: number) {
    if (tokens.preview === token) return;
    tokens.preview = token;
    void color();
    drawTilesAfter(context.state.tiles === "all" ? WAIT : SOON);
  }
  function leave() {
    fill(pointedAt);
    if (tokens.preview === null) return;
    tokens.preview = null;
    void color();
    drawTilesAfter(SOON);
  }
  function drawTilesAfter(wait: number) {
    clearTimeout(timer);
    timer = window.setTimeout(() => void tiles.draw(), wait);
  }

  function choose(token: number) {
    stage.element.focus({ preventScroll: true });
    if (tokens.isCrossed && !tokens.isTurned) context.set({ side: "in", key: token });
    else hold(token);
  }
  function chooseWord(token: number) {
    if (tokens.isCrossed) context.set({ side: "out", query: token });
    else hold(token);
  }
  function hold(token: number) {
    tokens.hold(token);
    void color();
  }

  return {
    element,
    update(before) {
      const { state } = context;
      const isNew = isStageNew(
        state.text,
        state.side,
        state.heads,
        state.cover,
        state.scale,
        state.tiles,
        context.colors.theme,
        tokens.isSound ? `${state.layer}.${state.head}` : "",
      ); // the times of words are those of the head
      if (!before || isNew) {
        tokens.preview = null;
        return draw();
      }
      drawTools();
      drawWeights();
    },
    key(event) {
      if (event.key === "Escape" && tokens.held) {
        tokens.held = false;
        fill(pointedAt);
        return true;
      }
      const target = event.composedPath()[0] as HTMLElement;
      if (target.classList?.contains("tile")) return tiles.key(target, event.key);
      const arrow = arrowOf(event.key);
      if (!arrow || !tokens.choosesPatches || !tokens.panels.length) return false;
      tokens.preview = null;
      tokens.move(tokens.neighbor(arrow), true);
      return true;
    },
    close() {
      turn++;
      clearTimeout(timer);
      tiles.close();
    },
  };
}
