// Continuing texts: text streams, stop rules, drafts, log probabilities, and the state after every kind of end.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>

#include "model/generate/text_stream.h"
#include "model/network/cpu/activations.h"
#include "tests/support/complaint.h"
#include "tests/support/folder.h"
#include "tests/support/golden_model.h"
#include "weft/generate.h"
#include "weft/perplexity.h"
#include "weft/tokenizer.h"

namespace {

using namespace weft;
using namespace weft::testing_support;
using model::SentenceEnd;
using model::StopStrings;

// One thread: results do not depend on the number, and tests share their machine.
constexpr Stream kOneThread{Backend::cpu, 0, nullptr, 1, Isa::best};

const Model& bundled() {
  static const Model model = Model::load(shipped_model());
  return model;
}

HybridState make_state(int64_t rollback = 0, int64_t capacity = 4096) {
  HybridPlan plan = bundled().plan("8v4", capacity);
  plan.rollback = rollback;
  return HybridState::create(plan);
}

// A run from an empty state, and what it left behind.
struct Done {
  Generation result;
  std::vector<int32_t> tokens;
  HybridState state;
};
Done run(const std::string& prompt, const GenerateOptions& options, const TokenCallback& on_token = {}, int64_t capacity = 4096) {
  Done done{{}, bundled().encode(prompt), make_state(options.draft, capacity)};
  done.result = Generator(bundled(), options, kOneThread).run(done.state, done.tokens, on_token);
  return done;
}
GenerateOptions greedy(int64_t max_tokens) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.sampling.temperature = 0;
  return options;
}
// Text that repeats itself, so that drafts have something to propose.
const std::string kSea = "the sea, the sea, the sea, the sea";

// ---- text

// The pieces of a text that is cut at every boundary of characters, and the rest.
std::string through(StopStrings stops, const std::vector<std::string>& pieces) {
  std::string out;
  for (const std::string& piece : pieces) out += stops.push(piece);
  return out + stops.finish();
}

TEST(StopStrings, HoldBackOnlyWhatCouldBecomeOne) {
  StopStrings stops({"END", "EXIT"});
  EXPECT_EQ(stops.push("one E"), "one ");
  EXPECT_EQ(stops.push("X"), "");
  EXPECT_EQ(stops.push("TRA E"), "EXTRA ");
  EXPECT_EQ(stops.push("N"), "");
  EXPECT_FALSE(stops.stopped());
  EXPECT_EQ(stops.push("D, and more"), "");
  EXPECT_EQ(stops.stopped(), 0u);
  EXPECT_EQ(stops.push("more"), "");
  EXPECT_EQ(stops.finish(), "");
  StopStrings rest({"END"});
  EXPECT_EQ(rest.push("the EN"), "the ");
  EXPECT_EQ(rest.finish(), "EN");
}

TEST(StopStrings, TheCutOfTheTextDoesNotMatter) {
  const std::string text = "xabcy";
  for (const std::vector<std::string>& stops : std::vector<std::vector<std::string>>{
           {"abc", "b"}, {"b", "abc"}, {"bc", "abc"}, {"abc", "bc"}, {"abcy", "bc"}, {"cy", "y"}, {"q"}, {}}) {
    const std::string whole = through(StopStrings(stops), {text}), single = through(StopStrings(stops), {"x", "a", "b", "c", "y"}),
                      pairs = through(StopStrings(stops), {"xa", "bc", "y"});
    EXPECT_EQ(whole, single) << testing::PrintToString(stops);
    EXPECT_EQ(whole, pairs) << testing::PrintToString(stops);
  }
  EXPECT_EQ(through(StopStrings({"abc", "b"}), {text}), "xa") << "the one that is complete first";
  EXPECT_EQ(through(StopStrings({"bc", "abc"}), {text}), "x") << "the longest of those complete at the same character";
}

TEST(StopStrings, CharactersStayWhole) {
  // Both begin with the bytes E2 82; only whole characters are held back.
  StopStrings stops({"\xE2\x82\xAC!"});
  EXPECT_EQ(stops.push("\xE2\x82\xA9"), "\xE2\x82\xA9");
  EXPECT_EQ(stops.push("5 \xE2\x82\xAC"), "5 ");
  EXPECT_EQ(stops.push("!"), "");
  EXPECT_EQ(stops.stopped(), 0u);
}

