// The schema of the C interface against the header: sets of ops, layouts of structs, values of constants, and conversions of all
// ops.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <deque>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "c/convert.h"
#include "cases/builders.h"
#include "cases/table.h"
#include "weft/schema.h"

namespace weft {
namespace {

const Schema& schema() {
  static const Schema made = c_schema();
  return made;
}

// All structs of the schema: those of ops with their direct members alone.
std::vector<SchemaStruct> all_structs() {
  std::vector<SchemaStruct> all = schema().structs;
  for (const SchemaOp& op : schema().ops) {
    SchemaStruct direct{op.args.name, op.args.size, {}};
    for (const SchemaMember& member : op.args.members)
      if (member.path.find('.') == std::string::npos) direct.members.push_back(member);
    all.push_back(direct);
  }
  return all;
}

std::string header_text() {
  std::ifstream file(WEFT_SOURCE_DIR "/include/weft/c.h");
  return {std::istreambuf_iterator<char>(file), {}};
}

std::set<std::string> matches(const std::string& text, const char* pattern) {
  std::set<std::string> found;
  const std::regex wanted(pattern);
  for (std::sregex_iterator at(text.begin(), text.end(), wanted), end; at != end; ++at) found.insert((*at)[1]);
  return found;
}

TEST(CSchema, HasTheOpsOfTheHeader) {
  std::set<std::string> ops;
  for (const SchemaOp& op : schema().ops) ops.insert(op.op);
  const std::vector<std::string>& list = cases::op_names();
  EXPECT_EQ(ops, std::set<std::string>(list.begin(), list.end()));
  EXPECT_EQ(ops, matches(header_text(), "\nWEFT_C_OP\\((\\w+)\\);"));
}

TEST(CSchema, HasTheStructsAndConstantsOfTheHeader) {
  std::set<std::string> structs, constants;
  for (const SchemaStruct& made : all_structs()) structs.insert(made.name);
  EXPECT_EQ(structs, matches(header_text(), "typedef struct (\\w+) \\{"));
  for (const SchemaEnum& made : schema().enums)
    for (const auto& value : made.values) constants.insert(value.constant);
  EXPECT_EQ(constants, matches(header_text(), "(WEFT_\\w+) = \\d+"));
}

// One after the other, from the first byte to the last: no member is forgotten, and no padding is left to the compiler.
TEST(CSchema, MembersFillTheirStructs) {
  for (const SchemaStruct& made : all_structs()) {
    size_t end = 0;
    for (const SchemaMember& member : made.members) {
      EXPECT_EQ(member.offset, end) << made.name << "." << member.path;
      end = member.offset + member.size;
    }
    EXPECT_EQ(end, made.size) << made.name;
  }
}

TEST(CSchema, ZeroIsTheDefault) {
  std::map<std::string, std::string> first;
  for (const SchemaEnum& made : schema().enums) first[made.name] = made.values.front().name;
  for (const SchemaOp& op : schema().ops) {
    EXPECT_EQ(op.args.members.front().path, "struct_size") << op.op;
    for (const SchemaMember& member : op.args.members) {
      const std::string where = op.op + "." + member.path;
      if (member.kind == "enum") {
        EXPECT_EQ(member.fallback, first.at(member.of)) << where;
      }
      if (member.kind == "flag" || (member.kind == "i64" && !member.fallback.empty() && member.legal != ">= 1")) {
        EXPECT_EQ(member.fallback, "0") << where;
      }
      EXPECT_EQ(member.role.empty(), member.kind == "size" || member.kind == "struct" || member.kind == "reserved") << where;
    }
  }
}

// c_layout.inc holds what WEFT_C_ABI 2 promises, and c_abi_test.c compiles it against the header. A struct may grow at its end;
// nothing else changes while the ABI stays 2.
TEST(CSchema, KeepsTheLayoutOfTheAbi) {
  if (sizeof(void*) != 8) GTEST_SKIP() << "the list is of 64-bit machines";
  std::multiset<std::string> promised, now;
  std::ifstream file(WEFT_SOURCE_DIR "/tests/c_layout.inc");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("WEFT_")) promised.insert(line);
  std::ostringstream fresh;
  const auto add = [&](const std::string& line) {
    now.insert(line);
    if (!promised.contains(line)) fresh << line << "\n";
  };
  for (const SchemaStruct& made : all_structs()) {
    add("WEFT_SIZE(" + made.name + ", " + std::to_string(made.size) + ")");
    for (const SchemaMember& member : made.members)
      add("WEFT_MEMBER(" + made.name + ", " + member.path + ", " + std::to_string(member.offset) + ", " +
          std::to_string(member.size) + ")");
  }
  for (const SchemaEnum& made : schema().enums)
    for (const auto& value : made.values) add("WEFT_CONSTANT(" + value.constant + ", " + std::to_string(value.value) + ")");
  EXPECT_EQ(promised, now) << "lines that tests/c_layout.inc lacks:\n" << fresh.str();
}

// weft_schema() says all that c_schema() says: every field of every member, and what is absent is absent.
TEST(CSchema, JsonIsTheSchema) {
  const auto json = nlohmann::json::parse(weft_schema());
  EXPECT_EQ(json["c_abi"], WEFT_C_ABI);
  EXPECT_EQ(json["pointer_bytes"], sizeof(void*));
  const auto text = [](const nlohmann::json& from, const char* key) { return from.value(key, std::string()); };
  const auto texts = [](const nlohmann::json& from, const char* key) { return from.value(key, std::vector<std::string>()); };
  const auto check = [&](const nlohmann::json& from, const SchemaStruct& made) {
    EXPECT_EQ(from["struct"], made.name);
    EXPECT_EQ(from["size"], made.size);
    ASSERT_EQ(from["members"].size(), made.members.size()) << made.name;
    for (size_t i = 0; i < made.members.size(); ++i) {
      const nlohmann::json& entry = from["members"][i];
      const SchemaMember& member = made.members[i];
      EXPECT_EQ(std::tuple(text(entry, "path"), text(entry, "kind"), text(entry, "type"), text(entry, "of"), text(entry, "role")),
                std::tuple(member.path, member.kind, member.c_type, member.of, member.role));
      EXPECT_EQ(std::tuple(text(entry, "dtype_of"), text(entry, "default"), text(entry, "legal"), texts(entry, "dtypes"),
                           texts(entry, "shapes"), texts(entry, "may_be")),
                std::tuple(member.dtype_of, member.fallback, member.legal, member.dtypes, member.shapes, member.may_be));
      EXPECT_EQ(std::tuple(entry["offset"], entry["size"], entry.value("optional", false), entry.contains("optional")),
                std::tuple(member.offset, member.size, member.optional, !member.role.empty()));
    }
  };
  ASSERT_EQ(json["ops"].size(), schema().ops.size());
  for (size_t i = 0; i < schema().ops.size(); ++i) check(json["ops"][i], schema().ops[i].args);
  ASSERT_EQ(json["structs"].size(), schema().structs.size());
  for (size_t i = 0; i < schema().structs.size(); ++i) check(json["structs"][i], schema().structs[i]);
  ASSERT_EQ(json["enums"].size(), schema().enums.size());
  for (size_t i = 0; i < schema().enums.size(); ++i) {
    ASSERT_EQ(json["enums"][i]["values"].size(), schema().enums[i].values.size());
    for (size_t j = 0; j < schema().enums[i].values.size(); ++j) {
      EXPECT_EQ(json["enums"][i]["values"][j]["constant"], schema().enums[i].values[j].constant);
      EXPECT_EQ(json["enums"][i]["values"][j]["value"], schema().enums[i].values[j].value);
    }
  }
}

// --- conversions --------------------------------------------------------------------------------------------------------------

weft_tensor to_c(const Tensor& t) {
  weft_tensor made{};
  made.data = t.data;
  std::copy(t.sizes.begin(), t.sizes.end(), made.sizes);
  std::copy(t.strides.begin(), t.strides.end(), made.strides);
  made.rank = int{t.rank};
  made.dtype = c::dtype_value(t.dtype);
  made.place = t.place == Place::host ? WEFT_HOST : WEFT_CUDA;
  made.device = int{t.device};
  return made;
}

// The visitor that fills a C struct from an argument struct: the inverse of c::FromC.
template <class C>
struct ToC {
  C& c;
  std::deque<weft_kv_recipe>& recipes;

