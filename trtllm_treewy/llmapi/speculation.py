"""Speculation: which drafts, which commit, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .draft_shape import MAX_TREE_NODES, MAX_TREE_WIDTH, count_nodes, parent_depths, widest
from .fields import check_default, check_int, check_one_of, construct, int_tuple, settings_of

if TYPE_CHECKING:
    from ..draft_tree import TreeTopology

OWNER = "MTPDecodingConfig"
StateCommit = Literal["reconstruct", "deferred", "snapshot"]
STATE_COMMITS: tuple[str, ...] = ("reconstruct", "deferred", "snapshot")
TreePolicyName = Literal["static", "dynamic", "auto"]
TREE_POLICIES: tuple[str, ...] = ("static", "dynamic", "auto")
StashKind = Literal["auto", "pseudo_values", "inputs"]
STASHES: tuple[str, ...] = ("auto", "pseudo_values", "inputs")

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
                object.__setattr__(self, name, int_tuple(OWNER, name, getattr(self, name)))
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
            return max(parent_depths(self.draft_tree_parents))
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
            return count_nodes(self.draft_tree_widths) - 1
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
            return widest(self.draft_tree_parents)
        return max(self.draft_tree_widths or (min(1, self.max_depth),))

    def topology(self) -> TreeTopology:
        """The tree of every step; the root alone without drafts.

        Raises:
            ValueError: the tree is dynamic, so that there is no tree of every step.
        """
        from ..draft_tree import TreeTopology

        if self.use_dynamic_tree:
            raise ValueError("a dynamic draft tree has no fixed topology")
        if self.draft_tree_parents is not None:
            return TreeTopology.from_parents(list(self.draft_tree_parents))
        if self.draft_tree_widths is not None:
            return TreeTopology.from_widths(list(self.draft_tree_widths))
        return TreeTopology.chain(self.max_depth)

    def _check_refused(self) -> None:
        for name in (
            "decoding_type",
            "use_relaxed_acceptance_for_thinking",
            "relaxed_topk",
            "relaxed_delta",
            "use_mtp_vanilla",
            "mtp_eagle_one_model",
        ):
            check_default(OWNER, name, getattr(self, name), getattr(MTPDecodingConfig, name))

    def _check_policy(self) -> None:
        """Also makes the tree dynamic where the policy asks for one and no shape is given."""
        check_one_of(OWNER, "acceptance_rule", self.acceptance_rule, ("match", "rejection"))
        policy = self.tree_policy
        if policy is None:
            return
        check_one_of(OWNER, "tree_policy", policy, TREE_POLICIES)
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
        check_one_of(OWNER, "state_commit", self.state_commit, STATE_COMMITS)
        check_int(OWNER, "deferred_history", self.deferred_history, 1)
        check_one_of(OWNER, "stash", self.stash, STASHES)
        check_one_of(OWNER, "stash_dtype", self.stash_dtype, ("float32", "bfloat16"))
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
                check_int(OWNER, name, value, 0, limit)
        if self.dynamic_tree_max_topK is not None:
            check_int(OWNER, "dynamic_tree_max_topK", self.dynamic_tree_max_topK, 1, MAX_TREE_WIDTH)
            if not self.use_dynamic_tree:
                raise ValueError(
                    "MTPDecodingConfig: dynamic_tree_max_topK needs use_dynamic_tree=True"
                )
        for width in self.draft_tree_widths or ():
            check_int(OWNER, "each of draft_tree_widths", width, 1, MAX_TREE_WIDTH)

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
                check_int(OWNER, f"a dynamic tree's {name}", getattr(self, name), 1)

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
    settings = settings_of(obj, "speculative_config", MTPDecodingConfig)
    for key in ("decoding_type", "method"):
        kind = settings.pop(key, "MTP")
        if not isinstance(kind, str) or kind.upper() != "MTP":
            raise ValueError(
                f"speculative_config: {key} must be 'MTP', the only kind in this version, "
                f"got {kind!r}"
            )
    return construct(MTPDecodingConfig, "speculative_config", settings)
