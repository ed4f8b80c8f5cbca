"""The MQTT broker that the relay runs for a small fleet: a nats-server as its child process."""
