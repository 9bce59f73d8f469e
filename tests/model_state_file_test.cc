// State files: a loaded state equals the saved one in every format and layout, and every refusal says what differs.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>

#include "files/checksum.h"
#include "model/state/state_header.h"
#include "tests/support/complaint.h"
#include "tests/support/file_faults.h"
#include "tests/support/folder.h"
#include "tests/support/golden_model.h"
#include "tests/support/sequence_bits.h"
#include "weft/state_file.h"

namespace {

using namespace weft;
using namespace weft::testing_support;

constexpr Stream kOneThread{Backend::cpu, 0, nullptr, 1, Isa::best};

std::vector<float> append(HybridState& state, int64_t sequence, std::span<const int32_t> tokens) {
  std::vector<float> logits(static_cast<size_t>(one_golden_model().vocab_size()));
  one_golden_model().append(kOneThread, state, {{.sequence = sequence, .tokens = tokens, .logits = logits.data()}});
  return logits;
}

TEST(StateFile, ComesBackBitForBit) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  for (const char* kv : {"f32", "f16", "8v4", "3v5", "f16v4", "aura4v2"})
    for (size_t count : {1, 63, 64, 65, 200}) {
      HybridState before = one_golden_model().create_state(kv, 400, 2), after = one_golden_model().create_state(kv, 300);
      const std::vector<int32_t> tokens = some_ids(count);
      append(before, 1, tokens);
      one_golden_model().save(file, before, 1, tokens, kv);
      append(after, 0, some_ids(17));  // is replaced by the load
      EXPECT_EQ(one_golden_model().restore(file, after, 0), tokens);
      EXPECT_EQ(after.tokens(0), static_cast<int64_t>(count));
      EXPECT_EQ(bits_of(after, 0), bits_of(before, 1)) << kv << " " << count;
      // Saving it again gives the same file, codes and gains included.
      one_golden_model().save(folder.path() / "two.state", after, 0, tokens, kv);
      EXPECT_EQ(text_of(folder.path() / "two.state"), text_of(file)) << kv << " " << count;
      EXPECT_EQ(append(after, 0, some_ids(5)), append(before, 1, some_ids(5))) << kv << " " << count;
    }
}

TEST(StateFile, EveryLayoutTakesItOver) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridPlan tiles = one_golden_model().plan("8v4", 300), rows = tiles, plain = tiles;
  for (HybridPlan* plan : {&rows, &plain})
    for (LayerMemory& layer : plan->layers)
      if (auto* memory = std::get_if<AttentionMemory>(&layer)) {
        memory->layout = plan == &rows ? KvLayout::rows : KvLayout::tiles;
        memory->tile_order = TileOrder::token_major;
      }
  HybridState first = HybridState::create(tiles);
  append(first, 0, some_ids(150));
  one_golden_model().save(file, first, 0, some_ids(150));
  for (const HybridPlan& plan : {rows, plain, tiles}) {
    HybridState other = HybridState::create(plan);
    one_golden_model().restore(file, other, 0);
    one_golden_model().save(folder.path() / "again", other, 0, some_ids(150));
    EXPECT_EQ(text_of(folder.path() / "again"), text_of(file));
  }
}

TEST(StateFile, RolledBackTokensLeaveNoTrace) {
  const Folder folder;
  HybridPlan plan = one_golden_model().plan("4v4", 300);
  HybridState plain = HybridState::create(plan);
  plan.rollback = 8;
  HybridState tried = HybridState::create(plan);
  for (HybridState* state : {&plain, &tried}) {
    append(*state, 0, some_ids(62));
    append(*state, 0, some_ids(1));
  }
  append(tried, 0, some_ids(8));
  tried.rollback(kOneThread, 0, 8);
  one_golden_model().save(folder.path() / "a", plain, 0, some_ids(63));
  one_golden_model().save(folder.path() / "b", tried, 0, some_ids(63));
  EXPECT_EQ(text_of(folder.path() / "a"), text_of(folder.path() / "b"));
  // The same into a state with rollback, which then decodes and rolls back.
  one_golden_model().restore(folder.path() / "a", tried, 0);
  append(tried, 0, some_ids(4));
  tried.rollback(kOneThread, 0, 4);
  one_golden_model().save(folder.path() / "b", tried, 0, some_ids(63));
  EXPECT_EQ(text_of(folder.path() / "a"), text_of(folder.path() / "b"));
}

