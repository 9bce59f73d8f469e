/* The same in C: a model continues a text, and a callback prints every token. Link with libweft_c. */
#include <stdio.h>
#include <string.h>
#include <weft/c_model.h>

static int32_t print_token(const weft_generated_token* token, void* user) {
  (void)user;
  fputs(token->text, stdout);
  fflush(stdout);
  return 0; /* anything else stops */
}

int main(int argc, char** argv) {
  const char* prompt = argc > 2 ? argv[2] : "The old house stood";
  int32_t tokens[1024];
  size_t count = 0;
  weft_model* model = NULL;
  weft_state* state = NULL;
  weft_status status = {.struct_size = sizeof status};
  weft_generate_options options = {.struct_size = sizeof options, .has_max_tokens = 1, .max_tokens = 60, .seed = 1};
  weft_generate_result result = {.struct_size = sizeof result};

  fputs(prompt, stdout);
  if (weft_model_load(argc > 1 ? argv[1] : "models/weft-11m", NULL, &model, &status) ||
      weft_state_create(model, NULL, NULL, &state, &status) ||
      weft_model_encode(model, prompt, strlen(prompt), tokens, 512, &count, &status) ||
      weft_generate(model, NULL, state, &options, tokens, 1024, &count, print_token, NULL, &result, &status)) {
    fprintf(stderr, "%s\n", status.message);
  } else {
    printf("\n\n%lld tokens\n", (long long)result.written_tokens);
  }
  weft_state_free(state);
  weft_model_free(model);
  return status.code == WEFT_OK && result.written_tokens > 0 ? 0 : 1;
}
