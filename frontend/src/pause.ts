// Lets the browser draw and answer keys between the steps of long work.
const [SHARE, AT_ONCE] = [12, 12]; // milliseconds of work before a pause; requests that a server gets at once

export const nextTask = () =>
  new Promise<void>((done) => {
    setTimeout(done);
  });

export function pauses(): () => Promise<void> {
  let began = performance.now();
  return async () => {
    if (performance.now() - began < SHARE) return;
    await nextTask();
    began = performance.now();
  };
}

// Works on a list in parts, with a pause after each part that took long.
export async function inParts<Item, Result>(
  items: Item[],
  work: (item: Item, at: number) => Promise<Result>,
): Promise<Result[]> {
  const pause = pauses();
  const found: Result[] = [];
  for (let first = 0; first < items.length; first += AT_ONCE) {
    const part = items.slice(first, first + AT_ONCE);
    found.push(...(await Promise.all(part.map((item, at) => work(item, first + at)))));
    await pause();
  }
  return found;
}