TEST(StateFile, SaysWhatItHolds) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridState state = one_golden_model().create_state("8v4", 300);
  append(state, 0, some_ids(100));
  one_golden_model().save(file, state, 0, some_ids(103), "8v4");
  const StateFileInfo info = read_state_file(file);
  EXPECT_EQ(info.version, 1);
  EXPECT_EQ(info.bytes, static_cast<int64_t>(std::filesystem::file_size(file)));
  EXPECT_EQ(info.tokens, 100);
  EXPECT_EQ(info.label.ids, some_ids(103));
  EXPECT_EQ(info.label.kv, "8v4");
  EXPECT_EQ(info.label.model, one_golden_model().summary());
  EXPECT_EQ(info.label.fingerprint, one_golden_model().fingerprint());
  EXPECT_EQ(info.layers.size(), model::parts_of(one_golden_model()).config.layers.size());
  EXPECT_EQ(info.sections.front().name, "ids");
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"one.state"});
  EXPECT_NE(complaint([&] { one_golden_model().save(file, state, 0, some_ids(99)); }), "none") << "fewer ids than tokens";
  std::vector<int32_t> ids = some_ids(100);
  ids[7] = static_cast<int32_t>(one_golden_model().vocab_size());
  const std::string bound = std::to_string(one_golden_model().vocab_size() - 1);
  EXPECT_EQ(complaint([&] { one_golden_model().save(file, state, 0, ids); }),
            "model save: ids hold " + std::to_string(ids[7]) + ", wanted 0 to " + bound);
  // A file that Weft did not write.
  save_state(file, state, 0, {one_golden_model().fingerprint(), "", "", ids});
  EXPECT_EQ(complaint([&] { one_golden_model().restore(file, state, 0); }),
            file.string() + ": ids hold " + std::to_string(ids[7]) + ", wanted 0 to " + bound);
  EXPECT_EQ(state.tokens(0), 100);
  ids[7] = -7;
  EXPECT_EQ(complaint([&] { save_state(file, state, 0, {"", "", "", ids}); }), file.string() + ": ids hold -7, wanted 0 or more");
  // An empty sequence can be saved too.
  state.reset(0);
  one_golden_model().save(file, state, 0, {});
  append(state, 0, some_ids(3));
  EXPECT_TRUE(one_golden_model().restore(file, state, 0).empty());
  EXPECT_EQ(state.tokens(0), 0);
}

// A load reads straight into the slot of an empty sequence before the file is fully checked. Bytes of a damaged file in that slot
// must have no effect.
TEST(StateFile, ADamagedFileLeavesAnEmptySequenceEmpty) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridState state = one_golden_model().create_state("8v4", 300);
  append(state, 0, some_ids(150));
  one_golden_model().save(file, state, 0, some_ids(150));
  const std::vector<float> want = [&] {
    HybridState fresh = one_golden_model().create_state("8v4", 300);
    return append(fresh, 0, some_ids(40));
  }();
  const StateFileInfo info = read_state_file(file);
  for (size_t damaged : {size_t{0}, size_t{1}, size_t{2}, info.sections.size() - 1}) {
    HybridState other = one_golden_model().create_state("8v4", 300);
    std::string bytes = text_of(file);
    bytes[static_cast<size_t>(info.sections[damaged].offset)] ^= 1;
    std::ofstream(folder.path() / "bad.state", std::ios::binary) << bytes;
    const std::string said = complaint([&] { one_golden_model().restore(folder.path() / "bad.state", other, 0); });
    EXPECT_NE(said.find(info.sections[damaged].name + " is damaged"), std::string::npos) << said;
    EXPECT_EQ(other.tokens(0), 0);
    EXPECT_EQ(model::pools_of(other).pages->in_use(), 0);
    EXPECT_EQ(append(other, 0, some_ids(40)), want) << damaged;
  }
}

