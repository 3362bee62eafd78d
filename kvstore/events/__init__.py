"""KV events: what a store tells routers about the blocks and window states that it holds."""
