/** The C interface of Weft, as plain C11: every op, and the recipes of KV caches.
 * @file
 *
 * Every op X has two functions. weft_X_scratch_bytes() answers whether the call would work on this stream and how many bytes to
 * lend. weft_X() performs the call. The members of a C struct mean what the members of the C++ struct of the same name mean: the
 * other headers of this folder have their shapes, dtypes and math. Comments here say only where C differs.
 *
 * Structs. A struct that begins with struct_size (set it to sizeof) may grow at its end in later versions. A shorter one, from a
 * caller built with an older header, is accepted, and its missing tail reads as zeros. A longer one than the library knows is
 * refused. All other structs never change. Zero bytes after struct_size mean the defaults: `weft_short_conv_args a = {.struct_size
 * = sizeof a};`. Members without a default say so, and zero is then refused. Optional numbers have a has_ flag; without the flag
 * the number is not read. Flags are 0 or 1. Members called reserved must be 0.
 *
 * Errors. Every function returns a code; WEFT_OK is 0. A weft_status given by the caller (or NULL) receives the op, the argument
 * and a sentence. No exception, signal or message leaves the library, except what its OpenMP runtime does where the system refuses
 * a thread (below). When a code other than WEFT_OK and WEFT_DEVICE_ERROR returns, nothing was written.
 *
 * Threads. Every function may be called from any thread at the same time. The library keeps no state that changes a result. A
 * recipe is immutable once created. Memory that one call writes must not be used by another call until the first is done (cuda:
 * until the queue has reached its end). On the cpu the workers of a call are OpenMP threads: where the system refuses a thread, the
 * OpenMP runtime prints a message and ends the process; a child of fork() must not call with several threads before exec; every
 * thread that calls keeps a team of its own. A stream with threads = 1 has no workers, and none of this applies.
 *
 * Alignment. Tensor data and states are aligned to their element, codes in tiles to 64 bytes, scratch to WEFT_SCRATCH_ALIGNMENT.
 *
 * Stability. Names, values and layouts stay valid for every library with the same WEFT_C_ABI. From 2 on, this header only grows.
 */
#ifndef WEFT_C_H
#define WEFT_C_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#pragma GCC visibility push(default) /* what the shared libraries export */
#endif
#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_C_ABI 2               /**< of this header */
#define WEFT_MAX_RANK 5            /**< the most dimensions of a tensor */
#define WEFT_SCRATCH_ALIGNMENT 256 /**< bytes */

const char* weft_version(void); /**< of the library: "0.2.0" */
int32_t weft_c_abi(void);       /**< of the library: call no other function where it is not WEFT_C_ABI */
/** Every op, struct, member and enum of this header, with offsets and meanings, as JSON (docs/json.md): what `weft ops --schema`
 *  prints, and `weft ops --members` as tables. The text belongs to the library. NULL: the host is out of memory. */
const char* weft_schema(void);

/* ---- results ---- */

/** WEFT_OK or what went wrong: see weft::Code. */
typedef int32_t weft_code;
/** The values of weft_code. */
enum {
  WEFT_OK = 0,
  WEFT_INVALID_ARGUMENT = 1,
  WEFT_UNSUPPORTED = 2,
  WEFT_SCRATCH_TOO_SMALL = 3,
  WEFT_DEVICE_ERROR = 4,
  WEFT_OUT_OF_MEMORY = 5, /**< of the host */
  WEFT_INTERNAL_ERROR = 6 /**< a fault of the library itself */
};

/** What happened. Texts are cut to fit and always terminated. */
typedef struct weft_status {
  size_t struct_size;
  weft_code code;
  char op[60];       /**< "gated_delta_rule_decode" */
  char argument[64]; /**< "states.in", as the member is called below */
  char message[512]; /**< "gated_delta_rule_decode: states.in is [4, 8, 64, 64], wanted [slots, 8, 128, 64]" */
} weft_status;

/* ---- where and in what order ---- */

/** The values of weft::Backend. */
enum { WEFT_BACKEND_CPU = 0, WEFT_BACKEND_REFERENCE = 1, WEFT_BACKEND_CUDA = 2, WEFT_BACKEND_VULKAN = 3 };
/** The values of weft::Isa. */
enum {
  WEFT_ISA_BEST = 0,
  WEFT_ISA_SCALAR = 1,
  WEFT_ISA_AVX2 = 2,
  WEFT_ISA_AVX512 = 3,
  WEFT_ISA_AVX512_VNNI = 4,
  WEFT_ISA_NEON = 5
};
/** The values of weft::Schedule. */
enum { WEFT_SCHEDULE_FASTEST = 0, WEFT_SCHEDULE_INVARIANT = 1 };

