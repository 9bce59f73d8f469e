// placeholder
#include "reference/table.h"
namespace weft::reference {
void fill_compressed_attention(BackendTable&) {}
}  // namespace weft::reference
