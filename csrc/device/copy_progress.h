// Progress of copies on streams: a ticket taken after copies were queued shows later whether they are complete.
#pragma once

#include "device/handles.h"

#include <cstdint>
#include <deque>
#include <vector>

class copy_progress {
public:
    using ticket = uint64_t;

    // For copies that are complete when queued. In tests they count as running until `lag` further tickets were taken,
    // as on a device that is so far behind.
    explicit copy_progress(size_t lag = 0) : lag(lag) {}

    // For copies on `streams` of one or more devices, all of which have events; the streams must outlive this object.
    explicit copy_progress(std::vector<ggml_backend_t> streams);

    // Stands for all copies up to here.
    ticket take();

    // Whether the copies of ticket `t` are complete. Does not wait; without a query of the device, they are complete once
    // a caller has waited for them.
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

    std::vector<ggml_backend_t> streams;  // none if there is no device
    size_t                      lag      = 0;
    bool                        askable  = true;
    ticket                      taken    = 0;
    ticket                      complete = 0;
    std::deque<mark>            marks;  // of tickets after `complete`, in order
    std::vector<events>         spare;
};
