"""The KV cache as vLLM's block pool keeps it: references, a prefix cache by hash chain, least-recent eviction.

Freed blocks keep their content until they are handed out again, so a later request may revive them; those that were
never full are handed out first. Block 0 is the
null block and never handed out; usage is therefore counted over `num_blocks - 1`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array


def extend_chain(chain: list[bytes], tokens: "array[int]", *, block_size: int, salt: bytes = b"") -> None:
    """Appends the hashes of the full blocks that `chain` lacks; each hash covers the whole prefix."""
    for index in range(len(chain), len(tokens) // block_size):
        parent = chain[-1] if index else salt
        content = tokens[index * block_size : (index + 1) * block_size].tobytes()
        chain.append(blake2b(parent + b"|" + content, digest_size=12).digest())


class BlockPool:
    """All blocks of one engine. Invariant: a block is either free (zero references) or referenced, never both."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._holders: dict[bytes, dict[int, None]] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks without a reference, cached content or not."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that a request holds."""
        return self.num_blocks - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """The share in use, as the gauge shows it."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def cached_prefix(self, chain: Sequence[bytes], limit: int) -> list[int]:
        """The longest run of cached blocks, at most `limit`, that starts the chain."""
        found: list[int] = []
        for digest in chain[:limit]:
            holders = self._holders.get(digest)
            if not holders:
                break
            found.append(next(iter(holders)))
        return found

    def missing(self, new_blocks: int, hits: Sequence[int] = ()) -> int:
        """How many blocks are lacking to take `hits` and `new_blocks` fresh ones; zero or less when they fit."""
        revived = sum(1 for block in hits if self._references[block] == 0)
        return new_blocks + revived - len(self._free)

    def take(self, new_blocks: int, hits: Sequence[int] = ()) -> list[int]:
        """References `hits` and hands out `new_blocks` more, evicting the least recently freed content."""
        for block in hits:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        taken = list(hits)
        for _ in range(new_blocks):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def remember(self, block: int, digest: bytes) -> None:
        """Makes a full block findable by later requests."""
        if block not in self._hash_of:
            self._hash_of[block] = digest
            self._holders.setdefault(digest, {})[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference each; the tail of a request is evicted before its head.

        A block that nobody can find again is handed out next, before any that holds cached content.
        """
        unfindable: list[int] = []
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._free[block] = None
                else:
                    unfindable.append(block)
        for block in reversed(unfindable):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reset_cache(self) -> None:
        """Forgets all cached content; what is referenced stays allocated."""
        self._hash_of.clear()
        self._holders.clear()

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            holders = self._holders[digest]
            del holders[block]
            if not holders:
                del self._holders[digest]
