// Lets a server that would listen on every interface listen on the loopback address alone.
import net from "node:net";

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (port, ...rest) {
  return listen.call(this, { port: Number(port), host: "127.0.0.1" }, ...rest);
};
