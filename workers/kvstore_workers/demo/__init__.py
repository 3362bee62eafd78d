"""`kvstore demo`: an agent session over real files on real processes, with and without the store."""
