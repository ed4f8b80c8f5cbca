// Takes out of package-lock.json the addresses that npm writes there beside the hashes: the lock names packages,
// versions and hashes, and where to get them is npm's own configuration. Run by `npm run lock`.
import { readFileSync, writeFileSync } from "node:fs";

const path = new URL("package-lock.json", import.meta.url);
const lock = JSON.parse(readFileSync(path, "utf8"));
for (const entry of Object.values(lock.packages)) {
  delete entry.funding;
}
writeFileSync(path, JSON.stringify(lock, null, 2) + "\n");
