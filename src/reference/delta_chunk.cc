// placeholder
#include "reference/table.h"
namespace weft::reference {
void fill_delta_chunk(BackendTable&) {}
}  // namespace weft::reference
