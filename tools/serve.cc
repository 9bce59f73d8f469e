// `weft serve`: a model behind OpenAI's HTTP API.
#include "serve/server.h"

#include <fmt/format.h>

#include <filesystem>

#include "serve/access.h"
#include "tools/model_command.h"
#include "tools/terminal.h"
#include "tools/validators.h"

namespace weft::tools {
namespace {

namespace fs = std::filesystem;

struct ServeFlags {
  ModelFlags model;
  std::string host = "127.0.0.1", key_file, name, sessions, chat_template;
  std::vector<std::string> allowed_hosts;
  int port = 8080;
  int64_t capacity = 4096, sequences = 8, queue = 64, store = 64 << 20, connections = 1024;
  int64_t stall = 200, expiry = 1800, drain = 30;
};

std::string model_name(const ServeFlags& flags, const std::string& directory) {
  if (!flags.name.empty()) return flags.name;
  const fs::path path = fs::path(directory).lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

serve::ServeOptions options_of(const ServeFlags& flags, const Stream& stream, const std::string& directory) {
  serve::ServeOptions options;
  options.host = flags.host;
  options.port = static_cast<uint16_t>(flags.port);
  if (!flags.key_file.empty()) options.key = serve::read_key_file(flags.key_file);
  options.allowed_hosts = flags.allowed_hosts;
  options.name = model_name(flags, directory);
  options.http.connections = flags.connections;
  options.drain = std::chrono::seconds(flags.drain);
  options.signals = true;
  BatcherOptions& batch = options.batch;
  batch.sequences = flags.sequences;
  batch.capacity = flags.capacity;
  batch.kv = flags.model.kv;
  batch.queue = flags.queue;
  batch.memory = flags.model.memory;
  batch.store = flags.store;
  batch.longest_step = std::chrono::milliseconds(flags.stall);
  batch.session_expiry = std::chrono::seconds(flags.expiry);
  batch.sessions = flags.sessions;
  batch.stream = stream;
  return options;
}

int run_serve(const ServeFlags& flags) {
  const Stream stream = flags.model.stream();
  const std::string directory = flags.model.directory();
  const serve::ServeOptions options = options_of(flags, stream, directory);
  const Model model = flags.model.load();
  if (!model.has_tokenizer()) throw std::runtime_error(directory + " has no tokenizer, and the server reads and writes texts");
  const ChatTemplate chat = flags.model.chat_template(flags.chat_template);
  const HybridPlan plan = plan_memory(model, stream, flags.model.kv, flags.capacity, flags.sequences);
  if (flags.model.memory == 0)
    check_memory(model, stream, plan, {.tokens = flags.capacity, .lower = "--max-sequences, --capacity or --kv, or set --memory"});
  serve::Server server(model, Tokenizer::load(directory), chat, options);
  const BatcherStats stats = server.batcher().stats();
  tell("{}\n", model.summary());
  tell("chats: {}\n", chat.is_plain() ? "this model has no chat template; it continues texts" : chat.summary());
  tell("{} sequences of up to {} tokens, KV {}; budget {}, of which the prefix store takes up to {}; weights {}\n", flags.sequences,
       flags.capacity, flags.model.kv, bytes_text(stats.budget), bytes_text(flags.store), bytes_text(stats.weights));
  show("{} at {} {}\n", options.name, server.url(), where_text(stream));
  flush_output();
  server.run();
  for (const std::string& fault : server.faults()) tell("weft: {}\n", fault);
  tell("stopped\n");
  return server.faults().empty() ? kOk : kFailed;
}

void add_network_options(CLI::App& command, ServeFlags& flags) {
  command.add_option("--host", flags.host, "Address or name to listen on; any but the loopback address requires --api-key-file")
      ->capture_default_str();
  command.add_option("--port", flags.port, "Port to listen on; 0: the system chooses one")
      ->capture_default_str()
      ->transform(whole_number_in(0, 65535));
  command
      .add_option(
          "--api-key-file", flags.key_file,
          "File whose first line is the key that clients must send; a file that other users can read is refused (chmod 600)")
      ->check(file_name());
  command
      .add_option(
          "--allow-host", flags.allowed_hosts,
          "Another name of this server, for example that of a proxy, which requests may have in their field Host; without port. "
          "Requires --api-key-file. Repeat the option for several")
      ->allow_extra_args(false)
      ->option_text("NAME");
  command
      .add_option("--max-connections", flags.connections, "Most connections; one more closes the connection that is idle longest")
      ->capture_default_str()
      ->transform(whole_number_in(1, 65536));
  command.add_option("--name", flags.name, "Name of the model in requests and answers; default: the name of its folder or file");
}

void add_batch_options(CLI::App& command, ServeFlags& flags) {
  command.add_option("--capacity", flags.capacity, "Most tokens of one sequence: prompt and text")
      ->capture_default_str()
      ->transform(whole_number_in(1, int64_t{1} << 30));
  command.add_option("--max-sequences", flags.sequences, "Most sequences in a batch")
      ->capture_default_str()
      ->transform(whole_number_in(1, 4096));
  command.add_option("--max-queue", flags.queue, "Most requests that wait; further ones get status 429")
      ->capture_default_str()
      ->transform(whole_number_in(1, 1 << 20));
  command
      .add_option("--prefix-store", flags.store, "The part of --memory that holds beginnings of prompts for all requests; 0: none")
      ->default_str("64M")
      ->transform(byte_count());
  command
      .add_option("--max-stall-ms", flags.stall,
                  "Longest step in milliseconds while a sequence decodes; prompts are prefilled in chunks of that length, of at "
                  "least 64 tokens")
      ->capture_default_str()
      ->transform(whole_number_in(1, 1 << 20));
  command
      .add_option("--sessions", flags.sessions,
                  "Folder where the server saves sessions when it stops; default: sessions are lost then")
      ->check(file_name());
  command.add_option("--session-expiry", flags.expiry, "Seconds after which a session that nobody uses is dropped")
      ->capture_default_str()
      ->transform(whole_number_in(1, int64_t{1} << 30));
  command.add_option("--drain", flags.drain, "Seconds that running requests have to finish after SIGTERM or Ctrl-C")
      ->capture_default_str()
      ->transform(whole_number_in(0, 86400));
  command.add_option("--template", flags.chat_template, "Template file for chats, instead of the model's own (docs/chat.md)")
      ->check(file_name());
}

}  // namespace

void add_serve(CLI::App& app, int& exit) {
  CLI::App* command = app.add_subcommand("serve", "Serve a model over HTTP: OpenAI's API, and a page to chat at /");
  auto flags = std::make_shared<ServeFlags>();
  flags->model.add_options(*command);
  command->get_option("--memory")
      ->description(
          "Most memory of states, KV caches, sessions and prefix store together (500M, 8G), weights not counted; default: what "
          "--max-sequences sequences of --capacity tokens take");
  add_network_options(*command, *flags);
  add_batch_options(*command, *flags);
  command->footer(
      "Examples:\n"
      "  weft serve                                   the bundled model at http://127.0.0.1:8080\n"
      "  weft serve --model DIR --max-sequences 32 --memory 8G\n"
      "  weft serve --host 0.0.0.0 --api-key-file key.txt --allow-host weft.example.org\n"
      "  weft serve --sessions DIR                    sessions survive a restart\n"
      "  curl -s 127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"The ship\", \"max_tokens\": "
      "40}'");
  command->callback([flags, &exit] { exit = run_serve(*flags); });
}

}  // namespace weft::tools