/** Where a call computes: see weft::Stream. NULL: the cpu backend with its own choice of threads and instructions. */
typedef struct weft_stream {
  size_t struct_size;
  int32_t backend;
  int32_t device;
  void* queue; /**< cuda: cudaStream_t; vulkan: Recorder::queue() of weft/vulkan.h */
  int32_t threads;
  int32_t isa;
} weft_stream;

/* ---- tensors ---- */

/** The values of weft::DType. */
enum { WEFT_F32 = 0, WEFT_F16 = 1, WEFT_BF16 = 2, WEFT_I32 = 3, WEFT_I64 = 4, WEFT_U8 = 5, WEFT_U32 = 6 };
/** The values of weft::Place. */
enum { WEFT_HOST = 0, WEFT_CUDA = 1, WEFT_VULKAN = 2 };

/** A strided view that owns nothing: see weft::Tensor. Sizes and strides count elements. rank 0: absent. */
typedef struct weft_tensor {
  void* data;
  int64_t sizes[WEFT_MAX_RANK];
  int64_t strides[WEFT_MAX_RANK];
  int32_t rank;
  int32_t dtype;
  int32_t place;
  int32_t device;
} weft_tensor;

/** A dense row-major view of host memory. More than WEFT_MAX_RANK sizes give a rank that every op refuses. */
weft_tensor weft_dense(void* data, int32_t dtype, int32_t rank, const int64_t* sizes);

/** How the tokens of a call belong to sequences: see weft::Sequences. count has no default: one sequence is count = 1. */
typedef struct weft_sequences {
  weft_tensor cu_seqlens; /**< [count + 1] i32 or i64, or absent: T / count tokens each */
  int64_t count;
  int64_t max_tokens; /**< with cu_seqlens */
} weft_sequences;

/** The values of weft::Speed. */
enum { WEFT_SPEED_FAST = 0, WEFT_SPEED_PORTABLE = 1, WEFT_SPEED_SLOW = 2 };

/** What would run for a call: see weft::Choice. Texts are cut to fit and always terminated. */
typedef struct weft_choice {
  size_t struct_size;
  char kernel[128];
  char plan[512];
  int32_t speed;
  int32_t reserved;
} weft_choice;

/** Declares the three functions of an op. scratch may be NULL when 0 bytes are wanted.
 *   weft_X_scratch_bytes(): would the call work on this stream, and how many bytes must the caller lend?
 *   weft_X_choose(): which kernel would run?
 *   weft_X(): performs it. */
#define WEFT_C_OP(name)                                                                                                 \
  weft_code weft_##name##_scratch_bytes(const weft_stream* stream, const weft_##name##_args* args, size_t* bytes,       \
                                        weft_status* status);                                                           \
  weft_code weft_##name##_choose(const weft_stream* stream, const weft_##name##_args* args, weft_choice* choice,        \
                                 weft_status* status);                                                                  \
  weft_code weft_##name(const weft_stream* stream, const weft_##name##_args* args, void* scratch, size_t scratch_bytes, \
                        weft_status* status)

/* ---- weft/delta_preprocess.h ---- */

/** Arguments of weft_delta_gates(): see weft::DeltaGatesArgs. */
typedef struct weft_delta_gates_args {
  size_t struct_size;
  weft_tensor a, b, a_log, dt_bias;
  weft_tensor g, beta; /**< out */
  int32_t double_beta;
  int32_t reserved;
} weft_delta_gates_args;
WEFT_C_OP(delta_gates);

/** The values of weft::Activation. */
enum { WEFT_ACTIVATION_SILU = 0, WEFT_ACTIVATION_NONE = 1 };

/** Arguments of weft_short_conv(): see weft::ShortConvArgs. */
typedef struct weft_short_conv_args {
  size_t struct_size;
  weft_tensor x, weight, bias;
  weft_tensor y; /**< out */
  weft_sequences sequences;
  weft_tensor state_in, state_out; /**< state_out: out */
  weft_tensor state_in_slots, state_out_slots, state_offsets, has_initial;
  int32_t activation;
  int32_t reserved;
} weft_short_conv_args;
WEFT_C_OP(short_conv);

