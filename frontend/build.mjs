// `make page`: bundles src/ into the package, with every file of src/views/ as a view, and src/lecture.ts, and writes the hash of the sources
// into the bundle, which a test checks. The names of the views are static/views.json, for Python.
import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const target = new URL("../src/regard/viewer/static/", import.meta.url);

export function sourcesHash() {
  const hash = createHash("sha256");
  const names = [
    "package.json",
    "package-lock.json",
    ...readdirSync("src", { recursive: true, withFileTypes: true })
      .filter((file) => file.isFile())
      .map((file) => `${file.parentPath}/${file.name}`)
      .sort(),
  ];
  for (const name of names) hash.update(`${name}\n`).update(readFileSync(name));
  return hash.digest("hex");
}

const views = readdirSync("src/views")
  .map((name) => name.replace(/\.ts$/, ""))
  .sort();
const everyView = {
  name: "every-view",
  setup(build) {
    build.onResolve({ filter: /^every-view$/ }, ({ path }) => ({ path, namespace: "views" }));
    build.onLoad({ filter: /.*/, namespace: "views" }, () => ({
      resolveDir: "src",
      contents: [
        'import { register } from "./registry";',
        ...views.map(
          (name) =>
            `import { view as ${name} } from "./views/${name}"; register("${name}", ${name});`,
        ),
      ].join("\n"),
    }));
  },
};

const stamp = `/* Built from frontend/ by make page; sources ${sourcesHash()} */`;
const options = {
  bundle: true,
  minify: true,
  write: false,
  target: "es2022",
  legalComments: "none",
  charset: "utf8",
};
const script = await build({
  ...options,
  entryPoints: ["src/main.ts"],
  format: "esm",
  plugins: [everyView],
});
const lecture = await build({ ...options, entryPoints: ["src/lecture.ts"], format: "esm" });
const style = await build({ ...options, entryPoints: ["src/style.css"] });
for (const [name, made] of [
  ["page.js", script],
  ["lecture.js", lecture],
  ["page.css", style],
])
  writeFileSync(new URL(name, target), `${stamp}\n${made.outputFiles[0].text}`);
writeFileSync(new URL("views.json", target), `${JSON.stringify(views)}\n`);
copyFileSync("src/page.html", new URL("page.html", target));
