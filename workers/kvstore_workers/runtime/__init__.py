"""What a worker does with a model and a store, and the gateway in front of the workers."""
