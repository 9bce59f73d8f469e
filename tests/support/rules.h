// Lists of broken arguments: each breaks one validation rule and names the sentence that validate() must give.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cases/memory.h"
#include "weft/op.h"

namespace weft::tests {

// One breakage, and the sentence "<op>: <argument> <what>" that must follow.
template <class Args>
struct Rule {
  std::function<void(Args&)> break_it;
  const char* argument;
  std::string what;
};

// `legal` must pass; each rule is applied to a fresh copy of it.
template <class Args>
void expect_rules(const char* op, const Args& legal, const std::vector<Rule<Args>>& rules) {
  const Status good = validate(legal);
  ASSERT_TRUE(good.ok()) << good.message;
  for (const Rule<Args>& rule : rules) {
    Args args = legal;
    rule.break_it(args);
    const Status status = validate(args);
    EXPECT_EQ(status.code, Code::invalid_argument) << rule.what;
    EXPECT_EQ(status.op, op);
    EXPECT_EQ(status.argument, rule.argument);
    EXPECT_EQ(status.message, std::string(op) + ": " + rule.argument + " " + rule.what);
    EXPECT_EQ(supports({Backend::reference}, args).message, status.message);
  }
}

// Tensors that live as long as the test program.
inline cases::Memory& shared_memory() {
  static cases::Memory memory;
  return memory;
}
inline Tensor f32(std::initializer_list<int64_t> sizes) { return shared_memory().make(DType::f32, sizes); }
inline Tensor bf16(std::initializer_list<int64_t> sizes) { return shared_memory().make(DType::bf16, sizes); }
inline Tensor i32(std::initializer_list<int64_t> sizes) { return shared_memory().make(DType::i32, sizes); }

}  // namespace weft::tests