TEST(SentenceEnd, WhiteSpaceBehindAFullStop) {
  const auto find = [](const std::vector<std::string>& pieces) {
    SentenceEnd end;
    std::optional<size_t> found;
    for (const std::string& piece : pieces) found = end.find(piece);
    return found;
  };
  EXPECT_EQ(find({"He left. She"}), 8u);
  EXPECT_EQ(find({"He left.", " She"}), 0u);
  EXPECT_EQ(find({"\"Go!", "\"", "\n"}), 0u);
  EXPECT_EQ(find({"What?\xE2\x80\x9D said"}), 8u) << "a closing quote";
  EXPECT_EQ(find({"Well\xE2\x80\xA6 no"}), 7u) << "an ellipsis";
  EXPECT_EQ(find({"3.14 and 2"}), std::nullopt);
  EXPECT_EQ(find({"He left."}), std::nullopt) << "more of it may follow";
  EXPECT_EQ(find({"", " ", "one two"}), std::nullopt);
  SentenceEnd later;
  EXPECT_EQ(later.find("He left. She", false), std::nullopt);
  EXPECT_EQ(later.find(" stayed. He"), 8u) << "not the end of the first sentence";
}

TEST(TextStream, PiecesAreWholeCharactersAndGiveTheText) {
  const std::string text = "r\xC3\xA9sum\xC3\xA9 \xF0\x9F\x98\x80\xF0\x9F\x98\x80 \xE2\x82\xAC 5";
  const std::vector<int32_t> ids = bundled().encode(text);
  TextStream stream(bundled());
  std::string all;
  bool held = false;
  for (int32_t id : ids) {
    const std::string piece = stream.push(id);
    EXPECT_EQ(to_well_formed_utf8(piece), piece);
    held = held || piece.empty();
    all += piece;
  }
  EXPECT_TRUE(held) << "this tokenizer cuts characters";
  EXPECT_EQ(all + stream.finish(), text);
  TextStream cut(bundled(), {" \xF0\x9F\x98\x80"});
  all.clear();
  for (int32_t id : ids) all += cut.push(id);
  EXPECT_EQ(all + cut.finish(), "r\xC3\xA9sum\xC3\xA9");
  EXPECT_EQ(cut.stopped(), 0u);
  EXPECT_EQ(complaint([] { TextStream(bundled(), {"a", ""}); }), "text_stream: stop_strings[1] is empty, wanted a text");
  EXPECT_EQ(complaint([] { TextStream(bundled(), {"\xFF"}); }),
            "text_stream: stop_strings[0] is '\\xff', wanted well-formed UTF-8");
  EXPECT_EQ(complaint([] { TextStream none(one_golden_model()); }),
            "text_stream: model has no tokenizer, so its tokens have no text");
}

// ---- running

TEST(Generator, TakesTheMostProbableTokensOneByOne) {
  const Done done = run("The old house", greedy(12));
  std::vector<int32_t> by_hand = bundled().encode("The old house");
  HybridState state = make_state();
  int32_t best = 0;
  bundled().append(kOneThread, state, {{.tokens = by_hand, .best = &best}});
  for (int i = 0; i < 12; ++i) {
    by_hand.push_back(best);
    bundled().append(kOneThread, state, {{.tokens = {&by_hand.back(), 1}, .best = &best}});
  }
  EXPECT_EQ(done.tokens, by_hand);
  EXPECT_EQ(done.result.stop, StopReason::length);
  EXPECT_EQ(done.result.tokens, std::vector<int32_t>(by_hand.end() - 12, by_hand.end()));
  EXPECT_EQ(done.result.text, bundled().decode(done.result.tokens));
  EXPECT_EQ(done.result.prompt_tokens, 3);
  EXPECT_EQ(done.result.prefill.tokens, 3);
  EXPECT_EQ(done.result.decode.tokens, 11);
  EXPECT_GT(done.result.first_token_seconds, 0);
}

// The state holds all tokens but the last, so a second run continues the text.
TEST(Generator, ASecondRunContinues) {
  const Done whole = run("The ship", greedy(30));
  Done parts = run("The ship", greedy(12));
  EXPECT_EQ(parts.state.tokens(0), static_cast<int64_t>(parts.tokens.size()) - 1);
  const Generation more = Generator(bundled(), greedy(18), kOneThread).run(parts.state, parts.tokens);
  EXPECT_EQ(parts.tokens, whole.tokens);
  EXPECT_EQ(parts.result.text + more.text, whole.result.text);
  EXPECT_EQ(more.prompt_tokens, 1);
}

