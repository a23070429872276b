// Prints a story: every view on a page of its own, with its sentence.
import type { Context } from "./context";
import type { Story } from "./data";
import { h } from "./dom";
import type { Stage } from "./story";

const [MOST, PAUSE] = [200, 50]; // looks at a view until its weights are there, and milliseconds between them
const [WIDE, TALL] = [680, 930]; // pixels of CSS that a page has beside its margins, A4 as well as Letter

const pause = (time: number) => new Promise((done) => setTimeout(done, time));

async function drawn(page: HTMLElement) {
  for (let look = 0; look < MOST; look++) {
    await pause(PAUSE);
    const waits = page.querySelector("[data-waiting]:not([data-waiting='0'])");
    if (look > 4 && !waits) return;
  }
}

// The views are drawn beside the page, where nobody sees them, and removed after the print.
export async function printStory(context: Context, stage: Stage, story: Story): Promise<void> {
  const pages = h("div", { class: "story-pages", "aria-hidden": "true", inert: true });
  context.root.append(pages);
  const closing: (() => void)[] = [];
  for (const [at, { link, sentence }] of story.steps.entries()) {
    const view = h("div", { class: "regard story-view", "data-theme": "light" });
    const section = h(
      "section",
      {},
      h(
        "p",
        { class: "step", dir: "auto" },
        h("span", { class: "count" }, `${story.title}, ${at + 1} of ${story.steps.length}`),
        " ",
        sentence,
      ),
      view,
    );
    pages.append(section);
    closing.push(await stage.show(view, link));
    await drawn(view);
    const fit = Math.min(WIDE / section.offsetWidth, TALL / section.offsetHeight);
    section.style.setProperty("--fit", fit.toFixed(3));
  }
  addEventListener(
    "afterprint",
    () => {
      closing.forEach((close) => {
        close();
      });
      pages.remove();
    },
    { once: true },
  );
  print();
}
