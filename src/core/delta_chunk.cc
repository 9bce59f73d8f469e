// placeholder
#include "core/check.h"
namespace weft {
Status validate(const ChunkCumsumArgs&) { return fail(Code::unsupported, "ChunkCumsum", "args", "placeholder"); }
Status validate(const ChunkKktArgs&) { return fail(Code::unsupported, "ChunkKkt", "args", "placeholder"); }
Status validate(const ChunkTriInverseArgs&) { return fail(Code::unsupported, "ChunkTriInverse", "args", "placeholder"); }
Status validate(const ChunkWuArgs&) { return fail(Code::unsupported, "ChunkWu", "args", "placeholder"); }
Status validate(const ChunkStateArgs&) { return fail(Code::unsupported, "ChunkState", "args", "placeholder"); }
Status validate(const ChunkOutputArgs&) { return fail(Code::unsupported, "ChunkOutput", "args", "placeholder"); }
}  // namespace weft
