// The entry of the one bundle, for a file with embedded maps, for a page from a server, and for a notebook widget.
import { mount } from "./app";
import type { Common } from "./data";
import { Embedded, Live, type Ask, type Source } from "./source";

type Data = Common & { live?: boolean; texts: ConstructorParameters<typeof Embedded>[1] };

const open = async (data: Data, ask: Ask): Promise<Source> =>
  data.live ? Live.open(ask) : new Embedded(data, data.texts);

// Requests to the server, below the address of the page, with its token if it has one.
const fromServer: Ask = async (path, signal, body) => {
  const token = new URLSearchParams(location.search).get("token");
  const address = `ask/${path}${token ? `?token=${encodeURIComponent(token)}` : ""}`;
  const posted = body && {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
  };
  const answer = await fetch(address, { signal, ...posted }).catch((error) => {
    throw signal?.aborted
      ? error
      : new Error("the server does not answer. Start regard view again.");
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.arrayBuffer();
};

// Requests to the kernel of a notebook. A number connects each answer with its request.
interface Model {
  get(name: string): string;
  send(message: object): void;
  on(
    event: string,
    told: (message: { id: number; error?: string } | null, buffers: DataView[]) => void,
  ): void;
}
function fromKernel(model: Model): Ask {
  let count = 0;
  const waiting = new Map<number, [(buffer: ArrayBuffer) => void, (error: Error) => void]>();
  model.on("msg:custom", (message, buffers) => {
    const found = message && waiting.get(message.id);
    if (!found) return;
    waiting.delete(message.id);
    if (message.error) return found[1](new Error(message.error));
    const { buffer, byteOffset, byteLength } = buffers[0];
    found[0]((buffer as ArrayBuffer).slice(byteOffset, byteOffset + byteLength));
  });
  return (path, signal) =>
    new Promise((done, failed) => {
      const id = count++;
      waiting.set(id, [done, failed]);
      signal?.addEventListener("abort", () => {
        waiting.delete(id);
        failed(new Error("stopped"));
      });
      model.send({ id, path });
    });
}

async function start(root: HTMLElement, data: Data, ask: Ask, own: boolean): Promise<() => void> {
  try {
    return await mount(root, await open(data, ask), own);
  } catch (error) {
    root.replaceChildren(
      Object.assign(document.createElement("p"), {
        className: "broken",
        textContent: `This page could not be shown: ${(error as Error).message}`,
      }),
    );
    return () => undefined;
  }
}

export default {
  render({ model, el }: { model: Model; el: HTMLElement }) {
    el.classList.add("regard", "widget");
    const closing = start(el, JSON.parse(model.get("data")), fromKernel(model), false);
    return () => void closing.then((close) => close());
  },
};

const data = document.getElementById("regard-data");
const root = document.getElementById("regard");
if (data && root) void start(root, JSON.parse(data.textContent ?? ""), fromServer, true);
