// The links that the first sentence tells, and the colors of their heads in it, in the arcs and in the grid.
import { SERIES } from "./color";
import type { Lead, Text } from "./data";
import { ownColor } from "./head_sets";

export const toldLinks = ({ lead }: Text): Lead[] =>
  lead ? [lead, ...(lead.other ? [lead.other] : [])] : [];

// The color of a head, as its tile has it; the second head of a sentence has another one than the first.
export function colorOfTold(
  { layer, head }: { layer: number; head: number },
  told: Lead[],
): string {
  const [own, first] = [ownColor([layer, head]), ownColor([told[0].layer, told[0].head])];
  const isFirst = layer === told[0].layer && head === told[0].head;
  return isFirst || own !== first ? own : SERIES.find((one) => one !== first)!;
}
