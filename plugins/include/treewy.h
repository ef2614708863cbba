/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA kernels of trtllm-treewy behind one plain C interface: raw device pointers, strides in
 * elements, a stream. Used by the torch operators and by the TensorRT plugins alike.
 *
 * Every launcher checks its parameters on the host, launches on the given stream and returns: no
 * allocation, no synchronisation, no exception. It returns TREEWY_OK, or a status whose text
 * treewy_last_error() gives (per thread); then nothing was launched. All of it can be captured in
 * a CUDA graph: what changes from step to step (slots, parents, node counts, accepted nodes) is
 * read on the device, so a captured graph replays over other topologies.
 *
 * Conventions: B rows, N node columns, L layers; HK key heads and HV value heads (value head h uses
 * key head h / (HV / HK)), head dims K and V. `slot` int32 [B], -1 for a padded row: no state
 * is read or written for it and its outputs are zero (its inputs may be read). `parents` int32 [B,
 * N], topological order, root first with parent -1. `num_nodes` int32 [B]; nodes at or beyond it
 * are padding: inert, output zero. State [slots, HV, V, K], K innermost. The innermost dimension of
 * every tensor is contiguous; the other strides are given.
 */
#ifndef TREEWY_H_
#define TREEWY_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TREEWY_API
#else
#define TREEWY_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum treewy_status {
    TREEWY_OK = 0,
    TREEWY_INVALID_ARGUMENT = 1, /* a null pointer, a negative size, a bad stride */
    TREEWY_UNSUPPORTED = 2,      /* a valid request beyond a limit, which the message names */
    TREEWY_CUDA_ERROR = 3        /* the launch failed; the message holds CUDA's own */
} treewy_status;

typedef enum treewy_dtype {
    TREEWY_FLOAT32 = 0,
    TREEWY_BFLOAT16 = 1,
    TREEWY_FLOAT16 = 2
} treewy_dtype;

/* A cudaStream_t, without CUDA's headers. */
typedef void* treewy_stream;

/* Text of the last status other than TREEWY_OK in this thread; never null. */
TREEWY_API const char* treewy_last_error(void);

/* Interface version; a caller checks that it equals TREEWY_VERSION of the header it was built for.
 */
#define TREEWY_VERSION 5
TREEWY_API int32_t treewy_version(void);

/* One batch of draft trees on the device. */
typedef struct treewy_tree {
    int32_t batch;            /* B */
    int32_t max_nodes;        /* N, at most TREEWY_MAX_NODES */
    int64_t num_slots;        /* slots of the pools; a slot outside [-1, num_slots) is skipped */
    const int32_t* slot;      /* [B] */
    const int32_t* parents;   /* [B, N] contiguous */
    const int32_t* num_nodes; /* [B] */
} treewy_tree;

#define TREEWY_MAX_NODES 128

/* ------------------------------------------------------------------ commits (commit*.cu)
 *
 * Accepted nodes and paths: `accepted` int32 [B], tree index of the last accepted node; -1 moves
 * nothing: every bit of the row stays. The path is found by walking the parents. A row that cannot
 * be moved (slot or accepted node out of range, parents that are not in topological order, a path
 * longer than the history) is left alone, and counted once in `errors`, where that is not null.
 * A slot may be in one row only.
 */

/* What tree verification leaves behind for a commit, all layers. */
typedef struct treewy_stash {
    const void* u;        /* pseudo-values [L, B, N, HV, V] in u_dtype */
    const void* k;        /* keys [L, B, N, HK, K] in k_dtype */
    const float* g;       /* each node's own log decay [L, B, N, HV] */
    int64_t u_stride[4];  /* layer, row, node, head; in elements, like all strides */
    int64_t k_stride[4];  /* layer, row, node, head */
    int64_t g_stride[3];  /* layer, row, node */
    int32_t k_dtype;      /* treewy_dtype */
    int32_t k_normalized; /* 0: k is raw and is L2-normalised on the way */
    int32_t u_dtype;      /* TREEWY_FLOAT32, or TREEWY_BFLOAT16 where the state is */
    int32_t reserved;
} treewy_stash;

