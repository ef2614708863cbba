"""Settings of an `LLM`: speculation and caches, with the names of TensorRT-LLM's LLM API."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from .draft_tree import TreeTopology

StateCommit = Literal["reconstruct", "deferred", "snapshot"]
STATE_COMMITS: tuple[str, ...] = ("reconstruct", "deferred", "snapshot")
TreePolicyName = Literal["static", "dynamic", "auto"]
TREE_POLICIES: tuple[str, ...] = ("static", "dynamic", "auto")
StashKind = Literal["auto", "pseudo_values", "inputs"]
STASHES: tuple[str, ...] = ("auto", "pseudo_values", "inputs")

MAX_TREE_NODES = 128
"""Most nodes of a draft tree, the root among them."""
MAX_TREE_WIDTH = 64
"""Most children of one node."""

DEFAULT_CHAIN = 1
DEFAULT_DYNAMIC_DEPTH = 3
DEFAULT_DYNAMIC_TOP_K = 4
DEFAULT_DYNAMIC_DRAFT_TOKENS = 15


@dataclass(frozen=True, kw_only=True)
class MTPDecodingConfig:
    """Speculation with the model's own MTP module.

    At most one shape of drafts may be given:

    - a chain: `max_draft_len=3` (or `num_nextn_predict_layers=3`, as TensorRT-LLM 1.2 calls it);
    - a static tree by widths: `draft_tree_widths=(3, 3, 3)`: every node of level d has width[d]
      children, 40 nodes with the root;
    - a static tree by parents: `draft_tree_parents=(-1, 0, 0, 1)`, parents before children;
    - a dynamic tree: `use_dynamic_tree=True`, the best `max_total_draft_tokens` drafts of the
      step by the drafter's cumulative log probability, at most `max_draft_len` deep.

    With none of them it is a chain of 1, as in TensorRT-LLM. `draft_tree_widths=()` means no drafts
    at all, and the object only chooses the commit policy: the two settings are independent. The
    fields keep what was given; `kind`, `max_depth`, `num_draft_tokens`, `max_nodes` and `top_k` say
    what follows from it.

    Attributes:
        num_nextn_predict_layers: another name of `max_draft_len` for chains. One MTP layer is
            applied as often as needed, so it may be above the number of layers in the checkpoint.
        max_draft_len: depth of the drafts: a chain's length, a dynamic tree's deepest level (3
            unless given); beside a static tree it must agree with it.
        max_total_draft_tokens: draft tokens a step, the root not among them: a dynamic tree's
            budget (15 unless given); beside another shape it must agree with it.
        draft_tree_widths: children per node, one entry a level.
        draft_tree_parents: parent index of each node, the root first with -1.
        use_dynamic_tree: choose the tree anew at every step.
        dynamic_tree_max_topK: candidates considered below each node of a dynamic tree (4 unless
            given).
        tree_policy: "static" and "dynamic" say again what the shape says, "dynamic" also without
            `use_dynamic_tree`. "auto" takes the shape given (a dynamic tree unless one is) for the
            largest: at every step it drafts as many of its nodes as bring the most tokens a second,
            by the measured time of steps and the recent acceptance, or none.
        acceptance_rule: how drafts are accepted under random sampling, without changing what is
            sampled: "match" draws the target's token and keeps the draft that is the same, so that
            one seed gives one text whatever else runs; "rejection" accepts more, and its text
            depends on the drafts.
        state_commit: how accepted tokens reach the recurrent state: "reconstruct", "deferred" or
            "snapshot".
        deferred_history: accepted tokens a sequence collects before its state is rewritten, under
            "deferred"; raised to the longest path if that is longer. On a GPU steps of one or two
            rows collect none.
        stash: what "reconstruct" computes the accepted state from: "pseudo_values" (a vector per
            node and value head, written by verification), "inputs" (nothing but what the
            projections write; the accepted path is computed again), or "auto": the faster one,
            which so far is pseudo-values.
        simulated_acceptance: draw acceptance from a law instead of the model: entry d is the
            probability that a draft at depth d + 1 is accepted where its parent is. For measuring
            speed without trained weights; the texts mean nothing, and a warning says so.
        stash_dtype: type of the pseudo-values where they are kept: "float32", or "bfloat16" beside
            a bfloat16 state for half of their memory at up to two fifths more rounding error.

    Raises:
        ValueError: a value out of range, two shapes at once, or shapes that contradict a limit.
    """

    num_nextn_predict_layers: int | None = None
    max_draft_len: int | None = None
    max_total_draft_tokens: int | None = None
    draft_tree_widths: tuple[int, ...] | None = None
    draft_tree_parents: tuple[int, ...] | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    tree_policy: TreePolicyName | None = None
    acceptance_rule: Literal["match", "rejection"] = "match"
    state_commit: StateCommit = "reconstruct"
    deferred_history: int = 16
    stash: StashKind = "auto"
    stash_dtype: Literal["float32", "bfloat16"] = "float32"
    simulated_acceptance: tuple[float, ...] | None = None

    # Settings of TensorRT-LLM's class that this version refuses unless they ask for nothing.
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    use_mtp_vanilla: bool = False
    mtp_eagle_one_model: bool = True

    decoding_type: str = "MTP"

    def __post_init__(self) -> None:
        """Turns lists into tuples and checks everything."""
        for name in ("draft_tree_widths", "draft_tree_parents"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _int_tuple(name, getattr(self, name)))
        self._check_refused()
        self._check_policy()
        self._check_commit()
        self._check_law()
        self._check_bounds()
        self._check_one_shape()
        if self.use_dynamic_tree:
            self._check_dynamic()
        else:
            self._check_static()

    @property
    def kind(self) -> Literal["none", "static", "dynamic"]:
        """Whether there are drafts, and whether their tree is the same at every step."""
        if self.use_dynamic_tree:
            return "dynamic"
        return "static" if self.num_draft_tokens else "none"

    @property
    def enabled(self) -> bool:
        """Whether there are drafts at all."""
        return self.kind != "none"

    @property
    def max_depth(self) -> int:
        """Most drafts on one path; 0 without drafts."""
        if self.draft_tree_parents is not None:
            return max(_parent_depths(self.draft_tree_parents))
        if self.draft_tree_widths is not None:
            return len(self.draft_tree_widths)
        given = self.max_draft_len
        if given is None:
            given = self.num_nextn_predict_layers
        if given is None:
            return DEFAULT_DYNAMIC_DEPTH if self.use_dynamic_tree else DEFAULT_CHAIN
        return given

    @property
    def num_draft_tokens(self) -> int:
        """Most draft tokens of a step, the root not among them; 0 without drafts."""
        if self.draft_tree_parents is not None:
            return len(self.draft_tree_parents) - 1
        if self.draft_tree_widths is not None:
            return _count_nodes(self.draft_tree_widths) - 1
        if not self.use_dynamic_tree:
            return self.max_depth
        budget = self.max_total_draft_tokens
        return DEFAULT_DYNAMIC_DRAFT_TOKENS if budget is None else budget

    @property
    def max_nodes(self) -> int:
        """Most nodes of a step's tree, the root among them; 1 without drafts."""
        return 1 + self.num_draft_tokens

    @property
    def top_k(self) -> int:
        """Candidates below each node: the given ones of a dynamic tree, else the widest node."""
        if self.use_dynamic_tree:
            return self.dynamic_tree_max_topK or DEFAULT_DYNAMIC_TOP_K
        if self.draft_tree_parents is not None:
            return _widest(self.draft_tree_parents)
        return max(self.draft_tree_widths or (min(1, self.max_depth),))

    def topology(self) -> TreeTopology:
        """The tree of every step; the root alone without drafts.

        Raises:
            ValueError: the tree is dynamic, so that there is no tree of every step.
        """
        from .draft_tree import TreeTopology

        if self.use_dynamic_tree:
            raise ValueError("a dynamic draft tree has no fixed topology")
        if self.draft_tree_parents is not None:
            return TreeTopology.from_parents(list(self.draft_tree_parents))
        if self.draft_tree_widths is not None:
            return TreeTopology.from_widths(list(self.draft_tree_widths))
        return TreeTopology.chain(self.max_depth)

    def _check_refused(self) -> None:
        if self.decoding_type != "MTP":
            raise _refused(
                "MTPDecodingConfig", "decoding_type", self.decoding_type, "only 'MTP' is"
            )
        for name in (
            "use_relaxed_acceptance_for_thinking",
            "relaxed_topk",
            "relaxed_delta",
            "use_mtp_vanilla",
            "mtp_eagle_one_model",
        ):
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise _refused(
                    "MTPDecodingConfig", name, getattr(self, name), f"only {default!r} is"
                )

    def _check_policy(self) -> None:
        """Also makes the tree dynamic where the policy asks for one and no shape is given."""
        if self.acceptance_rule not in ("match", "rejection"):
            raise ValueError(
                "MTPDecodingConfig: acceptance_rule must be one of match, rejection, got "
                f"{self.acceptance_rule!r}"
            )
        policy = self.tree_policy
        if policy is None:
            return
        if policy not in TREE_POLICIES:
            raise ValueError(
                f"MTPDecodingConfig: tree_policy must be one of {', '.join(TREE_POLICIES)}, got "
                f"{policy!r}"
            )
        if policy == "static" and self.use_dynamic_tree:
            raise ValueError(
                "MTPDecodingConfig: tree_policy='static' contradicts use_dynamic_tree=True"
            )
        fixed = self.draft_tree_widths is not None or self.draft_tree_parents is not None
        chain = self.max_total_draft_tokens is None and (
            self.max_draft_len is not None or self.num_nextn_predict_layers is not None
        )
        if policy == "dynamic" or (policy == "auto" and not (fixed or chain)):
            object.__setattr__(self, "use_dynamic_tree", True)
        if policy == "auto" and not self.enabled:
            raise ValueError("MTPDecodingConfig: tree_policy='auto' needs drafts to choose from")

    def _check_commit(self) -> None:
        if self.state_commit not in STATE_COMMITS:
            raise ValueError(
                f"MTPDecodingConfig: state_commit must be one of {', '.join(STATE_COMMITS)}, "
                f"got {self.state_commit!r}"
            )
        _check_int("deferred_history", self.deferred_history, 1)
        for name, allowed in (("stash", STASHES), ("stash_dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"MTPDecodingConfig: {name} must be one of {', '.join(allowed)}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.stash == "inputs" and self.state_commit != "reconstruct":
            raise ValueError(
                f"MTPDecodingConfig: stash='inputs' needs state_commit='reconstruct', got "
                f"{self.state_commit!r}: the other policies keep more than one step's inputs"
            )

    def _check_law(self) -> None:
        law = self.simulated_acceptance
        if law is None:
            return
        ok = isinstance(law, Iterable) and not isinstance(law, (str, bytes))
        values = tuple(law) if ok else ()
        if not ok or not all(
            isinstance(p, (int, float)) and not isinstance(p, bool) and 0 <= p <= 1 for p in values
        ):
            raise ValueError(
                "MTPDecodingConfig: simulated_acceptance must hold probabilities in [0, 1], got "
                f"{law!r}"
            )
        object.__setattr__(self, "simulated_acceptance", tuple(float(p) for p in values))

    def _check_bounds(self) -> None:
        limit = MAX_TREE_NODES - 1
        for name in ("num_nextn_predict_layers", "max_draft_len", "max_total_draft_tokens"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, limit)
        if self.dynamic_tree_max_topK is not None:
            _check_int("dynamic_tree_max_topK", self.dynamic_tree_max_topK, 1, MAX_TREE_WIDTH)
            if not self.use_dynamic_tree:
                raise ValueError(
                    "MTPDecodingConfig: dynamic_tree_max_topK needs use_dynamic_tree=True"
                )
        for width in self.draft_tree_widths or ():
            _check_int("each of draft_tree_widths", width, 1, MAX_TREE_WIDTH)

    def _check_one_shape(self) -> None:
        shapes = [
            name
            for name in ("draft_tree_widths", "draft_tree_parents", "use_dynamic_tree")
            if getattr(self, name) not in (None, False)
        ]
        if len(shapes) > 1:
            raise ValueError(
                f"MTPDecodingConfig: {' and '.join(shapes)} exclude each other; give one"
            )
        lengths = (self.num_nextn_predict_layers, self.max_draft_len)
        if None not in lengths and lengths[0] != lengths[1]:
            raise ValueError(
                f"MTPDecodingConfig: num_nextn_predict_layers ({lengths[0]}) and max_draft_len "
                f"({lengths[1]}) are two names of one length and must agree"
            )

    def _check_dynamic(self) -> None:
        for name in ("max_draft_len", "num_nextn_predict_layers", "max_total_draft_tokens"):
            if getattr(self, name) is not None:
                _check_int(f"a dynamic tree's {name}", getattr(self, name), 1)

    def _check_static(self) -> None:
        """The limits given beside a fixed shape must be those of the shape."""
        if self.draft_tree_parents is not None:
            shape = f"draft_tree_parents with {len(self.draft_tree_parents)} nodes"
        elif self.draft_tree_widths is not None:
            shape = f"draft_tree_widths={self.draft_tree_widths}"
        else:
            shape = f"a chain of {self.max_depth}"
        for name, actual in (
            ("max_draft_len", self.max_depth),
            ("num_nextn_predict_layers", self.max_depth),
            ("max_total_draft_tokens", self.num_draft_tokens),
        ):
            given = getattr(self, name)
            if given is not None and given != actual:
                raise ValueError(
                    f"MTPDecodingConfig: {name}={given} contradicts {shape}, which makes it "
                    f"{actual}; leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class KvCacheConfig:
    """The caches: the paged KV cache of the attention layers, and the recurrent state's type.

    Attributes:
        max_tokens: tokens the KV cache holds over all sequences; None sizes it for
            `max_batch_size` sequences of the longest length, as far as memory allows.
        free_gpu_memory_fraction: part of the device's free memory (on the CPU, of the machine's)
            that weights, states, caches and steps may take together; 0.9 unless given.
        memory_bytes: the same in bytes; the smaller of both holds.
        enable_block_reuse: prefix caching: a prompt that starts like an earlier one takes its KV
            blocks and a saved recurrent state over, and computes the rest.
        max_checkpoints: recurrent states that the prefix cache keeps; by default as many as memory
            allows, up to two for each sequence of the batch.
        checkpoint_interval: tokens between the states that are kept of a long sequence, a multiple
            of `tokens_per_block` (1024 unless given). One more is kept at the last block boundary
            of every prompt, and one where a prompt leaves what it shares with others.
        tokens_per_block: tokens in one block of the KV cache.
        dtype: type of the KV cache: "auto" (the model's), "float32", "bfloat16" or "float16".
        mamba_ssm_cache_dtype: type of the recurrent state, under TensorRT-LLM's name: "auto" or
            "float32", or "bfloat16" for half the memory at less precision.

    Raises:
        ValueError: a value out of range or not supported in this version.
    """

    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    memory_bytes: int | None = None
    enable_block_reuse: bool = False
    max_checkpoints: int | None = None
    checkpoint_interval: int | None = None
    tokens_per_block: int = 32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    mamba_ssm_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        """Checks everything."""
        owner = "KvCacheConfig"
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, owner=owner)
        _check_int("tokens_per_block", self.tokens_per_block, 1, owner=owner)
        fraction = self.free_gpu_memory_fraction
        if fraction is not None and not (
            isinstance(fraction, (int, float))
            and not isinstance(fraction, bool)
            and 0 < fraction <= 1
        ):
            raise ValueError(
                f"{owner}: free_gpu_memory_fraction must be above 0 and at most 1, got {fraction!r}"
            )
        if self.memory_bytes is not None:
            _check_int("memory_bytes", self.memory_bytes, 1, owner=owner)
        self._check_block_reuse(owner)
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("mamba_ssm_cache_dtype", ("auto", "float32", "bfloat16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{owner}: {name} must be one of {', '.join(allowed)} in this version, "
                    f"got {getattr(self, name)!r}"
                )

    def _check_block_reuse(self, owner: str) -> None:
        if not isinstance(self.enable_block_reuse, bool):
            raise ValueError(
                f"{owner}: enable_block_reuse must be True or False, got "
                f"{self.enable_block_reuse!r}"
            )
        for name in ("max_checkpoints", "checkpoint_interval"):
            value = getattr(self, name)
            if value is None:
                continue
            _check_int(name, value, 1, owner=owner)
            if not self.enable_block_reuse:
                raise ValueError(f"{owner}: {name} needs enable_block_reuse=True")
        interval = self.checkpoint_interval
        if interval is not None and interval % self.tokens_per_block:
            raise ValueError(
                f"{owner}: checkpoint_interval must be a multiple of tokens_per_block "
                f"({self.tokens_per_block}), got {interval}"
            )

    @property
    def state_dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the recurrent state: float32 unless bfloat16 was asked for."""
        return "bfloat16" if self.mamba_ssm_cache_dtype == "bfloat16" else "float32"


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig:
    """Which steps are captured as CUDA graphs; it has no effect where there is no GPU.

    A decoding step is captured for a number of sequences and a number of nodes, and replayed over
    any trees of that shape. Those of the drafter's own trees are captured when the engine starts,
    others when they are first met. Steps that are not captured run all the same, and are counted.

    Prompt steps are captured when the engine starts, for a few numbers of tokens and of sequences,
    and padded to them. Those of more than `max_prompt_tokens` keep a GPU busy uncaptured.

    Attributes:
        batch_sizes: numbers of sequences; by default 1, 2, 4 and then ever wider steps.
        max_batch_size: the largest of them, at most the engine's `max_batch_size`, which it is
            where this is 0.
        enable_padding: fill smaller batches up to the next size, instead of running them
            uncaptured.
        max_prompt_tokens: tokens of the largest prompt step that is captured, at most the engine's
            `max_num_tokens`; 0 captures none.

    Raises:
        ValueError: a value out of range.
    """

    batch_sizes: tuple[int, ...] | None = None
    max_batch_size: int = 0
    enable_padding: bool = True
    max_prompt_tokens: int = 2048

    def __post_init__(self) -> None:
        """Checks everything."""
        owner = "CudaGraphConfig"
        _check_int("max_batch_size", self.max_batch_size, 0, owner=owner)
        _check_int("max_prompt_tokens", self.max_prompt_tokens, 0, owner=owner)
        if not isinstance(self.enable_padding, bool):
            raise ValueError(
                f"{owner}: enable_padding must be True or False, got {self.enable_padding!r}"
            )
        if self.batch_sizes is None:
            return
        sizes = _int_tuple("batch_sizes", self.batch_sizes, owner)
        if not sizes:
            raise ValueError(
                f"{owner}: batch_sizes is empty; leave it out, or set cuda_graph_config=None"
            )
        for size in sizes:
            _check_int("each of batch_sizes", size, 1, owner=owner)
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(sizes))))

    def sizes(self, max_batch_size: int) -> tuple[int, ...]:
        """The batch sizes for an engine of so many sequences, ascending; may be empty."""
        most = min(self.max_batch_size or max_batch_size, max_batch_size)
        if self.batch_sizes is not None:
            return tuple(size for size in self.batch_sizes if size <= most)
        steps = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32)]
        steps += range(256, most, 64)
        return (*(size for size in steps if size < most), most)


def speculation_config_from(
    obj: MTPDecodingConfig | Mapping[str, Any] | None,
) -> MTPDecodingConfig:
    """What `LLM(speculative_config=...)` accepts, as the class; None means no drafts.

    Args:
        obj: the class, a mapping of its fields (with "decoding_type" or "method": "MTP", if
            either is there), or None.

    Raises:
        ValueError: an unknown key, a decoding type other than MTP, or a bad value.
    """
    if obj is None:
        return MTPDecodingConfig(draft_tree_widths=())
    if isinstance(obj, MTPDecodingConfig):
        return obj
    settings = _mapping(obj, "speculative_config", MTPDecodingConfig)
    for key in ("decoding_type", "method"):
        kind = settings.pop(key, "MTP")
        if not isinstance(kind, str) or kind.upper() != "MTP":
            raise ValueError(
                f"speculative_config: {key} must be 'MTP', the only kind in this version, "
                f"got {kind!r}"
            )
    return _construct(MTPDecodingConfig, "speculative_config", settings)


def kv_cache_config_from(obj: KvCacheConfig | Mapping[str, Any] | None) -> KvCacheConfig:
    """What `LLM(kv_cache_config=...)` accepts, as the class; None means the defaults.

    Raises:
        ValueError: an unknown key or a bad value.
    """
    if obj is None:
        return KvCacheConfig()
    if isinstance(obj, KvCacheConfig):
        return obj
    return _construct(
        KvCacheConfig, "kv_cache_config", _mapping(obj, "kv_cache_config", KvCacheConfig)
    )


def cuda_graph_config_from(
    obj: CudaGraphConfig | Mapping[str, Any] | None,
) -> CudaGraphConfig | None:
    """What `LLM(cuda_graph_config=...)` accepts, as the class; None means no graphs.

    Raises:
        ValueError: an unknown key or a bad value.
    """
    if obj is None or isinstance(obj, CudaGraphConfig):
        return obj
    return _construct(
        CudaGraphConfig, "cuda_graph_config", _mapping(obj, "cuda_graph_config", CudaGraphConfig)
    )


_Config = TypeVar("_Config", MTPDecodingConfig, KvCacheConfig, CudaGraphConfig)


def _mapping(obj: object, what: str, cls: type) -> dict[str, Any]:
    if not isinstance(obj, Mapping):
        raise ValueError(
            f"{what} must be a {cls.__name__}, a dict of its fields or None, "
            f"got {type(obj).__name__}"
        )
    return dict(obj)


def _construct(cls: type[_Config], what: str, settings: dict[str, Any]) -> _Config:
    known = [field.name for field in dataclasses.fields(cls)]
    for key in settings:
        if key not in known:
            raise ValueError(f"{what}: unknown key {key!r}; {_suggestion(key, known)}")
    return cls(**settings)


def _suggestion(key: object, known: list[str]) -> str:
    """The closest known name, else all of them."""
    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(key).lower(), lowered, n=1, cutoff=0.6)
    return f"did you mean {lowered[close[0]]!r}?" if close else f"known keys: {', '.join(known)}"


def _count_nodes(widths: tuple[int, ...]) -> int:
    """Nodes of the tree, the root among them; ValueError above the limit."""
    nodes = level = 1
    for width in widths:
        level *= width
        nodes += level
    if nodes > MAX_TREE_NODES:
        raise ValueError(
            f"MTPDecodingConfig: draft_tree_widths={widths} makes {nodes} nodes with the root, "
            f"the limit is {MAX_TREE_NODES}"
        )
    return nodes


def _parent_depths(parents: tuple[int, ...]) -> list[int]:
    """Depth of each node, the root at 0; ValueError unless the list is a tree in order."""
    if not parents or parents[0] != -1:
        raise ValueError(
            "MTPDecodingConfig: draft_tree_parents must start with -1, the root, "
            f"got {list(parents[:4])}"
        )
    if len(parents) > MAX_TREE_NODES:
        raise ValueError(
            f"MTPDecodingConfig: draft_tree_parents has {len(parents)} nodes with the root, the "
            f"limit is {MAX_TREE_NODES}"
        )
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(
                f"MTPDecodingConfig: draft_tree_parents[{node}] is {parent}; a parent comes "
                f"before its child, so it must be in [0, {node})"
            )
        depths.append(depths[parent] + 1)
    if _widest(parents) > MAX_TREE_WIDTH:
        raise ValueError(
            f"MTPDecodingConfig: draft_tree_parents gives a node {_widest(parents)} children, the "
            f"limit is {MAX_TREE_WIDTH}"
        )
    return depths


def _widest(parents: tuple[int, ...]) -> int:
    """Most children of one node."""
    return max(Counter(parents[1:]).values(), default=0)


def _int_tuple(
    name: str, values: Iterable[Any], owner: str = "MTPDecodingConfig"
) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{owner}: {name} must be a list of integers, got {values!r}")
    result = tuple(values)
    for value in result:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{owner}: {name} must hold integers, got {value!r}")
    return result


def _check_int(
    name: str,
    value: object,
    minimum: int,
    maximum: int | None = None,
    owner: str = "MTPDecodingConfig",
) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        bound = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise ValueError(f"{owner}: {name} must be an integer {bound}, got {value!r}")


def _refused(owner: str, name: str, value: object, instead: str) -> ValueError:
    return ValueError(f"{owner}: {name}={value!r} is not supported in this version; {instead}")
