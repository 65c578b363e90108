// Builds src/ into the one module that ships inside the Python package, and the tests into build/ for node's runner.
// The bundle's first line names the sources it was built from, so that a stale one is found without node.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build, transform } from "esbuild";

const MOST = 150_000; // bytes of the bundle
const OUT = "../src/regard/_page/page.js";
const SHARED = ["../src/regard/_walk/examples.json", "../src/regard/_walk/layer.json"]; // words that the command prints too

export function digest() {
  const files = readdirSync("src", { recursive: true }).map((name) => `src/${String(name).replaceAll("\\", "/")}`).filter((name) => /\.(ts|css)$/.test(name));
  const hash = createHash("sha256");
  for (const name of [...files, "build.mjs", "package-lock.json", ...SHARED].sort()) hash.update(`${name}\n`).update(readFileSync(name, "utf8").replaceAll("\r\n", "\n")).update("\0");
  return hash.digest("hex");
}

/** Style sheets are text to the scripts, without the spaces that people read them by. */
const styles = { name: "styles", setup(on) {
  on.onLoad({ filter: /\.css$/ }, async ({ path }) => ({ contents: (await transform(readFileSync(path, "utf8"), { loader: "css", minify: true, target: "es2022" })).code.trim(), loader: "text" }));
} };

if (process.argv[2] === "test") {
  const entryPoints = readdirSync("test").filter((name) => name.endsWith(".test.ts")).map((name) => `test/${name}`);
  await build({ entryPoints, bundle: true, format: "esm", platform: "node", outdir: "build", outExtension: { ".js": ".mjs" }, loader: { ".css": "text" }, logLevel: "warning" });
} else {
  const { outputFiles } = await build({ entryPoints: ["src/main.ts"], bundle: true, minify: true, format: "esm", target: "es2022", charset: "utf8", legalComments: "none", plugins: [styles], write: false, logLevel: "warning" });
  const text = `/* regard page, built from frontend/ ${digest()} */\n${outputFiles[0].text}`;
  if (/<\/script|<!--/i.test(text)) throw new Error("the bundle holds text that would end the script it stands in");
  const size = Buffer.byteLength(text);
  if (size > MOST) throw new Error(`the bundle has ${size} bytes; at most ${MOST} are allowed`);
  writeFileSync(OUT, text);
  console.log(`${OUT}: ${size} bytes`);
}
