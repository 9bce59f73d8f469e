// Conversions member by member: the one place that knows both the C and the C++ structs.
#include "c/convert.h"

#include <algorithm>
#include <iterator>

#include "core/check.h"

namespace weft::c {

void refuse(const char* op, const char* prefix, const char* argument, const std::string& what) {
  throw Error(fail(Code::invalid_argument, op, std::string(prefix) + argument, what));
}

void check_struct_size(const char* op, const char* prefix, size_t got, size_t known, size_t align) {
  const std::string text = "is " + std::to_string(got);
  if (got < sizeof(size_t) || got % align != 0) refuse(op, prefix, "struct_size", text + ", wanted sizeof the struct");
  if (got > known)
    refuse(op, prefix, "struct_size", text + ", this library knows " + std::to_string(known) + ": it is older than the caller");
}

namespace {

weft_code code_of(Code code) {
  switch (code) {
    case Code::ok: return WEFT_OK;
    case Code::invalid_argument: return WEFT_INVALID_ARGUMENT;
    case Code::unsupported: return WEFT_UNSUPPORTED;
    case Code::scratch_too_small: return WEFT_SCRATCH_TOO_SMALL;
    case Code::device_error: return WEFT_DEVICE_ERROR;
  }
  return WEFT_INTERNAL_ERROR;
}

// dtypes by their C values.
constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64, DType::u8, DType::u32};

// The converters of one call: they know its op, for the sentences, and a prefix for members of nested structs.
class Converter {
 public:
  explicit Converter(const char* op, const char* prefix = "") : op_(op), prefix_(prefix) {}

  Tensor tensor(const char* member, const weft_tensor& from) const { return to_tensor(op_, prefix_, member, from); }
  bool flag(const char* member, int32_t from) const {
    if (from != 0 && from != 1) refuse(op_, prefix_, member, "is " + std::to_string(from) + ", wanted 0 or 1");
    return from == 1;
  }
  void reserved(int32_t from) const {
    if (from != 0) refuse(op_, prefix_, "reserved", "is " + std::to_string(from) + ", wanted 0");
  }
  std::optional<float> optional(const char* has, int32_t given, float value) const {
    return flag(has, given) ? std::optional(value) : std::nullopt;
  }
  // The C value is an index into `values`.
  template <class E, size_t n>
  E choice(const char* member, int32_t from, const E (&values)[n]) const {
    if (from < 0 || static_cast<size_t>(from) >= n)
      refuse(op_, prefix_, member, "is " + std::to_string(from) + ", wanted 0.." + std::to_string(n - 1));
    return values[from];
  }

  Sequences sequences(const weft_sequences& from) const;
  KvDomain domain(int32_t from) const { return choice("domain", from, {KvDomain::original, KvDomain::rotated}); }
  HeadMap head_map(int32_t from) const { return choice("head_map", from, {HeadMap::grouped, HeadMap::tiled}); }
  Schedule schedule(int32_t from) const { return choice("schedule", from, {Schedule::fastest, Schedule::invariant}); }
  DeltaGateInputs gates(const weft_delta_gate_inputs& from) const;
  DeltaStates states(const weft_delta_states& from) const;
  DeltaRecord record(const weft_delta_record& from) const;
  const KvRecipe& recipe(const weft_kv_recipe* from) const {
    if (!from) refuse(op_, prefix_, "recipe", "is null, wanted one from weft_kv_recipe_create()");
    return from->recipe;
  }
  KvCache cache(const char* prefix, const weft_kv_cache& from) const;
  AttentionQueries queries(const weft_attention_queries& from) const;
  AttentionMask mask(const weft_attention_mask& from) const;
  AttentionPartials partials(const weft_attention_partials& from) const;

 private:
  Converter inside(const char* prefix) const { return Converter(op_, prefix); }

