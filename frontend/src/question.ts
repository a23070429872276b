// A question to the model behind the page: one at a time, with a line that tells how it goes.
import type { Context } from "./context";
import { h } from "./dom";

export function questions({ source }: Context) {
  const said = h("p", { class: "notice", role: "status", hidden: true });
  let asking: AbortController | null = null;
  const tell = (message: string) => {
    said.hidden = !message;
    said.textContent = message;
  };
  return {
    said,
    tell,
    isAsking: () => asking !== null,
    stop: () => asking?.abort(),
    // `answered` is told the number of the text that answers; `question` are the other fields of the request.
    async ask(
      text: string,
      waiting: string,
      question: object,
      answered: (text: number) => void | Promise<void>,
    ) {
      if (asking) return;
      asking = new AbortController();
      const { signal } = asking;
      tell(waiting);
      try {
        const number = await source.read!(text, signal, question);
        tell("");
        await answered(number);
      } catch (error) {
        tell(signal.aborted ? "Stopped." : (error as Error).message);
      } finally {
        asking = null;
      }
    },
  };
}
