// Reads rotary frequencies from config.json: see rope_config.h.
#include "model/checkpoint/rope_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "files/refuse.h"

namespace weft::model {
namespace {

using files::JsonFields;

constexpr double kMaxFactor = 1e6;

// The channel whose frequency makes `turns` full rotations within the original context. Between two such channels, yarn blends from
// the frequencies of the original model to frequencies divided by `factor`.
double channel_of(double turns, double channels, double theta, double original) {
  return channels * std::log(original / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta));
}

double log_scale(double factor, double slope) { return factor <= 1 ? 1 : 0.1 * slope * std::log(factor) + 1; }

Yarn read_yarn(const JsonFields& yarn, const JsonFields& fields) {
  Yarn out;
  const std::optional<double> factor = yarn.number("factor", 1, kMaxFactor);
  if (!factor) yarn.fail("factor", "is missing, rope_type 'yarn' needs it");
  std::optional<int64_t> original = yarn.whole("original_max_position_embeddings", 1, int64_t{1} << 40);
  if (!original) original = fields.whole("max_position_embeddings", 1, int64_t{1} << 40);
  if (!original) yarn.fail("original_max_position_embeddings", "is missing, rope_type 'yarn' needs it");
  out.factor = *factor;
  out.original = static_cast<double>(*original);
  out.fast = yarn.number("beta_fast", 1e-3, kMaxFactor).value_or(out.fast);
  out.slow = yarn.number("beta_slow", 1e-3, kMaxFactor).value_or(out.slow);
  const std::optional<double> slope = yarn.number("mscale", 0, 1000), all_slope = yarn.number("mscale_all_dim", 0, 1000);
  const double blend = slope && all_slope && *slope > 0 && *all_slope > 0
                           ? log_scale(*factor, *slope) / log_scale(*factor, *all_slope)
                           : log_scale(*factor, 1);
  out.attention = yarn.number("attention_factor", 0, 1000).value_or(blend);
  out.truncate = yarn.flag("truncate").value_or(true);
  return out;
}

}  // namespace

double yarn_attention(double factor) { return log_scale(factor, 1); }

RopeConfig plain_rope(double theta, int64_t channels) {
  RopeConfig rope;
  for (int64_t j = 0; j < channels / 2; ++j)
    rope.frequencies.push_back(std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(channels)));
  return rope;
}

void apply_yarn(const Yarn& yarn, double theta, RopeConfig& rope) {
  rope.factor = yarn.attention;
  const auto channels = static_cast<double>(rope.channels());
  double low = channel_of(yarn.fast, channels, theta, yarn.original);
  double high = channel_of(yarn.slow, channels, theta, yarn.original);
  if (yarn.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, channels - 1);
  if (low == high) high += 0.001;
  for (size_t j = 0; j < rope.frequencies.size(); ++j) {
    const double stretched = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    rope.frequencies[j] *= stretched / yarn.factor + (1 - stretched);
  }
}

RopeConfig read_rope(const JsonFields& fields, int64_t head_dim) {
  // rope_parameters and rope_scaling name the same object. A file that has both with different contents is refused, because other
  // readers disagree about which one counts.
  std::optional<JsonFields> rope = fields.object("rope_parameters");
  if (!rope)
    rope = fields.object("rope_scaling");
  else if (fields.has("rope_scaling") && *fields.find("rope_scaling") != *fields.find("rope_parameters"))
    fields.fail("rope_scaling", "is given together with a different rope_parameters, wanted one of them");
  // A value in this object takes precedence over a field of the same name outside it.
  const auto number = [&](const char* name, double low, double high, double fallback) {
    if (rope)
      if (const auto value = rope->number(name, low, high)) return *value;
    return fields.number(name, low, high).value_or(fallback);
  };
  const double theta = number("rope_theta", 1.0001, 1e12, 10000);
  const double part = number("partial_rotary_factor", 1e-6, 1, 0.25);
  std::string type = "default";
  if (rope) type = rope->text(rope->has("rope_type") ? "rope_type" : "type").value_or(type);

  const auto channels = static_cast<int64_t>(static_cast<double>(head_dim) * part);
  if (channels < 2 || channels % 2 != 0)
    fields.fail("partial_rotary_factor", "makes " + std::to_string(channels) + " of head_dim = " + std::to_string(head_dim) +
                                             " channels rotary, wanted an even number of at least 2");
  RopeConfig result = plain_rope(theta, channels);
  if (type == "default" || type == "mrope") return result;
  if (type == "linear") {
    const std::optional<double> factor = rope->number("factor", 1, kMaxFactor);
    if (!factor) rope->fail("factor", "is missing, rope_type 'linear' needs it");
    for (double& frequency : result.frequencies) frequency /= *factor;
    return result;
  }
  if (type != "yarn") rope->fail("rope_type", "is " + files::in_quotes(type) + ", wanted 'default', 'linear' or 'yarn'");
  apply_yarn(read_yarn(*rope, fields), theta, result);
  return result;
}

}  // namespace weft::model
