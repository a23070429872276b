// Records a story: adds the view that is shown, and edits, moves and deletes the views that were added.
import type { Context } from "./context";
import { shortName, type Step, type Story } from "./data";
import { actionButton, cut, fill, h, hint, labelled } from "./dom";
import { download } from "./output";
import { fromLink, toLink } from "./state";
import type { Stage } from "./story";
import { canSavePage, pageWithStory } from "./story_file";

interface Uses extends Stage {
  play(story: Story): void;
  closed(): void;
  print(story: Story): Promise<void>;
}

// The story of these texts that this browser keeps while it is recorded.
function kept(name: string, story?: Story): Story {
  try {
    if (story) localStorage.setItem(name, JSON.stringify(story));
    const found = JSON.parse(localStorage.getItem(name) ?? "null");
    if (typeof found?.title === "string" && Array.isArray(found.steps)) return found;
  } catch {
    /* the browser keeps nothing for this page */
  }
  return story ?? { title: "A story", steps: [] };
}

export function recorder(context: Context, uses: Uses): { element: HTMLElement; update(): void } {
  const name = `regard-story-${context.source.titles[0]}`;
  const story = kept(name);
  const element = h("section", { class: "recorder", "aria-label": "Record a story" });
  let shown = "";

  function change(edit: () => void, redraw = true) {
    edit();
    kept(name, story);
    if (redraw) draw();
  }
  const button = (said: string, does: () => void, more: Record<string, string | boolean> = {}) =>
    actionButton({ onclick: does, ...more }, said);

  function stepRow(step: Step, at: number): HTMLElement {
    const { steps } = story;
    const move = (by: number) =>
      change(() => {
        steps.splice(at, 1);
        steps.splice(at + by, 0, step);
      });
    const sentence = h(
      "textarea",
      {
        rows: 2,
        maxlength: 1000,
        "aria-label": `Sentence of view ${at + 1}`,
        dir: "auto",
        placeholder: "What does this view show?",
        oninput: () =>
          change(() => {
            step.sentence = sentence.value;
          }, false),
      },
      step.sentence,
    );
    return h(
      "li",
      {},
      button(viewName(context, step.link), () => void uses.follow(step.link), {
        class: "line",
        title: "Show this view",
      }),
      sentence,
      h(
        "span",
        { class: "buttons" },
        button("↑", () => move(-1), { disabled: at === 0, "aria-label": `Move view ${at + 1} up` }),
        button("↓", () => move(1), {
          disabled: at + 1 === steps.length,
          "aria-label": `Move view ${at + 1} down`,
        }),
        button("✕", () => change(() => steps.splice(at, 1)), {
          "aria-label": `Delete view ${at + 1}`,
        }),
      ),
    );
  }

  function draw() {
    const { steps } = story;
    const title = h("input", {
      value: story.title,
      maxlength: 80,
      "aria-label": "Title of the story",
      oninput: () =>
        change(() => {
          story.title = title.value;
        }, false),
    });
    fill(
      element,
      hint(
        steps.length
          ? "This browser keeps the story until you delete its views."
          : "Choose a view, add it here, and write a sentence about it. Then choose the next view.",
      ),
      steps.length > 0 && labelled("Title", title),
      h("ol", {}, ...steps.map(stepRow)),
      h(
        "p",
        { class: "buttons" },
        button(
          "Add this view",
          () => change(() => steps.push({ link: toLink(context.state), sentence: "" })),
          { class: "main-button", disabled: steps.length >= 50 },
        ),
        ...(steps.length
          ? [
              button("Play", () => uses.play(story)),
              button(
                "Save story.json",
                () =>
                  download(
                    new Blob([JSON.stringify(story, null, 1)], { type: "application/json" }),
                    "story.json",
                  ),
                { title: "For regard analyze --story and regard view --story" },
              ),
              canSavePage() &&
                button("Save as one page", () => download(pageWithStory(story), "story.html")),
              button("Print", () => void uses.print(story), { title: "One view a page" }),
            ]
          : []),
        button("Close", uses.closed, { class: "quiet" }),
      ),
    );
  }

  return {
    element,
    update() {
      if (shown === "") draw();
      shown = "drawn";
    },
  };
}

// A view in words: its name, and the head or the text.
function viewName({ source, text: { layers } }: Context, link: string): string {
  const found = fromLink(link);
  if (!found) return link;
  const text = source.titles.length > 1 ? `, ${cut(source.titles[found.text ?? 0] ?? "", 24)}` : "";
  const layer = layers[found.layer ?? 0]; // texts of one page have the same layers, but for those of other models
  return `${found.view}${layer ? `, ${shortName(layer, found.head ?? 0)}` : ""}${text}`;
}