// Pages that are not consecutive are read and written in runs; a rolled-back state has its history at another offset.
TEST(StateFile, ScatteredPagesComeBackBitForBit) {
  const Folder folder;
  for (const char* kv : {"8v4", "f16"}) {
    HybridPlan scattered = one_golden_model().plan(kv, 1000, 3);
    if (std::string(kv) == "f16")
      for (LayerMemory& layer : scattered.layers)
        if (auto* memory = std::get_if<AttentionMemory>(&layer)) memory->layout = KvLayout::rows;
    HybridState state = HybridState::create(scattered), other = HybridState::create(scattered),
                fresh = HybridState::create(scattered);
    for (size_t i = 0; i < 12; ++i)  // pages of two sequences alternate
      for (int64_t n : {0, 1}) append(state, n, some_ids(70));
    append(other, 2, some_ids(64));
    append(other, 0, some_ids(900));
    append(other, 1, some_ids(64));
    other.reset(2);
    other.reset(0);  // free pages on both sides of one in use
    const std::vector<int32_t> tokens(840, 1);
    one_golden_model().save(folder.path() / "one", state, 1, tokens);
    for (HybridState* to : {&other, &fresh}) {
      one_golden_model().restore(folder.path() / "one", *to, 2);
      EXPECT_EQ(bits_of(*to, 2), bits_of(state, 1));
      one_golden_model().save(folder.path() / "two", *to, 2, tokens);
      EXPECT_EQ(text_of(folder.path() / "two"), text_of(folder.path() / "one")) << kv;
    }
  }
}

// A header with a valid checksum may still hold anything.
TEST(StateFile, FewerIdsThanTokensAreRefused) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridState state = one_golden_model().create_state("8v4", 300);
  append(state, 0, some_ids(100));
  one_golden_model().save(file, state, 0, some_ids(100), "8v4");
  std::string bytes = text_of(file);
  const size_t at = bytes.find("\"ids\":100");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at, 9, "\"ids\": 99");
  uint32_t header = 0;
  std::memcpy(&header, bytes.data() + 12, sizeof header);
  files::Checksum sum;
  sum.add(bytes.data(), 24);
  sum.add(bytes.data() + 32, header);
  const uint64_t value = sum.value();
  std::memcpy(bytes.data() + 24, &value, sizeof value);
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_NE(complaint([&] { one_golden_model().restore(file, state, 0); }).find("ids are 99, wanted at least the 100 tokens"),
            std::string::npos)
      << complaint([&] { one_golden_model().restore(file, state, 0); });
}

TEST(StateFile, KeepsItsModeAndItsLink) {
  namespace fs = std::filesystem;
  const Folder folder;
  const fs::path file = folder.path() / "one.state", link = folder.path() / "link", pipe = folder.path() / "two.state.weft-lock";
  HybridState state = one_golden_model().create_state("8v4", 300);
  one_golden_model().save(file, state, 0, {}, "8v4");
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink(file, link);
  append(state, 0, some_ids(3));
  one_golden_model().save(link, state, 0, some_ids(3), "8v4");
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(read_state_file(file).tokens, 3);
  // A link may precede its target, and lead through other links.
  fs::create_directory(folder.path() / "far");
  fs::create_symlink("far/link", folder.path() / "first");
  fs::create_symlink("../later.state", folder.path() / "far" / "link");
  one_golden_model().save(folder.path() / "first", state, 0, some_ids(3), "8v4");
  EXPECT_TRUE(fs::is_symlink(folder.path() / "first"));
  EXPECT_TRUE(fs::is_symlink(folder.path() / "far" / "link"));
  EXPECT_EQ(read_state_file(folder.path() / "later.state").tokens, 3);
  const fs::path loop = folder.path() / "loop";
  fs::create_symlink("loop", loop);
  EXPECT_EQ(complaint([&] { one_golden_model().save(loop, state, 0, some_ids(3), "8v4"); }),
            loop.string() + ": is a link that cannot be followed: Too many levels of symbolic links");
  // A pipe in the place of the lock file is refused at once.
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(complaint([&] { one_golden_model().save(folder.path() / "two.state", state, 0, some_ids(3), "8v4"); }),
            pipe.string() + ": is not a lock file that Weft made; move it away");
}

