// Writing on with a model: see generation.h.
#include "tools/generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>

#include "model/generate/draft.h"
#include "model/parts.h"
#include "tools/interrupt.h"
#include "tools/terminal.h"

namespace weft::tools {
namespace {

constexpr int64_t kStepsToCompare = 4;  // taken one by one before the first draft

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void read_prompt(const Model& model, const Stream& stream, HybridState& state, std::span<const int32_t> tokens, float* logits,
                 PrefixStore* store, Generated& out) {
  const auto begin = Clock::now();
  if (store) {
    out.restored = model.prefill(stream, state, 0, tokens, logits, *store, &out.prefill.times);
    out.prefill.tokens = static_cast<int64_t>(tokens.size()) - out.restored;
  } else {
    auto left = tokens.subspan(static_cast<size_t>(state.tokens(0)));
    const bool prompt = left.size() > static_cast<size_t>(kMaxDecodeTokens);
    while (!left.empty() && !Interrupt::asked()) {
      const auto chunk = left.first(std::min(static_cast<size_t>(model::step_tokens(stream, model.parts().config)), left.size()));
      float* const wanted = chunk.size() == left.size() ? logits : nullptr;
      model.append(stream, state, {{.tokens = chunk, .logits = wanted, .prompt_part = prompt}}, &out.prefill.times);
      out.prefill.tokens += static_cast<int64_t>(chunk.size());
      left = left.subspan(chunk.size());
    }
  }
  out.prefill.seconds = out.first_token_seconds = since(begin);
}

// Where nobody reads any more, as after a hangup, what the model remembers can still be saved: a failure is told at the end.
void put(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) remember_output_fault(errno);
  flush_output();
}

}  // namespace

double DraftStats::single_seconds() const {
  if (single.empty()) return 0;
  std::vector<double> sorted = single;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

double Generated::speed_up() const {
  return decode.seconds > 0 ? static_cast<double>(decode.tokens) * draft.single_seconds() / decode.seconds : 0;
}

void Output::write(const std::string& piece) {
  text_ += piece;
  if (keep_ || !stream_) return;
  put(piece);
}

void Output::finish() {
  if (!keep_) put((stream_ ? "" : text_) + "\n");
}

Generated generate(const Model& model, const Stream& stream, HybridState& state, std::vector<int32_t>& tokens, Sampler& sampler,
                   const GenerateOptions& options, Output& output) {
  Generated out;
  out.prompt_tokens = static_cast<int64_t>(tokens.size()) - (options.store ? 0 : state.tokens(0));
  out.finish = "length";
  const auto vocab = static_cast<size_t>(model.vocab_size());
  std::vector<float> logits(vocab * static_cast<size_t>(options.draft + 1));
  read_prompt(model, stream, state, tokens, logits.data(), options.store, out);

  model::StreamDecoder decoder(*model.parts().tokenizer);
  std::vector<int32_t> draft, step;
  const auto begin = Clock::now();
  // Rows of logits whose tokens were proposed rightly, and one more.
  const auto choose = [&](size_t rows) {
    for (size_t row = 0; row < rows; ++row) {
      const int32_t next = sampler(std::span(logits).subspan(row * vocab, vocab));
      tokens.push_back(next);
      if (model.ends(next)) {
        out.finish = "end";
        return row;
      }
      out.ids.push_back(next);
      output.write(decoder.push(next));
      if (row < draft.size() && next != draft[row]) return row;
    }
    return rows - 1;
  };
  if (Interrupt::asked()) {
    out.finish = "interrupted";
  } else if (options.max_tokens > 0) {
    choose(1);
  }
  while (out.finish == "length" && static_cast<int64_t>(out.ids.size()) < options.max_tokens) {
    if (Interrupt::asked() || output_fault_known()) {  // nobody reads any more
      out.finish = "interrupted";
      break;
    }
    const auto step_begin = Clock::now();
    const int64_t room = options.max_tokens - static_cast<int64_t>(out.ids.size()) - 1;
    draft.clear();
    if (out.draft.steps >= kStepsToCompare) draft = model::propose(tokens, std::min(options.draft, room));
    step.assign(1, tokens.back());
    step.insert(step.end(), draft.begin(), draft.end());
    model.append(stream, state, {{.tokens = step, .logits = logits.data(), .every_token = true}}, &out.decode.times);
    const size_t accepted = choose(step.size());
    if (accepted < draft.size()) state.rollback(stream, 0, static_cast<int64_t>(draft.size() - accepted));
    out.decode.tokens += static_cast<int64_t>(accepted) + 1;
    out.draft.proposed += static_cast<int64_t>(draft.size());
    out.draft.accepted += static_cast<int64_t>(accepted);
    ++out.draft.steps;
    if (draft.empty()) out.draft.single.push_back(since(step_begin));
  }
  output.write(decoder.finish());
  out.decode.seconds = since(begin);
  // What the state holds of the answer is the beginning of the next turn.
  if (options.store && state.tokens(0) > 0)
    options.store->insert(state, 0, std::span(tokens).first(static_cast<size_t>(state.tokens(0))));
  return out;
}

}  // namespace weft::tools
