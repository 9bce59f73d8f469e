// `weft ops`: the support matrix, op by backend, and the schema of the C interface.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "cases/cuda_device.h"
#include "cases/speed_classes.h"
#include "tools/command.h"
#include "tools/json_output.h"
#include "tools/terminal.h"
#include "weft/c.h"
#include "weft/schema.h"

namespace weft::tools {
namespace {

using Json = nlohmann::ordered_json;

bool usable_here(Backend backend) {
  const std::vector<DeviceInfo> all = devices(backend);
  return std::any_of(all.begin(), all.end(), [](const DeviceInfo& d) { return d.usable; });
}

// Cases of the fast tier, and how many of them a backend takes; 0 where there is no device to ask.
struct Coverage {
  int cases = 0, supported = 0;
};
std::map<std::pair<std::string, Backend>, Coverage> coverage() {
  std::map<std::pair<std::string, Backend>, Coverage> all;
  Progress progress(cases::all_cases().size());
  for (const cases::Case& row : cases::all_cases()) {
    progress.step(row.op);
    if (row.tier != cases::Tier::fast) continue;
    const std::unique_ptr<cases::Problem> problem = cases::build(row);
    for (Backend backend : kAllBackends) {
      Stream stream;
      stream.backend = backend;
      Coverage& entry = all[{row.op, backend}];
      ++entry.cases;
      entry.supported += problem->supports(stream).ok();
    }
  }
  return all;
}

constexpr DType kDTypes[] = {DType::bf16, DType::f16, DType::f32};

// The speed of a class by dtype, for each backend; empty where the backend computes none of it here.
using Speeds = std::vector<std::pair<DType, Speed>>;
std::map<Backend, Speeds> speeds_of(const cases::SpeedClass& one) {
  std::vector<Stream> streams(std::size(kAllBackends));
  for (size_t i = 0; i < streams.size(); ++i) streams[i].backend = kAllBackends[i];
  std::map<Backend, Speeds> found;
  for (DType dtype : kDTypes) {
    const std::vector<std::optional<Speed>> all = cases::speeds_of(one, dtype, streams);
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i]) found[streams[i].backend].emplace_back(dtype, *all[i]);
  }
  return found;
}

// "fast", or "bf16 f16 fast, f32 slow".
std::string speeds_text(const Speeds& speeds) {
  std::string text;
  for (Speed speed : {Speed::fast, Speed::portable, Speed::slow}) {
    std::string dtypes;
    for (const auto& [dtype, of_it] : speeds)
      if (of_it == speed) dtypes += (dtypes.empty() ? "" : " ") + std::string(dtype_name(dtype));
    if (dtypes.empty()) continue;
    const bool all = std::all_of(speeds.begin(), speeds.end(), [&](const auto& entry) { return entry.second == speed; });
    text += (text.empty() ? "" : ", ") + (all ? "" : dtypes + " ") + speed_name(speed);
  }
  return text.empty() ? "-" : text;
}

// Leaves out the reference, which is slow by design. Where there is no device, cuda is planned for an H200. vulkan plans for
// present devices only, so a document, which must not depend on the machine, has no column for it.
void print_speeds(bool markdown) {
  std::vector<std::pair<Backend, std::string>> shown{{Backend::cpu, "speed on cpu"}, {Backend::cuda, "speed on cuda"}};
  if (!markdown) shown.emplace_back(Backend::vulkan, "speed on vulkan");
  std::vector<std::string> head{"op", "sizes"};
  for (const auto& [backend, title] : shown) head.push_back(title);
  Table table(head);
  Progress progress(cases::speed_classes().size());
  std::vector<std::vector<std::string>> rows;
  for (const cases::SpeedClass& one : cases::speed_classes()) {
    progress.step(one.op);
    const std::string op = markdown ? "`" + one.op + "`" : one.op;
    std::map<Backend, Speeds> speeds = speeds_of(one);
    rows.push_back({op, one.sizes});
    for (const auto& [backend, title] : shown) rows.back().push_back(speeds_text(speeds[backend]));
    const auto alike = [&](const std::vector<std::string>& row) {
      return std::equal(row.begin() + 1, row.end(), rows.back().begin() + 1);
    };
    if (const auto first = std::find_if(rows.begin(), rows.end() - 1, alike); markdown && first != rows.end() - 1) {
      first->front() += ", " + op;
      rows.pop_back();
    }
  }
  progress.clear();
  for (const auto& row : rows) table.add(row);
  if (markdown)
    show("{}", table.markdown());
  else
    table.show();
}

