// The frame around the views: it chooses the text and the head, and handles keys, links and the theme.
import { Colors, SCALES } from "./color";
import { place, type Context, type Panel } from "./context";
import { actionButton, fill, h, inPlace } from "./dom";
import { headBar } from "./head_bar";
import { identity } from "./identity";
import { opening } from "./opening";
import { scaleRow } from "./scale";
import type { Source } from "./source";
import { lackingOf, stateOf } from "./link";
import { fromLink, START, toLink, type State } from "./state";
import { figureSheet } from "./figure";
import { storyBar } from "./story";
import { withPin } from "./pin_set";
import { isWithoutHead, nameOf, offeredViews, viewOf, viewsWithTab } from "./registry";
import { within } from "./steps";
import "every-view";

const KEYS: [string, string][] = [
  ["[ ]", "previous head, next head"],
  ["{ }", "previous layer, next layer"],
  [
    "arrows",
    "move between heads, cells or words (with Shift: ten cells, or the other word of a link)",
  ],
  ["f", "figure for a paper: PDF, SVG, PNG, CSV"],
  ["Esc", "stop computing, or close this menu"],
  ["p", "pin or unpin this head"],
  ["r", "record a story: views with a sentence each"],
  ["t", "light or dark theme"],
  ["?", "this menu"],
];

// A choice that outlives the page, where the browser allows it; `value` sets it.
function remembered(name: string, value?: string): string | null {
  try {
    if (value !== undefined) localStorage.setItem(`regard-${name}`, value);
    return localStorage.getItem(`regard-${name}`);
  } catch {
    return null;
  }
}

