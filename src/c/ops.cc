// The C functions: each converts its arguments, calls the C++ op, and returns a code. No exception leaves them.
#include "c/convert.h"

using weft::c::full_copy;
using weft::c::guarded;
using weft::c::refuse;

extern "C" {

const char* weft_version(void) { return weft::version(); }

int32_t weft_c_abi(void) { return WEFT_C_ABI; }

weft_tensor weft_dense(void* data, int32_t dtype, int32_t rank, const int64_t* sizes) {
  weft_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = rank;
  if (rank < 0 || rank > WEFT_MAX_RANK) return tensor;
  int64_t stride = 1;
  for (int32_t i = rank - 1; i >= 0; --i) {
    tensor.sizes[i] = sizes[i];
    tensor.strides[i] = stride;
    if (sizes[i] > 0 && __builtin_mul_overflow(stride, sizes[i], &stride)) stride = INT64_MAX;
  }
  return tensor;
}

weft_code weft_kv_recipe_create(const weft_kv_recipe_args* args, weft_kv_recipe** recipe, weft_status* status) {
  constexpr const char* kOp = "kv_recipe";
  return guarded(kOp, status, [&] {
    if (!recipe) refuse(kOp, "recipe", "is null");
    *recipe = nullptr;
    const weft_kv_recipe_args given = full_copy(kOp, "args", args);
    if (!given.name) refuse(kOp, "name", "is null");
    weft::KvRecipe made = weft::kv_recipe(given.name, given.k_head_dim, given.v_head_dim, given.seed);
    made.k.mean = weft::c::to_tensor(kOp, "k_mean", given.k_mean);
    made.v.mean = weft::c::to_tensor(kOp, "v_mean", given.v_mean);
    for (const auto& [side, name] : {std::pair{&made.k, "k"}, std::pair{&made.v, "v"}})
      if (weft::Status fault = weft::validate(*side, kOp, name); !fault) throw weft::Error(std::move(fault));
    *recipe = new weft_kv_recipe{std::move(made)};
  });
}

void weft_kv_recipe_destroy(weft_kv_recipe* recipe) { delete recipe; }

weft_code weft_kv_recipe_describe(const weft_kv_recipe* recipe, weft_kv_recipe_info* info, weft_status* status) {
  constexpr const char* kOp = "kv_recipe_describe";
  return guarded(kOp, status, [&] {
    if (!recipe) refuse(kOp, "recipe", "is null");
    weft_kv_recipe_info full = full_copy(kOp, "info", info);
    const auto side = [](const weft::KvFormat& format) {
      weft_kv_side_info out{};
      out.head_dim = format.head_dim;
      out.code_bytes = weft::code_bytes(format);
      out.gain_bytes = weft::gain_bytes(format);
      out.tile_bytes = weft::tile_bytes(format);
      out.passthrough = format.passthrough.has_value();
      const weft::DType element = format.passthrough.value_or(weft::DType::u8);
      out.codes_dtype = weft::c::dtype_value(element);
      out.bits = format.passthrough ? static_cast<int32_t>(8 * weft::dtype_bytes(element)) : format.bits;
      if (!format.passthrough) {
        out.gains = format.head_dim / format.gain_group;
        out.gains_dtype = weft::c::dtype_value(format.gain_dtype);
      }
      return out;
    };
    weft::c::copy_text(full.id, recipe->recipe.id);
    full.k = side(recipe->recipe.k);
    full.v = side(recipe->recipe.v);
    full.bytes_per_token = weft::bytes_per_token(recipe->recipe);
    std::memcpy(info, &full, full.struct_size);
  });
}

weft_code weft_kv_recipe_arrangement(const weft_kv_recipe* recipe, const weft_stream* stream, int32_t* layout, int32_t* tile_order,
                                     weft_status* status) {
  constexpr const char* kOp = "kv_recipe_arrangement";
  return guarded(kOp, status, [&] {
    if (!recipe) refuse(kOp, "recipe", "is null");
    if (!layout) refuse(kOp, "layout", "is null");
    if (!tile_order) refuse(kOp, "tile_order", "is null");
    const auto fastest = weft::fastest_arrangement(recipe->recipe, weft::c::to_stream(kOp, stream).backend);
    *layout = static_cast<int32_t>(fastest.layout);
    *tile_order = static_cast<int32_t>(fastest.tile_order);
  });
}

#define WEFT_C_DEFINE(name, Args)                                                                                       \
  weft_code weft_##name##_scratch_bytes(const weft_stream* stream, const weft_##name##_args* args, size_t* bytes,       \
                                        weft_status* status) {                                                          \
    return guarded(#name, status, [&] {                                                                                 \
      if (!bytes) refuse(#name, "bytes", "is null");                                                                    \
      const weft::Stream on = weft::c::to_stream(#name, stream);                                                        \
      *bytes = weft::scratch_bytes(on, weft::c::to_cpp<weft::Args>(#name, full_copy(#name, "args", args)));             \
    });                                                                                                                 \
  }                                                                                                                     \
  weft_code weft_##name##_choose(const weft_stream* stream, const weft_##name##_args* args, weft_choice* choice,        \
                                 weft_status* status) {                                                                 \
    return guarded(#name, status, [&] {                                                                                 \
      weft_choice full = full_copy(#name, "choice", choice);                                                            \
      const weft::Stream on = weft::c::to_stream(#name, stream);                                                        \
      const auto call = weft::c::to_cpp<weft::Args>(#name, full_copy(#name, "args", args));                             \
      weft::c::copy_choice(full, weft::choose(on, call));                                                               \
      std::memcpy(choice, &full, full.struct_size);                                                                     \
    });                                                                                                                 \
  }                                                                                                                     \
  weft_code weft_##name(const weft_stream* stream, const weft_##name##_args* args, void* scratch, size_t scratch_bytes, \
                        weft_status* status) {                                                                          \
    return guarded(#name, status, [&] {                                                                                 \
      const weft::Stream on = weft::c::to_stream(#name, stream);                                                        \
      weft::name(on, weft::c::to_cpp<weft::Args>(#name, full_copy(#name, "args", args)), {scratch, scratch_bytes});     \
    });                                                                                                                 \
  }
WEFT_FOR_EACH_OP(WEFT_C_DEFINE)
#undef WEFT_C_DEFINE

}  // extern "C"
