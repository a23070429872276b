// What is pure: numbers, words and links. The oracle of a number is its own digits, read back.
import assert from "node:assert/strict";
import { test } from "node:test";
import { build } from "esbuild";

const source = `
export * from "./format";
export { cut, joins, visible } from "./dom";
export { scaleOf } from "./color";
export { fromLink, START, toLink } from "./state";
export { register } from "./registry";
export { ranges } from "./first";
export { csvText, fileName } from "./output";
export { counterparts, rowChange } from "./counterparts";
`;
const { outputFiles } = await build({
  stdin: { contents: source, resolveDir: "src", loader: "ts" },
  bundle: true,
  write: false,
  format: "esm",
});
const page = await import(
  `data:text/javascript;base64,${Buffer.from(outputFiles[0].text).toString("base64")}`
);
const read = (written) => Number(written.replace("−", "-").replaceAll(",", ""));
// Numbers of every size and sign, and those at which the rules change.
const drawn = [0, 1, 0.0005, 0.00049999, 0.005, 0.995, 0.9949, 999.9996, 1000, 1234567];
let seed = 7;
const random = () => {
  seed = (seed * 16807) % 2147483647;
  return seed / 2147483647;
};
for (let at = 0; at < 500; at++) drawn.push(10 ** (14 * random() - 8));

test("a number is within half of its last digit, or says that it is smaller", () => {
  for (const value of drawn.flatMap((size) => [size, -size])) {
    const written = page.shown(value);
    if (/[<>]/.test(written)) assert.ok(Math.abs(value) < 0.0005 && value !== 0, written);
    else assert.ok(Math.abs(read(written) - value) <= (Math.abs(value) < 1000 ? 5.0001e-4 : 0.5));
    assert.ok(!/e/.test(written), written);
  }
});

test("a cell has no zero before the point, and none where it would be .00", () => {
  for (const value of drawn.filter((size) => size < 10)) {
    const written = page.inCell(value);
    if (value < 0.005) assert.equal(written, "");
    else assert.ok(Math.abs(read(written) - value) <= (value < 1 ? 5.0001e-3 : 0.05), written);
    assert.ok(!written.startsWith("0"));
  }
});

test("a count has its noun", () => {
  assert.equal(page.plural(1, "head"), "1 head");
  assert.equal(page.plural(12288, "query", "queries"), "12,288 queries");
});

test("the exact number gives back every float32 to six digits, and CSV every one exactly", () => {
  for (const value of drawn.map(Math.fround)) {
    assert.ok(Math.abs(Number(page.exact(value)) - value) <= 5e-6 * value);
    assert.equal(Math.fround(Number(page.csvText([[value]]))), value);
  }
  assert.equal(page.csvText([['a "b"', ","]]), '"a ""b""",","\r\n');
});

test("a link gives back the state that it was written from", () => {
  page.register("head", {});
  page.register("overview", {});
  for (let at = 0; at < 200; at++) {
    const state = { ...page.START, view: random() < 0.5 ? "head" : "overview" };
    for (const [name, value] of Object.entries(page.START)) {
      if (name === "view" || random() < 0.6) continue;
      if (typeof value === "number") state[name] = Math.round(1e5 * random()) / 1000;
      else state[name] = ["a&b=c", "ü #?", "5.3,2.1", "“it” → x"][Math.floor(4 * random())];
    }
    assert.deepEqual({ ...page.START, ...page.fromLink(page.toLink(state)) }, state);
  }
  for (const broken of ["", "#", "#none?layer=1", "layer=2"])
    assert.equal(page.fromLink(broken), null);
  assert.ok(!("layer" in page.fromLink("#head?layer=x&unknown=1")));
});

test("a link of an earlier page leads to where its view is now, with what it chose", () => {
  for (const view of ["overview", "head", "compare"]) page.register(view, {});
  const moved = [
    ["#map?layer=2&x=3", { view: "head", layer: 2, x: 3 }],
    ["#text?query=3&heads=all", { view: "head", query: 3, heads: "all" }],
    ["#text?way=heads&pairs=AB", { view: "head", way: "lines", pairs: "AB" }],
    ["#text?way=model&layer=1", { view: "overview", way: "words", grid: "lines", layer: 1 }],
    ["#text?way=neurons&key=4", { view: "head", way: "words", why: "yes", key: 4 }],
    ["#pins?pins=0.1.2", { view: "compare", pair: "heads", pins: "0.1.2" }],
  ];
  for (const [link, state] of moved) assert.deepEqual(page.fromLink(link), state);
});

test("a scale is 0 at no weight, 1 at the whole row, and never falls", () => {
  for (const kind of ["linear", "sqrt", "log"])
    for (const keys of [1, 2, 14, 32768]) {
      const { place } = page.scaleOf(kind, keys);
      const places = Array.from({ length: 101 }, (_, at) => place(at / 100));
      assert.ok(places[0] === 0 && Math.abs(places[100] - 1) < 1e-9);
      for (let at = 1; at < 101; at++) assert.ok(places[at] >= places[at - 1]);
    }
});

test("invisible tokens are told apart, and a cut text keeps whole characters", () => {
  const blanks = ["", " ", "  ", "\t", "\n", "\n\n", "\u200b", "\u202e", "\u00a0"];
  const said = blanks.map(page.visible);
  assert.equal(new Set(said).size, blanks.length);
  for (const each of said) assert.match(each, /\S/u);
  assert.equal(page.cut("👩‍🚀👩‍🚀", 2), "👩…");
  assert.equal(page.cut("word", 4), "word");
});

test("the ranges of a long text hold all its ends, in order and apart", () => {
  for (let at = 0; at < 100; at++) {
    const size = 1 + Math.floor(400 * random());
    const ends = [1, 2, 3].map(() => Math.floor(size * random()));
    const found = page.ranges(size, ends);
    for (const end of ends) assert.ok(found.some(([first, last]) => first <= end && end < last));
    found.forEach(([first, last], n) => {
      assert.ok(first < last && last <= size && (n === 0 || found[n - 1][1] < first));
    });
  }
});
