// Statistics in plain words, with their name beside them: "spread (entropy)".
import type { Common } from "./data";

export const label = (common: Common, name: string): string => common.labels?.[name] ?? name;
