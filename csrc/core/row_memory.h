// The rows of a sequence, without its state: in the cells of the library's cache (attention_rows.h), or
// in buffers of our own (row_store.h).
#pragma once

#include "core/block.h"
#include "core/layout.h"
#include "device/held_rows.h"

// Rows [first, last) out of the saved block of `size` bytes at `data`; or out of held rows, if `held` is not 0.
struct row_span {
    const uint8_t *   data;
    size_t            size;
    int64_t           first;
    int64_t           last;
    held_rows::handle held = 0;
};

// Throws std::invalid_argument for wrong positions and sizes; the sequence is unchanged then. Sequence ids are the
// caller's to check. Copies may be on their way when a function returns, see transfer.h.
class row_memory {
public:
    // `copies` must outlive this; `hash` is the whole memory layout's, which blocks carry.
    row_memory(const row_layout & layout, uint64_t hash, transfer & copies, size_t n_cells)
        : layout(layout), hash(hash), copies(copies), held(n_cells) {}
    virtual ~row_memory() = default;

    // How many rows `seq` has.
    virtual int64_t end_of(llama_seq_id seq) const = 0;

    // The position of row n of `seq`, or the one after the last row.
    virtual int64_t position(llama_seq_id, int64_t n) const { return n; }

    // The last `count` rows of `seq`, which the library evaluated at one position, belong to an image with so many columns.
    virtual void add_image(llama_seq_id, int64_t, int64_t) { refuse("images cannot be in this memory"); }

    // Bytes of the block that holds rows [p0, p1), which no file can have if p1 is beyond `last_position`: that throws.
    size_t size(int64_t p0, int64_t p1) const;

    // Rows [p0, p1) of `seq` into a block of exactly `size(p0, p1)` bytes.
    void save(llama_seq_id seq, int64_t p0, int64_t p1, uint8_t * out, size_t size);

    // Throws unless `load_checked` may be called with these arguments. The position after the last row of `spans`.
    int64_t check_load(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) const;

    // Appends the rows of `spans`, which follow each other from p0 on, to `seq`, which ends at p0. Held rows are
    // held where the sequence has them then. Or out_of_cells. Nothing but `check_load` for the same arguments, which are not
    // empty, came before.
    virtual void load_checked(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) = 0;

    // Drops the rows from n on; std::invalid_argument inside an image.
    virtual void truncate(llama_seq_id seq, int64_t n) = 0;

    // Rows [p0, p1) of `seq` stay until they are released, also when no sequence has them; no byte is moved for that.
    virtual held_rows::handle hold(llama_seq_id seq, int64_t p0, int64_t p1) = 0;
    void                      release(held_rows::handle rows);

    // As `save`, from rows that are held.
    void fetch(held_rows::handle rows, int64_t p0, int64_t p1, uint8_t * out, size_t size);

    // How many of these cells no sequence has, and nothing else that is held; 0 of the released rows.
    int64_t n_own(held_rows::handle rows, int64_t p0, int64_t p1) const;

    // Cells that held rows have and no sequence.
    virtual int64_t n_held() const = 0;

    // Cells that neither a sequence nor held rows have.
    virtual int64_t n_free() const = 0;

    // Makes sure that the next evaluation, of n tokens, finds no held row in the cells that it takes; `in_parts` if the
    // library may divide it. Dropped rows are settled. Else out_of_cells: for one in parts possibly with up to 2 n free ones.
    virtual void reserve(int64_t n, bool in_parts) = 0;

protected:
    [[noreturn]] static void refuse(const std::string & why) {
        throw std::invalid_argument(why);
    }

    // Of `spans` that follow each other from p0 on, as blocks and held rows have them: throws if they cannot be loaded. The
    // position after their last row.
    virtual int64_t position_after(llama_seq_id seq, int64_t p0, const std::vector<row_span> & spans) const = 0;

    // Whether no sequence has the cell, or just one that has dropped it.
    virtual bool is_vacant(int64_t cell) const = 0;

    // Copies rows [p0, p1), which lie in `runs`, to `out`, where a block has them.
    virtual void copy_out(const std::vector<cell_run> & runs, int64_t p0, int64_t p1, uint8_t * out) = 0;

    // The library's facts about the rows of `spans`; empty without any.
    std::vector<cell_extra> exts_of(const std::vector<row_span> & spans) const;

    // Rows that are computed or moved next may overwrite rows that were given up.
    void fence();

    row_layout layout;
    uint64_t   hash;
    transfer & copies;
    held_rows  held;
    mutable int64_t n_only_held = 0;  // cells that held rows have and no sequence
    bool            is_reading  = false;  // copies may be on their way from cells that are given up
};
