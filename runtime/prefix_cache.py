"""Prefix cache of a hybrid model: KV blocks by their tokens, states only where they were saved.

A tree over blocks of `block_size` tokens. Every node keeps its block of the KV cache; some nodes
also have a checkpoint, the recurrent and conv states after their last token. A prompt can start
only from a checkpoint, so every leaf has one, and a hit is the deepest node with one on the
prompt's path.

A state costs as much as thousands of KV rows, so checkpoints are few: at multiples of an interval,
at the last block boundary of a prompt, and where a prompt left a path that others share (the next
one that shares it then finds a state there). Host side only: pages and states are moved by others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Pages(Protocol):
    """What is needed of the KV cache; see `KvCache`."""

    @property
    def free_blocks(self) -> int: ...
    def blocks(self, slot: int) -> tuple[int, ...]: ...
    def refs(self, block: int) -> int: ...
    def hold(self, block: int) -> None: ...
    def drop(self, block: int) -> None: ...
    def drop_all(self) -> None: ...
    def recount(self) -> None: ...


@dataclass(frozen=True)
class CachedPrefix:
    """A sequence's start as the cache has it: `num_tokens` rows in `blocks`, and a state."""

    num_tokens: int
    blocks: tuple[int, ...]
    checkpoint: int


@dataclass(frozen=True)
class Match:
    """What the cache knows of a prompt.

    Attributes:
        prefix: where the prompt can start, None for nowhere.
        num_shared: tokens of the prompt whose blocks are there, with a state or without.
        node: of the prefix.
    """

    prefix: CachedPrefix | None
    num_shared: int
    node: _Node | None = None


@dataclass(eq=False)
class _Node:
    """A block of tokens behind its parent's. `pins` guard the checkpoint while it is read."""

    tokens: tuple[int, ...]
    block: int
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    checkpoint: int | None = None
    pins: int = 0
    last_used: int = 0


