// The table of heads: every statistic and role; a column sorts it, a row opens its head, a role or a word searches it.
import { headName, type Context } from "./context";
import { queriesOf, shortName, statisticsOf, type Text } from "./data";
import { actionButton, fill, h, labelled } from "./dom";
import { plural, shown } from "./format";
import type { Head } from "./head_sets";
import { label } from "./labels";
import { placesOf, wordNames } from "./word_names";

const [ROWS, PLACES, LONG] = [200, 8, 40]; // rows at first, occurrences of a word that are searched, letters of a long name
interface Link {
  query: number;
  key: number;
  weight: number;
}
interface Row {
  at: Head;
  values: Record<string, number>;
  roles: [string, number][];
  link: Link | null;
}

// The strongest link of a head from a query to an ordinary word that is not its neighbor, as TextReading.notable.
function notable(text: Text, query: number, row: ArrayLike<number>): Link | null {
  const left = new Set(text.queries === null ? [...text.special, 0] : text.special);
  let best: Link | null = null;
  for (let key = 0; key < row.length; key++)
    if (Math.abs(key - query) > 1 && !left.has(key) && row[key] > (best?.weight ?? -1))
      best = { query, key, weight: row[key] };
  return best;
}

export function headTable(context: Context) {
  const input = h("input", {
    type: "search",
    placeholder: "a role or a word",
    "aria-label": "Search for a role or a word",
    value: context.state.find,
    oninput: () => {
      clearTimeout(timer);
      timer = window.setTimeout(
        () => context.set({ find: input.value.trim(), table: "head" }, true),
        200,
      );
    },
  }); // a search chooses its own order
  const [note, box] = [
    h("span", { class: "hint", role: "status" }),
    h("div", { class: "head-table", tabindex: 0, role: "region", "aria-label": "Heads" }),
  ];
  const element = h(
    "div",
    { class: "charts-table" },
    h("div", { class: "tools" }, labelled("Search", input), note),
    box,
  );
  let timer = 0;
  let turn = 0;
  let rows = ROWS;
  let asked = "";

  const columns = () => statisticsOf(context.text);

  function allRows(): Row[] {
    return context.text.layers.flatMap((layer, at) =>
      layer.heads.map(
        (head, number): Row => ({
          at: [at, number],
          values: head.values,
          roles: head.roles.map(({ kind, score }) => [kind, score]),
          link: null,
        }),
      ),
    );
  }

  // The strongest notable link of each head from a word, over its first occurrences.
  async function addLinks(all: Row[], places: number[]) {
    const { source, state, text } = context;
    const byHead = new Map(all.map((row) => [row.at.join("."), row]));
    for (const layer of text.layers.keys())
      for (const query of places.slice(0, PLACES)) {
        const lines = await source.rows(state.text, layer, query);
        lines.forEach((line, head) => {
          const [row, link] = [byHead.get(`${layer}.${head}`), notable(text, query, line)];
          if (row && link && link.weight > (row.link?.weight ?? -1)) row.link = link;
        });
      }
  }

  // What a column sorts by: text columns by name, all others by number.
  function order(all: Row[], column: string, down: boolean): Row[] {
    const value = ({ at, values, roles, link }: Row) =>
      column === "head"
        ? at[0] * 1e4 + at[1]
        : column === "roles"
          ? (roles[0]?.[1] ?? -1)
          : column === "word"
            ? (link?.weight ?? -1)
            : (values[column] ?? -Infinity);
    return all.sort(
      (a, b) =>
        (down ? value(b) - value(a) : value(a) - value(b)) ||
        a.at[0] - b.at[0] ||
        a.at[1] - b.at[1],
    );
  }

  async function draw() {
    const mine = ++turn;
    const { state, text, source } = context;
    if (input.value.trim() !== state.find && document.activeElement !== input)
      input.value = state.find;
    if (asked !== `${state.text} ${state.find}`) rows = ROWS;
    asked = `${state.text} ${state.find}`;
    const wanted = state.find.toLowerCase();
    const kinds = wanted
      ? Object.keys(source.common.kinds).filter((kind) => kind.startsWith(wanted))
      : [];
    const places = placesOf(state.find, queriesOf(text));
    let found = allRows();
    const roles = kinds.filter((kind) =>
      found.some((row) => row.roles.some(([one]) => one === kind)),
    );
    if (roles.length)
      found = found.filter((row) => row.roles.some(([kind]) => roles.includes(kind)));
    const exact = found.filter(
      ({ at }) =>
        shortName(text.layers[at[0]], at[1]).toLowerCase() === wanted || at.join(".") === wanted,
    );
    if (exact.length) found = exact;
    const counted = roles.length ? "" : (kinds.find((kind) => columns().includes(kind)) ?? ""); // the statistic of a role
    if (wanted && !roles.length && !exact.length && !places.length && !counted) found = [];
    if (places.length) await addLinks(found, places);
    if (mine !== turn) return;
    const searched =
      state.table === "head" &&
      (places.length ? "-word" : roles.length ? "-roles" : counted && `-${counted}`);
    const sort = searched || state.table;
    fill(note, told(found.length, roles, places.length, exact.length > 0, kinds, counted));
    const down = sort.startsWith("-");
    drawTable(order(found, sort.replace(/^-/, ""), down), sort, places.length > 0);
  }

  function told(
    count: number,
    roles: string[],
    places: number,
    exact: boolean,
    kinds: string[],
    counted: string,
  ): string {
    const {
      state: { find },
      text,
      source,
    } = context;
    const heads = plural(count, "head");
    if (!find) return `${heads}. Click a column to sort, a row to open its head.`;
    const often = places > PLACES ? `, in its first ${PLACES} places` : "";
    const leftOut = `neighbors${text.queries === null ? ", the first token" : ""} and special tokens`;
    const word = places
      ? `What “${find}” attends to in each head${often}. Left out: the word itself, its ${leftOut}.`
      : "";
    if (roles.length) return `${heads} with the role ${roles.join(" or ")}. ${word}`;
    if (exact) return heads;
    const column =
      counted && `The column “${label(source.common, counted)}” says it of every head. `;
    const none = text.has_roles
      ? `No head has the role ${kinds.join(" or ")} on this text.`
      : (text.why_no_roles ?? "No roles were computed for this text.");
    if (kinds.length) return `${none} ${column}${word}`;
    return word || `No role, word or head is named “${find}”.`;
  }

  function drawTable(found: Row[], sort: string, withWord: boolean) {
    const { source, state } = context;
    const meaning = (name: string) => source.common.statistics[name] ?? "";
    const shownColumns: [string, string, string][] = [
      ["head", "head", ""],
      ["roles", "roles", "and their scores"],
      ...(withWord
        ? [
            ["word", `“${state.find}” attends to`, "the strongest link of the head"] as [
              string,
              string,
              string,
            ],
          ]
        : []),
      ...columns().map((name): [string, string, string] => [
        name,
        label(source.common, name),
        meaning(name),
      ]),
    ];
    const header = shownColumns.map(([column, said, title]) => {
      const [up, down] = [sort === column, sort === `-${column}`];
      return h(
        "th",
        {
          scope: "col",
          class: ["head", "roles", "word"].includes(column) ? "said" : null,
          "aria-sort": up ? "ascending" : down ? "descending" : "none",
        },
        actionButton(
          {
            title,
            "data-column": column,
            class: said.length > LONG ? "long" : null,
            "data-sorted": String(up || down),
            onclick: () => context.set({ table: nextSort(column, sort) }),
          },
          `${said}${up ? " ↑" : down ? " ↓" : ""}`,
        ),
      );
    });
    const more =
      found.length > rows &&
      h(
        "p",
        {},
        actionButton(
          {
            onclick: () => {
              rows = Infinity;
              void draw();
            },
          },
          `Show all ${found.length} heads`,
        ),
      );
    fill(
      box,
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...header)),
        h("tbody", {}, ...found.slice(0, rows).map((row) => line(row, withWord))),
      ),
      more,
    );
  }

  // Numbers are sorted downwards first, heads upwards.
  function nextSort(column: string, sort: string): string {
    const [first, second] = column === "head" ? ["head", "-head"] : [`-${column}`, column];
    if (column === "head") return context.state.table === first ? second : first; // while searched, "head" is the search's order
    return sort === first ? second : first;
  }

  function line({ at, values, roles, link }: Row, withWord: boolean): HTMLElement {
    const { text, state } = context;
    const open = () =>
      context.set(
        link
          ? {
              view: "head",
              way: "words",
              heads: "one",
              layer: at[0],
              head: at[1],
              query: link.query,
              key: link.key,
            }
          : { view: "head", layer: at[0], head: at[1], x: -1, y: -1 },
      );
    const word = link
      ? [
          `${placesOf(state.find, queriesOf(text)).length > 1 ? `${wordNames(queriesOf(text))[link.query]} → ` : ""}`,
          h("b", { dir: "auto" }, wordNames(text.tokens)[link.key]),
          ` ${shown(link.weight)}`,
        ]
      : ["–"];
    return h(
      "tr",
      {
        onclick: open,
        "data-place": at.join("."),
        "aria-current": at[0] === state.layer && at[1] === state.head ? "true" : null,
      },
      h(
        "td",
        { class: "said" },
        actionButton(
          { "aria-label": `Open ${headName(context, ...at)}` },
          shortName(text.layers[at[0]], at[1]),
        ),
      ),
      h(
        "td",
        { class: "said" },
        roles.map(([kind, score]) => `${kind} ${shown(score)}`).join(", ") || "–",
      ),
      withWord && h("td", { class: "said" }, ...word),
      ...columns().map((column) => h("td", {}, shown(values[column]))),
    );
  }

  return { element, draw: () => void draw() };
}