/** Arguments of weft_l2_norm(): see weft::L2NormArgs. */
typedef struct weft_l2_norm_args {
  size_t struct_size;
  weft_tensor x;
  weft_tensor y; /**< out */
  int32_t has_eps;
  float eps; /**< default 1e-6 */
} weft_l2_norm_args;
WEFT_C_OP(l2_norm);

/** The values of weft::Gate. */
enum { WEFT_GATE_SILU = 0, WEFT_GATE_SIGMOID = 1 };

/** Arguments of weft_gated_rms_norm(): see weft::GatedRmsNormArgs. */
typedef struct weft_gated_rms_norm_args {
  size_t struct_size;
  weft_tensor x, z, weight;
  weft_tensor y; /**< out */
  int32_t has_eps;
  float eps; /**< default 1e-6 */
  int32_t gate;
  int32_t reserved;
} weft_gated_rms_norm_args;
WEFT_C_OP(gated_rms_norm);

/* ---- weft/delta_chunk.h: `chunk` has no default ---- */

/** The values of weft::HeadMap. */
enum { WEFT_HEAD_MAP_GROUPED = 0, WEFT_HEAD_MAP_TILED = 1 };

/** Arguments of weft_chunk_cumsum(): see weft::ChunkCumsumArgs. */
typedef struct weft_chunk_cumsum_args {
  size_t struct_size;
  weft_tensor g;
  weft_tensor g_cumsum; /**< out */
  weft_sequences sequences;
  int64_t chunk;
} weft_chunk_cumsum_args;
WEFT_C_OP(chunk_cumsum);

/** Arguments of weft_chunk_kkt(): see weft::ChunkKktArgs. */
typedef struct weft_chunk_kkt_args {
  size_t struct_size;
  weft_tensor k, beta, g_cumsum;
  weft_tensor a; /**< out */
  weft_sequences sequences;
  int64_t chunk;
  int32_t head_map;
  int32_t reserved;
} weft_chunk_kkt_args;
WEFT_C_OP(chunk_kkt);

/** Arguments of weft_chunk_tri_inverse(): see weft::ChunkTriInverseArgs. */
typedef struct weft_chunk_tri_inverse_args {
  size_t struct_size;
  weft_tensor a;
  weft_tensor a_inv; /**< out */
  weft_sequences sequences;
  int64_t chunk;
} weft_chunk_tri_inverse_args;
WEFT_C_OP(chunk_tri_inverse);

/** Arguments of weft_chunk_wu(): see weft::ChunkWuArgs. */
typedef struct weft_chunk_wu_args {
  size_t struct_size;
  weft_tensor k, v, beta, g_cumsum, a_inv;
  weft_tensor w, u; /**< out */
  weft_sequences sequences;
  int64_t chunk;
  int32_t head_map;
  int32_t reserved;
} weft_chunk_wu_args;
WEFT_C_OP(chunk_wu);

/** Arguments of weft_chunk_state(): see weft::ChunkStateArgs. */
typedef struct weft_chunk_state_args {
  size_t struct_size;
  weft_tensor k, w, u, g_cumsum, state_in;
  weft_tensor h, v_new, state_out; /**< out */
  weft_sequences sequences;
  int64_t chunk;
  int32_t head_map;
  int32_t reserved;
} weft_chunk_state_args;
WEFT_C_OP(chunk_state);

/** Arguments of weft_chunk_output(): see weft::ChunkOutputArgs. */
typedef struct weft_chunk_output_args {
  size_t struct_size;
  weft_tensor q, k, v_new, h, g_cumsum;
  weft_tensor o; /**< out */
  weft_sequences sequences;
  int64_t chunk;
  int32_t has_scale;
  float scale; /**< default K^-1/2 */
  int32_t head_map;
  int32_t reserved;
} weft_chunk_output_args;
WEFT_C_OP(chunk_output);

/* ---- weft/gated_delta_rule.h ---- */

/** The values of weft::StateLayout. */
enum { WEFT_STATE_LAYOUT_VK = 0, WEFT_STATE_LAYOUT_KV = 1 };