TEST(Generator, TheCallbackSeesEveryTokenAndItsText) {
  std::vector<int32_t> ids;
  std::string text;
  const Done done = run(kSea, greedy(20), [&](const GeneratedToken& next) {
    if (next.token) ids.push_back(*next.token);
    text += next.text;
    return true;
  });
  EXPECT_EQ(ids, done.result.tokens);
  EXPECT_EQ(text, done.result.text);
}

TEST(Generator, ACallbackStopsAndTheTextCanContinue) {
  const Done whole = run(kSea, greedy(40));
  for (int64_t draft : {0, 5})
    for (size_t after : {1, 7, 20, 33}) {
      GenerateOptions options = greedy(40);
      options.draft = draft;
      size_t seen = 0;
      Done part = run(kSea, options, [&](const GeneratedToken&) { return ++seen < after; });
      EXPECT_EQ(part.result.stop, StopReason::callback) << draft << " " << after;
      EXPECT_EQ(part.result.tokens.size(), after);
      EXPECT_EQ(part.state.tokens(0), static_cast<int64_t>(part.tokens.size()) - 1);
      options.max_tokens = 40 - static_cast<int64_t>(after);
      Generator(bundled(), options, kOneThread).run(part.state, part.tokens);
      EXPECT_EQ(part.tokens, whole.tokens) << draft << " " << after;
    }
}

TEST(Generator, AnExceptionOfACallbackLeavesTheStateInOrder) {
  const Done whole = run(kSea, greedy(30));
  GenerateOptions options = greedy(30);
  options.draft = 4;
  std::vector<int32_t> tokens = bundled().encode(kSea);
  HybridState state = make_state(4);
  int calls = 0;
  EXPECT_THROW(Generator(bundled(), options, kOneThread)
                   .run(state, tokens,
                        [&](const GeneratedToken&) {
                          if (++calls == 17) throw std::runtime_error("enough");
                          return true;
                        }),
               std::runtime_error);
  EXPECT_EQ(state.tokens(0), static_cast<int64_t>(tokens.size()) - 1);
  options.max_tokens = 30 - 17;
  Generator(bundled(), options, kOneThread).run(state, tokens);
  EXPECT_EQ(tokens, whole.tokens);
}

TEST(Generator, DraftsDoNotChangeTheTokens) {
  for (double temperature : {0.0, 0.5}) {
    GenerateOptions options = greedy(60);
    options.sampling.temperature = temperature;
    options.sampling.seed = 5;
    options.sampling.presence_penalty = temperature > 0 ? 0.1 : 0;
    const Done one_by_one = run(kSea, options);
    options.draft = 6;
    const Done drafted = run(kSea, options);
    EXPECT_EQ(drafted.tokens, one_by_one.tokens) << temperature;
    EXPECT_EQ(one_by_one.result.draft.proposed, 0);
    EXPECT_GT(drafted.result.draft.proposed, 0) << temperature;
    EXPECT_GE(drafted.result.draft.proposed, drafted.result.draft.accepted);
    EXPECT_EQ(drafted.result.decode.tokens, 59);
    EXPECT_EQ(one_by_one.result.draft.single.size(), 59u);
  }
}

// ---- stop rules

TEST(Generator, StopStringsCutTheText) {
  const std::string text = run("The old house", greedy(40)).result.text;
  const std::string stop = text.substr(text.size() / 2, 7);
  for (int64_t draft : {0, 5}) {
    GenerateOptions options = greedy(40);
    options.stop_strings = {"never in this text", stop};
    options.draft = draft;
    std::string streamed;
    const Done done = run("The old house", options, [&](const GeneratedToken& next) {
      streamed += next.text;
      return true;
    });
    EXPECT_EQ(done.result.stop, StopReason::stop_string);
    EXPECT_EQ(done.result.stop_index, 1u);
    EXPECT_EQ(done.result.text, text.substr(0, text.find(stop)));
    EXPECT_EQ(streamed, done.result.text);
    EXPECT_LT(done.result.tokens.size(), 40u);
    EXPECT_NE(bundled().decode(done.result.tokens).find(stop), std::string::npos) << "its tokens are written";
    EXPECT_EQ(done.state.tokens(0), static_cast<int64_t>(done.tokens.size()) - 1);
  }
}

