// Lets the browser draw and answer keys between the steps of long work.
const SHARE = 12; // milliseconds of work before a pause

export function pauses(): () => Promise<void> {
  let began = performance.now();
  return async () => {
    if (performance.now() - began < SHARE) return;
    await new Promise((done) => setTimeout(done));
    began = performance.now();
  };
}
