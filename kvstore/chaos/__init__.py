"""Tries to break the store on real files, devices and processes, and counts what it found: `kvstore chaos`.

A load writes through the public interface and says in a journal, outside of the store, what was promised to it; the
ledger is what follows from that journal; after each blow the store is opened and held against the ledger.
"""
