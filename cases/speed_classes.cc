// Classes of call sizes, and the speed of the kernels that they take: see cases/speed_classes.h.
#include "cases/speed_classes.h"

#include <algorithm>
#include <initializer_list>

#include "cases/table.h"

namespace weft::cases {
namespace {

using Texts = std::vector<std::string>;

// Every text of `one` before every text of `other`.
Texts crossed(const Texts& one, const Texts& other) {
  Texts all;
  for (const std::string& a : one)
    for (const std::string& b : other) all.push_back(a + "," + b);
  return all;
}

Texts each(const std::string& key, std::initializer_list<const char*> values) {
  Texts all;
  for (const char* value : values) all.push_back(key + "=" + value);
  return all;
}

void add_delta(std::vector<SpeedClass>& all) {
  for (const char* op : {"delta_gates", "short_conv", "l2_norm", "gated_rms_norm"}) all.push_back({op, "all", {"T=64"}});
  for (const char* op : {"chunk_cumsum", "chunk_kkt", "chunk_tri_inverse", "chunk_wu", "chunk_state", "chunk_output"}) {
    const bool typed = std::string(op) != "chunk_cumsum" && std::string(op) != "chunk_tri_inverse";
    all.push_back({op, "all", {typed ? "T=130,Hk=2,Hv=4,Dk=128" : "T=130,Hv=4"}, typed});
  }
  const std::string heads = "Hk=1,Hv=2,l2norm=1", prompt = "T=130," + heads;
  const char* prefill = "gated_delta_rule_prefill";
  all.push_back({prefill, "decay per head; K = 64, 128", crossed({prompt}, each("Dk", {"64", "128"}))});
  all.push_back(
      {prefill, "decay per head; other multiples of 16 up to 128", crossed({prompt}, each("Dk", {"32", "48", "96", "112"}))});
  all.push_back(
      {prefill, "decay per head; K > 128, or no multiple of 16", crossed({prompt}, each("Dk", {"20", "100", "192", "256"}))});
  all.push_back({prefill, "decay per channel (KDA)", crossed({prompt + ",kda=1"}, each("Dk", {"64", "100", "128", "256"}))});
  all.push_back({prefill, "up to 16 tokens a sequence", crossed({"T=1," + heads}, each("Dk", {"64", "100", "128", "256"}))});
  for (const char* op : {"gated_delta_rule_decode", "gated_delta_rule_replay"}) {
    const std::string few = std::string("T=2,N=2,Hk=2,Hv=4");
    all.push_back({op, "all", crossed({few}, each("Dk", {"64", "100", "128", "256"}))});
  }
  const char* summarize = "gated_delta_rule_summarize";
  const std::string range = "T=130,Hk=1,Hv=2";
  all.push_back({summarize, "decay per head", crossed({range}, each("Dk", {"64", "128", "256"}))});
  all.push_back({summarize, "decay per channel (KDA)", crossed({range + ",kda=1"}, each("Dk", {"64", "128", "256"}))});
  all.push_back({"gated_delta_rule_compose", "all", crossed({"Hv=4"}, each("Dk", {"64", "128", "256"})), false});
  all.push_back({"gated_delta_rule_apply", "all", crossed({"Hv=4"}, each("Dk", {"64", "128", "256"})), false});
}

void add_attention(std::vector<SpeedClass>& all) {
  for (const char* op : {"kv_rotate", "kv_encode", "kv_decode", "kv_repack"}) all.push_back({op, "all", {"D=128"}, false});
  for (const char* op : {"attention_scores", "attention_values", "attention_partials", "attention_merge"})
    all.push_back({op, "all", {"D=128"}, false});
  const std::string lanes = "layout=tiles,order=lanes";
  const Texts usual = each("D", {"64", "128", "256"});
  const Texts own = crossed({lanes}, each("recipe", {"4v4", "8v4", "4v2", "3v3", "8v8", "2v2"}));
  const Texts pairs = crossed({lanes}, each("recipe", {"5v3", "6v4", "7v6", "2v8"}));
  const Texts sixteen = crossed({lanes}, each("recipe", {"f16", "bf16"})), f32 = {lanes + ",recipe=f32", lanes + ",recipe=f32v4"};
  const Texts rows = crossed({"layout=rows"}, each("recipe", {"4v4", "8v4", "5v3"}));
  const Texts tables = {lanes + ",recipe=aura4v2,D=128", lanes + ",recipe=tq4,D=256"};
  const Texts odd = crossed(crossed({"layout=tiles"}, each("recipe", {"4v4", "bf16"})), each("D", {"80", "96", "512"}));
  const auto add = [&](const std::string& tokens, const char* sizes, const Texts& options) {
    all.push_back({"compressed_attention", sizes, crossed({tokens + ",N=1,context=140,Hq=4,Hk=1"}, options)});
  };
  add("T=1", "one new token; 4v4, 8v4, 4v2, 3v3, 8v8, 2v2 in tiles; D = 64, 128, 256", crossed(own, usual));
  add("T=1", "one new token; other pairs of bits in tiles; D = 64, 128, 256", crossed(pairs, usual));
  add("T=1", "one new token; coded sides in rows", crossed(rows, usual));
  add("T=1", "one new token; f16, bf16 in tiles; D = 64, 128, 256", crossed(sixteen, usual));
  add("T=1", "one new token; an f32 side", crossed(f32, usual));
  add("T=1", "one new token; AURA and TQ tables", tables);
  add("T=1", "one new token; other D", odd);
  const std::string prompt = "T=130";
  add(prompt, "prompts; 4v4, 8v4, 4v2, 3v3, 8v8, 2v2 in tiles; D = 64, 128", crossed(own, each("D", {"64", "128"})));
  add(prompt, "prompts; the same; D = 256", crossed(own, {"D=256"}));
  add(prompt, "prompts; f16, bf16 in tiles; D = 64, 128, 256", crossed(sixteen, usual));
  add(prompt, "prompts; other pairs of bits in tiles", crossed(pairs, usual));
  add(prompt, "prompts; coded sides in rows", crossed(rows, usual));
  Texts rest = odd;
  rest.insert(rest.end(), tables.begin(), tables.end());
  for (const std::string& one : f32) rest.push_back(one + ",D=128");
  add(prompt, "prompts; an f32 side, AURA and TQ tables, other D", rest);
}

}  // namespace

const std::vector<SpeedClass>& speed_classes() {
  static const std::vector<SpeedClass> all = [] {
    std::vector<SpeedClass> made;
    add_delta(made);
    add_attention(made);
    return made;
  }();
  return all;
}

std::vector<std::optional<Speed>> speeds_of(const SpeedClass& one, DType dtype, const std::vector<Stream>& streams) {
  std::vector<std::optional<Speed>> slowest(streams.size());
  if (!one.typed && dtype != DType::f32) return slowest;
  std::fill(slowest.begin(), slowest.end(), Speed::fast);
  for (const std::string& options : one.options) {
    const auto problem = build(shape_case(one.op), options + (one.typed ? ",dtype=" + std::string(dtype_name(dtype)) : ""));
    for (size_t i = 0; i < streams.size(); ++i) {
      if (slowest[i] && !problem->supports(streams[i])) slowest[i].reset();
      if (slowest[i]) slowest[i] = std::max(*slowest[i], problem->choose(streams[i]).speed);
    }
  }
  return slowest;
}

}  // namespace weft::cases
