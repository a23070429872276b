// Guards against drawing the same again.

// A function that is true if its arguments differ from those of the call before.
export function changeDetector(): (...parts: unknown[]) => boolean {
  let before: string | null = null;
  return (...parts) => {
    const now = parts.join();
    const isNew = now !== before;
    before = now;
    return isNew;
  };
}
