// A server on MCP's own SDK, version 1 or 2, over stdio: a tool whose arguments are checked beyond their schema,
// and one that is gone after its first call.
import { z } from "zod";

const old = process.argv[2] === "1";
const { McpServer } = await import(
  old ? "@modelcontextprotocol/sdk/server/mcp.js" : "@modelcontextprotocol/server"
);
const { StdioServerTransport } = await import(
  old ? "@modelcontextprotocol/sdk/server/stdio.js" : "@modelcontextprotocol/server/stdio"
);

const server = new McpServer({ name: "sdk", version: "1" });
const done = { content: [{ type: "text", text: "done" }] };
const even = { n: z.number().refine((n) => n % 2 === 0, "it is odd") };
server.registerTool("even", { inputSchema: old ? even : z.object(even) }, async () => done);
server.registerTool("fails", {}, async () => {
  throw new Error("Unknown tool: another");
});
const once = server.registerTool("once", {}, async () => {
  once.remove();
  return done;
});
await server.connect(new StdioServerTransport());
