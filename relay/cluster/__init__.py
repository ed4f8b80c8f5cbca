"""Several relays that share one fleet, over NATS: commands, frames, presence, certificates, and the ledgers.

part = Cluster(environment, config.cluster, local=router, local_frames=frames, effects=Effects(...), ...)
await part.run()                                        # connects, and connects again
ack = await part.router.run(command)                    # at the relay that holds the node's session
reply = await part.peers.ask(relay, "telemetry_read", body, timeout_s=2.0)
"""
