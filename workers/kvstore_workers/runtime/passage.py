"""One sequence on its way through a worker: it advances, and what is to be kept of it goes to the writer."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as TokenSequence

import torch

from kvstore.prefix.joined import JoinedKeys
from kvstore.prefix.keys import KeyChain
from kvstore_workers.model.model import Logits, Model
from kvstore_workers.runtime.restore import Restored
from kvstore_workers.runtime.writer import StoreRun


class RunKeys:
    """Keys of the whole blocks of one token run: the prompt's, and those of the output as it comes."""

    def __init__(self, root: bytes, tokens: Iterable[int], *, block_tokens: int) -> None:
        self._root = root
        self._chain = KeyChain(root, block_tokens=block_tokens)
        self.keys: list[bytes] = list(self._chain.extend(tokens))

    @property
    def joined(self) -> JoinedKeys:
        """The keys so far, as a lookup takes them."""
        return self._chain.joined

    def extend(self, tokens: Iterable[int]) -> None:
        self.keys += self._chain.extend(tokens)

    def parent(self, index: int) -> bytes:
        """What block `index` names as the one before it."""
        return self.keys[index - 1] if index else self._root


class Passage:
    """Extends a restored sequence and hands finished blocks, and the states and rows that were asked for, to a run.

    `keys` holds the prompt's already and grows with the output. `run` None: nothing is kept.
    """

    def __init__(self, model: Model, restored: Restored, *, keys: RunKeys, run: StoreRun | None) -> None:
        self._model = model
        self._keys = keys
        self._run = run
        self._save = restored.save_states
        self._lineage = restored.report.lineage
        self._prompt_tokens = restored.report.prompt_tokens
        self._block_tokens = model.profile.block_tokens
        self.sequence = restored.sequence
        self._next_block = self.position // self._block_tokens
        self._states: dict[int, bytes] = {}
        self._rows: dict[int, bytes] = {}
        self._saved: dict[int, tuple[bool, bool]] = {}
        if run is not None and restored.report.replayed_tokens and any(self._tiers(self.position)):
            # The replay has just made a state that nobody holds; its block is held.
            self._states[self.position] = self.sequence.state()

    @property
    def position(self) -> int:
        return self.sequence.position

    def extend(self, tokens: TokenSequence[int], *, logits: bool) -> torch.Tensor | None:
        """Advance by `tokens` and hand over what that finished; the last token's logits, if asked for."""
        wanted: Logits = "last" if logits else "none"
        if self._run is None:
            return self._model.extend(self.sequence, tokens, logits=wanted)
        if self.position >= self._prompt_tokens:
            self._keys.extend(tokens)
        result = self._model.extend(self.sequence, tokens, logits=wanted, on_edge=self._at_edge)
        self._hand_over(self._run)
        return result

    def finish(self) -> None:
        """Hand over the state at the output's last edge, if it is to be kept. Nothing is extended after this."""
        save = self._save
        if self._run is None or not (save.output_edge_pool or save.output_edge_ssd):
            return
        last = self.sequence.last_edge_state()
        # Up to the prompt's last usable edge the prompt's own states decide.
        if last is None or last[0] <= (self._prompt_tokens - 1) // self._block_tokens * self._block_tokens:
            return
        edge, state = last
        had_pool, had_ssd = self._saved.get(edge, (False, False))
        to_pool, to_ssd = save.output_edge_pool and not had_pool, save.output_edge_ssd and not had_ssd
        if to_pool or to_ssd:
            self._run.put_state(
                key=self._key(edge),
                position=edge,
                payload=state,
                to_pool=to_pool,
                to_ssd=to_ssd,
                lineage=self._lineage,
            )

    # ---- what is kept ------------------------------------------------------------------------------------------

    def _tiers(self, edge: int) -> tuple[bool, bool]:
        """Whether the state at `edge` goes to the pool, and to SSD."""
        every = self._save.every_tokens
        in_output = every > 0 and edge > self._prompt_tokens and edge % every == 0
        return edge in self._save.pool, edge in self._save.ssd or in_output

    def _at_edge(self, edge: int) -> None:
        """Take what is to be kept while the sequence still has it."""
        if any(self._tiers(edge)):
            self._states[edge] = self.sequence.state_at(edge)
        if self._save.rows:
            rows = self.sequence.rows_payload(edge // self._block_tokens - 1, overlap=self._save.rows_overlap)
            if rows is not None:
                self._rows[edge] = rows

    def _hand_over(self, run: StoreRun) -> None:
        # Nothing leaves before all that it was computed from is here.
        self.sequence.finish_feed()
        rebuilt = self._next_block * self._block_tokens
        if rebuilt in self._states:
            self._put_state(run, rebuilt)
        for index in range(self._next_block, self.position // self._block_tokens):
            edge = (index + 1) * self._block_tokens
            run.put_block(
                key=self._keys.keys[index],
                parent=self._keys.parent(index),
                position=edge,
                payload=self.sequence.block_payload(index),
                lineage=self._lineage,
            )
            if edge in self._states:
                self._put_state(run, edge)
            if edge in self._rows:
                run.put_rows(
                    key=self._key(edge), position=edge, payload=self._rows.pop(edge), lineage=self._lineage
                )
        self._next_block = self.position // self._block_tokens

    def _put_state(self, run: StoreRun, edge: int) -> None:
        to_pool, to_ssd = self._saved[edge] = self._tiers(edge)
        run.put_state(
            key=self._key(edge),
            position=edge,
            payload=self._states.pop(edge),
            to_pool=to_pool,
            to_ssd=to_ssd,
            lineage=self._lineage,
        )

    def _key(self, edge: int) -> bytes:
        return self._keys.keys[edge // self._block_tokens - 1]
