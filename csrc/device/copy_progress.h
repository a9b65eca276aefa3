// How far the copies on some streams have come: a ticket is taken after some were put there, and asked about later.
#pragma once

#include "compat.h"

#include <cstdint>
#include <deque>
#include <vector>

class copy_progress {
public:
    using ticket = uint64_t;

    // Of copies that are complete when they are put there. For tests: they count as under way until `lag` further
    // tickets were taken, as if a device were that far behind.
    explicit copy_progress(size_t lag = 0) : lag(lag) {}

    // Of copies on `streams`, of one device or several; they must outlive this.
    explicit copy_progress(std::vector<ggml_backend_t> streams);

    // Stands for all copies up to here.
    ticket take();

    // Whether the copies that `t` stands for are complete. Waits for nothing; where the device cannot be asked, they are
    // when a caller has waited for them.
    bool is_complete(ticket t);

    // Whether `is_complete` learns of copies without a waiting caller.
    bool can_ask() const { return askable; }

    // Waits for the copies that `t` stands for.
    void wait(ticket t);

    // Everything on the streams is complete: the caller has waited for it.
    void all_complete();

private:
    using events = std::vector<event_handle>;  // one for each stream

    struct mark {
        ticket number;
        events reached;
    };

    void pop_front();

    std::vector<ggml_backend_t> streams;  // none where there is no device
    size_t                      lag      = 0;
    bool                        askable  = true;
    ticket                      taken    = 0;
    ticket                      complete = 0;
    std::deque<mark>            marks;  // of tickets after `complete`, in order
    std::vector<events>         spare;
};
