// Browsers start no worker from a page that was opened as a file. There, and only there, the search runs in a hidden frame
// that behaves as a worker does.
if (location.protocol === "file:") {
  const load = (frame, address) =>
    new Promise((done, failed) => {
      const script = frame.document.createElement("script");
      Object.assign(script, { src: address, onload: done, onerror: failed });
      frame.document.body.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.started = new Promise((done) => (document.readyState === "complete" ? done() : addEventListener("load", done))).then(() => this.start(address));
    }

    async start(address) {
      const holder = document.createElement("iframe");
      holder.hidden = true;
      document.body.append(holder);
      const frame = holder.contentWindow;
      frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.importScripts = (...all) => all.reduce((before, one) => before.then(() => load(frame, one)), Promise.resolve());
      await load(frame, new URL(address, location.href));
      return frame;
    }

    postMessage(data) {
      this.started.then((frame) => frame.dispatchEvent(new frame.MessageEvent("message", { data })));
    }
  };
}