TEST(Generator, TextThatIsHeldBackComesAtTheEnd) {
  const Done whole = run("The old house", greedy(10));
  GenerateOptions options = greedy(10);
  options.stop_strings = {whole.result.text.substr(whole.result.text.size() - 3) + "and something that does not follow"};
  bool last = false;
  const Done done = run("The old house", options, [&](const GeneratedToken& next) {
    last = !next.token;
    return true;
  });
  EXPECT_TRUE(last) << "the last call has text and no token";
  EXPECT_EQ(done.result.text, whole.result.text);
  EXPECT_EQ(done.result.stop, StopReason::length);
}

TEST(Generator, StopTokensAndEndTokens) {
  const Done whole = run("The old house", greedy(30));
  const int32_t token = whole.result.tokens[10];
  const auto first = std::find(whole.result.tokens.begin(), whole.result.tokens.end(), token) - whole.result.tokens.begin();
  GenerateOptions options = greedy(30);
  options.stop_tokens = {0, token};
  const Done done = run("The old house", options);
  EXPECT_EQ(done.result.stop, StopReason::stop_token);
  EXPECT_EQ(done.result.stop_index, 1u);
  EXPECT_EQ(static_cast<std::ptrdiff_t>(done.result.tokens.size()), first) << "without the stop token";
  EXPECT_EQ(done.tokens.back(), token) << "which the sequence has";
  EXPECT_EQ(done.result.text, bundled().decode(done.result.tokens));
}

TEST(Generator, ASentenceEnds) {
  GenerateOptions options = greedy(200);
  options.sentence_after = 8;
  std::string streamed;
  const Done done = run("It was a dark night, and the", options, [&](const GeneratedToken& next) {
    streamed += next.text;
    return true;
  });
  ASSERT_EQ(done.result.stop, StopReason::sentence_end);
  EXPECT_GE(done.result.tokens.size(), 8u);
  EXPECT_NE(std::string(".!?\"').").find(done.result.text.back()), std::string::npos) << done.result.text;
  for (int64_t after : {20, 40, 60}) {
    options.sentence_after = after;
    const std::string text = run("It was a dark night, and the", options).result.text;
    EXPECT_NE(std::string(".!?\"').").find(text.back()), std::string::npos) << after << text;
  }
  EXPECT_EQ(streamed, done.result.text);
  const std::string decoded = bundled().decode(done.result.tokens);
  EXPECT_EQ(decoded.rfind(done.result.text, 0), 0u);
  // A stop string that never comes holds the end of the sentence back until the run ends.
  options.sentence_after = 8;
  options.max_tokens = static_cast<int64_t>(done.result.tokens.size());
  options.stop_strings = {decoded.substr(done.result.text.size() - 1) + "#"};
  const Done held = run("It was a dark night, and the", options);
  EXPECT_EQ(held.result.stop, StopReason::sentence_end);
  EXPECT_EQ(held.result.text, done.result.text);
}

TEST(Generator, AFullStateEndsTheText) {
  for (int64_t draft : {0, 4}) {
    GenerateOptions options = greedy(100);
    options.draft = draft;
    const Done done = run(kSea, options, {}, 40);
    EXPECT_EQ(done.result.stop, StopReason::capacity);
    EXPECT_EQ(done.state.tokens(0), 40);
    EXPECT_EQ(done.tokens.size(), 41u);
    options.max_tokens = 20;
    EXPECT_EQ(run(kSea, options, {}, 40).result.stop, StopReason::length);
  }
}

// ---- the rest