// The speeds of an op, per backend: one entry per class.
std::map<Backend, Json> speeds_json(const std::string& op) {
  std::map<Backend, Json> out;
  for (const cases::SpeedClass& one : cases::speed_classes()) {
    if (one.op != op) continue;
    for (const auto& [backend, speeds] : speeds_of(one)) {
      Json entry{{"sizes", one.sizes}};
      for (const auto& [dtype, speed] : speeds) entry[dtype_name(dtype)] = speed_name(speed);
      out[backend].push_back(std::move(entry));
    }
  }
  return out;
}

Json ops_json(bool with_cases, bool with_speed) {
  const auto covered = with_cases ? coverage() : std::map<std::pair<std::string, Backend>, Coverage>{};
  Json out{{"schema", kSchema}, {"ops", Json::array()}};
  for (const std::string& op : cases::op_names()) {
    Json entries = Json::object();
    std::map<Backend, Json> speeds = with_speed ? speeds_json(op) : std::map<Backend, Json>{};
    for (Backend backend : kAllBackends) {
      const std::optional<OpSupport> found = op_support(backend, op);
      Json& entry = entries[backend_name(backend)];
      if (!found) continue;  // stays null
      entry = {{"dtypes", found->dtypes}, {"shapes", found->shapes}};
      if (with_speed) entry["speed"] = speeds[backend];
      if (with_cases) {
        const Coverage& count = covered.at({op, backend});
        entry["cases"] = count.cases;
        entry["supported"] = count.supported;
        entry["usable"] = usable_here(backend);
      }
    }
    out["ops"].push_back({{"op", op}, {"shapes", legal_shapes(op)}, {"backends", entries}});
  }
  return out;
}

void print_table(bool markdown, bool with_cases) {
  const auto covered = with_cases ? coverage() : std::map<std::pair<std::string, Backend>, Coverage>{};
  std::vector<std::string> head{"op", "legal shapes"};
  for (Backend backend : kAllBackends) head.emplace_back(backend_name(backend));
  Table table(head);
  std::vector<std::vector<std::string>> rows;
  for (const std::string& op : cases::op_names()) {
    std::vector<std::string> cells{markdown ? "`" + op + "`" : op, legal_shapes(op)};
    for (Backend backend : kAllBackends) {
      const std::optional<OpSupport> found = op_support(backend, op);
      if (!found) {
        cells.emplace_back("-");
        continue;
      }
      std::string cell = fmt::format("{}: {}", found->dtypes, found->shapes);
      if (with_cases) {
        const Coverage& count = covered.at({op, backend});
        cell += usable_here(backend) ? fmt::format(" ({}/{} cases)", count.supported, count.cases) : " (no device)";
      }
      cells.push_back(cell);
    }
    // The document joins ops with equal cells to one row; the terminal shows a row per op.
    const auto alike = std::find_if(rows.begin(), rows.end(), [&](const std::vector<std::string>& row) {
      return markdown && std::equal(row.begin() + 1, row.end(), cells.begin() + 1);
    });
    if (alike == rows.end())
      rows.push_back(cells);
    else
      alike->front() += ", " + cells.front();
  }
  for (const auto& row : rows) table.add(row);
  if (markdown)
    show("{}", table.markdown());
  else
    table.show();
}

