// Models and states from C: see weft/c_model.h.
#include <algorithm>

#include "c_model/handles.h"

using weft::c::full_copy;
using weft::c::guarded;
using weft::c::not_null;
using weft::c::refuse;

namespace weft::c {

void give_text(const char* op, std::string_view from, char* to, size_t capacity, size_t* count) {
  give<char>(op, from, to, capacity, count);
  if (from.size() < capacity) to[from.size()] = '\0';
}

bool flag(const char* op, const char* argument, int32_t value) {
  if (value != 0 && value != 1) refuse(op, argument, "is " + std::to_string(value) + ", wanted 0 or 1");
  return value == 1;
}

namespace {

bool has_sequence(const weft_state* state, int64_t sequence) {
  return state && sequence >= 0 && sequence < state->state.sequences();
}

}  // namespace
}  // namespace weft::c

extern "C" {

weft_code weft_model_load(const char* directory, const weft_model_options* options, weft_model** model, weft_status* status) {
  constexpr const char* kOp = "model_load";
  return guarded(kOp, status, [&] {
    not_null(kOp, "model", model) = nullptr;
    not_null(kOp, "directory", directory);
    weft::ModelOptions how;
    if (options) {
      const weft_model_options given = full_copy(kOp, "options", options);
      how.exact = weft::c::flag(kOp, "options.exact", given.exact);
      if (given.reserved != 0) refuse(kOp, "options.reserved", "is not 0");
    }
    *model = new weft_model{weft::Model::load(directory, how)};
  });
}

void weft_model_free(weft_model* model) { delete model; }

int64_t weft_model_vocab_size(const weft_model* model) { return model ? model->model.vocab_size() : 0; }
int64_t weft_model_max_positions(const weft_model* model) { return model ? model->model.max_positions() : 0; }
int32_t weft_model_is_end_token(const weft_model* model, int32_t token) { return model && model->model.ends(token) ? 1 : 0; }
int32_t weft_model_begin_token(const weft_model* model) { return model ? model->model.begin_token().value_or(-1) : -1; }

weft_code weft_model_summary(const weft_model* model, char* text, size_t capacity, size_t* count, weft_status* status) {
  constexpr const char* kOp = "model_summary";
  return guarded(kOp, status,
                 [&] { weft::c::give_text(kOp, not_null(kOp, "model", model).model.summary(), text, capacity, count); });
}

weft_code weft_model_encode(const weft_model* model, const char* text, size_t text_bytes, int32_t* tokens, size_t capacity,
                            size_t* count, weft_status* status) {
  constexpr const char* kOp = "model_encode";
  return guarded(kOp, status, [&] {
    const auto from = weft::c::list(kOp, "text", text, text_bytes);
    const std::vector<int32_t> found = not_null(kOp, "model", model).model.encode({from.data(), from.size()});
    weft::c::give<int32_t>(kOp, found, tokens, capacity, count);
  });
}

weft_code weft_model_decode(const weft_model* model, const int32_t* tokens, size_t token_count, char* text, size_t capacity,
                            size_t* count, weft_status* status) {
  constexpr const char* kOp = "model_decode";
  return guarded(kOp, status, [&] {
    const auto from = weft::c::list(kOp, "tokens", tokens, token_count);
    weft::c::give_text(kOp, not_null(kOp, "model", model).model.decode(from), text, capacity, count);
  });
}

weft_code weft_state_create(const weft_model* model, const weft_stream* stream, const weft_state_options* options,
                            weft_state** state, weft_status* status) {
  constexpr const char* kOp = "state_create";
  return guarded(kOp, status, [&] {
    not_null(kOp, "state", state) = nullptr;
    weft_state_options given{};
    if (options) given = full_copy(kOp, "options", options);
    const std::string kv = given.kv ? given.kv : "8v4";
    weft::HybridPlan plan = not_null(kOp, "model", model)
                                .model.plan(kv, given.capacity == 0 ? 4096 : given.capacity,
                                            given.sequences == 0 ? 1 : given.sequences, weft::c::to_stream(kOp, stream));
    plan.rollback = given.rollback;
    *state = new weft_state{weft::HybridState::create(std::move(plan)), kv};
  });
}

void weft_state_free(weft_state* state) { delete state; }

int64_t weft_state_tokens(const weft_state* state, int64_t sequence) {
  return weft::c::has_sequence(state, sequence) ? state->state.tokens(sequence) : -1;
}

int64_t weft_state_rollable(const weft_state* state, int64_t sequence) {
  return weft::c::has_sequence(state, sequence) ? state->state.rollable(sequence) : -1;
}

weft_code weft_state_reset(weft_state* state, int64_t sequence, weft_status* status) {
  constexpr const char* kOp = "state_reset";
  return guarded(kOp, status, [&] { not_null(kOp, "state", state).state.reset(sequence); });
}

weft_code weft_state_fork(weft_state* state, int64_t from, int64_t to, weft_status* status) {
  constexpr const char* kOp = "state_fork";
  return guarded(kOp, status, [&] { not_null(kOp, "state", state).state.fork(from, to); });
}

weft_code weft_state_rollback(const weft_stream* stream, weft_state* state, int64_t sequence, int64_t tokens, weft_status* status) {
  constexpr const char* kOp = "state_rollback";
  return guarded(kOp, status,
                 [&] { not_null(kOp, "state", state).state.rollback(weft::c::to_stream(kOp, stream), sequence, tokens); });
}

weft_code weft_model_append(const weft_model* model, const weft_stream* stream, weft_state* state, const weft_model_input* inputs,
                            size_t count, weft_status* status) {
  constexpr const char* kOp = "model_append";
  return guarded(kOp, status, [&] {
    std::vector<weft::ModelInput> converted;
    for (const weft_model_input& input : weft::c::list(kOp, "inputs", inputs, count)) {
      if (input.token_count < 0)
        refuse(kOp, "inputs.token_count", "is " + std::to_string(input.token_count) + ", wanted 0 or more");
      converted.push_back({.sequence = input.sequence,
                           .tokens = weft::c::list(kOp, "inputs.tokens", input.tokens, static_cast<size_t>(input.token_count)),
                           .logits = input.logits,
                           .every_token = weft::c::flag(kOp, "inputs.every_token", input.every_token),
                           .best = input.best,
                           .prompt_part = weft::c::flag(kOp, "inputs.prompt_part", input.prompt_part)});
    }
    not_null(kOp, "model", model).model.append(weft::c::to_stream(kOp, stream), not_null(kOp, "state", state).state, converted);
  });
}

}  // extern "C"
