// placeholder
#include "reference/table.h"
namespace weft::reference {
void fill_kv_codec(BackendTable&) {}
}  // namespace weft::reference
