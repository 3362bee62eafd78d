"""Tokens to chained block keys. Pure, and the same in every process."""

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.joined import JoinedKeys
from kvstore.prefix.keys import KeyChain, block_keys

__all__ = ["JoinedKeys", "KeyChain", "NamespaceIdentity", "block_keys"]