// `own`: the page is the whole document, and its address is the view. Otherwise it begins with the view of `at`.
export async function mount(
  root: HTMLElement,
  source: Source,
  own: boolean,
  at = "",
): Promise<() => void> {
  const state: State = { ...START };
  const context = {
    root,
    source,
    state,
    text: await source.text(0),
    colors: new Colors(root),
    isOwn: own,
  } as Context;
  let panel: Panel | null = null;
  let drawn: State | null = null;
  let listedTexts = 0; // by the frame

  const story = storyBar(context, {
    follow,
    show: (page, link) => mount(page, source, false, link),
  });
  const spoken = h("div", { class: "spoken", "aria-live": "polite" });
  const tabs = h("nav", { class: "tabs", "aria-label": "Views" });
  const bar = headBar(context);
  const about = identity(context, (text) => openText(text));
  const main = h("main", { class: "view", tabindex: -1 });
  const notice = h("p", { class: "notice", role: "alert", hidden: true });
  const keys = h("dl", {});
  const acts = h("p", { class: "help-buttons", role: "group", "aria-label": "Actions" });
  const done = h("p", { class: "hint", role: "status" });
  const showMenu = () => {
    const views = viewsWithTab(context);
    const act = (said: string, does: () => void, stays = false) =>
      actionButton(
        {
          onclick: () => {
            if (!stays) help.close();
            does();
          },
        },
        said,
      );
    fill(
      acts,
      context.tour && act(context.tour.title, context.tour.play),
      own && act("Copy link", () => void copyLink(), true),
      ...(panel?.acts ?? []).map(([said, does]) => act(said, does)),
      act("Record a story", story.record),
      act("Light or dark", turnTheme),
    );
    fill(done);
    fill(
      keys,
      ...[
        [`1 … ${views.length}`, views.map(nameOf).join(", ")],
        ...KEYS,
        ...views.flatMap((view) =>
          (viewOf(view).keys ?? []).map(([key, effect]) => [key, `${nameOf(view)}: ${effect}`]),
        ),
      ].flatMap(([key, effect]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, effect)]),
    );
    help.showModal();
  };
  async function copyLink() {
    const copied = navigator.clipboard?.writeText(location.href).then(() => "The link is copied.");
    fill(done, await (copied ?? Promise.reject()).catch(() => location.href));
  }
  const help = h(
    "dialog",
    { class: "help", "aria-label": "Menu" },
    acts,
    done,
    h("h2", {}, "Keys"),
    keys,
    actionButton({ onclick: () => help.close() }, "Close"),
  );
  const skip = h(
    "a",
    {
      class: "skip",
      href: "#",
      onclick: (event: Event) => {
        event.preventDefault();
        main.focus();
      },
    },
    "Skip to the view",
  );
  const header = h(
    "header",
    {},
    skip,
    h("p", { class: "name" }, "Regard"),
    about.element,
    tabs,
    h(
      "span",
      { class: "end" },
      actionButton(
        { class: "figure-open", title: "Figure for a paper (f)", onclick: () => openFigure() },
        "Figure",
      ),
      actionButton(
        { class: "figure-open", title: "Tour, link, theme and keys (?)", onclick: showMenu },
        "Menu",
      ),
    ),
  );
  const figures = figureSheet(context);
  const openFigure = () => context.set({ figure: viewOf(state.view).figure ?? "words,map" });
  const scale = scaleRow(context);
  root.replaceChildren(
    header,
    h("div", { class: "frame-row" }, bar.element, scale.element),
    notice,
    main,
    story.element,
    help,
    figures.element,
    spoken,
  );

  const isDark = () =>
    (root.dataset.theme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  function useTheme(theme: string) {
    root.dataset.theme = theme;
    if (own) document.documentElement.dataset.theme = theme;
  }
  function turnTheme() {
    useTheme(isDark() ? "light" : "dark");
    remembered("theme", root.dataset.theme);
    recolor();
  }
  const chosen = remembered("theme");
  if (own && (chosen === "light" || chosen === "dark")) {
    useTheme(chosen);
    context.colors.read();
  }
  function recolor() {
    context.colors.read();
    const before = panel;
    before?.close?.();
    panel = null;
    draw();
  }

  // A view that asks for weights and gets none.
  const failed = (event: PromiseRejectionEvent) => {
    event.preventDefault();
    tellNotice(`Weights could not be loaded: ${(event.reason as Error)?.message ?? event.reason}`);
  };
  function tellNotice(message: string) {
    notice.hidden = false;
    notice.textContent = message;
  }
  context.tell = (message) => {
    spoken.textContent = message;
  };
  context.keysPerCell = scale.keysPerCell;
  context.set = (change, quiet = false) => {
    Object.assign(state, change);
    if (change.layer !== undefined || change.text !== undefined) tidy();
    if (own) {
      const link = toLink(state);
      if (link !== location.hash)
        quiet ? history.replaceState(null, "", link) : history.pushState(null, "", link);
    }
    if (change.text !== undefined && source.titles.length > 1) void load().then(mend);
    else draw();
  };

  // Limit the state of a link to layers, heads and tokens that exist.
  function tidy() {
    const nearest = (at: number, size: number) => within(Math.round(at), size);
    const { text } = context;
    state.layer = nearest(state.layer, text.layers.length);
    state.head = nearest(state.head, text.layers[state.layer].heads.length);
    state.query = nearest(state.query, (text.queries ?? text.tokens).length);
    if (!offeredViews(context).includes(state.view)) state.view = START.view;
    state.depth = Math.min(Math.max(-1, Math.round(state.depth)), text.layers.length - 1);
    state.key = Math.min(Math.max(-1, Math.round(state.key)), text.tokens.length - 1);
    if (!SCALES.some(([kind]) => kind === state.scale)) state.scale = START.scale;
  }
  // A text that this page has; the first in place of a typed text that is not kept any more.
  function heldText(wanted: number): number {
    const at = within(Math.round(wanted), source.titles.length);
    return source.titles[at] === undefined ? 0 : at;
  }
  // `link`: the address that led here. What it names and the page does not have is told, and the address is mended.
  async function load(fresh = false, link = "") {
    state.text = heldText(state.text);
    const text = await source.text(state.text);
    if (text !== context.text || fresh) {
      context.text = text;
      drawn = null;
    }
    state.model = text.model ?? "";
    const lacking = link && lackingOf(link, context, offeredViews(context));
    tidy();
    if (own) document.title = `${text.title} · Regard`;
    if (link.length > 1) mend();
    draw();
    if (lacking) tellNotice(lacking);
  }
  function mend() {
    if (own && toLink(state) !== location.hash) history.replaceState(null, "", toLink(state));
  }
  // Show the view of a link. False: it names no view of this page.
  async function follow(link: string): Promise<boolean> {
    const found = fromLink(link);
    const wanted = Math.max(0, Math.round(found?.text ?? 0));
    if (!found || source.titles[wanted] === undefined) return false;
    const text = await source.text(wanted);
    Object.assign(state, START, text.start, found);
    await load();
    if (own && toLink(state) !== location.hash) history.pushState(null, "", toLink(state));
    return true;
  }
  // Another text stays in the view, unless that was only what the last text opened with.
  const openText = (text: number) =>
    void source.text(text).then((found) => {
      const stays = state.view !== opening(context.text).view;
      Object.assign(
        state,
        found.start,
        { text, key: -1, x: -1, y: -1 },
        stays ? { view: state.view } : opening(found),
      );
      context.text = found;
      drawn = null;
      context.set({ text });
    });

  function drawFrame() {
    listedTexts = source.titles.length;
    about.draw();
    tabs.replaceChildren(
      ...viewsWithTab(context).map((view, at) =>
        h(
          "a",
          {
            href: toLink({ ...state, view }),
            "aria-current": view === state.view ? "page" : null,
            title: `${nameOf(view)} (${at + 1})`,
            onclick: inPlace(() => {
              context.set({ view });
            }),
          },
          nameOf(view),
        ),
      ),
    );
    bar.draw();
  }

  function draw() {
    notice.hidden = true;
    figures.update();
    drawPanel();
    const views = viewsWithTab(context);
    tabs.querySelectorAll("a").forEach((tab, at) => {
      tab.href = toLink({ ...state, view: views[at] });
    });
    story.update();
  }
  function drawPanel() {
    const before = drawn;
    drawn = { ...state };
    if (before?.view !== state.view || before.text !== state.text) scale.keysPerCell(1);
    else scale.update();
    if (!panel || before?.view !== state.view) {
      panel?.close?.();
      panel = viewOf(state.view).make(context);
      main.replaceChildren(panel.element);
      main.className = `view view-${state.view}`;
      drawFrame();
      panel.update(null);
      return;
    }
    if (
      !before ||
      before.layer !== state.layer ||
      before.head !== state.head ||
      before.text !== state.text ||
      isWithoutHead(before) !== isWithoutHead(state) ||
      listedTexts !== source.titles.length
    )
      drawFrame();
    panel.update(before);
  }

  function pressed(event: KeyboardEvent) {
    const target = event.composedPath()[0] as HTMLElement;
    if (own && (event.ctrlKey || event.metaKey) && event.key === "p" && viewOf(state.view).figure) {
      event.preventDefault(); // the browser cannot wait for a server, so the page starts the print
      void figures.beforePrint().then(() => print());
    }
    if (event.ctrlKey || event.metaKey || event.altKey || help.open || figures.element.open) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName)) {
      if (event.key === "Escape") target.blur();
      return;
    }
    const used = story.key(event) || panel?.key?.(event) || common(event.key);
    if (used) event.preventDefault();
  }
  function common(key: string): boolean {
    const view = viewsWithTab(context)[Number(key) - 1];
    const act = view ? () => context.set({ view }) : keyActs[key];
    act?.();
    return Boolean(act);
  }
  const turnLayer = (step: number) => {
    const count = context.text.layers.length;
    context.set({ layer: (state.layer + step + count) % count });
  };
  const keyActs: Record<string, () => void> = {
    "[": () => bar.turn(-1),
    "]": () => bar.turn(1),
    "{": () => turnLayer(-1),
    "}": () => turnLayer(1),
    "/": () => {
      context.set({ view: "head" });
      panel?.key?.(new KeyboardEvent("keydown", { key: "/" }));
    },
    f: () => openFigure(),
    p: () => context.set({ pins: withPin(state.pins, place(context)) }),
    r: () => story.record(),
    t: turnTheme,
    "?": showMenu,
  };

  const listen = own ? document : root;
  const followed = async () => {
    const hash = location.hash;
    if (hash === toLink(state)) return; // the second event of one change of the address
    const link = stateOf(hash) ?? opening(await source.text(0));
    const { start } = await source.text(heldText(link.text ?? 0));
    Object.assign(state, START, start, link);
    void load(false, hash);
  };
  const night = matchMedia("(prefers-color-scheme: dark)");
  const closed = new AbortController();
  const until = { signal: closed.signal };
  listen.addEventListener("keydown", pressed as EventListener, until);
  night.addEventListener("change", recolor, until);
  if (!own) root.tabIndex = 0;
  const hash = own ? location.hash : at;
  const link = stateOf(hash);
  Object.assign(state, context.text.start, link ?? opening(context.text));
  if (state.text !== 0)
    Object.assign(state, (await source.text(heldText(state.text))).start, link ?? {});
  await load(true, hash);
  // A view without a figure prints as it is, in the light theme.
  let themeBefore: string | null = null;
  const beforePrint = () => {
    if (
      viewOf(state.view).figure ||
      figures.element.open ||
      root.querySelector(":scope > .story-pages")
    )
      return void figures.beforePrint();
    if (!isDark()) return;
    themeBefore = root.dataset.theme ?? "";
    useTheme("light");
    recolor();
  };
  const afterPrint = () => {
    figures.afterPrint();
    if (themeBefore === null) return;
    useTheme(themeBefore);
    if (!themeBefore)
      for (const each of [root, document.documentElement]) delete each.dataset.theme;
    themeBefore = null;
    recolor();
  };
  if (own) {
    addEventListener("beforeprint", beforePrint, until);
    addEventListener("afterprint", afterPrint, until);
    addEventListener("popstate", followed, until);
    addEventListener("hashchange", followed, until);
    addEventListener("unhandledrejection", failed, until);
  }
  return () => {
    panel?.close?.();
    closed.abort();
    root.replaceChildren();
  };
}
