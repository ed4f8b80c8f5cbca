// Lists the tools and makes the calls that stdin asks for, through one of the two TypeScript SDKs; prints one JSON
// object. Both clients check structuredContent against the tool's output schema by themselves.
//
//   node call_tools.mjs sdk | client URL ERA      ERA: legacy, or a version to pin (only `client` knows it)
//   EDGE_STDIO: a command, as a JSON array, to be started and spoken to on its stdin and stdout instead of URL
//   stdin: [{"name": …, "arguments": {…}, "spoil": true?}, …]      EDGE_TOKEN: the bearer token
//
// `spoil` renames a member of the answer on its way in, so that a test can see that the client does look.
import { readFileSync } from "node:fs";
import process from "node:process";

import { Ajv } from "ajv";

const [flavour, url, era] = process.argv.slice(2);
const ME = { name: "edge-conformance", version: "1" };

let spoiling = false;

async function spoilingFetch(input, init) {
  const response = await fetch(input, init);
  if (!spoiling || init?.method !== "POST") {
    return response;
  }
  const text = (await response.text()).replaceAll('"received_at_ms"', '"received_at"');
  return new Response(text, { status: response.status, headers: response.headers });
}

// The server as a program that the client starts, or null: `Transport` is the SDK's own for that.
function started(Transport) {
  if (!process.env.EDGE_STDIO) {
    return null;
  }
  const [command, ...args] = JSON.parse(process.env.EDGE_STDIO);
  return new Transport({ command, args, env: { EDGE_TOKEN: process.env.EDGE_TOKEN } });
}

async function connect() {
  const options = {
    fetch: spoilingFetch,
    requestInit: { headers: { Authorization: `Bearer ${process.env.EDGE_TOKEN}` } },
  };
  if (flavour === "sdk") {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const { StdioClientTransport } = await import("@modelcontextprotocol/sdk/client/stdio.js");
    const client = new Client(ME);
    const transport = started(StdioClientTransport) ?? new StreamableHTTPClientTransport(new URL(url), options);
    // Not every transport keeps it, but each is told.
    let version;
    const tell = transport.setProtocolVersion?.bind(transport);
    transport.setProtocolVersion = (negotiated) => {
      version = negotiated;
      tell?.(negotiated);
    };
    await client.connect(transport);
    return { client, version };
  }
  const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
  const { StdioClientTransport } = await import("@modelcontextprotocol/client/stdio");
  const mode = era === "legacy" ? "legacy" : { pin: era };
  const client = new Client(ME, { versionNegotiation: { mode } });
  await client.connect(started(StdioClientTransport) ?? new StreamableHTTPClientTransport(new URL(url), options));
  return { client, version: client.getNegotiatedProtocolVersion() };
}

async function call(client, { name, arguments: given, spoil }) {
  spoiling = spoil === true;
  try {
    return { result: await client.callTool({ name, arguments: given }) };
  } catch (error) {
    return { thrown: `${error.constructor.name}: ${error.message}` };
  } finally {
    spoiling = false;
  }
}

// Compiles the schemas of all tools in one validator, as many clients do, and returns what it refuses.
function refusedByOneValidator(tools) {
  const validator = new Ajv({ strict: true, strictRequired: false, logger: false });
  const refused = [];
  for (const tool of tools) {
    for (const schema of [tool.inputSchema, tool.outputSchema]) {
      try {
        validator.compile(schema);
      } catch (error) {
        refused.push(`${tool.name}: ${error.message}`);
      }
    }
  }
  return refused;
}

const { client, version } = await connect();
const { tools } = await client.listTools();
const outcomes = [];
for (const wanted of JSON.parse(readFileSync(0, "utf8"))) {
  outcomes.push(await call(client, wanted));
}
await client.close();
process.stdout.write(JSON.stringify({ version, tools, outcomes, refused: refusedByOneValidator(tools) }));