// A caller with a buffer for the ids says how many fit. The file may grow between two looks at it.
TEST(StateFile, MoreIdsThanWantedAreRefused) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridState state = one_golden_model().create_state("8v4", 300), other = one_golden_model().create_state("8v4", 300);
  append(state, 0, some_ids(100));
  one_golden_model().save(file, state, 0, some_ids(103));
  append(other, 0, some_ids(5));
  EXPECT_EQ(complaint([&] { one_golden_model().restore(file, other, 0, 102); }),
            file.string() + ": ids are 103, wanted at most 102");
  EXPECT_EQ(other.tokens(0), 5) << "nothing was loaded";
  EXPECT_EQ(one_golden_model().restore(file, other, 0, 103).size(), 103u);
}

TEST(StateFile, OtherModelsFormatsAndSizesAreRefused) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridState state = one_golden_model().create_state("8v4", 300);
  append(state, 0, some_ids(100));
  one_golden_model().save(file, state, 0, some_ids(100), "8v4");
  const auto said = [&](const Model& loaded, std::string_view kv, int64_t capacity) {
    HybridState other = loaded.create_state(kv, capacity);
    const std::vector<int32_t> own(20, 1);
    loaded.append(kOneThread, other, {{.tokens = own}});
    const SequenceBits before = bits_of(other, 0);
    const std::string what = complaint([&] { loaded.restore(file, other, 0); });
    EXPECT_EQ(other.tokens(0), 20);
    EXPECT_EQ(bits_of(other, 0), before) << "the state was not touched";
    return what.substr(0, file.native().size()) == file.native() ? what.substr(file.native().size()) : what;
  };
  EXPECT_EQ(said(one_golden_model(), "8v4", 99), ": tokens are 100, the capacity of the state is 99");
  const std::string recipe = said(one_golden_model(), "4v4", 300);
  EXPECT_NE(recipe.find("is of another kind: attention"), std::string::npos) << recipe;
  EXPECT_NE(recipe.find("keys weft1-8, values weft1-4; the state has attention"), std::string::npos) << recipe;
  EXPECT_NE(recipe.find("keys weft1-4, values weft1-4"), std::string::npos) << recipe;
  const std::string other = said(Model::load(golden_models() / "qwen3_next"), "8v4", 300);
  EXPECT_EQ(other.find(": was made with another model: 'qwen3_5"), 0u) << other;
  // Another rotation under the same name.
  HybridPlan seeded = one_golden_model().plan("8v4", 300);
  for (LayerMemory& layer : seeded.layers)
    if (auto* memory = std::get_if<AttentionMemory>(&layer)) memory->recipe.k.signs[0] ^= 1;
  HybridState turned = HybridState::create(seeded);
  EXPECT_NE(complaint([&] { one_golden_model().restore(file, turned, 0); }).find("with another rotation or codebook"),
            std::string::npos);
  EXPECT_NE(complaint([&] { one_golden_model().restore(folder.path() / "none", turned, 0); }).find("cannot be opened"),
            std::string::npos);
  EXPECT_NE(complaint([&] { one_golden_model().restore(folder.path(), turned, 0); }).find("not a regular file"), std::string::npos);
}

TEST(StateFile, FingerprintsTellModelsApart) {
  const std::string own = one_golden_model().fingerprint();
  EXPECT_EQ(own, "8adb203f63b30d5c1dcdd2bc5c7fa360") << "files of earlier versions carry it";
  EXPECT_EQ(Model::load(golden_models() / "qwen3_5").fingerprint(), own);
  EXPECT_NE(Model::load(golden_models() / "qwen3_5_moe").fingerprint(), own);
  // The same shapes with one number changed.
  const Folder folder;
  for (const auto& entry : std::filesystem::directory_iterator(golden_models() / "qwen3_5"))
    std::filesystem::copy(entry.path(), folder.path());
  EXPECT_EQ(Model::load(folder.path()).fingerprint(), own);
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("model", 0) != 0 || entry.path().extension() != ".safetensors") continue;
    std::string bytes = text_of(entry.path());
    bytes.back() ^= 1;
    folder.write(name, bytes);
  }
  EXPECT_NE(Model::load(folder.path()).fingerprint(), own);
}

