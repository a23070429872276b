// What a figure becomes outside of the page: SVG, PNG with its size in it, CSV, and a print of exactly its size.

export const DPI = 300;
export const PT = 72 / 25.4; // points to a millimeter
export type Row = (string | number)[];

const LONGEST = 80; // characters of a file's name, which ends with a whole word
export function fileName(name: string, kind: string): string {
  const whole = name
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "")
    .toLowerCase();
  return `${
    (whole.length > LONGEST
      ? whole
          .slice(0, LONGEST + 1)
          .replace(/-[^-]*$/, "")
          .slice(0, LONGEST)
      : whole) || "figure"
  }.${kind}`;
}

export function download(content: Blob, name: string) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const svgBlob = (text: string) => new Blob([text], { type: "image/svg+xml" });

// The text of an SVG as a PNG of a width and height in pixels, which says how many of them are an inch.
export async function pngBlob(text: string, width: number, height: number): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(width), Math.round(height)];
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  const plain = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
  if (!plain) throw new Error("this figure is too large for a PNG; save it as SVG or PDF.");
  return new Blob([withDensity(new Uint8Array(await plain.arrayBuffer()), DPI)], {
    type: "image/png",
  });
}

// Adds the chunk pHYs, pixels to a meter, after the header of a PNG (33 bytes).
function withDensity(png: Uint8Array, dpi: number): Uint8Array<ArrayBuffer> {
  const chunk = new Uint8Array(21);
  const view = new DataView(chunk.buffer);
  view.setUint32(0, 9);
  chunk.set([112, 72, 89, 115], 4);
  view.setUint32(8, Math.round(dpi / 0.0254));
  view.setUint32(12, Math.round(dpi / 0.0254));
  view.setUint8(16, 1);
  view.setUint32(17, checksum(chunk.subarray(4, 17)));
  const out = new Uint8Array(png.length + chunk.length);
  out.set(png.subarray(0, 33));
  out.set(chunk, 33);
  out.set(png.subarray(33), 54);
  return out;
}

// CRC-32 of a chunk of a PNG.
function checksum(bytes: Uint8Array): number {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

// Nine digits give back every float32 exactly.
export function csvText(rows: Row[]): string {
  const cell = (value: string | number) => {
    const text =
      typeof value === "number"
        ? String(Number.isInteger(value) ? value : +value.toPrecision(9))
        : value;
    return /[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

// A document of one sheet of paper of the size of a figure, in mm. Printed to a file it is a vector PDF with its fonts.
export const printedPage = (svg: string, width: number, height: number, title: string) =>
  `<!doctype html><html><head><meta charset="utf-8"><title>${title.replace(/[&<]/g, (one) =>
    one === "&" ? "&amp;" : "&lt;",
  )}</title><style>@page{size:${width}mm ${height}mm;margin:0}` +
  "html,body{margin:0;background:#fff;print-color-adjust:exact;-webkit-print-color-adjust:exact}" +
  "svg{display:block}</style></head>" +
  `<body>${svg}</body></html>`;

// Print a document that is not the page: from a frame that nobody sees.
export function printDocument(page: string, root: Element, name: string) {
  const frame = document.createElement("iframe");
  frame.className = "printed";
  frame.setAttribute("aria-hidden", "true");
  frame.tabIndex = -1;
  const title = document.title;
  frame.addEventListener("load", () => {
    document.title = name; // browsers propose it as the name of the file
    frame.contentWindow!.addEventListener("afterprint", () => {
      document.title = title;
    });
    frame.contentWindow!.print();
    setTimeout(() => {
      document.title = title;
    }, 1000);
  });
  root.querySelectorAll("iframe.printed").forEach((old) => {
    old.remove();
  });
  frame.srcdoc = page;
  root.append(frame);
}
