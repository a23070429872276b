// The choices of a layer and of a head of a text.
import { layerLabel, type HeadPlace, type Text } from "./data";
import { choice, cut } from "./dom";

// `of`: " of A" if there are several of these choices.
export const headChoices = (
  { layers }: Text,
  { layer, head }: HeadPlace,
  chosen: (change: Partial<HeadPlace>) => void,
  of = "",
): HTMLElement[] => [
  choice(
    `Layer${of}`,
    String(layer),
    layers.map((one, at) => [String(at), cut(layerLabel(one), 24)]),
    (value) => chosen({ layer: Number(value) }),
  ),
  choice(
    `Head${of}`,
    String(head),
    layers[layer].heads.map((_, at) => [String(at), String(at)]),
    (value) => chosen({ head: Number(value) }),
  ),
];
