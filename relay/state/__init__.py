"""What the operator and the relay decide: files of JSON lines, and one table of their kinds.

names = NameLedger(root / NODE_NAMES.path, now_ms)          # a command, or the relay, appends
names.label(node_id, "default", "Greenhouse")
files = {file: file.ledger(root) for file in files_of()} | {NODE_NAMES: names.ledger}
shared = shared_ledgers(files, Merging(now_ms, log))
sharer = Sharer(shared, ...)                                # merges them with other relays'
watcher = Watcher(watched(files, applied), sharing=sharer, ...)   # applies what has changed
"""