std::string quoted(const std::vector<std::string>& all, const char* between) {
  std::string text;
  for (const std::string& one : all) text += (text.empty() ? "" : between) + fmt::format("`{}`", one);
  return text;
}

// What a caller may give for a member, in words.
std::string values_text(const SchemaMember& member, const std::vector<SchemaEnum>& enums) {
  std::string text;
  if (member.kind == "tensor") {
    for (const std::string& dtype : member.dtypes) text += (text.empty() ? "" : " ") + dtype;
    if (!member.dtype_of.empty()) text = fmt::format("dtype of `{}`", member.dtype_of);
    if (!member.may_be.empty()) text += fmt::format("; may be {} itself", quoted(member.may_be, " or "));
    return text;
  }
  for (const SchemaEnum& one : enums)
    if (member.kind == "enum" && one.name == member.of)
      for (const auto& value : one.values) text += (text.empty() ? "" : ", ") + fmt::format("`{}`", value.name);
  if (member.kind == "flag") text = "0 or 1";
  return member.legal.empty() ? text : member.legal;
}

// A Markdown table per op with the members that a caller fills in. Flags that announce a number, and padding, are left out.
void print_members() {
  const Schema schema = c_schema();
  for (const SchemaOp& op : schema.ops) {
    show("### `{}`\n\nLegal shapes: {}.\n\n", op.op, legal_shapes(op.op));
    Table table({"member", "use", "shape", "dtype or values", "default"});
    for (const SchemaMember& member : op.args.members) {
      const bool announces = member.kind == "flag" && !member.of.empty();
      if (announces || member.role == "unused" || member.kind == "struct" || member.kind == "size" || member.kind == "reserved")
        continue;
      const bool tensor = member.kind == "tensor";
      const std::string missing = member.kind == "recipe" || !member.optional ? "required" : tensor ? "absent" : member.fallback;
      table.add({fmt::format("`{}`", member.path), member.role, quoted(member.shapes, " or "), values_text(member, schema.enums),
                 missing});
    }
    show("{}\n", table.markdown());
  }
}

}  // namespace

void add_ops(CLI::App& app, int& exit) {
  struct Flags {
    bool markdown = false, cases = false, schema = false, members = false, speed = false;
    JsonOutput output;
  };
  CLI::App* command = app.add_subcommand("ops", "Which backend offers which op, with dtypes and shapes");
  auto flags = std::make_shared<Flags>();
  flags->output.add_options(*command);
  auto* json = command->get_option("--json");
  auto* markdown = command->add_flag("--markdown", flags->markdown, "As a Markdown table, as in docs/ops.md")->excludes(json);
  auto* speed = command->add_flag("--speed", flags->speed, "How fast the kernels are that calls take, by size and dtype");
  auto* cases = command->add_flag("--cases", flags->cases, "Count how many cases of each op a backend takes");
  auto* schema = command->add_flag("--schema", flags->schema, "The C interface as JSON: every struct, member, offset and enum");
  cases->excludes(speed);
  schema->excludes(markdown)->excludes(cases)->excludes(speed);
  command->add_flag("--members", flags->members, "The arguments of every op as Markdown tables")
      ->excludes(schema)
      ->excludes(json)
      ->excludes(cases)
      ->excludes(markdown)
      ->excludes(speed);
  command->footer(
      "Examples:\n  weft ops\n  weft ops --markdown\n  weft ops --speed\n  weft ops --cases --json\n  weft ops --schema\n  weft "
      "ops --members");
  command->callback([flags, &exit] {
    flags->output.check_writable();
    if (flags->speed) weft::cases::pretend_cuda_device();
    if (flags->schema)
      flags->output.write(Json::parse(weft_schema()), 1);
    else if (flags->members)
      print_members();
    else if (flags->output.json)
      flags->output.write(ops_json(flags->cases, flags->speed), 2);
    else if (flags->speed)
      print_speeds(flags->markdown);
    else
      print_table(flags->markdown, flags->cases);
    exit = kOk;
  });
}

}  // namespace weft::tools