/* The pools of recurrent state, all layers; each [HV, V, K] is contiguous and 16-byte aligned. */
typedef struct treewy_state_pool {
    void* data;           /* [L, slots, HV, V, K] */
    int64_t layer_stride; /* elements */
    int64_t slot_stride;
    int32_t dtype;       /* TREEWY_FLOAT32 or TREEWY_BFLOAT16 */
    int32_t layers;      /* L */
    int32_t key_heads;   /* HK */
    int32_t value_heads; /* HV, a multiple of HK */
    int32_t key_dim;     /* K, a multiple of 8, at most TREEWY_MAX_HEAD_DIM */
    int32_t value_dim;   /* V, likewise */
} treewy_state_pool;

#define TREEWY_MAX_HEAD_DIM 256

/* Accepted nodes not yet folded into the state (deferred commit), all layers; what lies beyond a
 * slot's length is never used. The inner dimensions of a slot are contiguous.
 *
 * With `folded` and `folding`, both or neither, verification may fold a history into the state that
 * it has read anyway, layer by layer; the commit folds what is left, and only appends where nothing
 * is. Between a fold and that commit the entries are still there, and their length counts them:
 * `folded` says which rows of V hold all of them, so that whoever reads the state leaves these
 * entries out. A byte is of the TREEWY_FOLD_ROWS rows of V that have one writer in any
 * verification, a block, which alone reads it there too; between launches all bytes of a slot's
 * layer are alike. Both begin as zeros, and are zero again for a slot that is given to another
 * sequence. Once given to a verification they go to every call with that history: one without them
 * would count the entries twice. */
typedef struct treewy_history {
    void* u;             /* pseudo-values [L, slots, H, HV, V] in u_dtype */
    void* k;             /* keys [L, slots, H, HK, K] in k_dtype: float32 L2-normalised, 16-bit
                            types raw, as verification took them, and normalised where used */
    float* g;            /* each entry's own log decay [L, slots, H, HV] */
    int32_t* length;     /* [slots], shared by the layers */
    int64_t u_stride[2]; /* layer, slot */
    int64_t k_stride[2]; /* layer, slot */
    int64_t g_stride[2]; /* layer, slot */
    int32_t capacity;    /* H, at least 1; verification takes at most 64 */
    int32_t u_dtype;     /* TREEWY_FLOAT32, or TREEWY_BFLOAT16 where the state is */
    int32_t k_dtype;     /* TREEWY_FLOAT32, or the type of the keys of stash and verification */
    int32_t reserved;
    uint8_t* folded;  /* [L, slots, HV, ceil(V / TREEWY_FOLD_ROWS)], 1 where the state holds all
                         `length` entries already; or null */
    int32_t* folding; /* [slots], 1 where it does anywhere in any layer; or null */
    int64_t folded_stride[2]; /* layer, slot */
} treewy_history;

#define TREEWY_FOLD_ROWS 64

/* How a commit is cut: blocks of 128 threads, and vectors of 16 bytes of the state that a thread
 * holds at once; or whole value heads, whose states stream through shared memory (paths of at most
 * 16 nodes; longer ones go by VECTORS_4). AUTO is the one to take; the states are the same to the
 * bit. */
typedef enum treewy_commit_tile {
    TREEWY_COMMIT_AUTO = 0,
    TREEWY_COMMIT_VECTORS_4 = 1,  /* 8 KiB of state a block */
    TREEWY_COMMIT_VECTORS_8 = 2,  /* 16 KiB */
    TREEWY_COMMIT_VECTORS_16 = 3, /* 32 KiB */
    TREEWY_COMMIT_STREAM = 4
} treewy_commit_tile;

typedef struct treewy_commit_params {
    treewy_tree tree;
    treewy_state_pool state;
    treewy_stash stash;
    const int32_t* accepted; /* [B] */
    int32_t* errors;         /* rows that could not be moved are added to it; may be null */
    int32_t tile;            /* treewy_commit_tile */
    int32_t items;           /* tiles of state that a block moves one after the other; 0: auto */
} treewy_commit_params;

/* S_a = exp(G_a) S_0 + sum over i <= a of exp(G_a - G_i) u_i k_i^T, in place, all layers. */
TREEWY_API treewy_status treewy_commit(const treewy_commit_params* params, treewy_stream stream);

typedef struct treewy_commit_deferred_params {
    treewy_commit_params commit;
    treewy_history history;
} treewy_commit_deferred_params;

/* Appends the accepted paths to the histories; a history without room is folded in first, and so is
 * the rest of one that verification has begun to fold. */
TREEWY_API treewy_status treewy_commit_deferred(const treewy_commit_deferred_params* params,
                                                treewy_stream stream);

