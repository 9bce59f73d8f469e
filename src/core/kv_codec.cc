// placeholder
#include "core/check.h"
namespace weft {
Status validate(const KvRotateArgs&) { return fail(Code::unsupported, "KvRotate", "args", "placeholder"); }
Status validate(const KvEncodeArgs&) { return fail(Code::unsupported, "KvEncode", "args", "placeholder"); }
Status validate(const KvDecodeArgs&) { return fail(Code::unsupported, "KvDecode", "args", "placeholder"); }
Status validate(const KvRepackArgs&) { return fail(Code::unsupported, "KvRepack", "args", "placeholder"); }
}  // namespace weft
