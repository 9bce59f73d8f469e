// The harness of the cases: it must detect every kind of fault, and refuse options that make no sense.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "cases/golden_reader.h"
#include "cases/options.h"
#include "cases/verify.h"
#include "tests/support/complaint.h"

namespace weft::cases {
namespace {

// ---- ops with faults

using Norm = OpProblem<L2NormArgs>;
using Sabotage = void (*)(const L2NormArgs& args, Scratch scratch, int run);

// The reference's l2_norm, followed by a fault.
std::unique_ptr<Norm> sabotaged(Sabotage sabotage) {
  auto problem = std::make_unique<Norm>();
  Rng rng(1);
  problem->args.x = problem->memory().make(DType::f32, {4, 8});
  problem->args.y = problem->memory().make_padded(DType::f32, {4, 8}, 3);
  fill_normal(problem->args.x, rng);
  problem->output(
      "y", [](L2NormArgs& a) -> Tensor& { return a.y; }, small_op(DType::f32, 0));
  problem->second = [](const L2NormArgs&) { return Findings{}; };
  problem->run_as = [sabotage, run = std::make_shared<int>(0)](const Stream& stream, const L2NormArgs& args, Scratch scratch) {
    launch(stream, args, {});
    sabotage(args, scratch, (*run)++);
  };
  problem->run_as_scratch = [](const Stream&, const L2NormArgs&) { return size_t{64}; };
  return problem;
}

std::string fault_of(Sabotage sabotage) {
  const Outcome outcome = Checker(sabotaged(sabotage)).check({Backend::reference});
  return outcome.verdict == Verdict::failed ? outcome.why : "nothing";
}

float* data(const Tensor& t) { return static_cast<float*>(t.data); }

TEST(Harness, AcceptsWhatIsRight) {
  EXPECT_EQ(fault_of([](const L2NormArgs&, Scratch scratch, int) { std::memset(scratch.data, 1, scratch.bytes); }), "nothing");
}
TEST(Harness, NoticesWrongNumbers) {
  EXPECT_EQ(fault_of([](const L2NormArgs& a, Scratch, int) { data(a.y)[0] *= 1.0001f; }), "y");
  EXPECT_EQ(fault_of([](const L2NormArgs& a, Scratch, int) { data(a.y)[12] = NAN; }), "y");
}
TEST(Harness, NoticesMissingElements) {
  EXPECT_EQ(fault_of([](const L2NormArgs& a, Scratch, int) { std::memset(data(a.y) + 1, 0xFF, 4); }), "y");
}
TEST(Harness, NoticesStrayWrites) {
  EXPECT_NE(fault_of([](const L2NormArgs& a, Scratch, int) { data(a.y)[8] = 0; }).find("padding"), std::string::npos);
  EXPECT_NE(fault_of([](const L2NormArgs& a, Scratch, int) { data(a.x)[3] = 0; }).find("input"), std::string::npos);
  EXPECT_NE(fault_of([](const L2NormArgs& a, Scratch, int) { data(a.x)[-1] = 0; }).find("guard"), std::string::npos);
  EXPECT_NE(fault_of([](const L2NormArgs& a, Scratch, int) { data(a.x)[32] = 0; }).find("guard"), std::string::npos);
}
TEST(Harness, NoticesScratchOverrun) {
  EXPECT_NE(fault_of([](const L2NormArgs&, Scratch s, int) { static_cast<char*>(s.data)[s.bytes] = 0; }).find("scratch"),
            std::string::npos);
}
TEST(Harness, NoticesOtherBits) {
  EXPECT_NE(fault_of([](const L2NormArgs& a, Scratch, int run) {
              if (run == 1) data(a.y)[0] = std::nextafter(data(a.y)[0], 2.0f);
            }).find("second run"),
            std::string::npos);
  // A result that depends on garbage in the scratch.
  EXPECT_NE(fault_of([](const L2NormArgs& a, Scratch s, int) {
              if (*static_cast<uint8_t*>(s.data) == 0x5A) data(a.y)[0] = std::nextafter(data(a.y)[0], 2.0f);
            }).find("second run"),
            std::string::npos);
}
TEST(Harness, NoticesElementsThatMustStay) {
  // The op must not write the rows of inert sequences.
  const Case item{"short_conv", "inert", "cu=-3:0:4:2:30,T=12,C=8", Tier::fast, ""};
  const std::unique_ptr<Problem> problem = build(item);
  problem->prepare();
  Image image(problem->memory(), host_placement());
  problem->run({Backend::reference}, image, {});
  EXPECT_EQ(problem->misbehaviour(image), "");
  const auto* args = dynamic_cast<OpProblem<ShortConvArgs>*>(problem.get());
  ASSERT_NE(args, nullptr);
  data(image.at(args->args.y))[11 * 8] = 0;
  EXPECT_NE(problem->misbehaviour(image).find("must leave it alone"), std::string::npos);
}

// ---- images in device memory

// Host memory that is labelled as device memory, so that results must be fetched before they are compared.
class Elsewhere : public Placement {
 public:
  Place place() const override { return Place::cuda; }
  int device() const override { return 3; }
  uint8_t* allocate(size_t bytes) override { return host_placement().allocate(bytes); }
  void release(uint8_t* bytes) override { host_placement().release(bytes); }
  void upload(uint8_t* to, const uint8_t* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(uint8_t* to, const uint8_t* from, size_t bytes) override { std::memcpy(to, from, bytes); }
};

TEST(Image, MovesViewsAndBringsThemBack) {
  Memory memory;
  const Tensor whole = memory.make(DType::f32, {4, 6}, 1);
  fill(whole, 2);
  Tensor part = whole;
  part.data = data(whole) + 7;
  Elsewhere elsewhere;
  Image image(memory, elsewhere);
  const Tensor there = image.at(part);
  EXPECT_EQ(there.place, Place::cuda);
  EXPECT_EQ(there.device, 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(image.at(whole).data) % 256, 4u);  // alignment and misalignment are kept
  EXPECT_EQ(data(there)[0], 2);
  data(there)[0] = 5;
  image.fetch();
  EXPECT_EQ(data(image.fetched(whole))[7], 5);
  EXPECT_EQ(data(whole)[7], 2);
  EXPECT_TRUE(image.guards_intact());
  data(image.at(whole))[24] = 0;
  image.fetch();
  EXPECT_FALSE(image.guards_intact());
}

// ---- options and names

TEST(Options, NameWhatTheyDoNotUnderstand) {
  const Case item{"l2_norm", "x", "T=3,Tee=4", Tier::fast, ""};
  EXPECT_NE(complaint([&] { build(item); }).find("l2_norm: unknown option Tee; known: T, H, D"), std::string::npos);
  EXPECT_NE(complaint([&] {
              build({"l2_norm", "x", "T=three", Tier::fast, ""});
            }).find("option T is 'three', wanted an integer"),
            std::string::npos);
  EXPECT_NE(complaint([&] {
              build({"l2_norm", "x", "dtype=f64", Tier::fast, ""});
            }).find("wanted one of f32, f16, bf16"),
            std::string::npos);
  EXPECT_NE(complaint([&] { build({"l2_norm", "x", "T=-1", Tier::fast, ""}); }).find("option T is -1"), std::string::npos);
  EXPECT_NE(complaint([&] { build({"l2_norm", "x", "eps=tiny", Tier::fast, ""}); }).find("wanted a number"), std::string::npos);
  EXPECT_NE(complaint([&] { build({"nothing", "x", "", Tier::fast, ""}); }).find("no op nothing"), std::string::npos);
  EXPECT_NE(complaint([&] { build({"compressed_attention", "x", "recipe=9v9", Tier::fast, ""}); }).find("9v9"), std::string::npos);
  for (const char* text : {"T", "=3", "T=", "T=1,T=2", ",,"}) EXPECT_NE(complaint([&] { Options options{text}; }), "none") << text;
}

TEST(Options, SizesThatNoMachineHasAreRefused) {
  const auto refusal = [](const char* op, const char* options) {
    return complaint([&] { build({op, "x", options, Tier::fast, ""}); });
  };
  const auto expect = [&](const char* op, const char* options, const std::string& part) {
    const std::string said = refusal(op, options);
    EXPECT_NE(said.find(part), std::string::npos) << op << " " << options << ": " << said;
  };
  expect("delta_gates", "T=77415481078,Hv=238282367", "sizes [77415481078, 238282367] takes more than the ");  // 2^64 + 10
  expect("delta_gates", "T=77415481078,Hv=238282367,padded=1", " bytes of memory that this machine has");
  for (const char* partials : {"blocks", "interleaved"})  // 2^64 partials
    expect("attention_merge", (std::string("blocks=1099511627776,T=1048576,Hk=8,partials=") + partials).c_str(), "takes more than");
  expect("kv_encode", "T=1099511627776,capacity=64", "sizes [1099511627776] takes more than");
  for (const char* op : {"short_conv", "gated_delta_rule_compose", "gated_delta_rule_apply", "kv_repack"})
    expect(op, "N=1048577", "option N is 1048577, wanted 0 to 1048576");
  expect("short_conv", "lens=9223372036854775807:9223372036854775807", "option lens has 9223372036854775807, wanted numbers from ");
  expect("short_conv", "lens=-5:3", "sizes [-2] cannot be, wanted sizes of 0 or more");
  // Each tensor fits alone, but not all together.
  Memory memory;
  const int64_t machine = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  memory.make(DType::u8, {4096});
  EXPECT_NE(complaint([&] { memory.make(DType::u8, {machine}); }).find("the tensors of this shape take more than"),
            std::string::npos);
  EXPECT_EQ(refusal("delta_gates", "T=131072,Hv=64"), "none");
}

TEST(Options, OverridesReplaceAndDefaultsShow) {
  const auto problem = build({"l2_norm", "x", "T=3", Tier::fast, ""}, "T=5,dtype=bf16");
  std::string shape;
  for (const auto& [key, value] : problem->shape) shape += key + "=" + value + " ";
  EXPECT_EQ(shape, "T=5 H=3 D=64 dtype=bf16 padded=0 inplace=0 eps=1e-06 scale=1 ");
}

TEST(CaseNames, MatchAsTextOrGlob) {
  EXPECT_TRUE(matches("", "tokens/T=65"));
  EXPECT_TRUE(matches("T=6", "tokens/T=65"));
  EXPECT_FALSE(matches("T=7", "tokens/T=65"));
  EXPECT_TRUE(matches("tokens/*5", "tokens/T=65"));
  EXPECT_TRUE(matches("*T=?5", "tokens/T=65"));
  EXPECT_FALSE(matches("T=*", "tokens/T=65"));  // a glob covers the whole name
  for (const char* glob : {"*", "**", "?*", "*?", "tokens/T=65*", "*tokens/T=65", "*o*6?", "*T=*T=65*", "*5"})
    EXPECT_EQ(matches(glob, "tokens/T=65"), std::string_view(glob) != "*T=*T=65*") << glob;
  EXPECT_TRUE(matches("*ab*abc", "xababab_abc"));
  EXPECT_FALSE(matches("*ab*abd", "xababab_abc"));
  EXPECT_FALSE(matches("?", ""));
  EXPECT_TRUE(matches("*", ""));
}

// A matcher that tries every share of text for every star would take exponential time.
TEST(CaseNames, ManyStarsEndSoon) {
  const std::string stars(200, '*'), name(1000, 'a');
  EXPECT_FALSE(matches(stars + "zz", name));
  std::string pairs;
  for (int i = 0; i < 100; ++i) pairs += "a*";
  EXPECT_FALSE(matches(pairs + "z", name));
  EXPECT_TRUE(matches(pairs + "a", name));
}

}  // namespace
}  // namespace weft::cases