class PrefixCache:
    """The tree, who may be evicted, and which checkpoints are free.

    Args:
        pages: the KV cache whose blocks are kept.
        num_checkpoints: checkpoints there is room for.
        block_size: tokens of a block.
        interval: tokens between the checkpoints of a long sequence; a multiple of `block_size`.

    Attributes:
        evictions: checkpoints evicted so far.
    """

    def __init__(self, pages: Pages, num_checkpoints: int, block_size: int, interval: int) -> None:
        if interval < 1 or interval % block_size:
            raise ValueError(
                f"prefix cache: the checkpoint interval must be a multiple of the {block_size} "
                f"tokens of a block, got {interval}"
            )
        if num_checkpoints < 1:
            raise ValueError(f"prefix cache: num_checkpoints must be >= 1, got {num_checkpoints}")
        self.block_size, self.interval = block_size, interval
        self.num_checkpoints = num_checkpoints
        self.evictions = 0
        self._pages = pages
        self._roots: dict[bool, _Node] = {}
        self._clock = 0
        self._free: list[int] = []
        self._num_nodes = 0
        self.clear()

    @property
    def checkpoints_used(self) -> int:
        """Checkpoints that hold a state."""
        return self.num_checkpoints - len(self._free)

    @property
    def blocks_held(self) -> int:
        """KV blocks that the cache keeps."""
        return self._num_nodes

    def clear(self) -> None:
        """Forgets everything and gives every block back."""
        self._pages.drop_all()
        # A sequence without drafts leaves no rows of the MTP module: two trees, by that.
        self._roots = {drafts: _Node((), -1, None) for drafts in (False, True)}
        self._free = list(range(self.num_checkpoints - 1, -1, -1))
        self._num_nodes = 0

    def match(self, token_ids: Sequence[int], drafts: bool) -> Match:
        """The longest start of a prompt; at least its last token is left to run."""
        node, depth, found = self._roots[drafts], 0, None
        for depth, tokens in enumerate(self._split(token_ids, len(token_ids) - 1), start=1):
            child = node.children.get(tokens)
            if child is None:
                depth -= 1
                break
            node = child
            if node.checkpoint is not None:
                found = node
        shared = depth * self.block_size
        if found is None or found.checkpoint is None:
            return Match(None, shared)
        blocks = tuple(self._path_blocks(found))
        prefix = CachedPrefix(len(blocks) * self.block_size, blocks, found.checkpoint)
        return Match(prefix, shared, found)

    def pin(self, match: Match) -> None:
        """Keeps the match from eviction until `unpin`, and counts it as used."""
        if match.node is not None:
            match.node.pins += 1
            self._touch(match.node)

    def unpin(self, match: Match) -> None:
        """Ends `pin`."""
        if match.node is not None:
            match.node.pins -= 1

    def boundaries(self, start: int, num_tokens: int, num_shared: int) -> tuple[int, ...]:
        """Token counts, above `start`, at which a prompt of `num_tokens` is to be saved."""
        block = self.block_size
        wanted = {num_shared, (num_tokens - 1) // block * block}
        wanted.update(range(self.interval, num_tokens, self.interval))
        return tuple(sorted(count for count in wanted if start < count < num_tokens))

    def insert(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        drafts: bool,
        save: Callable[[int], None],
    ) -> bool:
        """Keeps a sequence whose state is that after `token_ids`, whole blocks of them.

        Args:
            token_ids: the tokens, a multiple of the block size.
            blocks: the sequence's blocks.
            drafts: whether the MTP module's rows are there.
            save: copies the state to the checkpoint whose number it is given.

        Returns:
            False where every checkpoint is in use, and nothing is kept.
        """
        keys = list(self._split(token_ids, len(token_ids)))
        node = self._roots[drafts]
        while node.children and len(keys) and (child := node.children.get(keys[0])):
            node, keys = child, keys[1:]
        if not keys and node.checkpoint is not None:
            self._touch(node)
            return True
        node.pins += 1  # room is made for its own child or state
        checkpoint = self._take_checkpoint()
        node.pins -= 1
        if checkpoint is None:
            return False
        try:
            save(checkpoint)
        except BaseException:
            self._free.append(checkpoint)
            raise
        first = len(token_ids) // self.block_size - len(keys)
        for tokens, block in zip(keys, blocks[first:], strict=False):
            self._pages.hold(block)
            child = _Node(tokens, block, node)
            node.children[tokens] = child
            self._num_nodes += 1
            node = child
        node.checkpoint = checkpoint
        self._touch(node)
        return True

    def make_room(self, num_blocks: int) -> bool:
        """Evicts until so many blocks are free; False if there are not enough to evict.

        Nothing is evicted where it would not suffice.
        """
        if self._pages.free_blocks >= num_blocks:
            return True
        if self._pages.free_blocks + self._evictable() < num_blocks:
            return False
        leaves = [self._rank(n) for n in self._nodes() if not n.children and not n.pins]
        heapq.heapify(leaves)
        while self._pages.free_blocks < num_blocks:
            above = self._evict(heapq.heappop(leaves)[-1])
            if above.parent is not None and not above.children and not above.pins:
                heapq.heappush(leaves, self._rank(above))
        return True

    def _rank(self, node: _Node) -> tuple[bool, int, int, _Node]:
        """The first to be evicted first: the least recently used of those that give a block back.

        A leaf that a sequence holds too gives none back itself: those go last.
        """
        return self._pages.refs(node.block) > 1, node.last_used, id(node), node

    def _evictable(self) -> int:
        """Blocks that only the cache holds and that no pinned path needs."""
        pinned: set[int] = set()
        for node in self._nodes():
            if node.pins:
                pinned.update(self._path_blocks(node))
        return sum(
            self._pages.refs(node.block) == 1 and node.block not in pinned for node in self._nodes()
        )

    def _take_checkpoint(self) -> int | None:
        if not self._free:
            saved = [n for n in self._nodes() if n.checkpoint is not None and not n.pins]
            if not saved:
                return None
            self._evict(min(saved, key=lambda node: node.last_used))
        return self._free.pop()

    def _evict(self, node: _Node) -> _Node:
        """Drops a node's state, and then every block that leads to no state; what is left."""
        if node.checkpoint is not None:
            self._free.append(node.checkpoint)
            node.checkpoint = None
            self.evictions += 1
        current = node
        while current.parent is not None and not current.children and not current.pins:
            if current.checkpoint is not None:
                break
            parent = current.parent
            del parent.children[current.tokens]
            self._pages.drop(current.block)
            self._num_nodes -= 1
            current = parent
        return current

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _split(self, token_ids: Sequence[int], end: int) -> Iterator[tuple[int, ...]]:
        """The whole blocks of the first `end` tokens."""
        for start in range(0, end - self.block_size + 1, self.block_size):
            yield tuple(token_ids[start : start + self.block_size])

    def _path_blocks(self, node: _Node) -> list[int]:
        blocks: list[int] = []
        current: _Node | None = node
        while current is not None and current.parent is not None:
            blocks.append(current.block)
            current = current.parent
        return blocks[::-1]

    def _nodes(self) -> Iterator[_Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node