  const char* op_;
  const char* prefix_;
};

Sequences Converter::sequences(const weft_sequences& from) const {
  return {tensor("sequences.cu_seqlens", from.cu_seqlens), from.count, from.max_tokens};
}

DeltaGateInputs Converter::gates(const weft_delta_gate_inputs& from) const {
  const Converter in = inside("gates.");
  in.reserved(from.reserved);
  return {in.tensor("g", from.g),         in.tensor("alpha", from.alpha),          in.tensor("a", from.a),
          in.tensor("a_log", from.a_log), in.tensor("dt_bias", from.dt_bias),      in.tensor("beta", from.beta),
          in.tensor("b", from.b),         in.flag("double_beta", from.double_beta)};
}

DeltaStates Converter::states(const weft_delta_states& from) const {
  const Converter in = inside("states.");
  in.reserved(from.reserved);
  return {in.tensor("in", from.in),
          in.tensor("out", from.out),
          in.tensor("in_slots", from.in_slots),
          in.tensor("out_slots", from.out_slots),
          in.tensor("has_initial", from.has_initial),
          in.choice("layout", from.layout, {StateLayout::vk, StateLayout::kv})};
}

DeltaRecord Converter::record(const weft_delta_record& from) const {
  const Converter in = inside("record.");
  return {in.tensor("k", from.k), in.tensor("delta", from.delta), in.tensor("g", from.g)};
}

KvCache Converter::cache(const char* prefix, const weft_kv_cache& from) const {
  const Converter in = inside(prefix);
  in.reserved(from.reserved);
  const KvRecipe& recipe = in.recipe(from.recipe);
  KvCache cache;
  cache.k = {recipe.k, in.tensor("k.codes", from.k.codes), in.tensor("k.gains", from.k.gains)};
  cache.v = {recipe.v, in.tensor("v.codes", from.v.codes), in.tensor("v.gains", from.v.gains)};
  cache.layout = in.choice("layout", from.layout, {KvLayout::rows, KvLayout::tiles});
  cache.tile_order = in.choice("tile_order", from.tile_order, {TileOrder::token_major, TileOrder::lanes});
  cache.kind = in.choice("kind", from.kind, {CacheKind::linear, CacheKind::ring, CacheKind::paged});
  cache.pinned = from.pinned;
  cache.slots = in.tensor("slots", from.slots);
  cache.page_table = in.tensor("page_table", from.page_table);
  cache.lengths = in.tensor("lengths", from.lengths);
  return cache;
}

AttentionQueries Converter::queries(const weft_attention_queries& from) const {
  const Converter in = inside("queries.");
  in.reserved(from.reserved);
  return {in.tensor("q", from.q), in.tensor("positions", from.positions), in.sequences(from.sequences), in.domain(from.domain),
          in.optional("has_scale", from.has_scale, from.scale)};
}

AttentionMask Converter::mask(const weft_attention_mask& from) const {
  const Converter in = inside("mask.");
  AttentionMask mask;
  mask.causal = !in.flag("not_causal", from.not_causal);
  if (in.flag("has_window", from.has_window)) mask.window = from.window;
  mask.softcap = in.optional("has_softcap", from.has_softcap, from.softcap);
  return mask;
}

AttentionPartials Converter::partials(const weft_attention_partials& from) const {
  const Converter in = inside("partials.");
  in.reserved(from.reserved);
  return {in.choice("layout", from.layout, {PartialLayout::blocks, PartialLayout::interleaved}),
          from.count,
          in.tensor("o", from.o),
          in.tensor("m", from.m),
          in.tensor("l", from.l),
          in.tensor("buffer", from.buffer)};
}

}  // namespace

weft_code report(weft_status* status, weft_code code, const char* op, const char* argument, const char* message) noexcept {
  if (!status || status->struct_size <= offsetof(weft_status, op)) return code;
  weft_status full{};
  full.struct_size = status->struct_size;
  full.code = code;
  copy_text(full.op, op);
  copy_text(full.argument, argument);
  copy_text(full.message, message);
  // A caller with an older, shorter struct gets its part, terminated.
  const size_t room = std::min(status->struct_size, sizeof full);
  std::memcpy(status, &full, room);
  reinterpret_cast<char*>(status)[room - 1] = '\0';
  return code;
}

weft_code report(weft_status* status, const Status& fault) noexcept {
  return report(status, code_of(fault.code), fault.op.c_str(), fault.argument.c_str(), fault.message.c_str());
}

int32_t dtype_value(DType dtype) { return static_cast<int32_t>(std::find(std::begin(kTypes), std::end(kTypes), dtype) - kTypes); }

