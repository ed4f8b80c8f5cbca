// An OpenID Connect provider by another's hand (npm oidc-provider): node openid_provider.mjs PORT CLIENT_ID SECRET REDIRECT_URI
// Its own development pages ask for a login and for consent; a person's login is the name, and the group before its dash.
import {createServer} from "node:http";
import Provider from "oidc-provider";

const [port, client_id, client_secret, redirect] = process.argv.slice(2);
const issuer = `http://localhost:${port}`;
const provider = new Provider(issuer, {
  clients: [{
    client_id, client_secret, redirect_uris: [redirect], grant_types: ["authorization_code"], response_types: ["code"],
  }],
  claims: {openid: ["sub"], profile: ["preferred_username"], groups: ["groups"], email: ["email", "email_verified"]},
  scopes: ["openid", "profile", "email", "groups"],
  conformIdTokenClaims: false,
  pkce: {required: () => true},
  findAccount: (_context, id) => ({
    accountId: id,
    claims: () => ({sub: id, preferred_username: id, groups: [id.split("-")[0]]}),
  }),
});
createServer(provider.callback()).listen(Number(port), "localhost", () => console.log("listening"));