/** See weft::DeltaGateInputs. */
typedef struct weft_delta_gate_inputs {
  weft_tensor g, alpha, a, a_log, dt_bias, beta, b;
  int32_t double_beta;
  int32_t reserved;
} weft_delta_gate_inputs;

/** See weft::DeltaStates. */
typedef struct weft_delta_states {
  weft_tensor in, out; /**< out: out */
  weft_tensor in_slots, out_slots, has_initial;
  int32_t layout;
  int32_t reserved;
} weft_delta_states;

/** See weft::DeltaRecord. */
typedef struct weft_delta_record {
  weft_tensor k, delta, g;
} weft_delta_record;

/** Arguments of weft_gated_delta_rule_prefill(): see weft::GatedDeltaRulePrefillArgs. */
typedef struct weft_gated_delta_rule_prefill_args {
  size_t struct_size;
  weft_tensor q, k, v;
  weft_delta_gate_inputs gates;
  weft_tensor o; /**< out */
  int32_t has_scale;
  float scale; /**< default K^-1/2 */
  int32_t l2_norm;
  int32_t head_map;
  weft_sequences sequences;
  weft_delta_states states;
  weft_tensor checkpoints; /**< out */
  int64_t checkpoint_every;
  int32_t schedule;
  int32_t reserved;
} weft_gated_delta_rule_prefill_args;
WEFT_C_OP(gated_delta_rule_prefill);

/** Arguments of weft_gated_delta_rule_decode(): see weft::GatedDeltaRuleDecodeArgs. */
typedef struct weft_gated_delta_rule_decode_args {
  size_t struct_size;
  weft_tensor q, k, v;
  weft_delta_gate_inputs gates;
  weft_tensor o; /**< out */
  int32_t has_scale;
  float scale; /**< default K^-1/2 */
  int32_t l2_norm;
  int32_t head_map;
  weft_sequences sequences;
  weft_delta_states states;
  weft_delta_record record; /**< out */
} weft_gated_delta_rule_decode_args;
WEFT_C_OP(gated_delta_rule_decode);

/** Arguments of weft_gated_delta_rule_replay(): see weft::GatedDeltaRuleReplayArgs. */
typedef struct weft_gated_delta_rule_replay_args {
  size_t struct_size;
  weft_delta_record record;
  weft_tensor accepted;
  weft_sequences sequences;
  weft_delta_states states;
  int32_t head_map;
  int32_t reserved;
} weft_gated_delta_rule_replay_args;
WEFT_C_OP(gated_delta_rule_replay);

/** Arguments of weft_gated_delta_rule_summarize(): see weft::GatedDeltaRuleSummarizeArgs. */
typedef struct weft_gated_delta_rule_summarize_args {
  size_t struct_size;
  weft_tensor k, v;
  weft_delta_gate_inputs gates;
  weft_sequences sequences;
  weft_tensor p, q; /**< out */
  int32_t l2_norm;
  int32_t head_map;
} weft_gated_delta_rule_summarize_args;
WEFT_C_OP(gated_delta_rule_summarize);

/** Arguments of weft_gated_delta_rule_compose(): see weft::GatedDeltaRuleComposeArgs. */
typedef struct weft_gated_delta_rule_compose_args {
  size_t struct_size;
  weft_tensor p1, q1, p2, q2;
  weft_tensor p, q; /**< out */
} weft_gated_delta_rule_compose_args;
WEFT_C_OP(gated_delta_rule_compose);

/** Arguments of weft_gated_delta_rule_apply(): see weft::GatedDeltaRuleApplyArgs. */
typedef struct weft_gated_delta_rule_apply_args {
  size_t struct_size;
  weft_tensor p, q;
  weft_delta_states states;
} weft_gated_delta_rule_apply_args;
WEFT_C_OP(gated_delta_rule_apply);

/* ---- weft/kv_codec.h ---- */

/** The formats of both sides of a cache under one name. Immutable. Ops copy what they need before they return. */
typedef struct weft_kv_recipe weft_kv_recipe;

/** Arguments of weft_kv_recipe_create(). */
typedef struct weft_kv_recipe_args {
  size_t struct_size;
  const char* name; /**< "4v4", "f16", "aura4v2", ...: see kv_recipe() */
  int64_t k_head_dim, v_head_dim;
  uint64_t seed;
  weft_tensor k_mean, v_mean; /**< [Hk, D] f32, optional; their memory must outlive every op that uses the recipe */
} weft_kv_recipe_args;