weft_code report_ok(weft_status* status) noexcept { return report(status, WEFT_OK, "", "", ""); }

Tensor to_tensor(const char* op, const char* prefix, const char* member, const weft_tensor& from) {
  if (from.rank < 0 || from.rank > Tensor::kMaxRank)
    refuse(op, prefix, member, "has rank " + std::to_string(from.rank) + ", wanted 0.." + std::to_string(Tensor::kMaxRank));
  if (from.rank == 0) return {};
  if (from.dtype < 0 || static_cast<size_t>(from.dtype) >= std::size(kTypes))
    refuse(op, prefix, member, "has dtype " + std::to_string(from.dtype) + ", wanted 0.." + std::to_string(std::size(kTypes) - 1));
  if (from.place != WEFT_HOST && from.place != WEFT_CUDA)
    refuse(op, prefix, member, "has place " + std::to_string(from.place) + ", wanted WEFT_HOST or WEFT_CUDA");
  if (from.device < 0 || from.device > INT8_MAX)
    refuse(op, prefix, member, "has device " + std::to_string(from.device) + ", wanted 0.." + std::to_string(INT8_MAX));
  Tensor tensor;
  tensor.data = from.data;
  tensor.dtype = kTypes[from.dtype];
  tensor.place = from.place == WEFT_HOST ? Place::host : Place::cuda;
  tensor.device = static_cast<int8_t>(from.device);
  tensor.rank = static_cast<int8_t>(from.rank);
  std::copy(std::begin(from.sizes), std::end(from.sizes), tensor.sizes.begin());
  std::copy(std::begin(from.strides), std::end(from.strides), tensor.strides.begin());
  return tensor;
}

Stream to_stream(const char* op, const weft_stream* from) {
  if (!from) return {};
  const weft_stream stream = full_copy(op, "stream", from);
  const Converter in(op, "stream.");
  return {in.choice("backend", stream.backend, {Backend::cpu, Backend::reference, Backend::cuda}), stream.device, stream.queue,
          stream.threads,
          in.choice("isa", stream.isa, {Isa::best, Isa::scalar, Isa::avx2, Isa::avx512, Isa::avx512_vnni, Isa::neon})};
}

DeltaGatesArgs to_cpp(const weft_delta_gates_args& args) {
  const Converter in("delta_gates");
  in.reserved(args.reserved);
  return {in.tensor("a", args.a),
          in.tensor("b", args.b),
          in.tensor("a_log", args.a_log),
          in.tensor("dt_bias", args.dt_bias),
          in.tensor("g", args.g),
          in.tensor("beta", args.beta),
          in.flag("double_beta", args.double_beta)};
}

ShortConvArgs to_cpp(const weft_short_conv_args& args) {
  const Converter in("short_conv");
  in.reserved(args.reserved);
  ShortConvArgs out;
  out.x = in.tensor("x", args.x);
  out.weight = in.tensor("weight", args.weight);
  out.bias = in.tensor("bias", args.bias);
  out.y = in.tensor("y", args.y);
  out.activation = in.choice("activation", args.activation, {Activation::silu, Activation::none});
  out.sequences = in.sequences(args.sequences);
  out.state_in = in.tensor("state_in", args.state_in);
  out.state_out = in.tensor("state_out", args.state_out);
  out.state_in_slots = in.tensor("state_in_slots", args.state_in_slots);
  out.state_out_slots = in.tensor("state_out_slots", args.state_out_slots);
  out.state_offsets = in.tensor("state_offsets", args.state_offsets);
  out.has_initial = in.tensor("has_initial", args.has_initial);
  return out;
}

GatedRmsNormArgs to_cpp(const weft_gated_rms_norm_args& args) {
  const Converter in("gated_rms_norm");
  in.reserved(args.reserved);
  GatedRmsNormArgs out;
  out.x = in.tensor("x", args.x);
  out.z = in.tensor("z", args.z);
  out.weight = in.tensor("weight", args.weight);
  out.y = in.tensor("y", args.y);
  out.eps = in.optional("has_eps", args.has_eps, args.eps).value_or(out.eps);
  out.gate = in.choice("gate", args.gate, {Gate::silu, Gate::sigmoid});
  return out;
}