  template <class F>
  void tensor(const char*, const Tensor& from, const InC<F>& member, const TensorRule&) {
    member.at(c) = to_c(from);
  }
  template <class T, class F>
  void scalar(const char*, const T& from, const InC<F>& member, const ScalarRule&) {
    if constexpr (std::is_enum_v<T>) {
      int32_t value = 0;
      for (const auto& entry : EnumValues<T>::kTable.values) {
        if (entry.value == from) member.at(c) = value;
        ++value;
      }
    } else {
      member.at(c) = from;
    }
  }
  template <class T, class Has, class F>
  void scalar(const char*, const T& from, const OptionInC<Has, F>& member, const ScalarRule&) {
    if constexpr (std::is_same_v<T, float>) {
      member.has(c) = 1;
      member.at(c) = from;
    } else {
      member.has(c) = from.has_value();
      if (from) member.at(c) = *from;
    }
  }
  template <class F>
  void scalar(const char*, const bool& from, const NegatedInC<F>& member, const ScalarRule&) {
    member.at(c) = !from;
  }
  template <class S, class F, class... Use>
  void group(const char*, const S& from, const InC<F>& member, Use... use) {
    auto& inner = member.at(c);
    describe(from, ToC<std::remove_reference_t<decltype(inner)>>{inner, recipes}, use...);
  }
  template <class S, class... Use>
  void format(const char*, const S&, const NotInC&, Use...) {}
  template <class F>
  void rule(const F&) {}
  template <class F>
  void recipe(const InC<F>& member, const KvFormat* k, const KvFormat* v) {
    recipes.push_back({{"test", k ? *k : KvFormat{}, *v}});
    member.at(c) = &recipes.back();
  }
  template <class F, class G>
  void recipe(const InC<F>& member, const InC<G>& side, const KvFormat* format) {
    side.at(c) = recipes.size() % 2 == 0 ? WEFT_RECIPE_SIDE_K : WEFT_RECIPE_SIDE_V;
    KvRecipe made;
    (side.at(c) == WEFT_RECIPE_SIDE_K ? made.k : made.v) = *format;
    recipes.push_back({made});
    member.at(c) = &recipes.back();
  }
};

bool same(const Tensor& a, const Tensor& b) {
  return a.data == b.data && a.rank == b.rank && a.place == b.place && a.device == b.device && a.sizes == b.sizes &&
         a.strides == b.strides && (a.rank == 0 || a.dtype == b.dtype);
}

template <class Args>
void expect_same(const Args& a, const Args& b, const std::string& where) {
  std::map<std::string, Tensor> tensors;
  for_each_tensor(a, [&](const Path& path, const Tensor& t, const TensorRule&) { tensors[path.text()] = t; });
  for_each_tensor(b, [&](const Path& path, const Tensor& t, const TensorRule&) {
    EXPECT_TRUE(same(tensors[path.text()], t)) << where << ": " << path.text();
  });
  std::vector<const void*> members;
  for_each_scalar(a, [&](const Path&, const auto& value) { members.push_back(&value); });
  size_t next = 0;
  for_each_scalar(b, [&](const Path& path, const auto& value) {
    const auto& other = *static_cast<const std::remove_reference_t<decltype(value)>*>(members.at(next++));
    EXPECT_TRUE(value == other) << where << ": " << path.text();
  });
}

// Every case of the fast tier crosses into C and back unchanged, and C accepts what C++ accepts.
template <class Args, class Ask, class Choose>
void round_trip(const char* op, const Ask& ask, const Choose& choose_kernel) {
  std::deque<weft_kv_recipe> recipes;
  weft_stream stream{};
  stream.struct_size = sizeof stream;
  stream.backend = WEFT_BACKEND_REFERENCE;
  int count = 0;
  for (const cases::Case& row : cases::all_cases()) {
    if (row.op != op || row.tier != cases::Tier::fast || count >= 40) continue;
    const std::unique_ptr<cases::Problem> problem = cases::build(row);
    const Args args = dynamic_cast<const cases::OpProblem<Args>&>(*problem).args;
    typename c::StructOf<Args>::Type made{};
    made.struct_size = sizeof made;
    describe(args, ToC<decltype(made)>{made, recipes});
    expect_same(args, c::to_cpp<Args>(op, made), row.op + " " + row.name);
    weft_status status{};
    status.struct_size = sizeof status;
    size_t bytes = 1;
    EXPECT_EQ(ask(&stream, &made, &bytes, &status), WEFT_OK) << row.name << ": " << status.message;
    EXPECT_EQ(bytes, scratch_bytes(Stream{Backend::reference}, args)) << row.name;
    weft_choice choice{};
    choice.struct_size = sizeof choice;
    EXPECT_EQ(choose_kernel(&stream, &made, &choice, &status), WEFT_OK) << row.name << ": " << status.message;
    const Choice chosen = choose(Stream{Backend::reference}, args);
    EXPECT_EQ(choice.kernel, chosen.kernel);
    EXPECT_EQ(choice.plan, chosen.plan);
    EXPECT_EQ(choice.speed, static_cast<int>(chosen.speed));
    ++count;
  }
  EXPECT_GT(count, 0) << op;
}

#define WEFT_ROUND_TRIP(name, Args) \
  TEST(CConversion, name) { round_trip<Args>(#name, weft_##name##_scratch_bytes, weft_##name##_choose); }
WEFT_FOR_EACH_OP(WEFT_ROUND_TRIP)
#undef WEFT_ROUND_TRIP

}  // namespace
}  // namespace weft
