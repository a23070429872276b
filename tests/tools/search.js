// Answers queries as the site does in a browser: it runs the search worker of the built site.
// node search.js SITE < QUERIES.json, prints {query: [page, ...]}
const fs = require("fs"), path = require("path"), vm = require("vm")

const site = process.argv[2]
const workers = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(workers).find((name) => /^search\..*\.js$/.test(name))
let answer, hear
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => (hear = listener)
globalThis.postMessage = (message) => answer(message.data)
vm.runInThisContext(fs.readFileSync(path.join(workers, worker), "utf8"))

const ask = (type, data) => new Promise((resolve) => ((answer = resolve), hear({ data: { type, data } })))

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))
  await ask(0, { options: { suggest: false }, ...index })
  const pages = {}
  for (const query of JSON.parse(fs.readFileSync(0, "utf8"))) {
    const found = await ask(2, query)
    pages[query] = found.items.map(([first]) => first.location.split("#")[0])
  }
  console.log(JSON.stringify(pages))
}
main()