GatedDeltaRulePrefillArgs to_cpp(const weft_gated_delta_rule_prefill_args& args) {
  const Converter in("gated_delta_rule_prefill");
  in.reserved(args.reserved);
  GatedDeltaRulePrefillArgs out;
  out.q = in.tensor("q", args.q);
  out.k = in.tensor("k", args.k);
  out.v = in.tensor("v", args.v);
  out.gates = in.gates(args.gates);
  out.o = in.tensor("o", args.o);
  out.scale = in.optional("has_scale", args.has_scale, args.scale);
  out.l2_norm = in.flag("l2_norm", args.l2_norm);
  out.head_map = in.head_map(args.head_map);
  out.sequences = in.sequences(args.sequences);
  out.states = in.states(args.states);
  out.checkpoints = in.tensor("checkpoints", args.checkpoints);
  out.checkpoint_every = args.checkpoint_every;
  out.schedule = in.schedule(args.schedule);
  return out;
}

GatedDeltaRuleDecodeArgs to_cpp(const weft_gated_delta_rule_decode_args& args) {
  const Converter in("gated_delta_rule_decode");
  GatedDeltaRuleDecodeArgs out;
  out.q = in.tensor("q", args.q);
  out.k = in.tensor("k", args.k);
  out.v = in.tensor("v", args.v);
  out.gates = in.gates(args.gates);
  out.o = in.tensor("o", args.o);
  out.scale = in.optional("has_scale", args.has_scale, args.scale);
  out.l2_norm = in.flag("l2_norm", args.l2_norm);
  out.head_map = in.head_map(args.head_map);
  out.sequences = in.sequences(args.sequences);
  out.states = in.states(args.states);
  out.record = in.record(args.record);
  return out;
}

GatedDeltaRuleReplayArgs to_cpp(const weft_gated_delta_rule_replay_args& args) {
  const Converter in("gated_delta_rule_replay");
  in.reserved(args.reserved);
  return {in.record(args.record), in.tensor("accepted", args.accepted), in.head_map(args.head_map), in.sequences(args.sequences),
          in.states(args.states)};
}

KvEncodeArgs to_cpp(const weft_kv_encode_args& args) {
  const Converter in("kv_encode");
  return {in.tensor("k", args.k), in.tensor("v", args.v), in.tensor("positions", args.positions), in.sequences(args.sequences),
          in.cache("cache.", args.cache)};
}

KvDecodeArgs to_cpp(const weft_kv_decode_args& args) {
  const Converter in("kv_decode");
  in.reserved(args.reserved);
  KvDecodeArgs out;
  out.cache = in.cache("cache.", args.cache);
  out.positions = in.tensor("positions", args.positions);
  out.sequences = in.sequences(args.sequences);
  out.domain = in.domain(args.domain);
  out.k = in.tensor("k", args.k);
  out.v = in.tensor("v", args.v);
  return out;
}

KvRepackArgs to_cpp(const weft_kv_repack_args& args) {
  const Converter in("kv_repack");
  return {in.cache("from.", args.from), in.cache("to.", args.to)};
}

AttentionMergeArgs to_cpp(const weft_attention_merge_args& args) {
  const Converter in("attention_merge");
  in.reserved(args.reserved);
  AttentionMergeArgs out;
  out.partials = in.partials(args.partials);
  out.v_format = in.recipe(args.recipe).v;
  out.domain = in.domain(args.domain);
  out.sinks = in.tensor("sinks", args.sinks);
  out.kv_heads = args.kv_heads;
  out.o = in.tensor("o", args.o);
  out.lse = in.tensor("lse", args.lse);
  return out;
}

CompressedAttentionArgs to_cpp(const weft_compressed_attention_args& args) {
  const Converter in("compressed_attention");
  CompressedAttentionArgs out;
  out.queries = in.queries(args.queries);
  out.cache = in.cache("cache.", args.cache);
  out.mask = in.mask(args.mask);
  out.sinks = in.tensor("sinks", args.sinks);
  out.precision = in.choice("precision", args.precision, {Precision::exact_scores, Precision::fast});
  out.schedule = in.schedule(args.schedule);
  out.counters = in.tensor("counters", args.counters);
  out.o = in.tensor("o", args.o);
  out.lse = in.tensor("lse", args.lse);
  return out;
}

}  // namespace weft::c
