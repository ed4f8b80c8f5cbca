"""Several relays that share one fleet, over NATS: the connection, commands of other relays, and presence."""
