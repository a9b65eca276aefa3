#include "library/cells.h"

#include "llama-kv-cache.h"

namespace library {

namespace {

llama_kv_cache & own(llama_memory_t memory) {
    return *static_cast<llama_kv_cache *>(memory);
}

}  // namespace

// The books of the one stream are the cache's own, not a copy.
cache::cache(llama_memory_t memory) : owner(memory), books(const_cast<llama_kv_cells *>(&own(memory).get_cells(0))) {}

int64_t cache::size() const {
    return books->size();
}

int64_t cache::n_used() const {
    return books->get_used();
}

bool cache::is_unified() const {
    return own(owner).get_n_stream() == 1;
}

bool cache::has_extra() const {
    return own(owner).has_cell_ext();
}

llama_pos cache::position(int64_t cell) const {
    const auto i = static_cast<uint32_t>(cell);
    return books->is_empty(i) ? -1 : books->pos_get(i);
}

cell_extra cache::extra(int64_t cell) const {
    const llama_kv_cell_ext & ext = books->ext_get(static_cast<uint32_t>(cell));
    return { ext.x, ext.y, ext.tok };
}

void cache::set_extra(int64_t cell, const cell_extra & extra) {
    books->ext_set(static_cast<uint32_t>(cell), { extra.x, extra.y, extra.token });
}

bool cache::has(int64_t cell, llama_seq_id seq, llama_pos p0, llama_pos p1) const {
    const auto i = static_cast<uint32_t>(cell);
    return books->pos_in(i, p0, p1) && books->seq_has(i, seq);
}

bool cache::has_alone(int64_t cell, llama_seq_id seq) const {
    const auto i = static_cast<uint32_t>(cell);
    return books->seq_has(i, seq) && books->seq_get_all(i).count() == 1;
}

std::vector<int64_t> cache::find(int64_t n) const {
    llama_seq_id seq = 0;  // all have the same stream, and find the same cells
    llama_ubatch batch{};
    batch.n_tokens = batch.n_seq_tokens = static_cast<uint32_t>(n);
    batch.n_seqs = batch.n_seqs_unq = batch.n_pos = 1;
    batch.seq_id_unq                              = &seq;
    const llama_kv_cache::slot_info found         = own(owner).find_slot(batch, false);
    return found.empty() ? std::vector<int64_t>() : std::vector<int64_t>(found.idxs[0].begin(), found.idxs[0].end());
}

void cache::take(const std::vector<int64_t> & cells, llama_seq_id seq, std::vector<llama_pos> positions) {
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
    own(owner).apply_ubatch({ 0, 0, { 0 }, { { cells.begin(), cells.end() } } }, batch);
}

}  // namespace library
