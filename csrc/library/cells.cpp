#include "library/cells.h"

#include "llama-kv-cache.h"

namespace library {

// The books of a stream are the cache's own, not a copy.
cache::cache(llama_memory_t memory)
    : owner(memory), cells(const_cast<llama_kv_cells *>(&static_cast<llama_kv_cache *>(memory)->get_cells(0))) {}

bool cache::has_extra() const {
    return static_cast<llama_kv_cache *>(owner)->has_cell_ext();
}

std::vector<int64_t> cache::find(int64_t n) const {
    llama_seq_id seq = 0;  // all have the same stream, and find the same cells
    llama_ubatch batch{};
    batch.n_tokens   = static_cast<uint32_t>(n);
    batch.n_seqs_unq = 1;
    batch.seq_id_unq = &seq;
    const auto found = static_cast<llama_kv_cache *>(owner)->find_slot(batch, false);
    return found.empty() ? std::vector<int64_t>() : std::vector<int64_t>(found.idxs[0].begin(), found.idxs[0].end());
}

void cache::take(const std::vector<int64_t> & taken, llama_seq_id seq, std::vector<llama_pos> positions) {
    std::vector<llama_token>    tokens(positions.size());
    std::vector<int32_t>        n_seqs(positions.size(), 1);
    std::vector<llama_seq_id *> seqs(positions.size(), &seq);
    llama_ubatch                batch{};
    batch.n_tokens = batch.n_seq_tokens = static_cast<uint32_t>(positions.size());
    batch.n_seqs = batch.n_seqs_unq = batch.n_pos = 1;
    batch.token                                   = tokens.data();
    batch.pos                                     = positions.data();
    batch.n_seq_id                                = n_seqs.data();
    batch.seq_id                                  = seqs.data();
    batch.seq_id_unq                              = &seq;
    static_cast<llama_kv_cache *>(owner)->apply_ubatch({ 0, 0, { 0 }, { { taken.begin(), taken.end() } } }, batch);
}

}  // namespace library
