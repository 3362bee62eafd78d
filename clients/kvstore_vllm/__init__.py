"""A secondary tier for vLLM's native KV offloading that keeps rows of the engine's host pool in this store.

Only `kvstore_vllm.tier` and `kvstore_vllm.compat` import vLLM; all that is decided can be used and tested without it.
"""