TEST(Generator, Logprobs) {
  GenerateOptions options = greedy(8);
  options.logprobs = 3;
  options.sampling.repetition_penalty = 1.3;  // log probabilities are those of the model all the same
  std::vector<float> passed;
  const Done done = run("The old house", options, [&](const GeneratedToken& next) {
    if (next.token) passed.push_back(next.logprob);
    EXPECT_EQ(next.top.size(), next.token ? 3u : 0u);
    return true;
  });
  ASSERT_EQ(done.result.logprobs.size(), 8u);
  ASSERT_EQ(done.result.top.size(), 8u);
  EXPECT_EQ(passed, done.result.logprobs);
  // Again by hand, from all logits.
  const auto vocab = static_cast<size_t>(bundled().vocab_size());
  std::vector<float> logits(done.tokens.size() * vocab);
  HybridState state = make_state();
  bundled().append(kOneThread, state, {{.tokens = done.tokens, .logits = logits.data(), .every_token = true}});
  for (size_t i = 0; i < 8; ++i) {
    const float* row = logits.data() + (2 + i) * vocab;
    const double sum = model::log_sum_exp(kOneThread, row, static_cast<int64_t>(vocab));
    const auto want = static_cast<double>(row[done.result.tokens[i]]) - sum;
    EXPECT_NEAR(static_cast<double>(done.result.logprobs[i]), want, 1e-3) << i;  // prefill and decode round differently
    const auto& top = done.result.top[i];
    EXPECT_GE(top[0].logprob, top[1].logprob);
    EXPECT_GE(top[1].logprob, top[2].logprob);
    EXPECT_NEAR(static_cast<double>(top[0].logprob), static_cast<double>(*std::max_element(row, row + vocab)) - sum, 1e-3);
    EXPECT_GE(top[0].logprob, done.result.logprobs[i]);
  }
  options.logprobs = 0;
  EXPECT_TRUE(run("The old house", options).result.top[0].empty());
  options.logprobs.reset();
  EXPECT_TRUE(run("The old house", options).result.logprobs.empty());
}

TEST(Generator, LongPromptsCanBeStopped) {
  std::vector<int32_t> tokens;
  while (tokens.size() < 1200) tokens.push_back(static_cast<int32_t>(tokens.size() * 7 % 6000));
  HybridState state = make_state();
  const Generator generator(bundled(), greedy(5), kOneThread);
  std::vector<std::pair<int64_t, int64_t>> calls;
  const Generation stopped = generator.run(state, tokens, {}, [&](int64_t done, int64_t all) {
    calls.emplace_back(done, all);
    return calls.size() < 2;
  });
  EXPECT_EQ(calls, (std::vector<std::pair<int64_t, int64_t>>{{512, 1200}, {1024, 1200}}));
  EXPECT_EQ(stopped.stop, StopReason::callback);
  EXPECT_EQ(state.tokens(0), 1024);
  EXPECT_EQ(tokens.size(), 1200u);
  const Generation rest = generator.run(state, tokens);
  EXPECT_EQ(rest.prompt_tokens, 176);
  std::vector<int32_t> again(tokens.begin(), tokens.begin() + 1200);
  HybridState other = make_state();
  EXPECT_EQ(generator.run(other, again).tokens, rest.tokens);
}

TEST(Generator, APrefixStoreRestoresWhatItHas) {
  PrefixStore store({.bytes = 64 << 20, .every = 64});
  GenerateOptions options = greedy(10);
  options.store = &store;
  std::vector<int32_t> tokens;
  while (tokens.size() < 150) tokens.push_back(static_cast<int32_t>(tokens.size() * 7 % 6000));
  HybridState state = make_state();
  const Generator generator(bundled(), options, kOneThread);
  const Generation first = generator.run(state, tokens);
  EXPECT_EQ(first.restored_tokens, 0);
  EXPECT_EQ(first.prompt_tokens, 150);
  tokens.push_back(77);
  const Generation second = generator.run(state, tokens);
  EXPECT_EQ(second.prompt_tokens, 161);
  EXPECT_EQ(second.restored_tokens, 159) << "all that the state held at the end of the first run";
}

TEST(Generator, AModelWithoutTokenizerGivesTokens) {
  const Model& model = one_golden_model();
  HybridState state = model.create_state("f16", 200);
  std::vector<int32_t> tokens = some_ids(20);
  GenerateOptions options = greedy(7);
  options.ignore_end_tokens = true;
  const Generation done = Generator(model, options, kOneThread).run(state, tokens);
  EXPECT_EQ(done.tokens.size(), 7u);
  EXPECT_EQ(done.text, "");
  options.stop_strings = {"x"};
  EXPECT_EQ(complaint([&] { Generator(model, options); }), "generator: stop_strings needs text, and the model has no tokenizer");
}

