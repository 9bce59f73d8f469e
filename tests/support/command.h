// Runs the `weft` command as a process.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace weft {

struct Result {
  int exit = -1;
  std::string out, err;
};

inline std::string slurp(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline std::string temporary(const std::string& name) {
  return testing::TempDir() + "weft_cli_" + std::to_string(getpid()) + "_" + name;
}

// Runs the command through a shell, with `environment` before it ("NO_COLOR=1").
inline Result weft(const std::string& arguments, const std::string& environment = "", const std::string& input = "/dev/null") {
  const std::string out = temporary("out"), err = temporary("err");
  const int status =
      std::system((environment + " '" WEFT_COMMAND "' " + arguments + " >'" + out + "' 2>'" + err + "' <'" + input + "'").c_str());
  Result result{WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp(out), slurp(err)};
  std::remove(out.c_str());
  std::remove(err.c_str());
  return result;
}

// The same, with SIGINT (or another signal) after `seconds`. The signal goes to the command alone, so it arrives once; a second
// SIGINT would end the command at once. The exit status is the command's own.
inline Result weft_interrupted(int seconds, const std::string& arguments, const std::string& signal = "INT") {
  return weft(arguments, "timeout --foreground --preserve-status -s " + signal + " " + std::to_string(seconds));
}

// The same, but the signal comes once the command has written so many bytes to stdout. Not for INT, which a shell's background jobs ignore.
inline Result weft_ended_after(size_t bytes, const std::string& arguments, const std::string& signal) {
  const std::string out = temporary("out"), err = temporary("err");
  const std::string line = ": >'" + out + "'; '" WEFT_COMMAND "' " + arguments + " >'" + out + "' 2>'" + err +
                           "' </dev/null & p=$!; " + "while kill -0 $p 2>/dev/null && [ $(stat -c %s '" + out + "') -lt " +
                           std::to_string(bytes) + " ]; do sleep 0.05; done; kill -s " + signal + " $p; wait $p";
  const int status = std::system(line.c_str());
  EXPECT_TRUE(WIFEXITED(status)) << arguments;
  Result result{WEXITSTATUS(status), slurp(out), slurp(err)};
  std::remove(out.c_str());
  std::remove(err.c_str());
  return result;
}

// Can script(1) make a terminal here? Containers without devpts cannot run it.
inline bool has_terminal() { return std::system("script -qec true /dev/null >/dev/null 2>&1 </dev/null") == 0; }

// Stdout and stderr of a shell command that runs on a terminal.
inline std::string on_terminal(const std::string& line, const std::string& environment = "TERM=xterm") {
  const std::string file = temporary("tty");
  const int status = std::system((environment + " script -qec \"" + line + "\" /dev/null >'" + file + "' </dev/null").c_str());
  EXPECT_TRUE(WIFEXITED(status)) << line;
  const std::string text = slurp(file);
  std::remove(file.c_str());
  return text;
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace weft