typedef struct treewy_flush_history_params {
    int32_t batch;
    int32_t reserved;
    int64_t num_slots;
    const int32_t* slot; /* [B] */
    treewy_state_pool state;
    treewy_history history;
    int32_t* errors; /* slots out of range are added to it; may be null */
} treewy_flush_history_params;

/* Folds the histories of the slots into their states, and empties them. */
TREEWY_API treewy_status treewy_flush_history(const treewy_flush_history_params* params,
                                              treewy_stream stream);

/* ---------------------------------------------------- commit from inputs (commit_inputs.cu)
 *
 * The same states from what the projections wrote: the raw conv inputs and gates of the nodes.
 * Conv, norms, gates and pseudo-values of the accepted path are computed again, from the windows as
 * they are before treewy_conv_commit moves them. Channels are [q, k, v]: C = 2 HK K + HV V.
 */
#define TREEWY_MAX_CONV_WIDTH 8

typedef struct treewy_conv_weights {
    const void* weight; /* [C, W] contiguous */
    const void* bias;   /* [C] in the same type, or null */
    int32_t dtype;      /* treewy_dtype of weight and bias */
    int32_t width;      /* W */
} treewy_conv_weights;

/* Threads of a block by vectors of 16 bytes of the state that a thread holds. */
typedef enum treewy_commit_inputs_tile {
    TREEWY_COMMIT_INPUTS_AUTO = 0,
    TREEWY_COMMIT_INPUTS_128_BY_4 = 1,
    TREEWY_COMMIT_INPUTS_128_BY_8 = 2,
    TREEWY_COMMIT_INPUTS_256_BY_4 = 3,
    TREEWY_COMMIT_INPUTS_256_BY_8 = 4
} treewy_commit_inputs_tile;

typedef struct treewy_commit_inputs_params {
    treewy_tree tree;
    treewy_state_pool state;
    treewy_conv_weights weights;  /* of layer 0 */
    const void* x;                /* raw conv inputs [L, B, N, C] in dtype */
    const void* conv_state;       /* [L, slots, W-1, C] in dtype, only read */
    const void* a;                /* raw gates [L, B, N, HV] in gate_dtype */
    const void* b;                /* [L, B, N, HV] */
    const float* A_log;           /* [L, HV] */
    const float* dt_bias;         /* [L, HV] */
    const int32_t* accepted;      /* [B] */
    int32_t* errors;              /* as for treewy_commit; may be null */
    int64_t weight_stride;        /* layer; in elements, like all strides */
    int64_t bias_stride;          /* layer */
    int64_t x_stride[3];          /* layer, row, node */
    int64_t conv_state_stride[3]; /* layer, slot, tap */
    int64_t a_stride[3];          /* layer, row, node */
    int64_t b_stride[3];
    int64_t A_log_stride;   /* layer */
    int64_t dt_bias_stride; /* layer */
    int32_t dtype;          /* treewy_dtype of x and conv_state */
    int32_t gate_dtype;     /* treewy_dtype of a and b */
    int32_t tile;           /* treewy_commit_inputs_tile */
    int32_t items;          /* as for treewy_commit */
} treewy_commit_inputs_params;

/* u_i = beta_i (v_i - alpha_i S_(i-1) k_i) and S_i = alpha_i S_(i-1) + u_i k_i^T along the path. */
TREEWY_API treewy_status treewy_commit_inputs(const treewy_commit_inputs_params* params,
                                              treewy_stream stream);

/* ------------------------------------------------------------------ convolution (tree_conv.cu)
 *
 * C channels, width W in [2, TREEWY_MAX_CONV_WIDTH]; `weight` [C, W] with the node's own tap last.
 * Inputs, outputs and windows have one type; the windows hold raw inputs, oldest first.
 */

typedef struct treewy_tree_conv_params {
    treewy_tree tree;
    treewy_conv_weights weights;
    const void* x;          /* [B, N, C] */
    void* y;                /* [B, N, C]; not x */
    const void* conv_state; /* [slots, W-1, C], one layer */
    int64_t x_stride[2];    /* row, node */
    int64_t y_stride[2];
    int64_t state_stride[2]; /* slot, tap */
    int32_t dtype;           /* treewy_dtype of x, y and conv_state */
    int32_t channels;        /* C */
    void* stash;             /* [B, N, C], gets x of the real nodes of live rows; or null; not x */
    int64_t stash_stride[2]; /* row, node */
} treewy_tree_conv_params;

