"""The MQTT broker that the relay runs for a small fleet: a nats-server as its child process.

broker = RelayBroker(supervisor, store, reads_access_files, probe_node)
await broker.start(write_access_files)  # returns when it listens; raises BrokerStartError
await broker.run()  # starts it again whenever it ends
await broker.close()
"""