// A loaded model stays the same when its files are replaced or deleted.
TEST(StateFile, FingerprintsAreOfTheModelThatWasLoaded) {
  namespace fs = std::filesystem;
  const Folder folder;
  for (const auto& entry : fs::directory_iterator(golden_models() / "qwen3_5")) fs::copy(entry.path(), folder.path());
  const Model changed = Model::load(folder.path()), gone = Model::load(folder.path());
  folder.write("config.json", R"({"model_type":"qwen3_next"})");
  EXPECT_EQ(changed.fingerprint(), one_golden_model().fingerprint());
  fs::remove_all(folder.path());
  EXPECT_EQ(gone.fingerprint(), one_golden_model().fingerprint());
  EXPECT_EQ(complaint([&] { gone.create_state("8v4", 100); }), "none");
}

TEST(StateFile, LabelsThatWouldNotComeBackAreRefused) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridPlan plan = one_golden_model().plan("8v4", 100);
  HybridState state = HybridState::create(plan);
  const auto said = [&](const StateLabel& label) {
    const std::string what = complaint([&] { save_state(file, state, 0, label); });
    return what.substr(0, file.native().size()) == file.native() ? what.substr(file.native().size()) : what;
  };
  EXPECT_EQ(said({"f\xc3\xa9", "", "", {}}), "none");
  EXPECT_EQ(read_state_file(file).label.fingerprint, "f\xc3\xa9");
  EXPECT_EQ(said({"f\xff", "", "", {}}), ": fingerprint is 'f\\xff', wanted UTF-8");
  EXPECT_EQ(said({"", "m\xed", "", {}}), ": model is 'm\\xed', wanted UTF-8");
  EXPECT_EQ(said({"", "", "8v4\xc3", {}}), ": kv is '8v4\\xc3', wanted UTF-8");
  EXPECT_EQ(read_state_file(file).label.fingerprint, "f\xc3\xa9") << "the file is as it was";
  for (LayerMemory& layer : plan.layers)
    if (auto* memory = std::get_if<AttentionMemory>(&layer)) memory->recipe.v.id = "\xff";
  state = HybridState::create(plan);
  EXPECT_EQ(said({}), ": id of a format is '\\xff', wanted UTF-8");
}

// Names of formats in a file are as untrusted as its other texts.
TEST(StateFile, NamesOfFormatsCannotWriteOnTheTerminal) {
  const Folder folder;
  const auto file = folder.path() / "one.state";
  HybridPlan plan = one_golden_model().plan("8v4", 100);
  HybridState usual = HybridState::create(plan);
  for (LayerMemory& layer : plan.layers)
    if (auto* memory = std::get_if<AttentionMemory>(&layer)) memory->recipe.k.id = "\x1b[31m" + std::string(100000, 'x');
  one_golden_model().save(file, HybridState::create(plan), 0, {});
  const std::string said = complaint([&] { one_golden_model().restore(file, usual, 0); });
  EXPECT_NE(said.find("keys \\x1b[31mxxx"), std::string::npos) << said;
  EXPECT_LT(said.size(), 1000u);
  for (const std::string& layer : read_state_file(file).layers) EXPECT_EQ(layer.find('\x1b'), std::string::npos);
}

TEST(StateFile, CannotBeWritten) {
  const Folder folder;
  HybridState state = one_golden_model().create_state("8v4", 300);
  append(state, 0, some_ids(5));
  EXPECT_NE(
      complaint([&] { one_golden_model().save(folder.path() / "no" / "such", state, 0, some_ids(5)); }).find("cannot be written"),
      std::string::npos);
  EXPECT_NE(complaint([&] { one_golden_model().save(folder.path(), state, 0, some_ids(5)); }).find("is not a regular file"),
            std::string::npos);
  EXPECT_NE(complaint([&] { one_golden_model().save("/dev/full", state, 0, some_ids(5)); }).find("is not a regular file"),
            std::string::npos);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
