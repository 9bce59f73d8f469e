/* With LD_PRELOAD: the ggml of a program says that it is of another version. */
const char* ggml_version(void);
const char* ggml_version(void) { return "0.99.0"; }
