"use strict";
// Makes a passkey, or signs in with one: the only thing that a page here needs a script for.
(() => {
  const button = document.getElementById("passkey");
  const message = document.getElementById("message");
  const makes = button.dataset.do === "invitation";
  // Behind #: neither servers nor previews of the link see it.
  const link = makes ? location.hash.slice(1) : "";

  const bytes = (text) => Uint8Array.from(
    atob(text.replaceAll("-", "+").replaceAll("_", "/")), (char) => char.charCodeAt(0));
  const text = (buffer) => btoa(String.fromCharCode(...new Uint8Array(buffer)))
    .replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

  async function post(path, value) {
    const answer = await fetch(path, {
      method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(value)});
    const body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(body.message || "The relay does not answer: try again.");
    return body;
  }

  async function made(options) {
    const key = options.publicKey;
    key.challenge = bytes(key.challenge);
    key.user.id = bytes(key.user.id);
    for (const known of key.excludeCredentials || []) known.id = bytes(known.id);
    const made = await navigator.credentials.create({publicKey: key});
    return {id: made.id, rawId: text(made.rawId), type: made.type, clientExtensionResults: {}, response: {
      clientDataJSON: text(made.response.clientDataJSON),
      attestationObject: text(made.response.attestationObject)}};
  }

  async function proven(options) {
    const key = options.publicKey;
    key.challenge = bytes(key.challenge);
    const used = await navigator.credentials.get({publicKey: key});
    return {id: used.id, rawId: text(used.rawId), type: used.type, clientExtensionResults: {}, response: {
      clientDataJSON: text(used.response.clientDataJSON),
      authenticatorData: text(used.response.authenticatorData),
      signature: text(used.response.signature),
      userHandle: used.response.userHandle ? text(used.response.userHandle) : null}};
  }

  async function run() {
    if (!window.PublicKeyCredential) throw new Error("This browser has no passkeys: use another, over https.");
    if (makes) {
      const options = await post("/invitation/options", {link});
      await post("/invitation/passkey", {link, credential: await made(options)});
      location.replace("/sign-in");
    } else {
      const options = await post("/sign-in/options", {});
      await post("/sign-in/passkey", {credential: await proven(options)});
      location.reload();
    }
  }

  button.addEventListener("click", async () => {
    button.disabled = true;
    message.textContent = "";
    try {
      await run();
    } catch (error) {
      const known = {NotAllowedError: "It was cancelled, or took too long: try again.",
        InvalidStateError: "This device has a passkey for you already: sign in with it."};
      message.textContent = known[error.name] || error.message;
      button.disabled = false;
    }
  });
})();
