// Running the command `weft` from outside.
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

// Runs the command through a shell; `environment` is put before it ("NO_COLOR=1").
inline Result weft(const std::string& arguments, const std::string& environment = "", const std::string& input = "/dev/null") {
  const std::string out = temporary("out"), err = temporary("err");
  const int status =
      std::system((environment + " '" WEFT_COMMAND "' " + arguments + " >'" + out + "' 2>'" + err + "' <'" + input + "'").c_str());
  Result result{WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp(out), slurp(err)};
  std::remove(out.c_str());
  std::remove(err.c_str());
  return result;
}

// The same, with SIGINT (or another signal) sent after so many seconds, to the command alone and so once: a second one would end it at once.
// The exit status is the command's own.
inline Result weft_interrupted(int seconds, const std::string& arguments, const std::string& signal = "INT") {
  return weft(arguments, "timeout --foreground --preserve-status -s " + signal + " " + std::to_string(seconds));
}

// Whether a terminal can be made: by script(1), which containers without devpts cannot run.
inline bool has_terminal() { return std::system("script -qec true /dev/null >/dev/null 2>&1 </dev/null") == 0; }

// What a terminal gets to see of a shell command, stdout and stderr.
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