/** Makes a recipe. On failure *recipe is NULL. */
weft_code weft_kv_recipe_create(const weft_kv_recipe_args* args, weft_kv_recipe** recipe, weft_status* status);
/** Frees a recipe. */
void weft_kv_recipe_destroy(weft_kv_recipe* recipe); /**< NULL is fine */

/** What a caller needs to allocate one side: see weft::KvSide for the shapes. */
typedef struct weft_kv_side_info {
  int64_t head_dim;
  int64_t code_bytes;  /**< of one row: codes, or elements of a passthrough side */
  int64_t gains;       /**< numbers of one row, 0 for passthrough */
  int64_t gain_bytes;  /**< of one row */
  int64_t tile_bytes;  /**< of 64 tokens in the tiles layout */
  int32_t codes_dtype; /**< WEFT_U8, or the dtype of a passthrough side */
  int32_t gains_dtype;
  int32_t bits; /**< of one number: 2..8, or 16 or 32 for passthrough */
  int32_t passthrough;
} weft_kv_side_info;

/** What weft_kv_recipe_describe() tells of a recipe. */
typedef struct weft_kv_recipe_info {
  size_t struct_size; /**< in: how much the caller has room for */
  char id[64];        /**< "weft1-4v4" */
  weft_kv_side_info k, v;
  int64_t bytes_per_token; /**< K and V of one token and KV head, rows layout */
} weft_kv_recipe_info;
/** Tells what a caller needs to allocate a cache. */
weft_code weft_kv_recipe_describe(const weft_kv_recipe* recipe, weft_kv_recipe_info* info, weft_status* status);

/** The values of weft::KvLayout. */
enum { WEFT_KV_LAYOUT_ROWS = 0, WEFT_KV_LAYOUT_TILES = 1 };
/** The values of weft::TileOrder. */
enum { WEFT_TILE_ORDER_TOKEN_MAJOR = 0, WEFT_TILE_ORDER_LANES = 1 };
/** The values of weft::CacheKind. */
enum { WEFT_CACHE_LINEAR = 0, WEFT_CACHE_RING = 1, WEFT_CACHE_PAGED = 2 };
/** The values of weft::KvDomain. */
enum { WEFT_KV_DOMAIN_ORIGINAL = 0, WEFT_KV_DOMAIN_ROTATED = 1 };
/** Gives the arrangement that the backend of a stream reads fastest: see weft::fastest_arrangement(). In tiles, a capacity is a
 *  multiple of 64 tokens. */
weft_code weft_kv_recipe_arrangement(const weft_kv_recipe* recipe, const weft_stream* stream, int32_t* layout, int32_t* tile_order,
                                     weft_status* status);
/** Which format of a recipe an op takes. */
enum { WEFT_RECIPE_SIDE_K = 0, WEFT_RECIPE_SIDE_V = 1 };

/** See weft::KvSide. The format comes from the recipe of the cache. */
typedef struct weft_kv_side {
  weft_tensor codes, gains;
} weft_kv_side;

/** See weft::KvCache. */
typedef struct weft_kv_cache {
  const weft_kv_recipe* recipe; /**< required */
  weft_kv_side k, v;
  int32_t layout;
  int32_t tile_order;
  int32_t kind;
  int32_t reserved;
  int64_t pinned;
  weft_tensor slots, page_table, lengths;
} weft_kv_cache;

/** Arguments of weft_kv_rotate(): see weft::KvRotateArgs. */
typedef struct weft_kv_rotate_args {
  size_t struct_size;
  weft_tensor x;
  weft_tensor y;                /**< out */
  const weft_kv_recipe* recipe; /**< required; one of its sides is format: */
  int32_t side;                 /**< WEFT_RECIPE_SIDE_K or WEFT_RECIPE_SIDE_V */
  int32_t inverse;
} weft_kv_rotate_args;
WEFT_C_OP(kv_rotate);

/** Arguments of weft_kv_encode(): see weft::KvEncodeArgs. */
typedef struct weft_kv_encode_args {
  size_t struct_size;
  weft_tensor k, v, positions;
  weft_sequences sequences;
  weft_kv_cache cache; /**< out */
} weft_kv_encode_args;
WEFT_C_OP(kv_encode);