TEST(Generator, RefusesWithASentence) {
  const auto said = [](const auto& change) {
    GenerateOptions options;
    change(options);
    return complaint([&] { Generator(bundled(), options); });
  };
  EXPECT_EQ(said([](auto&) {}), "none");
  EXPECT_EQ(said([](auto& o) { o.max_tokens = -1; }), "generator: max_tokens is -1, wanted 0 or more");
  EXPECT_EQ(said([](auto& o) { o.sampling.temperature = -1; }), "generator: sampling.temperature is -1.000000, wanted 0 or more");
  EXPECT_EQ(said([](auto& o) { o.sampling.min_p = 2; }), "generator: sampling.min_p is 2.000000, wanted 0 to 1");
  EXPECT_EQ(said([](auto& o) { o.sampling.repetition_penalty = 0; }),
            "generator: sampling.repetition_penalty is 0.000000, wanted 0.001 to 1000");
  EXPECT_EQ(said([](auto& o) { o.draft = 16; }), "generator: draft is 16, wanted 0 to 15");
  EXPECT_EQ(said([](auto& o) { o.logprobs = 6145; }), "generator: logprobs is 6145, wanted 0 to 6144");
  EXPECT_EQ(said([](auto& o) { o.stop_tokens = {6144}; }), "generator: stop_tokens hold token 6144, wanted 0 to 6143");
  EXPECT_EQ(said([](auto& o) { o.stop_strings = {""}; }), "generator: stop_strings[0] is empty, wanted a text");
  EXPECT_EQ(said([](auto& o) { o.sentence_after = -1; }), "generator: sentence_after is -1, wanted 0 or more");

  const auto refused = [](std::vector<int32_t> tokens, const GenerateOptions& options, HybridState state) {
    const std::vector<int32_t> before = tokens;
    const std::string said_of_run = complaint([&] { Generator(bundled(), options, kOneThread).run(state, tokens); });
    EXPECT_EQ(tokens, before);
    EXPECT_EQ(state.tokens(0), 0);
    return said_of_run;
  };
  EXPECT_EQ(refused({}, {}, make_state()), "generator: tokens are 0, and the state holds 0; wanted at least one more");
  EXPECT_EQ(refused({1, 6144}, {}, make_state()), "generator: inputs hold token 6144, wanted 0 to 6143");
  EXPECT_EQ(refused({1, 2, 3}, {}, make_state(0, 2)),
            "generator: inputs have 3 tokens for sequence 0, wanted at most 2 of its capacity of 2");
  GenerateOptions options;
  options.sequence = 1;
  EXPECT_EQ(refused({1}, options, make_state()), "generator: sequence is 1, the state holds 1");
  options.sequence = 0;
  options.draft = 4;
  EXPECT_EQ(refused({1}, options, make_state(3)), "generator: draft is 4, the state can roll back 3 tokens (HybridPlan::rollback)");
}

TEST(Generator, TheModelSuggestsARepetitionPenalty) {
  const Folder folder;
  for (const auto& file : std::filesystem::directory_iterator(shipped_model()))
    if (const auto name = file.path().filename(); name != "generation_config.json")
      std::filesystem::create_symlink(std::filesystem::absolute(file.path()), folder.path() / name);
  folder.write("generation_config.json", R"({"repetition_penalty":1.1,"temperature":0.5})");
  const GenerateOptions options = suggested_options(Model::load(folder.path()));
  EXPECT_EQ(options.sampling.repetition_penalty, 1.1);
  EXPECT_EQ(options.sampling.temperature, 0.5);
}

TEST(Generator, TheModelSuggestsOptions) {
  const GenerateOptions options = suggested_options(bundled());
  EXPECT_EQ(options.sampling.min_p, 0);
  EXPECT_EQ(options.sampling.repetition_penalty, 1);
  EXPECT_GT(options.max_tokens, 0);
  for (int i = 0; i <= static_cast<int>(StopReason::callback); ++i)
    EXPECT_STRNE(stop_reason_name(static_cast<StopReason>(i)), "unknown");
}

// The last token of a text is predicted and never appended, so append() does not check it.
TEST(Perplexity, RefusesTokensOutsideOfTheVocabulary) {
  for (int32_t wrong : {-1, 6144}) {
    HybridState state = make_state();
    const std::vector<int32_t> tokens{1, 2, wrong};
    EXPECT_EQ(complaint([&] { measure_perplexity(bundled(), kOneThread, state, tokens, {}); }),
              "perplexity: tokens hold token " + std::to_string(wrong) + ", wanted 0 to 6143");
  }
}

}  // namespace