/* y_t = silu(bias + sum over j of weight[:, j] x at the j-th tap of t's path), for every node. The
 * stash is what commits work from, kept where x passes by. */
TREEWY_API treewy_status treewy_tree_conv(const treewy_tree_conv_params* params,
                                          treewy_stream stream);

typedef struct treewy_conv_commit_params {
    treewy_tree tree;
    const int32_t* accepted; /* [B] */
    int32_t* errors;         /* as for treewy_commit; may be null */
    const void* x;           /* raw inputs [L, B, N, C] */
    void* conv_state;        /* [L, slots, W-1, C], in place */
    int64_t x_stride[3];     /* layer, row, node */
    int64_t state_stride[3]; /* layer, slot, tap */
    int32_t dtype;           /* treewy_dtype of x and conv_state */
    int32_t layers;          /* L */
    int32_t channels;        /* C */
    int32_t width;           /* W */
} treewy_conv_commit_params;

/* New window = the last W-1 raw inputs of (old window, inputs along the accepted path). */
TREEWY_API treewy_status treewy_conv_commit(const treewy_conv_commit_params* params,
                                            treewy_stream stream);

typedef struct treewy_path_conv_params {
    treewy_tree tree;
    treewy_conv_weights weights; /* of layer 0 */
    const int32_t* accepted;     /* [B] */
    const void* x;               /* raw inputs [L, B, N, C] */
    void* y;                     /* [L, B, N, C]; not x */
    const void* conv_state;      /* [L, slots, W-1, C], only read: as before treewy_conv_commit */
    int64_t weight_stride;       /* layer */
    int64_t bias_stride;         /* layer */
    int64_t x_stride[3];         /* layer, row, node */
    int64_t y_stride[3];
    int64_t state_stride[3]; /* layer, slot, tap */
    int32_t dtype;           /* treewy_dtype of x, y and conv_state */
    int32_t layers;          /* L */
    int32_t channels;        /* C */
    int32_t reserved;
} treewy_path_conv_params;

/* treewy_tree_conv at the nodes from the root to the accepted one, all layers; nothing else of y is
 * written. Rows that no commit moves are left alone; the commit counts them. */
TREEWY_API treewy_status treewy_path_conv(const treewy_path_conv_params* params,
                                          treewy_stream stream);

/* Sequences packed one after the other, without padding. */
typedef struct treewy_packed {
    int32_t batch; /* B */
    int32_t reserved;
    int64_t tokens; /* T */
    int64_t num_slots;
    const int32_t* slot;       /* [B]; the outputs of a row with slot -1 are zero */
    const int32_t* cu_seqlens; /* [B + 1], rising from 0 to T */
} treewy_packed;

typedef struct treewy_prefill_conv_params {
    treewy_packed packed;
    treewy_conv_weights weights;
    const void* x;           /* [T, C] */
    void* y;                 /* [T, C]; not x */
    void* conv_state;        /* [slots, W-1, C], one layer, in place */
    int64_t x_stride;        /* token */
    int64_t y_stride;        /* token */
    int64_t state_stride[2]; /* slot, tap */
    int32_t dtype;           /* treewy_dtype of x, y and conv_state */
    int32_t channels;        /* C */
} treewy_prefill_conv_params;

/* The same conv over sequences, from the window in their slots, which ends up at their end. */
TREEWY_API treewy_status treewy_prefill_conv(const treewy_prefill_conv_params* params,
                                             treewy_stream stream);

/* ------------------------------------------------------------------ prefill (prefill.cu) */

typedef struct treewy_prefill_params {
    treewy_packed packed;
    treewy_state_pool state; /* one layer: layers 1, layer_stride unused */
    const void* q;           /* raw projections: [T, HK, K] in dtype */
    const void* k;           /* [T, HK, K] */
    const void* v;           /* [T, HV, V] */
    const void* a;           /* [T, HV] in gate_dtype */
    const void* b;           /* [T, HV] */
    const float* A_log;      /* [HV] */
    const float* dt_bias;    /* [HV] */
    void* out;               /* [T, HV, V] in dtype */
    int64_t q_stride[2];     /* token, head */
    int64_t k_stride[2];
    int64_t v_stride[2];
    int64_t a_stride;      /* token */
    int64_t b_stride;      /* token */
    int64_t out_stride[2]; /* token, head */
    int32_t dtype;         /* treewy_dtype of q, k, v and out */
    int32_t gate_dtype;    /* treewy_dtype of a and b */
} treewy_prefill_params;

