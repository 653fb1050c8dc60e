"""PrefixCache: finds the KV blocks of a token prefix that has been computed before.

Owns the digest chain: the digest of a block covers its own tokens and everything before them, and
the salt that says who may share it. Model and proposer are not in it: a cache is of one engine.
Knows nothing of requests or scheduling; blocks and their lifetimes are the pool's. Only full blocks
take part.

Where drafts are made of hidden states, what lies in a slot depends on the tokens behind it too: the
digest then covers so many of them (`lookahead`), and a block is found only by who goes on alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from graphengine.kv.block_pool import BlockPool

_DIGEST_BYTES = 32


class PrefixCache:
    """Content-addressed view of a pool.

    Args:
        pool: where blocks live and digests are kept.
        block_size: tokens per block.
        lookahead: tokens behind a block that what it holds depends on.
    """

    def __init__(self, pool: BlockPool, block_size: int, lookahead: int = 0) -> None:
        self._pool = pool
        self._block_size = block_size
        self._lookahead = lookahead

    def num_full_blocks(self, num_rows: int, num_tokens: int) -> int:
        """Blocks that a digest can be told of: all of their rows and what they depend on."""
        return max(0, min(num_rows, num_tokens - self._lookahead)) // self._block_size

    def extend_digests(
        self,
        digests: list[bytes],
        token_ids: Sequence[int],
        num_blocks: int,
        salt: str | None = None,
    ) -> None:
        """Grows `digests` in place until it covers the first `num_blocks` full blocks.

        `salt` must be the same in every call for one list; None is a salt of its own.
        """
        size, behind = self._block_size, self._lookahead
        assert not num_blocks or num_blocks * size + behind <= len(token_ids), (
            f"{num_blocks} full blocks of {size} asked of {len(token_ids)} tokens"
        )
        for index in range(len(digests), num_blocks):
            parent = digests[index - 1] if index else _root(salt)
            tokens = np.asarray(token_ids[index * size : (index + 1) * size + behind], dtype="<i4")
            digests.append(
                hashlib.blake2b(parent + tokens.tobytes(), digest_size=_DIGEST_BYTES).digest()
            )

    def lookup(
        self, token_ids: Sequence[int], digests: list[bytes], salt: str | None = None
    ) -> list[int]:
        """Blocks of the longest cached chain, in order; takes no reference.

        The last token never counts: it enters through verify, so the chain covers at most
        `len(token_ids) - 1` tokens. `digests` is the caller's memo and grows as needed.
        """
        num_blocks = self.num_full_blocks(len(token_ids) - 1, len(token_ids))
        self.extend_digests(digests, token_ids, num_blocks, salt)
        block_ids: list[int] = []
        for digest in digests[:num_blocks]:
            block_id = self._pool.find(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, block_id: int, digest: bytes) -> bool:
        """Offers a full block of verified KV; the first publisher of a digest wins."""
        return self._pool.publish(block_id, digest)


def _root(salt: str | None) -> bytes:
    """What the digest of a first block stands on."""
    # Personalised, so that no text of a salt gives the digest of a block, or that of no salt.
    person = b"no salt" if salt is None else b"salt"
    data = (salt or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=person).digest()
