// placeholder
#include "reference/table.h"
namespace weft::reference {
void fill_gated_delta_rule(BackendTable&) {}
}  // namespace weft::reference
