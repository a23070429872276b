// Story mode, a bar at the bottom of the page while a story plays or is recorded: views with a sentence each.
import { isPhone, type Context } from "./context";
import type { Story } from "./data";
import { actionButton, fill, h } from "./dom";
import { toLink } from "./state";
import { recorder } from "./story_recorder";
import { printStory } from "./story_print";

export interface Stage {
  follow(link: string): Promise<boolean>; // shows the view of a link; false: there is no such view
  show(root: HTMLElement, link: string): Promise<() => void>; // another page with this view, as for printing
}

export function storyBar(context: Context, stage: Stage) {
  const given = context.source.common.story;
  const element = h("footer", { class: "story", "aria-label": "Story", hidden: true });
  if (given) context.tour = { ...given, play: () => play(given) };
  let playing: Story | null = null;
  let at = 0;
  let link = ""; // of the step as the page writes it
  const recording = recorder(context, {
    ...stage,
    play,
    closed: rest,
    print: (story) => printStory(context, stage, story),
  });

  const button = (said: string, does: () => void, more: Record<string, string | boolean> = {}) =>
    actionButton({ onclick: does, ...more }, said);

  function rest() {
    playing = null;
    element.hidden = true;
    element.replaceChildren();
  }
  function record() {
    playing = null;
    element.hidden = false;
    element.className = "story";
    fill(element, recording.element);
    recording.update();
  }
  function play(story: Story) {
    playing = story;
    at = 0;
    element.hidden = false;
    element.className = "story playing";
    fill(element, ...player.parts);
    player.next.focus({ preventScroll: true });
    void go(0);
  }

  async function go(to: number) {
    if (!playing || to < 0 || to >= playing.steps.length) return;
    [at, link] = [to, ""];
    const story = playing;
    player.update();
    const shown = await stage.follow(story.steps[at].link);
    if (story !== playing || at !== to) return;
    if (isPhone(context.root)) context.root.querySelector(".scale")?.scrollIntoView();
    link = shown ? toLink(context.state) : "";
    player.update(shown);
  }

  // The elements stay, so that the keyboard stays on its button.
  function makePlayer() {
    const [count, sentence] = [h("span", { class: "count" }), h("span", {})];
    const back = button("Back", () => void go(at - 1), { title: "Previous view (b)" });
    const next = button(
      "Next",
      () => (playing && at + 1 < playing.steps.length ? void go(at + 1) : rest()),
      { class: "main-button", title: "Next view (n)" },
    );
    const here = button("Return to this view", () => void go(at));
    const print = button("Print", () => void printStory(context, stage, playing!), {
      class: "quiet",
      title: "One view a page",
    });
    const end = button("End", rest, { class: "quiet" });
    const parts = [
      h("p", { class: "step", role: "status", dir: "auto" }, count, " ", sentence),
      h("span", { class: "buttons" }, here, back, next, print, end),
    ];
    return {
      parts,
      next,
      update(shown = true) {
        const { title, steps } = playing!;
        const last = at + 1 === steps.length;
        count.textContent = `${title}, ${at + 1} of ${steps.length}`;
        sentence.textContent = shown
          ? steps[at].sentence
          : `This page has no view ${steps[at].link}. ${steps[at].sentence}`;
        back.disabled = at === 0;
        next.textContent = last ? "End" : "Next";
        end.hidden = last;
        here.hidden = !link || toLink(context.state) === link;
      },
    };
  }

  const player = makePlayer();
  return {
    element,
    record,
    update() {
      if (playing) player.update();
      else if (element.contains(recording.element)) recording.update();
    },
    key({ key }: KeyboardEvent) {
      const step =
        playing && ({ n: 1, PageDown: 1, b: -1, PageUp: -1 } as Record<string, number>)[key];
      if (!step) return false;
      void go(at + step);
      return true;
    },
  };
}
