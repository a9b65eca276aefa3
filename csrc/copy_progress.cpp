#include "copy_progress.h"

#include "device_runtime.h"

#include <algorithm>
#include <utility>

copy_progress::copy_progress(ggml_backend_t stream, ggml_backend_dev_t device)
    : stream(stream), device(device), askable(device_runtime::instance().can_ask(device)) {}

copy_progress::ticket copy_progress::take() {
    ++taken;
    if (stream == nullptr) {
        return taken;
    }
    event_handle event;
    if (spare.empty()) {
        event.reset(ggml_backend_event_new(device));
    } else {
        event = std::move(spare.back());
        spare.pop_back();
    }
    if (event == nullptr) {
        ggml_backend_synchronize(stream);
        all_complete();
        return taken;
    }
    ggml_backend_event_record(event.get(), stream);
    marks.push_back({ taken, std::move(event) });
    return taken;
}

bool copy_progress::is_complete(ticket t) {
    if (stream == nullptr) {
        complete = std::max(complete, taken > lag ? taken - lag : 0);
    } else if (askable) {
        // One stream does one thing after the other.
        while (complete < t && !marks.empty() && device_runtime::instance().is_complete(marks.front().event.get())) {
            pop_front();
        }
    }
    return t <= complete;
}

void copy_progress::wait(ticket t) {
    while (complete < t && !marks.empty()) {
        ggml_backend_event_synchronize(marks.front().event.get());
        pop_front();
    }
    complete = std::max(complete, t);
}

void copy_progress::all_complete() {
    while (!marks.empty()) {
        pop_front();
    }
    complete = taken;
}

void copy_progress::pop_front() {
    complete = marks.front().number;
    spare.push_back(std::move(marks.front().event));
    marks.pop_front();
}
