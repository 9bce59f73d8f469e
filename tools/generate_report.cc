// What `weft generate` reports of its runs: see generate_report.h.
#include "tools/generate_report.h"

#include <fmt/format.h>

#include "tools/command.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "weft/tokenizer.h"

namespace weft::tools {
namespace {

// The field `finish` of docs/json.md.
const char* finish_text(StopReason reason) {
  switch (reason) {
    case StopReason::end_token: return "end";
    case StopReason::stop_token:
    case StopReason::stop_string: return "stop";
    case StopReason::sentence_end: return "sentence";
    case StopReason::callback: return "interrupted";
    default: return stop_reason_name(reason);
  }
}

}  // namespace

nlohmann::ordered_json generation_json(const Generation& g, const GenerationReport& report, const std::string& prompt,
                                       int64_t bytes) {
  nlohmann::ordered_json out{{"schema", kSchema},
                             {"prompt", to_well_formed_utf8(prompt)},
                             {"text", g.text},
                             {"finish", finish_text(g.stop)},
                             {"prompt_tokens", g.prompt_tokens},
                             {"generated_tokens", g.tokens.size()},
                             {"ids", g.tokens},
                             {"seed", report.seed},
                             {"backend", backend_name(report.stream.backend)},
                             {"kv", report.kv},
                             {"bytes_per_token", bytes},
                             {"prefill_tokens_per_second", g.prefill.rate()},
                             {"decode_tokens_per_second", g.decode.rate()},
                             {"first_token_seconds", g.first_token_seconds},
                             {"restored_tokens", g.restored_tokens},
                             {"peak_bytes", peak_memory_bytes()}};
  if (report.drafts)
    out["draft"] = {{"proposed", g.draft.proposed},
                    {"accepted", g.draft.accepted},
                    {"steps", g.draft.steps},
                    {"speed_up", g.draft.proposed > 0 ? number_or_null(g.draft_speed_up()) : nlohmann::ordered_json()}};
  return out;
}

void print_phases(const Generation& g, const GenerationReport& report) {
  const auto print = [&](const char* name, const GenerationPhase& phase) {
    tell("{:7} {:6} tokens{}\n", name, phase.tokens,
         phase.tokens > 0 ? fmt::format(", {:7.0f} tokens/s{}", phase.rate(), times_text(report.stream, phase.times, phase.seconds))
                          : "");
  };
  tell("\n");
  print("prefill", g.prefill);
  if (report.stores)
    tell("        {:6} of {} prompt tokens restored, first token after {:.1f} ms\n", g.restored_tokens, g.prompt_tokens,
         1e3 * g.first_token_seconds);
  print("decode", g.decode);
  if (!report.drafts) return;
  if (g.draft.proposed == 0) {
    tell("draft        0 tokens proposed\n");
    return;
  }
  tell("draft   {:6} of {} proposed tokens accepted ({:.0f} %), {:.2f} tokens per step, {:.2f} times the speed of one by one\n",
       g.draft.accepted, g.draft.proposed, 100.0 * static_cast<double>(g.draft.accepted) / static_cast<double>(g.draft.proposed),
       static_cast<double>(g.decode.tokens) / static_cast<double>(g.draft.steps), g.draft_speed_up());
}

void print_store(const PrefixStore& store) {
  const PrefixStoreStats stats = store.stats();
  tell("prefix store: {} checkpoints in {} of {}, {} evicted, {} too large", stats.checkpoints, bytes_text(stats.bytes),
       bytes_text(store.options().bytes), stats.evicted, stats.refused);
  if (store.options().recurrent == StateStorage::f32)
    tell("; recurrent states stored exactly\n");
  else
    tell("; recurrent states in {}, relative drift {:.2g} (at most {:.2g})\n", state_storage_name(store.options().recurrent),
         stats.drift, stats.largest_drift);
}

}  // namespace weft::tools
