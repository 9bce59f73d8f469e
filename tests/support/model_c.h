/* What the tests of weft/c_model.h share: a status, a count of failures, and options that always choose the most probable token. */
#ifndef WEFT_TESTS_MODEL_C_H
#define WEFT_TESTS_MODEL_C_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "weft/c_model.h"

static int failures = 0;
static weft_status status = {.struct_size = sizeof(weft_status)};

static void expect(int good, const char* what, int line) {
  if (good) return;
  fprintf(stderr, "%d: %s (last message: %s)\n", line, what, status.message);
  ++failures;
}
#define EXPECT(good) expect((good), #good, __LINE__)
#define REQUIRE(good)      \
  do {                     \
    if (!(good)) {         \
      EXPECT(good);        \
      return EXIT_FAILURE; \
    }                      \
  } while (0)

static weft_generate_options greedy(int64_t max_tokens) {
  weft_generate_options options = {.struct_size = sizeof options};
  options.has_max_tokens = 1;
  options.max_tokens = max_tokens;
  options.has_temperature = 1;
  return options;
}

#endif /* WEFT_TESTS_MODEL_C_H */