/** Arguments of weft_kv_decode(): see weft::KvDecodeArgs. */
typedef struct weft_kv_decode_args {
  size_t struct_size;
  weft_kv_cache cache;
  weft_tensor positions;
  weft_sequences sequences;
  weft_tensor k, v; /**< out */
  int32_t domain;
  int32_t reserved;
} weft_kv_decode_args;
WEFT_C_OP(kv_decode);

/** Arguments of weft_kv_repack(): see weft::KvRepackArgs. */
typedef struct weft_kv_repack_args {
  size_t struct_size;
  weft_kv_cache from;
  weft_kv_cache to; /**< out */
} weft_kv_repack_args;
WEFT_C_OP(kv_repack);

/* ---- weft/compressed_attention.h ---- */

/** The values of weft::PartialLayout. */
enum { WEFT_PARTIAL_LAYOUT_BLOCKS = 0, WEFT_PARTIAL_LAYOUT_INTERLEAVED = 1 };
/** The values of weft::Precision. */
enum { WEFT_PRECISION_EXACT_SCORES = 0, WEFT_PRECISION_FAST = 1 };

/** See weft::AttentionQueries. */
typedef struct weft_attention_queries {
  weft_tensor q, positions;
  weft_sequences sequences;
  int32_t domain;
  int32_t has_scale;
  float scale; /**< default Dk^-1/2 */
  int32_t reserved;
} weft_attention_queries;

/** See weft::AttentionMask. */
typedef struct weft_attention_mask {
  int32_t not_causal; /**< the negation of AttentionMask::causal, so that 0 is the default */
  int32_t has_window;
  int64_t window;
  int32_t has_softcap;
  float softcap;
} weft_attention_mask;

/** See weft::AttentionPartials. */
typedef struct weft_partials {
  int32_t layout;
  int32_t reserved;
  int64_t count;       /**< no default */
  weft_tensor o, m, l; /**< blocks */
  weft_tensor buffer;  /**< interleaved */
} weft_partials;

/** Arguments of weft_attention_scores(): see weft::AttentionScoresArgs. */
typedef struct weft_attention_scores_args {
  size_t struct_size;
  weft_attention_queries queries;
  weft_kv_cache cache;
  weft_attention_mask mask;
  weft_tensor scores; /**< out */
} weft_attention_scores_args;
WEFT_C_OP(attention_scores);

/** Arguments of weft_attention_values(): see weft::AttentionValuesArgs. */
typedef struct weft_attention_values_args {
  size_t struct_size;
  weft_tensor weights;
  weft_sequences sequences;
  weft_kv_cache cache;
  int32_t has_threshold;
  float threshold;
  int32_t domain;
  int32_t reserved;
  weft_tensor o; /**< out */
} weft_attention_values_args;
WEFT_C_OP(attention_values);

/** Arguments of weft_attention_partials(): see weft::AttentionPartialsArgs. */
typedef struct weft_attention_partials_args {
  size_t struct_size;
  weft_attention_queries queries;
  weft_kv_cache cache;
  weft_attention_mask mask;
  int64_t block_tokens;   /**< no default */
  weft_partials partials; /**< out */
} weft_attention_partials_args;
WEFT_C_OP(attention_partials);

/** Arguments of weft_attention_merge(): see weft::AttentionMergeArgs. */
typedef struct weft_attention_merge_args {
  size_t struct_size;
  weft_partials partials;
  const weft_kv_recipe* recipe; /**< required; its V side is v_format */
  int32_t domain;
  int32_t reserved;
  weft_tensor sinks;
  int64_t kv_heads;   /**< no default */
  weft_tensor o, lse; /**< out */
} weft_attention_merge_args;
WEFT_C_OP(attention_merge);

/** Arguments of weft_compressed_attention(): see weft::CompressedAttentionArgs. */
typedef struct weft_compressed_attention_args {
  size_t struct_size;
  weft_attention_queries queries;
  weft_kv_cache cache;
  weft_attention_mask mask;
  weft_tensor sinks;
  int32_t precision;
  int32_t schedule;
  weft_tensor o, lse; /**< out */
} weft_compressed_attention_args;
WEFT_C_OP(compressed_attention);

#undef WEFT_C_OP

#ifdef __cplusplus
}
#endif
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#endif /* WEFT_C_H */
