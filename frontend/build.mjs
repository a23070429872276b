// `make page`: bundles src/ into the package, and writes the hash of the sources into the bundle, which a test checks.
import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const target = new URL("../src/regard/viewer/static/", import.meta.url);

export function sourcesHash() {
  const hash = createHash("sha256");
  const names = ["package.json", "package-lock.json", ...readdirSync("src").sort().map((name) => `src/${name}`)];
  for (const name of names) hash.update(`${name}\n`).update(readFileSync(name));
  return hash.digest("hex");
}

const stamp = `/* Built from frontend/ by make page; sources ${sourcesHash()} */`;
const options = { bundle: true, minify: true, write: false, target: "es2022", legalComments: "none", charset: "utf8" };
const script = await build({ ...options, entryPoints: ["src/main.ts"], format: "esm" });
const style = await build({ ...options, entryPoints: ["src/style.css"] });
for (const [name, made] of [["page.js", script], ["page.css", style]])
  writeFileSync(new URL(name, target), `${stamp}\n${made.outputFiles[0].text}`);
copyFileSync("src/page.html", new URL("page.html", target));
