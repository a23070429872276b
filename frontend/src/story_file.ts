// The page as one file with another story in its data, for a reader who has only the file.
import type { Story } from "./data";

// A page from a server, or a notebook, has no maps inside.
export const canSavePage = (): boolean => {
  const data = document.getElementById("regard-data")?.textContent;
  return Boolean(data && !JSON.parse(data).live);
};

// JSON without characters that could end the element around it; embed() in page.py does the same.
const embed = (data: unknown) =>
  JSON.stringify(data).replace(
    /[<>&\u2028\u2029]/g,
    (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
const escaped = (text: string) => text.replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);

// The elements of the page as they came, without what the script has drawn since.
function written(element: Element, data: string): string {
  const name = element.localName;
  const attributes = [...element.attributes]
    .map(({ name: key, value }) => ` ${key}="${escaped(value)}"`)
    .join("");
  if (element.id === "regard") return `<div id="regard" class="regard"></div>`;
  const own = element.id === "regard-data" ? data : (element.textContent ?? "");
  const inside =
    name === "script" || name === "style"
      ? own
      : element.children.length
        ? [...element.children].map((child) => written(child, data)).join("\n")
        : escaped(own);
  return name === "meta" || name === "link"
    ? `<${name}${attributes}>`
    : `<${name}${attributes}>${inside}</${name}>`;
}

export function pageWithStory(story: Story): Blob {
  const data = JSON.parse(document.getElementById("regard-data")!.textContent!);
  const parts = [document.head, document.body].map((part) =>
    written(part, embed({ ...data, story })),
  );
  return new Blob([`<!doctype html>\n<html lang="en">\n${parts.join("\n")}\n</html>\n`], {
    type: "text/html",
  });
}
