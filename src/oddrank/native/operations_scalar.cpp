// Any CPU: vectors of four.
#include "operations_attention.h"
#include "operations_chunk.h"
#include "operations_delta.h"
#include "operations_prefill.h"
#include "operations_rows.h"

namespace oddrank {
const Operations scalar_operations = {
    norm,  unit,         rotate,   to_number, attend_scratch, attend, gated, scale, scale_by_sigmoid, gate_by_silu,
    add,   exponentials, products, convolve,  recur, recur_chunk_scratch, recur_chunk, attend_block_scratch, attend_block,
    run_maxima, run_weights,
};
}  // namespace oddrank