/* The gated delta rule over the tokens of every sequence; its state is carried in place. */
TREEWY_API treewy_status treewy_prefill(const treewy_prefill_params* params, treewy_stream stream);

/* ------------------------------------------------------------------ verification (tree_verify.cu)
 *
 * K is 64, 128 or 256; V a multiple of 64, at most 256; N at most TREEWY_MAX_NODES. Where the
 * block's shared memory does not hold a shape (many nodes in float32 on a small GPU),
 * TREEWY_UNSUPPORTED names what it would take.
 */

/* How a block is cut; AUTO is the one that a pure function of shape and GPU picks. */
typedef enum treewy_verify_tile {
    TREEWY_VERIFY_AUTO = 0,
    TREEWY_VERIFY_ROWS_64 = 1, /* 64 rows of V */
    TREEWY_VERIFY_ROWS_128 = 2 /* 128 rows; dtype of 16 bits alone */
} treewy_verify_tile;

typedef struct treewy_tree_verify_params {
    treewy_tree tree;
    treewy_state_pool state; /* S_0, one layer: layers 1, layer_stride unused */
    treewy_history history;  /* what comes after S_0, one layer; length null: nothing */
    const void* q;           /* raw projections: [B, N, HK, K] in dtype */
    const void* k;           /* [B, N, HK, K] */
    const void* v;           /* [B, N, HV, V] */
    const void* a;           /* [B, N, HV] in gate_dtype */
    const void* b;           /* [B, N, HV] */
    const float* A_log;      /* [HV] */
    const float* dt_bias;    /* [HV] */
    void* out;               /* [B, N, HV, V] in dtype */
    void* u;                 /* pseudo-values [B, N, HV, V] in u_dtype; null with g: no stash */
    float* g;                /* each node's own log decay [B, N, HV], or null */
    int64_t q_stride[3];     /* row, node, head; in elements, like all strides */
    int64_t k_stride[3];
    int64_t v_stride[3];
    int64_t a_stride[2]; /* row, node */
    int64_t b_stride[2];
    int64_t out_stride[3];
    int64_t u_stride[3];
    int64_t g_stride[2];
    int32_t dtype;      /* treewy_dtype of q, k, v and out */
    int32_t gate_dtype; /* treewy_dtype of a and b */
    int32_t u_dtype;    /* TREEWY_FLOAT32, or TREEWY_BFLOAT16 where the state is */
    int32_t tile;       /* treewy_verify_tile */
    int32_t fold_above; /* with history.folded: at least 0 */
    int32_t reserved;
} treewy_tree_verify_params;

/* Outputs of all nodes of the trees, and the stash that treewy_commit needs; without u and g the
 * outputs alone, for treewy_commit_inputs.
 *
 * State and history are only read, but for one case: with history.folded, a history of more than
 * fold_above entries is folded into the state, where the kernel can (at most 16 nodes and 32
 * entries, K = 128, aligned 16-bit inputs and keys); others stay for the commit. A slot may then be
 * in one row only: a row of the state has one writer at any time, the block that verified it or the
 * commit behind it. What state and history stand for together does not change, so that the outputs
 * are the same whether it folds or not, and the call may be repeated. */
TREEWY_API treewy_status treewy_tree_verify(const treewy_tree_verify_params* params,
                                            treewy_stream stream);

/* ------------------------------------------------------------------ acceptance (acceptance.cu) */

typedef struct treewy_greedy_accept_params {
    treewy_tree tree;
    const int64_t* target_ids; /* [B, N], the target's token after each node */
    const int64_t* token_ids;  /* [B, N], the drafted tokens */
    int64_t target_stride;     /* row */
    int64_t token_stride;      /* row */
    int32_t max_path;          /* P, at least 1: the longest path accepted */
    int32_t reserved;
    int32_t* accepted;     /* [B], last accepted node, -1 where the row must not move */
    int32_t* num_accepted; /* [B], nodes of the path, the root included */
    int64_t* path;         /* [B, P] contiguous, root first, -1 beyond the path */
    int64_t* bonus_ids;    /* [B], the target's token after the accepted node, or -1 */
} treewy_greedy_accept_params;

/* The deepest node whose every ancestor matches the target's choice; the root always does. */
TREEWY_API treewy_status treewy_greedy_accept(const treewy_greedy_accept_params* params,
                                              treewy_stream stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TREEWY_H_ */
